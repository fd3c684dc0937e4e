"""The contender `draftmill`: the batched engine with a method, slots and a draft length."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.benchmark.models import Models
from pipeline.benchmark.runs import Run
from pipeline.benchmark.workload import Workload, shared_head
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.build import STEP_TOKENS
from pipeline.decoding.checkpoint import estimate_memory
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.drafters.make import make_drafter
from pipeline.decoding.memory import SlotBudget
from pipeline.decoding.packing import prepare_linears
from pipeline.decoding.rows import Row
from pipeline.decoding.timing import StepTimes
from pipeline.errors import EngineError
from pipeline.records import Completion, GenerationRequest, SamplingParams
from pipeline.sections import DecodingConfig, Method
from pipeline.stats import RunTotals

_WARM_UP_TOKENS = 4
_DRAFT_CONFIDENCE = 0.4  # as in transformers
_TURN_SECONDS = 0.25  # of a contender: short beside the machine's moods, long beside a step
_TURN_SPREAD = 0.5  # of that, up or down at random: the machine may have a beat of its own


@dataclass(frozen=True)
class EngineSetup:
    """An engine to be measured. `draft_length`: tokens per draft at most, 0 for plain and for auto,
    which takes what is usual. The others
    are `decoding.exit_layer`, `draft_confidence` and `prompt_lookup_min`."""

    method: Method
    slots: int
    draft_length: int = 0
    exit_layer: int | None = None
    confidence: float = _DRAFT_CONFIDENCE
    lookup_min: int = 2

    @property
    def label(self) -> str:
        """`method/slots`, with the draft length if there is one."""
        method = f"{self.method}:{self.draft_length}" if self.draft_length else self.method
        return f"{method}/{self.slots}"


class RecordingEngine(BatchedEngine):
    """Keeps its rows: a completion has no token ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[str, Row] = {}

    def _row(self, request: GenerationRequest) -> Row:
        row = self.rows[request.row_key] = super()._row(request)
        return row


