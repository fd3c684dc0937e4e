"""What a plain step costs, measured in the same run: the baseline of every speedup figure.

A *control step* is a decode step without drafts. Plain runs consist of them; drafting runs
interleave one now and then. Their times per row are kept by occupancy (rows in the step) and
context, because both change the cost of a step. Too few of them means unknown, never an estimate.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

MIN_STEPS = 3  # evidence below which a bucket says nothing
INTERVAL = 32  # decode steps between control steps at least
EAGER_INTERVAL = 4  # the same while a bucket has too few
LOST_SHARE = 0.01  # of the decode time that control steps may cost, beyond those
AVERAGED_STEPS = 32  # recent steps behind a figure, so that it follows the machine's load
_KEPT_STEPS = 4096
_FADE = 1 - 1 / 256  # of drafted steps, in what drafting gains


class Bucket(NamedTuple):
    """Steps of about equal cost per row: occupancy up to a factor of 2, context of sqrt(2)."""

    occupancy: int
    context: int


def bucket_of(occupancy: int, context_tokens: float) -> Bucket:
    """The bucket of a step of `occupancy` rows that attend to `context_tokens` tokens each, in the
    mean. Occupancies 1, 2, 3 to 4, 5 to 8, ... share a bucket."""
    return Bucket(class_of(occupancy), math.floor(2 * math.log2(max(1, context_tokens))))


def class_of(rows: int) -> int:
    """The power of 2 that stands for a number of rows: the next one that is not below it."""
    return 1 << (rows - 1).bit_length()


class ControlClock:
    """Times of control steps, and when the next one is due. One per engine."""

    def __init__(self) -> None:
        self._seconds: defaultdict[Bucket, deque[float]] = defaultdict(
            lambda: deque(maxlen=_KEPT_STEPS)
        )
        self._steps_since_control = 0
        self._elapsed = self._lost = 0.0
        # of drafted steps, old ones fading: their seconds, and those of as many tokens without
        self._drafted_seconds = self._plain_worth = 0.0

    def wants_control(self, bucket: Bucket) -> bool:
        """Whether the coming decode step should do without drafts."""
        if len(self._seconds.get(bucket, ())) < MIN_STEPS:
            return self._steps_since_control + 1 >= EAGER_INTERVAL
        return self._steps_since_control + 1 >= INTERVAL and self._lost <= (
            LOST_SHARE * self._elapsed
        )

    def record_control(self, bucket: Bucket, seconds: float, occupancy: int = 1) -> None:
        """A decode step of `occupancy` rows without drafts took `seconds`."""
        if self.wants_control(bucket) and self._plain_worth > self._drafted_seconds:
            self._lost += seconds * (1 - self._drafted_seconds / self._plain_worth)
        self._elapsed += seconds
        self._seconds[bucket].append(seconds / occupancy)
        self._steps_since_control = 0

    def record_drafted(self, bucket: Bucket, num_tokens: int, seconds: float) -> None:
        """A decode step verified drafts and yielded so many tokens; `seconds` include drafting."""
        self._steps_since_control += 1
        self._elapsed += seconds
        plain = self.plain_seconds(bucket)
        if plain is not None:
            self._drafted_seconds = self._drafted_seconds * _FADE + seconds
            self._plain_worth = self._plain_worth * _FADE + plain * num_tokens

    def plain_seconds(self, bucket: Bucket, own_count: int = 0) -> float | None:
        """Seconds per row of a plain step: mean of the last `AVERAGED_STEPS` control steps, or of
        the asking row's own `own_count` if those are more. None with fewer than `MIN_STEPS`.
        """
        recorded = self._seconds.get(bucket)
        if recorded is None or len(recorded) < MIN_STEPS:
            return None
        recent = list(islice(reversed(recorded), max(own_count, AVERAGED_STEPS)))
        return math.fsum(recent) / len(recent)

    def plain_row_seconds(
        self, tokens: Mapping[Bucket, int], own: Mapping[Bucket, Sequence[float]]
    ) -> float | None:
        """What a row's decode tokens would have taken one by one; None where that is unknown.

        Tokens of the row's own control steps took what they took, so that a row decoded plainly
        has a speedup of 1 whatever else the machine was doing; all others are charged the mean.

        Args:
            tokens: the row's tokens after its first, counted by bucket.
            own: its share of the seconds of each control step that it had.
        """
        total = 0.0
        for bucket, count in tokens.items():
            measured = own.get(bucket, ())
            mean = self.plain_seconds(bucket, len(measured))
            if mean is None:
                return None
            total += math.fsum(measured) + (count - len(measured)) * mean
        return total


def count_buckets(first_context: int, tokens: int, occupancy: int = 1) -> Counter[Bucket]:
    """Buckets of `tokens` consecutive tokens, the first of which attends to `first_context`."""
    contexts = range(first_context, first_context + tokens)
    return Counter(bucket_of(occupancy, context) for context in contexts)
