"""Decode steps of a run by what they did: the evidence behind every speedup figure."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

PLAIN = "plain"
BESIDES = "besides"  # passes that yield no tokens and only show what plain steps cost
SCHEDULED = "scheduled"  # steps that plain decoding would have had: counts, no seconds
_NORMAL_95 = 1.96
_FIRM_STEPS = 3  # plain steps in a bucket, below which its price may be an accident
_FIRM_SHARE = 0.5  # of the tokens that are to have such a price, else all is unknown
# Between buckets, a step of `rows` rows costs as much as `rows + STEP_BASE` of something.
STEP_BASE = 8.0

_Bucket = tuple[int, int]


class StepKind(NamedTuple):
    """Steps of one kind: bucket of occupancy and context as of `decoding.control`, what drafted
    (or one of the words above), and its draft tokens per row that had any, rounded."""

    occupancy: int
    context: int
    method: str
    length: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @property
    def bucket(self) -> _Bucket:
        return self.occupancy, self.context

    @classmethod
    def parse(cls, text: str) -> "StepKind":
        occupancy, context, method, length = text.split("/")
        return cls(int(occupancy), int(context), method, int(length))


class StepTable(dict[str, list[float]]):
    """Kind of step -> [steps, tokens, seconds, squares], sums over rows' shares of their steps.

    `squares`: of the step's seconds per row, so that the spread of plain steps is known. JSON as it
    stands; tables add and subtract.
    """

    def add(
        self, kind: StepKind, rows: int, tokens: int, seconds: float, step_seconds: float
    ) -> None:
        """A row's share of a step of `rows` rows: its tokens and seconds; `step_seconds`: of the
        whole step."""
        sums = self.setdefault(str(kind), [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1 / rows, tokens, seconds, (step_seconds / rows) ** 2 / rows)):
            sums[i] += value

    def add_scheduled(self, bucket: _Bucket, steps: int, tokens: int) -> None:
        """Steps that plain decoding would have had for the run's rows, and their tokens."""
        sums = self.setdefault(str(StepKind(*bucket, SCHEDULED, 0)), [0.0] * 4)
        sums[0] += steps
        sums[1] += tokens

    def __add__(self, other: Mapping[str, Iterable[float]]) -> "StepTable":
        return self._merged(other, 1)

    def __sub__(self, other: Mapping[str, Iterable[float]]) -> "StepTable":
        return self._merged(other, -1)

    def _merged(self, other: Mapping[str, Iterable[float]], sign: int) -> "StepTable":
        merged = StepTable({kind: list(sums) for kind, sums in self.items()})
        merged._take(other, sign)
        return merged

    def _take(self, other: Mapping[str, Iterable[float]], sign: int) -> None:
        for kind, sums in other.items():
            mine = self.get(kind, [0.0] * 4)
            self[kind] = [a + sign * b for a, b in zip(mine, sums, strict=True)]

    @classmethod
    def parse(cls, texts: Iterable[str | None]) -> "StepTable":
        """The sum of tables that were written as JSON."""
        total = cls()
        for text in texts:
            if text:
                total._take(json.loads(text), 1)  # in place: a unit has hundreds of rows
        return total

    def kinds(self) -> Iterator[tuple[StepKind, list[float]]]:
        """Sorted: fullest steps first, plain ones before drafts."""
        parsed = [(StepKind.parse(text), sums) for text, sums in self.items()]
        yield from sorted(parsed, key=lambda pair: (-pair[0][0], pair[0][2] != PLAIN, pair[0][1:]))

    def rates(self) -> list[dict[str, Any]]:
        """Per occupancy, method and draft length: steps, tokens, tokens/s of all rows together."""
        merged: dict[tuple[int, str, int], list[float]] = {}
        for kind, sums in self.kinds():
            if kind.method == SCHEDULED:
                continue
            key = (kind.occupancy, kind.method, kind.length)
            merged[key] = [a + b for a, b in zip(merged.get(key, [0.0] * 4), sums, strict=True)]
        return [
            {
                "occupancy": occupancy,
                "method": method,
                "draft_tokens": length,
                "steps": round(steps),
                "tokens": round(tokens),
                "tokens_per_second": tokens / seconds if seconds else None,
            }
            for (occupancy, method, length), (steps, tokens, seconds, _) in merged.items()
        ]

    def plain_seconds(self) -> float | None:
        """What decoding the tokens plainly would have taken, by plain decoding's own schedule.

        Those that were decoded plainly in a bucket took what they took; others are at the price of
        such steps. None where most have no price. A run that was cut short is taken for one whose
        tokens are like those that are scheduled.
        """
        scheduled, prices = self._scheduled(), self._prices()
        total = math.fsum(scheduled.values())
        firm = math.fsum(n for bucket, n in scheduled.items() if _is_firm(bucket, prices))
        if not total or firm < _FIRM_SHARE * total:
            return None
        decoded = math.fsum(
            sums[1] for kind, sums in self.kinds() if kind.method not in (SCHEDULED, BESIDES)
        )
        return _cost(scheduled, prices) * decoded / total

    def plain_error(self) -> float | None:
        """Half the width of the 95 % interval of `plain_seconds`, relative to it: from the spread
        of plain steps. None without any."""
        scheduled, prices = self._scheduled(), self._prices()
        if not prices or not scheduled:
            return None
        alone, shared = 0.0, dict.fromkeys((occupancy for occupancy, _ in scheduled), 0.0)
        for bucket, count in scheduled.items():
            error = _missing(bucket, count, prices) * math.sqrt(_near(bucket, prices).variance)
            if bucket in prices and prices[bucket].is_firm:
                alone += error**2
            else:  # neighbours that lean on the same steps err together
                shared[bucket[0]] += error
        variance = alone + math.fsum(error**2 for error in shared.values())
        return _NORMAL_95 * math.sqrt(variance) / _cost(scheduled, prices)

    def _scheduled(self) -> dict[_Bucket, float]:
        """Tokens of plain decoding's schedule, by bucket."""
        kinds = self.kinds()
        return {kind.bucket: sums[1] for kind, sums in kinds if kind.method == SCHEDULED}

    def _prices(self) -> "dict[_Bucket, _Price]":
        """Of plain steps, by bucket, where there were any."""
        found: dict[_Bucket, list[float]] = {}
        own: dict[_Bucket, float] = {}
        for kind, sums in self.kinds():
            if kind.method in (PLAIN, BESIDES) and sums[1]:
                so_far = found.get(kind.bucket, [0.0] * 4)
                found[kind.bucket] = [a + b for a, b in zip(so_far, sums, strict=True)]
                if kind.method == PLAIN:
                    own[kind.bucket] = sums[1]
        return {
            bucket: _Price(steps, rows, seconds, squares, own.get(bucket, 0.0))
            for bucket, (steps, rows, seconds, squares) in found.items()
        }


