"""What a plain step costs, measured in the same run: the baseline of every speedup figure.

A *control step* is a decode step without drafts. Plain runs consist of them; drafting runs
interleave one now and then. Their times are kept per occupancy (rows in the step) and context,
because both change the cost of a step. Too few of them means unknown, never an estimate.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

MIN_STEPS = 3  # evidence below which a bucket says nothing
INTERVAL = 32  # decode steps between control steps: at 3 tokens a step they cost about 2 %
EAGER_INTERVAL = 4  # the same while a bucket has too few
AVERAGED_STEPS = 32  # recent steps behind a figure, so that it follows the machine's load
_KEPT_STEPS = 4096


class Bucket(NamedTuple):
    """Steps of about equal cost: rows in the step, and context up to a factor of sqrt(2)."""

    occupancy: int
    context: int


def bucket_of(occupancy: int, context_tokens: int) -> Bucket:
    """The bucket of a step of `occupancy` rows that attend to `context_tokens` tokens each."""
    return Bucket(occupancy, math.floor(2 * math.log2(max(1, context_tokens))))


class ControlClock:
    """Times of control steps, and when the next one is due. One per engine."""

    def __init__(self) -> None:
        self._seconds: defaultdict[Bucket, deque[float]] = defaultdict(
            lambda: deque(maxlen=_KEPT_STEPS)
        )
        self._steps_since_control = 0

    def wants_control(self, bucket: Bucket) -> bool:
        """Whether the coming decode step should do without drafts."""
        known = len(self._seconds.get(bucket, ())) >= MIN_STEPS
        return self._steps_since_control + 1 >= (INTERVAL if known else EAGER_INTERVAL)

    def record_control(self, bucket: Bucket, seconds: float) -> None:
        """A decode step without drafts took `seconds`."""
        self._seconds[bucket].append(seconds)
        self._steps_since_control = 0

    def record_drafted(self) -> None:
        """A decode step verified drafts."""
        self._steps_since_control += 1

    def plain_seconds(self, bucket: Bucket, own_count: int) -> float | None:
        """Seconds per row of a plain step; None with fewer than `MIN_STEPS` of them.

        Args:
            own_count: control steps that the asking row had in this bucket. All of them count, so
                that a row decoded plainly compares with itself.
        """
        recorded = self._seconds.get(bucket, ())
        if len(recorded) < MIN_STEPS:
            return None
        recent = list(recorded)[-max(own_count, AVERAGED_STEPS) :]
        return math.fsum(recent) / len(recent) / bucket.occupancy

    def plain_row_seconds(
        self, tokens: Mapping[Bucket, int], own_counts: Mapping[Bucket, int]
    ) -> float | None:
        """What a row's decode tokens, counted by bucket, would have taken one by one.

        None if any bucket has too little evidence.
        """
        total = 0.0
        for bucket, count in tokens.items():
            seconds = self.plain_seconds(bucket, own_counts.get(bucket, 0))
            if seconds is None:
                return None
            total += count * seconds
        return total


def count_buckets(first_context: int, tokens: int, occupancy: int = 1) -> Counter[Bucket]:
    """Buckets of `tokens` consecutive tokens, the first of which attends to `first_context`."""
    contexts = range(first_context, first_context + tokens)
    return Counter(bucket_of(occupancy, context) for context in contexts)
