"""The drafts that yield most tokens a second, against all that could be chosen."""

import numpy as np
import pytest

from pipeline.decoding.controller.lengths import Source, StepCost, best_drafts


def source(dice: np.random.Generator, rows: int, **passes: float) -> Source:
    keep, share = (dice.uniform(low, 1, (rows, 6)).cumprod(1) for low in (0.3, 0.8))
    return Source(keep, share, np.zeros(rows), **passes)


def goodput(one: Source, lengths: np.ndarray, cost: StepCost) -> float:
    """Of drafts of these lengths."""
    rows, places = one.keep.shape
    chosen = np.arange(places) < lengths[:, None]
    tokens = rows + (one.keep * one.share)[chosen].sum()
    seconds = cost.plain
    if lengths.any():
        seconds += cost.first + cost.token * one.share[chosen].sum()
        seconds += one.first + one.per_pass * lengths.max()
    return float(tokens / seconds)


def best_of_all(one: Source, cost: StepCost) -> float:
    """Over every threshold of chances and every depth: the best lengths are among these."""
    _, places = one.keep.shape
    return max(
        goodput(one, np.minimum((one.keep > least).sum(1), depth), cost)
        for least in (0.0, *one.keep.ravel())
        for depth in range(places + 1)
    )


@pytest.mark.parametrize("passes", [{}, {"per_pass": 0.02}, {"per_pass": 0.01, "first": 0.1}])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_as_good_as_the_best(rows: int, passes: dict[str, float]) -> None:
    dice = np.random.default_rng(rows)
    drafting = 0
    for _ in range(60):
        one = source(dice, rows, **passes)
        cost = StepCost(1.0, float(dice.choice([0.0, 0.3])), float(dice.uniform(0.5, 1.5)) / rows)
        cost = StepCost(cost.plain, cost.first, cost.token * float(dice.choice([0.05, 0.3, 1.0])))
        choice = best_drafts(rows, [one], cost)
        assert choice.goodput == pytest.approx(goodput(one, np.array(choice.lengths), cost))
        assert choice.plain == rows
        slack = 0.002 if not passes else 0.035  # passes must win by a margin
        assert choice.goodput >= best_of_all(one, cost) * (1 - slack)
        assert choice.source == [0 if n else -1 for n in choice.lengths]
        drafting += choice.drafts
    assert 10 < drafting <= 60


def test_rows_take_the_source_that_suits_them() -> None:
    good, bad = np.full((1, 4), 0.9), np.full((1, 4), 0.05)
    share = np.ones((2, 4))
    free = Source(np.vstack([good, bad]), share, np.zeros(2))
    paid = Source(np.vstack([bad, good]), share, np.zeros(2), per_pass=0.05)
    choice = best_drafts(2, [free, paid], StepCost(1.0, 0.0, 0.05))
    assert choice.source == [0, 1] and choice.lengths == [4, 4]
    dear = Source(paid.keep, share, np.zeros(2), per_pass=0.05, first=5.0)
    assert best_drafts(2, [free, dear], StepCost(1.0, 0.0, 0.05)).source == [0, -1]