def make_engine(
    models: Models,
    setup: EngineSetup,
    *,
    max_model_len: int,
    prefix: Sequence[int] = (),
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> RecordingEngine:
    """An engine on the packed target. Its slots have full length from the start.

    Args:
        prefix: token ids that prompts begin with.
        wrap: what to make of the drafter.
    """
    drafter = drafter_of(models, setup, prefix)
    dtype = str(models.target.dtype).removeprefix("torch.")
    token_bytes = estimate_memory(models.config, dtype, None).kv_bytes_per_token
    kv_bytes = token_bytes * max_model_len * (setup.slots + 1)
    if drafter is not None:
        prepare_linears(models.target, setup.slots)
    return RecordingEngine(
        models.target,
        models.tokenizer,
        SamplingParams(),
        max_model_len=max_model_len,
        budget=SlotBudget(setup.slots, kv_bytes, token_bytes),
        step_tokens=STEP_TOKENS["cpu"],
        method=setup.method,
        drafter=None if drafter is None else wrap(drafter),
        num_draft_tokens=_decoding(setup).max_draft_tokens,
        prefix_token_ids=prefix,
    )


def drafter_of(models: Models, setup: EngineSetup, prefix: Sequence[int]) -> Drafter | None:
    """What drafts by the setup's method.

    Raises:
        ConfigError: if it lacks its model.
    """
    return make_drafter(
        _decoding(setup),
        models.target,
        None if setup.method == "auto" and not models.drafter_folder else models.drafter_files,
        tokenizer=models.tokenizer,
        step_tokens=STEP_TOKENS["cpu"],
        prefix_token_ids=list(prefix),
    )


def _decoding(setup: EngineSetup) -> DecodingConfig:
    return DecodingConfig(
        method=setup.method,
        num_draft_tokens=setup.draft_length or "auto",
        exit_layer=setup.exit_layer,
        draft_confidence=setup.confidence,
        prompt_lookup_min=setup.lookup_min,
    )


class EngineContender:
    """The engine over the rows, a new one for each run."""

    def __init__(
        self, name: str, models: Models, setup: EngineSetup, *, share_prefix: bool = True
    ) -> None:
        """`share_prefix`: compute what all prompts begin with only once."""
        self.name = name
        self._models = models
        self.setup = setup
        self._share_prefix = share_prefix

    def run(self, workload: Workload) -> Run:
        """Generate all rows.

        Raises:
            EngineError: if a row fails.
        """
        return run_together([self], workload)[0]

    def begin(self, workload: Workload) -> "Progress":
        """Queue all rows in an engine that is warmed up."""
        engine = make_engine(
            self._models,
            self.setup,
            max_model_len=workload.max_model_len,
            prefix=shared_head(workload.prompts) if self._share_prefix else (),
        )
        warm_up(engine, workload.prompts[0])
        sampling = replace(
            params(workload.max_new_tokens, workload.ignore_end), temperature=workload.temperature
        )
        add_rows(engine, workload.prompts, sampling, workload.lengths)
        return Progress(engine, drafts=self.setup.method != "plain")


class Progress:
    """An engine on its way through a workload."""

    def __init__(self, engine: RecordingEngine, *, drafts: bool) -> None:
        self.engine = engine
        self._drafts = drafts
        self._seconds = 0.0

    @property
    def num_computed(self) -> int:
        """Tokens that are done with, of all rows."""
        return sum(row.num_cached for row in self.engine.rows.values())

    def take_turn(self, seconds: float) -> None:
        """Steps for so long, one at least.

        Raises:
            EngineError: if a row fails.
        """
        until = self._seconds + seconds
        while self.engine.num_unfinished and self._seconds < until:
            started = time.perf_counter()
            completions = self.engine.step()
            self._seconds += time.perf_counter() - started
            check_rows(completions)

    def result(self) -> Run:
        """What came of it; `total_seconds` are those of its own steps."""
        return _run_of(self.engine, self._seconds, drafts=self._drafts)


def run_together(contenders: Sequence[EngineContender], workload: Workload) -> list[Run]:
    """Generate all rows with each contender, side by side: whichever is furthest behind has the
    next turn. Whatever slows the machine down for a while then slows all of them down. A turn is
    many steps, so that hardly any of them follows one of another engine, whoever does how many.

    Raises:
        EngineError: if a row fails.
    """
    all_ = [contender.begin(workload) for contender in contenders]
    dice = random.Random(0)
    while running := [one for one in all_ if one.engine.num_unfinished]:
        seconds = _TURN_SECONDS * dice.uniform(1 - _TURN_SPREAD, 1 + _TURN_SPREAD)
        min(running, key=lambda one: one.num_computed).take_turn(seconds)
    return [one.result() for one in all_]


def _run_of(engine: RecordingEngine, seconds: float, *, drafts: bool) -> Run:
    stats = [row.stats for row in engine.rows.values()]
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    totals = RunTotals.from_rows(stats)
    return Run(
        [row.end.tokens for row in engine.rows.values()],
        seconds,
        prefill_seconds=engine.times.prefill_seconds,
        draft_seconds=engine.times.draft_seconds if drafts else None,
        target_passes=sum(one.num_target_forwards for one in stats),
        draft_tokens=sum(one.num_draft_tokens for one in stats) if drafts else None,
        accepted_draft_tokens=accepted if drafts else None,
        decode_speedup=totals.decode_speedup,
        job_speedup=totals.job_speedup,
    )


def params(max_new_tokens: int, ignore_end: bool) -> SamplingParams:
    """Greedy decoding."""
    return SamplingParams(max_new_tokens=max_new_tokens, end_tokens=() if ignore_end else None)


def add_rows(
    engine: RecordingEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    lengths: Sequence[int] | None = None,
) -> None:
    """Queue the prompts, as rows `0`, `1`, ...; `lengths`: of each, in place of the sampling's."""
    each = lengths or [sampling.max_new_tokens] * len(prompts)
    for index, (prompt, length) in enumerate(zip(prompts, each, strict=True)):
        own = replace(sampling, max_new_tokens=length)
        engine.add_request(GenerationRequest(str(index), prompt, own))


def finish(engine: RecordingEngine) -> None:
    """Decode all that is queued.

    Raises:
        EngineError: if a row fails.
    """
    while engine.num_unfinished:
        check_rows(engine.step())


def check_rows(completions: Sequence[Completion]) -> None:
    """Raises EngineError if a row failed."""
    for completion in completions:
        if completion.status != "ok":
            raise EngineError(f"row {completion.row_key}: {completion.error}")


def warm_up(engine: RecordingEngine, prompt: Sequence[int]) -> None:
    """Decode a few tokens, so that first calls and allocations are not timed.

    The prompt is fed backwards: it shares no prefix, which is then computed in the timed run.
    """
    add_rows(engine, [list(reversed(prompt))], params(_WARM_UP_TOKENS, ignore_end=True))
    finish(engine)
    engine.rows.clear()
    engine.times = StepTimes()
