"""Decode steps of a run by what they did: the evidence behind every speedup figure."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

PLAIN = "plain"
_NORMAL_95 = 1.96


class StepKind(NamedTuple):
    """Steps of one kind: bucket of occupancy and context as of `decoding.control`, what drafted
    (`plain`: nothing), and its draft tokens per row that had any, rounded."""

    occupancy: int
    context: int
    method: str
    length: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

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

    def plain_error(self) -> float | None:
        """Half the width of the 95 % interval of the plain decode time, relative to it: from the
        spread of plain steps in each bucket. None without any."""
        plain, assisted = self._by_bucket()
        total = variance = 0.0
        for bucket, tokens in assisted.items():
            steps, rows, seconds, squares = plain.get(bucket, [0.0] * 4)
            if steps < 1.5 or not rows:
                continue
            mean = seconds / rows
            total += tokens * mean
            variance += tokens**2 * max(0.0, squares / steps - mean**2) / (steps - 1)
        total += sum(sums[2] for sums in plain.values())
        return _NORMAL_95 * math.sqrt(variance) / total if total else None

    def _by_bucket(self) -> tuple[dict[Any, list[float]], dict[Any, float]]:
        """Sums of plain steps, and tokens of all others."""
        plain: dict[Any, list[float]] = {}
        assisted: dict[Any, float] = {}
        for kind, sums in self.kinds():
            bucket = kind[:2]
            if kind.method == PLAIN:
                plain[bucket] = sums
            else:
                assisted[bucket] = assisted.get(bucket, 0.0) + sums[1]
        return plain, assisted
