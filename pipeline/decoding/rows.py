"""One row on its way through the batched engine: its tokens, its slot, its statistics."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from pipeline.config import Method
from pipeline.decoding.control import Bucket, ControlClock
from pipeline.decoding.schedule import PlannedRow
from pipeline.decoding.stopping import RowEnd
from pipeline.records import Completion, GenerationRequest, GenerationStats, SamplingParams


class Row:
    """A row in flight. Satisfies `drafters.base.DraftRow`.

    `tokens` are prompt and completion so far; the first `num_cached` of them have K/V in the row's
    slot. A decoding row lacks that of its last token alone.
    """

    def __init__(
        self, request: GenerationRequest, sampling: SamplingParams, noise_key: int, end: RowEnd
    ) -> None:
        self.request = request
        self.sampling = sampling
        self.noise_key = noise_key
        self.end = end
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.slot = -1
        self.num_cached = 0
        self.prefilling = True
        self._started: float | None = None  # on `time.monotonic()`'s clock
        self.planned: PlannedRow | None = None
        self.stats = GenerationStats(prompt_tokens=self.num_prompt_tokens)
        self.accepted_by: Counter[Method] = Counter()  # draft tokens
        self._plain_tokens: Counter[Bucket] = Counter()
        self._control: defaultdict[Bucket, list[float]] = defaultdict(list)

    @property
    def max_tokens(self) -> int:
        """Prompt and completion at most."""
        return self.num_prompt_tokens + self.end.budget

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that can still matter: the target adds one of its own."""
        room = self.end.budget - len(self.end.tokens) - 1
        limit = self.sampling.num_draft_tokens
        return room if limit is None else min(room, limit)

    def start(self, slot: int) -> None:
        """The row takes a slot, for the first time or anew."""
        self.slot = slot
        self.num_cached = 0
        self.prefilling = True
        self._started = self._started or time.monotonic()
        if self.end.deadline is None and self.sampling.timeout_s is not None:
            self.end.deadline = time.monotonic() + self.sampling.timeout_s

    def add_tokens(self, tokens: Sequence[int], num_drafted: int, lossy: Sequence[bool]) -> bool:
        """What a pass yielded; True once the row is over.

        `tokens`: the accepted draft tokens and the target's own choice. `lossy`: for each accepted
        one whether the target alone would have rejected it.
        """
        before = len(self.end.tokens)
        over = self.end.push(tokens)
        kept = self.end.tokens[before:]
        self.tokens += kept
        stats = self.stats
        stats.num_target_forwards += 1
        stats.completion_tokens += len(kept)
        if num_drafted:
            # Drafts past the row's end never mattered to it: neither drafted nor accepted.
            drafted = min(num_drafted, len(kept)) if over else num_drafted
            stats.count_draft(drafted, min(len(lossy), len(kept)))
            stats.num_lossy_draft_tokens += sum(lossy[: len(kept)])
        return over

    def record_prefill(self, seconds: float) -> None:
        """Its share of a prefill step."""
        self.stats.prefill_seconds += seconds

    def record_decode(
        self, bucket: Bucket, num_tokens: int, seconds: float, draft_seconds: float
    ) -> None:
        """Its share of a decode step that yielded `num_tokens`; `seconds` include drafting."""
        self.stats.decode_seconds += seconds
        self.stats.draft_seconds += draft_seconds
        self._plain_tokens[bucket] += num_tokens

    def record_control(self, bucket: Bucket, seconds: float) -> None:
        """The decode step was a control step."""
        self._control[bucket].append(seconds)

    def complete(self, clock: ControlClock) -> Completion:
        """The finished row. Its method is the one that gave it most accepted tokens."""
        stats = self.stats
        stats.latency_seconds = time.monotonic() - (self._started or time.monotonic())
        if stats.num_accepted_draft_tokens:
            stats.method = max(self.accepted_by, key=lambda method: self.accepted_by[method])
        stats.plain_decode_seconds = clock.plain_row_seconds(self._plain_tokens, self._control)
        stats.num_control_steps = sum(map(len, self._control.values()))
        stats.control_seconds = sum(map(sum, self._control.values()))
        return Completion(
            self.request.row_key,
            status="timeout" if self.end.timed_out else "ok",
            text=self.end.text(),
            finish_reason=self.end.reason,
            stats=stats,
            token_ids=self.end.tokens,
        )

    def fail(self, error_type: str, error: str) -> Completion:
        """The row as an error; what it cost so far stays counted."""
        return failed(self.request, error_type, error, self.stats)


def failed(
    request: GenerationRequest,
    error_type: str,
    error: str,
    stats: GenerationStats | None = None,
) -> Completion:
    """A row that ended in an error."""
    stats = stats or GenerationStats(prompt_tokens=len(request.prompt_token_ids))
    return Completion(request.row_key, "error", error_type=error_type, error=error, stats=stats)
