"""Watches `model.generate()` decode one row: every step's tokens, drafts and time, as they happen.

transformers calls the stopping criteria exactly once after each target pass, and a candidate
generator before each pass of assisted decoding. An observer in the first place and a guard in the
second see all there is to count, in plain and in assisted decoding alike.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from pipeline.decoding.control import Bucket, ControlClock, bucket_of, count_buckets
from pipeline.decoding.stopping import RowEnd
from pipeline.records import GenerationStats
from pipeline.steptable import PLAIN, StepKind, StepTable


@dataclass(frozen=True)
class Step:
    """One pass of the target and what came of it; the first of a row is its prefill.

    `context`: tokens before the pass, of prompt and completion. `drafted`, `accepted`: draft tokens
    that it verified, up to the row's end. Seconds are wall time since the pass before.
    """

    context: int
    drafted: int
    accepted: int
    seconds: float
    draft_seconds: float


@dataclass
class RowObserver:
    """Observes one row. Called by `generate()` as its stopping criterion."""

    prompt_tokens: int
    end: RowEnd
    clock: ControlClock
    steps: list[Step] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # of the coming step, told by the guard
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._length = self.prompt_tokens
        self._last = self.started = time.perf_counter()

    @property
    def bucket(self) -> Bucket:
        """Of the coming step."""
        return bucket_of(1, self._length)

    @property
    def is_prefill(self) -> bool:
        return not self.steps

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """A step is over; input_ids `[1, length]`. Returns whether the row is, as bool `[1]`."""
        new = input_ids[0, self._length :].tolist()  # waits for a GPU: times below are true
        before = len(self.end.tokens)
        over = self.end.push(new)
        now = time.perf_counter()
        self._record(self.end.tokens[before:], over, now - self._last)
        self._length = input_ids.shape[1]
        self._last = now
        return torch.full((1,), over, dtype=torch.bool, device=input_ids.device)

    def _record(self, kept: list[int], over: bool, seconds: float) -> None:
        # Drafts past the row's end never mattered to it: neither drafted nor accepted.
        draft = self.draft[: len(kept)] if over else self.draft
        equal = (ours == theirs for ours, theirs in zip(draft, kept, strict=False))
        accepted = sum(takewhile(bool, equal))
        step = Step(self._length, len(draft), accepted, seconds, self.draft_seconds)
        if not self.is_prefill:
            if draft:
                self.clock.record_drafted(self.bucket, accepted + 1, seconds)
            else:  # without drafts, only the futile search sets this step apart from a plain one
                self.clock.record_control(self.bucket, seconds - self.draft_seconds)
        self.steps.append(step)
        self.draft, self.draft_seconds = [], 0.0

    def stats(self, method: str, finished: float) -> GenerationStats:
        """Statistics of the row; `finished` is when the call returned, on `perf_counter()`'s clock.

        The call's own costs before the first and after the last pass belong to the prefill.
        """
        decode = self.steps[1:]
        control: defaultdict[Bucket, list[float]] = defaultdict(list)
        for step in decode:
            if not step.drafted:
                control[bucket_of(1, step.context)].append(step.seconds - step.draft_seconds)
        decode_seconds = sum(step.seconds for step in decode)
        completion_tokens = len(self.end.tokens)
        decoded = count_buckets(self.prompt_tokens + 1, max(0, completion_tokens - 1))
        stats = GenerationStats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            num_target_forwards=len(self.steps),
            latency_seconds=finished - self.started,
            prefill_seconds=finished - self.started - decode_seconds,
            decode_seconds=decode_seconds,
            plain_decode_seconds=self.clock.plain_row_seconds(decoded, control),
            draft_seconds=sum(step.draft_seconds for step in decode),
            num_control_steps=sum(map(len, control.values())),
            control_seconds=sum(map(sum, control.values())),
            steps=_table(decode, method, decoded),
        )
        for step in decode:
            if step.drafted:
                stats.count_draft(step.drafted, step.accepted)
        stats.method = method if stats.num_accepted_draft_tokens else "plain"
        return stats


def _table(steps: Sequence[Step], method: str, decoded: Mapping[Bucket, int]) -> StepTable:
    """Decode steps of one row by kind; the futile search for drafts is no part of a plain one.
    Without drafts the row would have been alone as well, a token at a time."""
    table = StepTable()
    for step in steps:
        bucket = bucket_of(1, step.context)
        if step.drafted:
            kind = StepKind(*bucket, method, step.drafted)
            table.add(kind, 1, step.accepted + 1, step.seconds, 0.0)
        else:
            seconds = step.seconds - step.draft_seconds
            table.add(StepKind(*bucket, PLAIN, 0), 1, 1, seconds, seconds)
    for bucket, count in decoded.items():
        table.add_scheduled(bucket, count, count)
    return table


class GuardedLookup:
    """transformers' prompt lookup with three limits, in the shape of its candidate generators.

    No drafts in the prefill, whose time would otherwise contain a verification. None in control
    steps. And never beyond the row's budget: transformers drafts past `max_length`, which reaches
    positions that the model may not have.
    """

    requires_model_outputs = False

    def __init__(self, lookup: Any, observer: RowObserver) -> None:
        # The lookup would crop drafts with our processors applied to made-up uniform logits: top-p
        # and the noise then reject tokens at random. Verification applies them to the real ones.
        lookup.logits_processor = None
        self._lookup = lookup
        self._observer = observer

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """input_ids `[1, length]` -> the same with draft tokens appended `[1, length + drafts]`."""
        observer = self._observer
        if observer.is_prefill or observer.clock.wants_control(observer.bucket):
            return input_ids, None
        started = time.perf_counter()
        candidates, _ = self._lookup.get_candidates(input_ids)
        candidates = candidates[:, : self._lookup.max_length - 1]
        observer.draft = candidates[0, input_ids.shape[1] :].tolist()
        observer.draft_seconds = time.perf_counter() - started
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Nothing to adapt."""
