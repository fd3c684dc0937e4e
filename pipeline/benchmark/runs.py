"""What a run of a contender yields, and how runs compare."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.benchmark.workload import Workload


@dataclass(frozen=True)
class Run:
    """One run over all rows. None: the contender does not tell.

    `tokens`: per row the ids generated, its end token included. Seconds are wall time, of all rows
    together (`decode_speedup` and `job_speedup` are our own estimates against plain steps);
    `prefill_seconds` last to the rows' first tokens, and `decode_seconds` are all the
    rest. `target_passes`, summed over rows: passes that yielded tokens of the row. `others_cpu`:
    share of all cores that other processes used meanwhile.
    """

    tokens: Sequence[Sequence[int]]
    total_seconds: float
    prefill_seconds: float | None = None
    draft_seconds: float | None = None
    target_passes: int | None = None
    draft_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    others_cpu: float = 0.0
    decode_speedup: float | None = None
    job_speedup: float | None = None

    @property
    def decode_seconds(self) -> float | None:
        if self.prefill_seconds is None:
            return None
        return self.total_seconds - self.prefill_seconds

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def figures(self) -> dict[str, float | int | None]:
        """All that can be averaged."""
        drafted, passes = self.draft_tokens, self.target_passes
        return {
            "total_seconds": self.total_seconds,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "tokens": self.num_tokens,
            "tokens_per_second": self.num_tokens / self.total_seconds,
            "target_passes": passes,
            "tokens_per_target_pass": self.num_tokens / passes if passes else None,
            "draft_tokens": drafted,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "acceptance": (self.accepted_draft_tokens or 0) / drafted if drafted else None,
            "others_cpu": self.others_cpu,
        }


class Contender(Protocol):
    """Generates a workload in some way. `name`: `family/method/slots`."""

    name: str

    def run(self, workload: Workload) -> Run:
        """Generate all rows; loading and a warm-up are not timed."""
        ...


@dataclass(frozen=True)
class Agreement:
    """How far a run's tokens are those of another.

    `first_difference`: the earliest place in any row: its row, the index of the token there, and
    both tokens (None: the row had ended).
    """

    rows_equal: int
    rows: int
    first_difference: Mapping[str, int | None] | None


def compare(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> Agreement:
    """`tokens` against `reference`, row by row."""
    places = [_difference(a, b) for a, b in zip(tokens, reference, strict=True)]
    differing = [(at, row) for row, at in enumerate(places) if at is not None]
    if not differing:
        return Agreement(len(places), len(places), None)
    at, row = min(differing)
    found, expected = (dict(enumerate(side[row])).get(at) for side in (tokens, reference))
    first = {"row": row, "token": at, "found": found, "expected": expected}
    return Agreement(len(places) - len(differing), len(places), first)


def _difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two rows differ, if they do."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def medians(runs: Sequence[Run]) -> dict[str, float | None]:
    """Median of each figure over runs of one contender; None where it is unknown."""
    rows = [run.figures() for run in runs]
    return {key: median([row[key] for row in rows]) for key in rows[0]} if rows else {}


def speedup(runs: Sequence[Run], baseline: Sequence[Run], figure: str) -> float | None:
    """The baseline's seconds over the contender's: median of the pairs that ran one after another,
    so that a drift of the machine cancels out."""
    pairs: list[tuple[Any, Any]] = [
        (run.figures()[figure], base.figures()[figure])
        for run, base in zip(runs, baseline, strict=False)
    ]
    return median([base / own if own and base else None for own, base in pairs])


def median(values: Sequence[float | int | None]) -> float | None:
    """Median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
