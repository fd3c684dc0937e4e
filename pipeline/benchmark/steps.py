"""Single figures of the engine: the cost of a full step, and what a shared prefix saves."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.benchmark.engines import EngineSetup, add_rows, finish, make_engine, params, warm_up
from pipeline.benchmark.models import Models
from pipeline.benchmark.workload import Workload, shared_head
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step

_FIRST_TOKEN_ID = 300  # made-up prompts: what the tokens say does not change what a step costs


def measure_step(models: Models, *, rows: int, context: int, repeats: int) -> dict[str, Any]:
    """A decode step of many rows against one pass over as many tokens of a single row.

    Returns:
        Median milliseconds of three things that take turns, all at `context` tokens: `step_ms`, the
        engine's decode step of `rows` rows with choice and bookkeeping; `forward_rows_ms`, a bare
        pass of `rows` rows with a token each; `forward_tokens_ms`, a bare pass of one row with
        `rows` tokens. `step_ratio` and `forward_ratio`: of the first two to the last.
    """
    engine_step = _engine_step(models, rows, context, repeats)
    forward_rows = _forward(models, rows, 1, context)
    forward_tokens = _forward(models, 1, rows, context)
    seconds: dict[str, list[float]] = {"step": [], "forward_rows": [], "forward_tokens": []}
    for _ in range(repeats):
        for name, act in zip(seconds, (engine_step, forward_rows, forward_tokens), strict=True):
            started = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows": rows,
        "context": context,
        "repeats": repeats,
        **{f"{name}_ms": value * 1e3 for name, value in medians.items()},
        "step_ratio": medians["step"] / medians["forward_tokens"],
        "forward_ratio": medians["forward_rows"] / medians["forward_tokens"],
    }


def _prompt(models: Models, row: int, length: int) -> list[int]:
    size = models.target.config.get_text_config().vocab_size
    return [(_FIRST_TOKEN_ID + 7 * row + i) % size for i in range(length)]


def _engine_step(models: Models, rows: int, context: int, repeats: int) -> Callable[[], Any]:
    """A plain decode step; rows grow by a token in each, so that the middle one has `context`."""
    start = max(1, context - repeats // 2)
    engine = make_engine(models, EngineSetup("plain", rows), max_model_len=start + repeats + 8)
    prompts = [_prompt(models, row, start) for row in range(rows)]
    warm_up(engine, prompts[0])
    add_rows(engine, prompts, params(repeats + 8, ignore_end=True))
    while not engine.times.decode_steps:
        engine.step()
    return engine.step


def _forward(models: Models, rows: int, width: int, context: int) -> Callable[[], Any]:
    """A pass of `rows` rows that hold `context` tokens, over `width` further tokens of each."""
    runner = ModelRunner(models.target, SlotCache(rows, context + width))
    tokens = [_prompt(models, row, context + width) for row in range(rows)]
    for row in range(rows):
        runner.forward(Step([Span(row, 0, tokens[row][:context])], decoding=False), [])

    def act() -> Any:
        spans = [Span(row, context, tokens[row][context:]) for row in range(rows)]
        return runner.forward(Step(spans, decoding=True), range(rows * width))

    act()
    return act


def measure_prefix(
    models: Models, workload: Workload, *, slots: int, repeats: int
) -> dict[str, Any]:
    """Prefill seconds of all rows with their common head computed once, and for each row anew."""
    head = shared_head(workload.prompts)
    shared, apart = [], []
    for _ in range(repeats):
        shared.append(_prefill_seconds(models, workload, slots, head))
        apart.append(_prefill_seconds(models, workload, slots, ()))
    return {
        "rows": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens / len(workload.prompts),
        "shared_tokens": len(head),
        "prefill_seconds": statistics.median(apart),
        "shared_prefill_seconds": statistics.median(shared),
        "ratio": statistics.median(b / a for a, b in zip(shared, apart, strict=True)),
        "all_prefill_seconds": apart,
        "all_shared_prefill_seconds": shared,
    }


def _prefill_seconds(
    models: Models, workload: Workload, slots: int, prefix: Sequence[int]
) -> float:
    setup = EngineSetup("plain", slots)
    engine = make_engine(models, setup, max_model_len=workload.max_model_len, prefix=prefix)
    warm_up(engine, workload.prompts[0])
    add_rows(engine, workload.prompts, params(1, ignore_end=True))
    finish(engine)
    return engine.times.prefill_seconds
