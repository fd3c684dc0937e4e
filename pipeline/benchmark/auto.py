"""`method: auto` against plain decoding and the best fixed choice, on texts of every kind.

For each workload and number of slots one run of every fixed method and draft length finds the best
of them; then auto, that one and plain run several times. All that is compared runs side by side,
in turns, since a shared machine is a quarter slower in one minute than in the next. What auto
reports as its speedup is held against what the clock says of it and of plain runs beside it.
"""

import logging
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

from pipeline.auditing import ratio_interval
from pipeline.benchmark.engines import EngineContender, EngineSetup, run_together
from pipeline.benchmark.machine import describe_machine
from pipeline.benchmark.models import Models
from pipeline.benchmark.runs import Run, median
from pipeline.benchmark.workload import Workload, load_workload, read_prompts
from pipeline.decoding.loading import settle_heap
from pipeline.errors import ConfigError
from pipeline.sections import Method

logger = logging.getLogger(__name__)

RANDOM, COPY = "random", "copy"
_Item = TypeVar("_Item")
_Choice = tuple[Method, int]  # and its draft length
_PLAIN: _Choice = ("plain", 0)
_RANDOM_TOKENS = 128
_COPY_TOKENS = 96  # of a passage, given three times and a third


@dataclass(frozen=True)
class AutoSettings:
    """What to measure; the options of the command. `workloads`: tasks of the prompts' file,
    `random` (tokens drawn at random, sampled: nothing can be predicted) and `copy` (passages that
    repeat: everything can)."""

    model: str
    prompts: Path
    workloads: tuple[str, ...]
    slots: tuple[int, ...]
    methods: tuple[Method, ...]
    lengths: tuple[int, ...]
    drafter: str | None
    exit_layer: int | None
    max_new_tokens: int
    rows_per_slot: int
    least_rows: int
    repeats: int
    threads: int
    dtype: str
    chat: bool


def measure_auto(settings: AutoSettings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run everything.

    Args:
        save: called after each workload and number of slots with all results so far.

    Raises:
        ConfigError: for options that make no sense, or a model that cannot be had.
    """
    models = Models(settings.model, settings.drafter, settings.dtype)
    results: dict[str, Any] = {
        "machine": describe_machine(settings.threads, None),
        "settings": {**vars(settings), "dtype": models.dtype},
        "cases": [],
    }
    for name in settings.workloads:
        for slots in settings.slots:
            rows = max(settings.least_rows, settings.rows_per_slot * slots)
            workload = make_workload(name, rows, settings, models)
            settle_heap()
            results["cases"].append(_case(name, slots, workload, settings, models))
            save(results)
    return results


def make_workload(name: str, rows: int, settings: AutoSettings, models: Models) -> Workload:
    """Rows of a workload, always the same ones."""
    length = settings.max_new_tokens
    if name == RANDOM:
        size = models.target.config.get_text_config().vocab_size
        dice = random.Random(0)
        prompts = [[dice.randrange(size) for _ in range(_RANDOM_TOKENS)] for _ in range(rows)]
        return _made_up(prompts, length, temperature=1.0)
    if name == COPY:
        passages = [
            models.tokenizer(text, add_special_tokens=False)["input_ids"][:_COPY_TOKENS]
            for text in _times(read_prompts(settings.prompts, None, rows), rows)
        ]
        prompts = [ids * 3 + ids[: len(ids) // 3] for ids in passages]
        return _made_up(prompts, length)
    found = load_workload(
        settings.prompts,
        models.tokenizer,
        task=name,
        limit=rows,
        max_new_tokens=length,
        chat=settings.chat,
    )
    return replace(found, texts=_times(found.texts, rows), prompts=_times(found.prompts, rows))


def _times(items: Sequence[_Item], count: int) -> list[_Item]:
    """So many, over and over where there are fewer: no row knows of another."""
    return list(islice(cycle(items), count))


def _made_up(prompts: list[list[int]], length: int, temperature: float = 0.0) -> Workload:
    """Rows that end after half of `length` tokens to all of it."""
    dice = random.Random(1)
    lengths = [dice.randint(-(-length // 2), length) for _ in prompts]
    texts = [""] * len(prompts)
    return Workload(texts, prompts, length, True, temperature, lengths)


def _case(
    name: str, slots: int, workload: Workload, settings: AutoSettings, models: Models
) -> dict[str, Any]:
    def run(choices: Sequence[_Choice]) -> list[Run]:
        setups = [EngineSetup(method, slots, n, settings.exit_layer) for method, n in choices]
        contenders = [EngineContender(setup.label, models, setup) for setup in setups]
        found = run_together(contenders, workload)
        for setup, one in zip(setups, found, strict=True):
            logger.info("%s, %s: %.1f tokens/s in decode", name, setup.label, rate(one))
        return found

    fixed = list(_fixed(settings))
    screened = dict(zip(fixed, map(rate, run(fixed)), strict=True))
    best = max(screened, key=lambda choice: screened[choice])
    runs: dict[str, list[Run]] = {"auto": [], "best": [], "plain": []}
    for _ in range(settings.repeats):
        found = run([("auto", 0), ("plain", 0), *([best] if best != _PLAIN else [])])
        for key, one in zip(("auto", "plain", "best"), [*found, found[1]], strict=False):
            runs[key].append(one)
    return {
        "workload": name,
        "slots": slots,
        "rows": len(workload.prompts),
        "screened": {_label(*choice): value for choice, value in screened.items()},
        "best": _label(*best),
        "tokens_per_second": {
            key: median([rate(one) for one in each]) for key, each in runs.items()
        },
        **verdict(runs["auto"], runs["best"], runs["plain"]),
        "runs": {key: [one.figures() for one in each] for key, each in runs.items()},
    }


def _fixed(settings: AutoSettings) -> Iterator[_Choice]:
    yield _PLAIN
    for method in settings.methods:
        for length in settings.lengths:
            yield method, length


def _label(method: str, length: int) -> str:
    return f"{method}:{length}" if length else method


def rate(run: Run) -> float:
    """Tokens a second of decoding; the rows' first tokens are the prefill's."""
    assert run.decode_seconds is not None
    return (run.num_tokens - len(run.tokens)) / run.decode_seconds


def verdict(auto: Sequence[Run], best: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Auto against both, by medians of decode rates, and its estimates against the clock.

    `measured_job_speedup` and its 95 % interval: the mean ratio of plain to auto wall seconds, pair
    by pair.
    """
    rates = [statistics.median(rate(one) for one in each) for each in (auto, best, plain)]
    ratios = [b.total_seconds / a.total_seconds for a, b in zip(auto, plain, strict=True)]
    measured = statistics.geometric_mean(ratios)
    estimate = median([run.job_speedup for run in auto])
    return {
        "auto_over_plain": rates[0] / rates[2],
        "auto_over_better": rates[0] / max(rates[1:]),
        "estimated_job_speedup": estimate,
        "measured_job_speedup": measured,
        "measured_interval": ratio_interval(ratios),
        "estimate_over_measured": estimate / measured if estimate else None,
        "estimated_plain_speedup": median([run.job_speedup for run in plain]),
    }


def check(settings: AutoSettings) -> None:
    """Raises ConfigError for options that make no sense."""
    if min((*settings.slots, *settings.lengths, settings.repeats, settings.rows_per_slot)) < 1:
        raise ConfigError("--slots, --drafts, --repeats, --rows-per-slot", "must be at least 1")
    if {"plain", "auto"} & set(settings.methods):
        raise ConfigError("--methods", "names what auto chooses from; plain is always among it")
