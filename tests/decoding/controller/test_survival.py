"""How often drafts stand: both ways in which it is asked for say the same."""

import numpy as np
import pytest

from pipeline.decoding.controller.survival import Survival


def test_chances_row_by_row_are_those_of_all_rows_as_far_as_they_matter() -> None:
    survival = Survival(6, 0.6, {2: 0.3})
    dice = np.random.default_rng(0)
    for _ in range(300):
        slot, kind, drafted = (int(dice.integers(1, n)) for n in (8, 4, 7))
        survival.record(slot, kind, 6, drafted, int(dice.integers(0, drafted + 1)))
    slots, kinds, limits = [0, 1, 2, 3, 4], [1, 2, 3, 0, 1], [6, 6, 2, 6, 0]
    keep, share = survival.chances(slots, kinds, limits)
    assert (keep[3:] == 0).all() and (keep[2, 2:] == 0).all() and (keep[:3, 0] > 0).all()
    for least in (0.0, 0.2, 0.99):
        rows = survival.chances_above(least, slots, kinds, limits)
        for i, (chances, shares) in enumerate(rows):
            expected = keep[i][keep[i] > least]
            assert chances == pytest.approx(expected.tolist())
            assert list(shares[: len(chances)]) == pytest.approx(share[i, : len(chances)].tolist())