class _Price(NamedTuple):
    """Plain steps: how many, of how many rows, their seconds, the squares of seconds per row; and
    the run's tokens that came of them."""

    steps: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    own_tokens: float = 0.0

    @property
    def is_firm(self) -> bool:
        """Whether there are enough to go by."""
        return self.steps > _FIRM_STEPS - 0.5

    @property
    def mean(self) -> float:
        """Seconds per row."""
        return self.seconds / self.rows

    @property
    def variance(self) -> float:
        """Of the mean; 0 where a single step says nothing of it."""
        if self.steps < 1.5:
            return 0.0
        return max(0.0, self.squares / self.steps - self.mean**2) / (self.steps - 1)


_Prices = Mapping[_Bucket, _Price]


def _near(bucket: _Bucket, prices: _Prices) -> _Price:
    """Plain steps of the bucket, and of its neighbours in context if it has too few."""
    own = prices.get(bucket, _Price())
    if own.is_firm:
        return own
    occupancy, context = bucket
    around = (prices.get((occupancy, near), _Price()) for near in (context - 1, context + 1))
    return _Price(*(math.fsum(sums) for sums in zip(own, *around, strict=True)))


def _is_firm(bucket: _Bucket, prices: _Prices) -> bool:
    return _near(bucket, prices).is_firm


def _price_at(bucket: _Bucket, prices: _Prices) -> float:
    """Seconds of a plain step per row, there or, without steps enough, in the nearest bucket that
    has some, for as many rows."""
    near = _near(bucket, prices)
    if near.is_firm:
        return near.mean
    nearest = min(prices, key=lambda other: distance(bucket, other))
    return prices[nearest].mean * (1 + STEP_BASE / bucket[0]) / (1 + STEP_BASE / nearest[0])


def _missing(bucket: _Bucket, count: float, prices: _Prices) -> float:
    """How many of the bucket's tokens were not decoded plainly."""
    return max(0.0, count - prices[bucket].own_tokens) if bucket in prices else count


def _cost(scheduled: Mapping[_Bucket, float], prices: _Prices) -> float:
    """Seconds of all these tokens."""
    total = 0.0
    for bucket, count in scheduled.items():
        missing = _missing(bucket, count, prices)
        if missing < count:
            total += (count - missing) * prices[bucket].mean
        if missing:
            total += missing * _price_at(bucket, prices)
    return total


def distance(a: _Bucket, b: _Bucket) -> float:
    """How unlike the costs of steps in two buckets of occupancy and context are."""
    return 2 * abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1])
