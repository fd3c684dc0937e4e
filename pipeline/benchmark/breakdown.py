"""Where a decode step of the engine spends its time: a short run under torch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface

from pipeline.benchmark.engines import (
    EngineSetup,
    RecordingEngine,
    add_rows,
    make_engine,
    params,
    warm_up,
)
from pipeline.benchmark.models import Models
from pipeline.decoding.attention import NAME, ragged_attention
from pipeline.decoding.drafters.base import Drafter, DraftRow

STEPS = 10
_SETTLING = {True: 13, False: 3}  # decode steps first; with drafts plain ones are frequent early
_TOP_OPS = 12
_DRAFT, _ATTENTION = "draftmill::draft", "draftmill::attention"  # ranges in the profile
_MATRIX = re.compile(r"mm$|linear|mkldnn|matmul|mv$")  # names of operators


@dataclass(frozen=True)
class Breakdown:
    """Mean milliseconds of a decode step, and what they went into.

    `step_ms` is without the profiler, `profiled_ms` with it. The parts are those of the latter:
    `draft_ms` in the drafter and `attention_ms` in the attention, whatever they do there; of the
    rest `matrix_ms` and `other_ops_ms` in torch's operators, `host_ms` in none of them.
    """

    setup: str
    rows: float
    tokens: float
    context: float
    step_ms: float
    profiled_ms: float
    draft_ms: float
    matrix_ms: float
    attention_ms: float
    other_ops_ms: float
    host_ms: float
    top_ops_ms: dict[str, float]


def _marked_drafter(drafter: Drafter) -> Drafter:
    """The same drafter, whose operators the profiler can tell from the target's from now on."""
    propose = drafter.propose

    def marked(rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        with record_function(_DRAFT):
            return propose(rows, limits)

    drafter.propose = marked  # type: ignore[method-assign]
    return drafter


def break_down(models: Models, setup: EngineSetup, prompts: Sequence[Sequence[int]]) -> Breakdown:
    """Decode the first `setup.slots` prompts for a few steps right after their prefill."""
    rows = prompts[: setup.slots]
    settling = _SETTLING[setup.method != "plain"]
    new_tokens = (2 + settling + 2 * STEPS) * (1 + setup.draft_length)  # none ends before
    length = max(map(len, rows)) + new_tokens
    engine = make_engine(models, setup, max_model_len=length, wrap=_marked_drafter)
    warm_up(engine, rows[0][:64])
    add_rows(engine, rows, params(new_tokens, ignore_end=True))
    while engine.times.decode_steps < settling:
        engine.step()
    step_seconds = _time_steps(engine)
    return _profiled(engine, setup, step_seconds)


def _time_steps(engine: RecordingEngine) -> float:
    """Mean seconds of a step."""
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - started) / STEPS


def _profiled(engine: RecordingEngine, setup: EngineSetup, step_seconds: float) -> Breakdown:
    before = vars(engine.times).copy()
    with _marked_attention(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiled_seconds = _time_steps(engine)
    spent = {key: (value - before[key]) / STEPS for key, value in vars(engine.times).items()}
    ops = _operators(profiler.events() or ())
    groups = Counter[str]()
    for name, milliseconds in ops.items():
        groups[_group(name)] += milliseconds
    draft = spent["draft_seconds"] * 1e3
    lengths = [len(row.tokens) for row in engine.rows.values()]
    return Breakdown(
        setup=setup.label,
        rows=spent["decode_rows"],
        tokens=spent["decode_tokens"],
        context=sum(lengths) / len(lengths),
        step_ms=step_seconds * 1e3,
        profiled_ms=profiled_seconds * 1e3,
        draft_ms=draft,
        matrix_ms=groups["matrix"],
        attention_ms=groups["attention"],
        other_ops_ms=groups["other"],
        host_ms=max(0.0, profiled_seconds * 1e3 - draft - sum(groups.values())),
        top_ops_ms=dict(ops.most_common(_TOP_OPS)),
    )


@contextmanager
def _marked_attention() -> Iterator[None]:
    """Have the profiler show what runs in the attention: some of it is no operator of torch."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_ATTENTION):
            return ragged_attention(*args, **kwargs)

    AttentionInterface.register(NAME, marked)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, ragged_attention)


def _operators(events: Sequence[FunctionEvent]) -> Counter[str]:
    """Milliseconds a step by operator, time in operators called from it not included; all of the
    attention as one, and without what drafts."""
    ops = Counter[str]()
    for event in events:
        ranges = _names_around(event)
        if "::" in event.name and _DRAFT not in ranges:
            name = _ATTENTION if _ATTENTION in ranges else event.name
            ops[name] += event.self_cpu_time_total / 1e3 / STEPS
    return ops


def _names_around(event: FunctionEvent) -> set[str]:
    """Of the event and of all that it runs in."""
    names = {event.name}
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.add(event.name)
    return names


def _group(name: str) -> str:
    if name == _ATTENTION:
        return "attention"
    return "matrix" if _MATRIX.search(name) else "other"
