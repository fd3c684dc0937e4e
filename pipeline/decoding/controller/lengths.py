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

    source: Ints
    lengths: Ints
    goodput: float
    plain: float

    @property
    def gain(self) -> float:
        """Expected speedup over a plain step."""
        return self.goodput / self.plain

    @property
    def drafts(self) -> bool:
        return bool(self.lengths.any())


def best_drafts(rows: int, sources: Sequence[Source], cost: StepCost) -> Choice:
    """The drafts that yield most tokens a second: of one source, or by row of two of which at most
    one takes passes of a model."""
    free = [i for i, source in enumerate(sources) if not source.per_pass]
    paid = [i for i, source in enumerate(sources) if source.per_pass]
    best = plain_choice(rows, cost)
    for i in free:
        choice = _solve_free(rows, sources[i], i, cost, best.goodput)
        if choice.goodput > best.goodput:
            best = choice
    for pair in ((f, i) for i in paid for f in (*free, None)):
        choice = _solve(rows, sources, pair, cost, best.goodput)
        if choice.goodput > best.goodput * (1 + _PAID_MARGIN):
            best = choice
    return best


def plain_choice(rows: int, cost: StepCost) -> Choice:
    """No drafts."""
    none = np.zeros(rows, np.int64)
    return Choice(none - 1, none, rows / cost.plain, rows / cost.plain)


def _solve_free(rows: int, source: Source, index: int, cost: StepCost, goodput: float) -> Choice:
    """As `_solve`, for one source without passes. In plain loops: rows and places are few, and at
    most steps this is all that there is to decide."""
    plain = rows / cost.plain
    keep, share = source.keep.tolist(), source.share.tolist()
    best, best_lengths = goodput, [0] * rows
    for _ in range(_ITERATIONS):
        least, tokens, drafted = cost.token * best, float(rows), 0.0
        lengths = [0] * rows
        for i, chances in enumerate(keep):
            for place, chance in enumerate(chances):
                if chance <= least:
                    break
                tokens += chance * share[i][place]
                drafted += share[i][place]
                lengths[i] = place + 1
        found = tokens / (cost.plain + cost.first + cost.token * drafted) if drafted else plain
        before = best
        if found > best:
            best, best_lengths = found, lengths
        if found <= before * (1 + _CLOSE):
            break
    counts = np.array(best_lengths, np.int64)
    return Choice(np.where(counts > 0, index, -1), counts, max(best, plain), plain)


def _solve(
    rows: int, sources: Sequence[Source], pair: Any, cost: StepCost, goodput: float
) -> Choice:
    """Rows choose between a source without passes and one with; either may be None. The best, or
    no drafts if `goodput`, which others have, cannot be exceeded."""
    free, paid = pair
    plain = plain_choice(rows, cost)
    best = plain
    for _ in range(_ITERATIONS):
        source, lengths = plain.source.copy(), plain.lengths.copy()
        value = np.zeros(rows)
        if free is not None:
            gains = _gains(sources[free], cost, goodput)
            value = gains.sum(1)
            lengths = (gains > 0).sum(1)
            source[lengths > 0] = free
        _take_paid(sources[paid], paid, cost, goodput, value, source, lengths)
        found = _goodput(sources, source, lengths, cost)
        if found > best.goodput:
            best = Choice(source, lengths, found, plain.goodput)
        if found <= goodput * (1 + _CLOSE):
            break
        goodput = found
    return best


def _gains(source: Source, cost: StepCost, goodput: float) -> Floats:
    """Tokens that each place adds beyond what its time would yield; 0 where it adds none."""
    net = source.keep - cost.token * goodput
    gains: Floats = np.where(net > 0, net * source.share, 0.0)
    return gains


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
    by_depth = gains.cumsum(1) - (paid.entry * goodput)[:, None] - value[:, None]
    depths = np.arange(1, gains.shape[1] + 1)
    totals = np.maximum(by_depth, 0).sum(0) - (paid.first + paid.per_pass * depths) * goodput
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
