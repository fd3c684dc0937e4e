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
# Between buckets, a step of `rows` rows costs as much as `rows + _BASE` of something.
_BASE = 8.0

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
        """What decoding the run's tokens plainly would have taken: steps of plain decoding's own
        schedule at the price of the plain steps that the run had. None where most have no price.

        A run that was cut short is taken for one whose tokens are like those that are scheduled.
        """
        scheduled, prices = self._scheduled(), self._prices()
        total = math.fsum(scheduled.values())
        firm = math.fsum(
            count
            for bucket, count in scheduled.items()
            if bucket in prices and prices[bucket].steps > _FIRM_STEPS - 0.5
        )
        if not total or firm < _FIRM_SHARE * total:
            return None
        decoded = math.fsum(
            sums[1] for kind, sums in self.kinds() if kind.method not in (SCHEDULED, BESIDES)
        )
        seconds = math.fsum(n * _price_at(bucket, prices) for bucket, n in scheduled.items())
        return seconds * decoded / total

    def plain_error(self) -> float | None:
        """Half the width of the 95 % interval of `plain_seconds`, relative to it: from the spread
        of plain steps in each bucket. None without any."""
        scheduled, prices = self._scheduled(), self._prices()
        if not prices or not scheduled:
            return None
        variance = math.fsum(
            max(0.0, scheduled.get(bucket, 0.0) - price.own_tokens) ** 2 * price.variance
            for bucket, price in prices.items()
        )
        total = math.fsum(n * _price_at(bucket, prices) for bucket, n in scheduled.items())
        return _NORMAL_95 * math.sqrt(variance) / total

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
    """Plain steps of a bucket: how many, of how many rows, their seconds, the squares of seconds
    per row; and the run's tokens that came of them."""

    steps: float
    rows: float
    seconds: float
    squares: float
    own_tokens: float

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


def _price_at(bucket: _Bucket, prices: Mapping[_Bucket, _Price]) -> float:
    """Seconds of a plain step per row: the bucket's own, or that of the nearest one for as many
    rows."""
    near = min(prices, key=lambda other: _distance(bucket, other))
    return prices[near].mean * (1 + _BASE / bucket[0]) / (1 + _BASE / near[0])


def _distance(a: _Bucket, b: _Bucket) -> float:
    return 2 * abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1])
