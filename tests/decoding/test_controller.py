"""Draft lengths: the best there are for what is known, and what is known is right."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.controller import (
    MARGIN,
    StepCost,
    Survival,
    best_lengths,
    yield_of,
)

chances = st.lists(st.floats(0.0, 1.0), max_size=3).map(
    lambda cs: list(itertools.accumulate(cs, min))
)
costs = st.builds(
    StepCost,
    plain=st.floats(0.5, 2.0),
    token=st.floats(0.001, 0.6),
    draft=st.sampled_from([0.0, 0.1]),
    draft_pass=st.sampled_from([0.0, 0.05, 0.3]),
)


@settings(max_examples=200)
@given(st.lists(chances, min_size=1, max_size=3), costs)
def test_no_lengths_yield_more(survival: list[list[float]], cost: StepCost) -> None:
    found = best_lengths(survival, cost)
    options = itertools.product(*(range(len(row) + 1) for row in survival))
    best = max(yield_of(survival, lengths, cost) for lengths in options)
    plain = yield_of(survival, [0] * len(survival), cost)
    if any(found):
        assert yield_of(survival, found, cost) >= best * (1 - 1e-6)
        assert yield_of(survival, found, cost) > plain * (1 + MARGIN)
    else:
        assert best <= plain * (1 + MARGIN) * (1 + 1e-6)


def test_a_draft_pass_must_be_worth_it_to_all_rows_together() -> None:
    cost = StepCost(plain=1.0, token=0.01, draft_pass=0.5)
    assert best_lengths([[0.4, 0.4]], cost) == [0]
    assert best_lengths([[0.9, 0.8]] * 8, cost)[0] >= 1


@pytest.mark.parametrize("chance", [0.2, 0.7, 0.95])
def test_survival_is_learnt_per_place_and_class(chance: float) -> None:
    survival, dice = Survival(), random.Random(3)
    for _ in range(2_000):
        accepted = 0
        while accepted < 3 and dice.random() < chance:
            accepted += 1
        survival.record(2, 3, accepted)
    assert survival.conditional(2, 0) == pytest.approx(chance, abs=0.08)
    assert survival.of(2, 3)[2] == pytest.approx(chance**3, abs=0.12)
    assert survival.conditional(9, 0) == 0.5, "another class"
    assert survival.evidence(2) > 300


def test_nothing_is_learnt_behind_a_wrong_token() -> None:
    survival = Survival()
    for _ in range(50):
        survival.record(0, 5, 0)
    assert survival.conditional(0, 0) < 0.05
    right_after = survival.conditional(0, 1)
    assert right_after == pytest.approx(survival.conditional(0, 0)), "as the place before, no less"


def test_what_is_known_changes_with_the_text() -> None:
    survival = Survival()
    for _ in range(1_000):
        survival.record(0, 1, 1)
    for _ in range(600):
        survival.record(0, 1, 0)
    assert survival.conditional(0, 0) < 0.35
