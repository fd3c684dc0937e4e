"""The batched engine: continuous batching over slots, with lossless drafts for every row at once.

`step()` is a sentence: schedule, propose, verify, commit. Rows differ in length, draft, sampling
and age, yet each gets the tokens that it would get alone (see `verification`).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline.config import Method
from pipeline.decoding.accounts import charge, charge_control
from pipeline.decoding.admission import Admission
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.choosing import Chooser, Position, choice_error
from pipeline.decoding.control import Bucket, ControlClock, bucket_of
from pipeline.decoding.drafters.base import Drafter, StepReport
from pipeline.decoding.drafters.drafting import ModelDrafter
from pipeline.decoding.ensemble import Ensemble
from pipeline.decoding.faults import check_device, is_out_of_memory, release_memory
from pipeline.decoding.loading import neutralize
from pipeline.decoding.memory import SlotBudget
from pipeline.decoding.prefix import SharedPrefix
from pipeline.decoding.rows import Row, failed
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.schedule import PlainSchedule
from pipeline.decoding.scheduler import Chunk, Scheduler
from pipeline.decoding.serving import Serving
from pipeline.decoding.steps import Span, Step
from pipeline.decoding.timing import StepTimes
from pipeline.decoding.verification import Verified, verify
from pipeline.errors import RowError
from pipeline.records import Completion, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)


class BatchedEngine(Serving):
    """An `Engine` that decodes as many rows at once as it has slots.

    Args:
        model: a causal language model of transformers; its attention becomes ours and its
            generation settings are neutralised.
        tokenizer: the model's.
        sampling: of rows that bring none of their own.
        max_model_len: prompt and completion of a row at most, in tokens.
        budget: rows in flight and memory for them at most.
        step_tokens: prompt tokens per prefill pass at most.
        drafter: None decodes plainly.
        num_draft_tokens: per row and verification at most.
        ensemble_weight: of the target in ensemble verification (see `ensemble`), for a drafter that
            has probabilities; None: lossless.
        prefix_token_ids: what prompts begin with, if they have it in common: computed once.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: SamplingParams,
        *,
        max_model_len: int,
        budget: SlotBudget,
        step_tokens: int,
        method: Method = "plain",
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        ensemble_weight: float | None = None,
        prefix_token_ids: Sequence[int] = (),
    ) -> None:
        neutralize(model)
        self._admission = Admission(model, tokenizer, sampling, max_model_len)
        self._max_model_len = max_model_len
        self._chooser = Chooser(model.config.get_text_config().vocab_size)
        self._prefix = SharedPrefix(prefix_token_ids)
        self._budget = budget
        self._runner = ModelRunner(model, SlotCache(0, 0))  # made when the first rows are known
        self._scheduler = Scheduler(0, step_tokens)
        self._method: Method = method
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._clock = ControlClock()
        self._schedule = PlainSchedule()
        self._ensemble: Ensemble | None = None
        if drafter is not None:
            drafter.attach(self._runner)
        if ensemble_weight is not None:
            assert isinstance(drafter, ModelDrafter)
            drafter.keep_logits()
            self._ensemble = Ensemble(ensemble_weight, self._chooser)
        self._failed: list[Completion] = []
        self.times = StepTimes()

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a row; one that cannot be decoded comes back from the next `step`."""
        try:
            self._scheduler.add(self._row(request))
        except RowError as error:
            self._failed.append(failed(request, error.error_type, str(error)))

    @property
    def num_unfinished(self) -> int:
        """Rows queued or running."""
        return self._scheduler.num_unfinished + len(self._failed)

    @property
    def cache(self) -> SlotCache:
        return self._runner.cache

    def step(self) -> list[Completion]:
        """One pass of the target, for prefill or for decoding; the rows that it finished.

        Raises:
            EngineError: if the device is lost; the rows in flight are lost with it.
        """
        completions, self._failed = self._failed, []
        try:
            return completions + self._step()
        except Exception as error:
            check_device(error)
            if not is_out_of_memory(error):
                raise
            return completions + self._shrink(error)

    def _step(self) -> list[Completion]:
        self._make_room()
        for row in self._scheduler.admit():
            row.planned = row.planned or self._schedule.admit(row.num_prompt_tokens)
            self._reuse_prefix(row)
        chunks = self._scheduler.prefill()
        if chunks:
            return self._prefill(chunks)
        rows = self._scheduler.decoding()
        return self._decode(rows) if rows else []

    # Prefill

    def _prefill(self, chunks: list[Chunk]) -> list[Completion]:
        started = time.perf_counter()
        spans = [Span(c.row.slot, c.start, c.row.tokens[c.start : c.stop]) for c in chunks]
        step = Step(spans, decoding=False, device=self._runner.device)
        ready = [chunk.row for chunk in chunks if chunk.ends_prompt]
        logits = self._forward(step, [step.last_index(row.slot) for row in ready])
        chosen = self._chooser.choose(logits, [_position(row) for row in ready]) if ready else []
        seconds = time.perf_counter() - started
        self.times.prefill(seconds, step.num_tokens)
        if self._drafter is not None:
            self._drafter.after_prefill(seconds, step.num_tokens)
        for chunk in chunks:
            chunk.row.num_cached = chunk.stop
            chunk.row.prefilling = not chunk.ends_prompt
            chunk.row.record_prefill(seconds * (chunk.stop - chunk.start) / step.num_tokens)
        return self._commit(ready, [[]] * len(ready), [verify([], [choice]) for choice in chosen])

    def _reuse_prefix(self, row: Row) -> None:
        """Start the row behind what it shares with others, computing that first if need be."""
        length = self._prefix.usable(row.tokens)
        if not length:
            return
        if not self._prefix.is_cached:
            started = time.perf_counter()
            span = Span(self._prefix_slot, 0, self._prefix.token_ids)
            step = Step([span], decoding=False, device=self._runner.device)
            self._forward(step, [])
            self._prefix.is_cached = True
            seconds = time.perf_counter() - started
            self.times.prefill(seconds, step.num_tokens)
            row.record_prefill(seconds)
        self.cache.copy_prefix(self._prefix_slot, row.slot, length)
        if self._drafter is not None:
            self._drafter.copy_prefix(self._prefix_slot, row.slot, length)
        row.num_cached = length
        row.stats.cached_prompt_tokens = length

    @property
    def _prefix_slot(self) -> int:
        return self._scheduler.num_slots  # one behind those of rows

    def _forward(self, step: Step, keep: Sequence[int]) -> Tensor:
        """Run the step: logits `[len(keep), vocab]`."""
        if self._drafter is not None:
            self._runner.keeps_hidden = self._drafter.wants_hidden
        logits = self._runner.forward(step, keep)
        if self._drafter is not None:
            self._drafter.after_pass(step)
        return logits

    # Decoding

    def _decode(self, rows: list[Row]) -> list[Completion]:
        bucket = bucket_of(len(rows), sum(len(row.tokens) for row in rows) / len(rows))
        drafting = self._drafter is not None and not self._is_control(rows, bucket)
        started = time.perf_counter()
        drafts = self._propose(rows) if drafting else [[] for _ in rows]
        drafted = time.perf_counter()
        verified = self._verify(rows, drafts)
        seconds = time.perf_counter() - drafted
        accepted = [one.num_accepted for one in verified]
        draft_seconds = drafted - started if self._drafter else 0.0
        report = StepReport(rows, bucket, drafts, accepted, seconds, draft_seconds)
        methods: set[Method] = set()
        if self._drafter is not None:
            self._drafter.after_step(report)
            of = zip(rows, drafts, strict=True)
            methods = {self._drafter.method_of(row, self._method) for row, draft in of if draft}
        charge(report, rows, methods, self.times, self._clock)
        return self._commit(rows, drafts, verified)

    def _is_control(self, rows: list[Row], bucket: Bucket) -> bool:
        """Whether to do without drafts, so that the cost of that is known."""
        if not self._clock.wants_control(bucket):
            return False
        if self._ensemble is None:
            return True
        # Where drafts begin bears on the text, so they may not be left out: a pass besides.
        started = time.perf_counter()
        self._verify(rows, [[] for _ in rows])
        seconds = time.perf_counter() - started
        charge_control(rows, bucket, seconds, self.times, self._clock)
        return False

    def _propose(self, rows: list[Row]) -> list[list[int]]:
        assert self._drafter is not None
        limits = [min(self._num_draft_tokens, row.max_draft_tokens) for row in rows]
        return self._drafter.propose(rows, limits)

    def _verify(self, rows: list[Row], drafts: list[list[int]]) -> list[Verified]:
        """One pass over each row's last token and its draft."""
        spans = [
            Span(row.slot, row.num_cached, [row.tokens[-1], *draft])
            for row, draft in zip(rows, drafts, strict=True)
        ]
        step = Step(spans, decoding=True, device=self._runner.device)
        logits = self._forward(step, range(step.num_tokens))
        positions = [
            _position(row, draft[:j])
            for row, draft in zip(rows, drafts, strict=True)
            for j in range(len(draft) + 1)
        ]
        targets = choices = self._chooser.choose(logits, positions)
        if self._ensemble is not None and any(drafts):
            assert isinstance(self._drafter, ModelDrafter)
            drafted = self._drafter.draft_logits()
            choices = self._ensemble.choose_drafted(logits, drafted, positions, targets, drafts)
        bounds = list(zip(step.offsets, step.offsets[1:], strict=False))
        return [
            verify(draft, choices[a:b], targets[a:b])
            for draft, (a, b) in zip(drafts, bounds, strict=True)
        ]

    def _commit(
        self, rows: list[Row], drafts: list[list[int]], verified: list[Verified]
    ) -> list[Completion]:
        """Give each row what was accepted of its draft and the target's own choice after it."""
        completions = []
        for row, draft, one in zip(rows, drafts, verified, strict=True):
            tokens = one.tokens
            fault = choice_error(tokens.pop()) if tokens[-1] < 0 else None
            over = bool(tokens) and row.add_tokens(tokens, len(draft), one.lossy)
            row.num_cached = len(row.tokens) - 1
            if draft and self._drafter is not None:
                row.accepted_by[self._drafter.method_of(row, self._method)] += one.num_accepted
                self._drafter.observe(row, len(draft), one.num_accepted)
            if over:
                self._release(row)
                completions.append(row.complete(self._clock))
            elif fault:
                self._release(row)
                self.cache.clear(row.slot)  # nan would pass the masks of the slot's next rows
                completions.append(row.fail(fault.error_type, str(fault)))
        return completions

    def _release(self, row: Row) -> None:
        self._scheduler.release(row)
        assert row.planned is not None
        row.stats.steps += self._schedule.finish(
            row.planned,
            len(row.end.tokens),
            self._scheduler.num_slots,
            is_last=not self._scheduler.num_unfinished,
        )
        if self._drafter is not None:
            self._drafter.release(row)

    # Rows and faults

    def _row(self, request: GenerationRequest) -> Row:
        return self._admission.row(request)

    def _make_room(self) -> None:
        """See that the slots are long enough for whatever row is admitted next."""
        # a loop, for more rows may be next once there are more slots
        while (longest := self._scheduler.longest_next()) > self.cache.max_len:
            extra = 1 if self._prefix.token_ids else 0
            self._rebuild(*self._budget.fit(longest, self._max_model_len, extra))

    def _shrink(self, error: Exception) -> list[Completion]:
        """Out of memory: go on with half the slots, or give up the row that needs it all."""
        slots, rows = self._scheduler.num_slots, self._scheduler.decoding()
        logger.warning("out of memory with %d slots: %s", slots, str(error).split("\n")[0])
        completions = []
        if slots == 1:
            for row in rows:
                self._release(row)
                completions.append(row.fail("out_of_memory", f"{type(error).__name__}: {error}"))
        half = max(1, slots // 2)
        self._budget = replace(self._budget, max_slots=half)
        self._rebuild(half, self.cache.max_len)
        return completions

    def _rebuild(self, num_slots: int, length: int) -> None:
        """Slots of another number or length. Rows in flight queue again and keep their tokens."""
        if self._drafter is not None:
            for row in self._scheduler.decoding():
                self._drafter.release(row)
            self._drafter.resize(num_slots, length)
        self._scheduler.resize(num_slots)
        self._prefix.is_cached = False
        if self.cache.num_bytes:  # let go of the old before the new is made
            self._runner.cache = SlotCache(0, 0)
            release_memory()
        extra = 1 if self._prefix.token_ids else 0
        self._runner.cache = SlotCache(num_slots + extra, length)
        size = self._budget.bytes_per_token * (num_slots + extra) * length
        logger.info(
            "%d slots of %d tokens: %.2f GiB for K and V", num_slots, length, size / (1 << 30)
        )


def _position(row: Row, drafted: Sequence[int] = ()) -> Position:
    t = len(row.end.tokens) + len(drafted)
    return Position(row.sampling, row.noise_key, t, row.tokens, drafted)
