"""Which rows to draft for, by which method and how far: as far as a token is worth its price.

A packed step gives every draft token a price, the time that it adds to the verification, and a
value, the chance that it stands. A step of `rows` rows yields

    goodput = (rows + draft tokens that stand) / (plain step + draft tokens + drafting)

tokens a second. It is highest when exactly those tokens are drafted whose chance exceeds their cost
times the goodput itself, which is found by iteration (Dinkelbach, "On nonlinear fractional
programming", 1967). After Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", arXiv 2406.14066.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Chances = tuple[Sequence[float], Sequence[float]]  # of one row: `keep` and `share` of `Source`
_ITERATIONS = 4
_CLOSE = 1e-3  # relative improvement that is not worth another iteration
_PAID_MARGIN = 0.03  # by which passes of a model must win: chances are overrated where they matter


@dataclass(frozen=True)
class StepCost:
    """Seconds: of a plain step of these rows, of verifying drafts at all, of each draft token."""

    plain: float
    first: float
    token: float


@dataclass(frozen=True)
class Source:
    """What one method could draft for the rows of a step.

    `keep`: `[rows, places]`, chance that a draft token stands if it is proposed, those before it
    included: falling along a row, 0 where nothing can be drafted. `share`: of the same shape, the
    chance that the draft gets that far. `per_pass`: seconds of each pass of the drafter, one per
    place, for all rows together, and `first` once. `entry`: seconds per row `[rows]` before its
    first token.
    """

    keep: Floats
    share: Floats
    entry: Floats
    per_pass: float = 0.0
    first: float = 0.0


@dataclass(frozen=True)
class Choice:
    """`source`: per row the index of its source, -1 for none; `lengths`: of its draft. `goodput`:
    expected tokens a second; `plain`: the same without drafts."""

    source: list[int]
    lengths: list[int]
    goodput: float
    plain: float

    @property
    def gain(self) -> float:
        """Expected speedup over a plain step."""
        return self.goodput / self.plain

    @property
    def drafts(self) -> bool:
        return any(self.lengths)


def best_drafts(rows: int, sources: Sequence[Source], cost: StepCost) -> Choice:
    """The drafts that yield most tokens a second: of one source, or by row of two of which at most
    one takes passes of a model."""
    free = [i for i, source in enumerate(sources) if not source.per_pass]
    paid = [i for i, source in enumerate(sources) if source.per_pass]
    best = plain_choice(rows, cost)
    for i in free:
        chances = list(zip(sources[i].keep.tolist(), sources[i].share.tolist(), strict=True))
        choice = best_free(chances, cost, i)
        if choice.goodput > best.goodput:
            best = choice
    for i in paid:
        if not _may_exceed(sources[i], cost, best.goodput * (1 + _PAID_MARGIN)):
            continue
        for f in (*free, None):
            choice = _solve(rows, sources, (f, i), cost, best.goodput)
            if choice.goodput > best.goodput * (1 + _PAID_MARGIN):
                best = choice
    return best


def best_free(rows: Sequence[Chances], cost: StepCost, index: int = 0) -> Choice:
    """As `best_drafts`, of one source without passes, `index` by number. In plain loops: rows and
    places are few, and at most steps this is all that there is to decide.

    Args:
        rows: of each its chances, which may end where a token is not worth its price without any
            drafts: it is worth less beside others.
    """
    count = len(rows)
    best = plain = count / cost.plain
    best_lengths = [0] * count
    for _ in range(_ITERATIONS):
        least, tokens, drafted = cost.token * best, float(count), 0.0
        lengths = [0] * count
        for i, (keep, share) in enumerate(rows):
            for place, chance in enumerate(keep):
                if chance <= least:
                    break
                tokens += chance * share[place]
                drafted += share[place]
                lengths[i] = place + 1
        found = tokens / (cost.plain + cost.first + cost.token * drafted) if drafted else plain
        before = best
        if found > best:
            best, best_lengths = found, lengths
        if found <= before * (1 + _CLOSE):
            break
    return Choice([index if n else -1 for n in best_lengths], best_lengths, best, plain)


def _may_exceed(paid: Source, cost: StepCost, goodput: float) -> bool:
    """Whether the source's tokens could be worth its passes at this goodput, which others have; if
    not, neither alone nor beside others."""
    _, totals = _worth(paid, _gains(paid, cost, goodput), goodput)
    return bool((totals > 0).any())


def plain_choice(rows: int, cost: StepCost) -> Choice:
    """No drafts."""
    return Choice([-1] * rows, [0] * rows, rows / cost.plain, rows / cost.plain)


def _solve(
    rows: int, sources: Sequence[Source], pair: Any, cost: StepCost, goodput: float
) -> Choice:
    """Rows choose between a source without passes and one with; either may be None. The best, or
    no drafts if `goodput`, which others have, cannot be exceeded."""
    free, paid = pair
    plain = plain_choice(rows, cost)
    best = plain
    for _ in range(_ITERATIONS):
        source, lengths = np.full(rows, -1), np.zeros(rows, np.int64)
        value = np.zeros(rows)
        if free is not None:
            gains = _gains(sources[free], cost, goodput)
            value = gains.sum(1)
            lengths = (gains > 0).sum(1)
            source[lengths > 0] = free
        _take_paid(sources[paid], paid, cost, goodput, value, source, lengths)
        found = _goodput(sources, source, lengths, cost)
        if found > best.goodput:
            best = Choice(source.tolist(), lengths.tolist(), found, plain.goodput)
        if found <= goodput * (1 + _CLOSE):
            break
        goodput = found
    return best


def _gains(source: Source, cost: StepCost, goodput: float) -> Floats:
    """Tokens that each place adds beyond what its time would yield; 0 where it adds none."""
    net = source.keep - cost.token * goodput
    gains: Floats = np.where(net > 0, net * source.share, 0.0)
    return gains


def _worth(
    paid: Source, gains: Floats, goodput: float, value: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """Tokens that drafts of each depth add: by row beyond the row's `value` elsewhere, `[rows,
    depths]`; and of all rows that gain, less what the passes' time would yield, `[depths]`."""
    by_depth = gains.cumsum(1) - (paid.entry * goodput + value)[:, None]
    depths = np.arange(1, gains.shape[1] + 1)
    passes = (paid.first + paid.per_pass * depths) * goodput
    return by_depth, np.maximum(by_depth, 0).sum(0) - passes


def _take_paid(
    paid: Source,
    index: int,
    cost: StepCost,
    goodput: float,
    value: Floats,
    source: Ints,
    lengths: Ints,
) -> None:
    """Give rows to the source that takes passes, at the depth at which that gains most."""
    gains = _gains(paid, cost, goodput)
    by_depth, totals = _worth(paid, gains, goodput, value)
    depth = int(totals.argmax())
    if totals[depth] <= 0:
        return
    taken = by_depth[:, depth] > 0
    source[taken] = index
    lengths[taken] = (gains[taken, : depth + 1] > 0).sum(1)


def _goodput(sources: Sequence[Source], source: Ints, lengths: Ints, cost: StepCost) -> float:
    seconds, tokens, drafted = cost.plain, float(len(source)), 0.0
    for index, one in enumerate(sources):
        mine = (source == index) & (lengths > 0)
        if not mine.any():
            continue
        chosen = np.arange(one.keep.shape[1]) < np.where(mine, lengths, 0)[:, None]
        tokens += float((one.keep * one.share)[chosen].sum())
        drafted += float(one.share[chosen].sum())
        seconds += float(one.entry[mine].sum()) + one.first
        seconds += one.per_pass * int(lengths[mine].max())
    if drafted:
        seconds += cost.first + cost.token * drafted
    return tokens / seconds
