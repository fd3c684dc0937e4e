"""What the controller makes of the times that it is told."""

import itertools
from dataclasses import replace

import pytest

from pipeline.decoding.control import bucket_of
from pipeline.decoding.controller.controller import DraftLengthController
from pipeline.decoding.controller.costs import DraftCosts, VerifyCosts
from pipeline.decoding.controller.views import Outcome, RowsView


def test_passes_cost_what_they_took_once_enough_were_seen() -> None:
    costs = DraftCosts(0.5)
    assert costs.of_draft(2.0, 4) == (0.0, 1.0), "a guess"
    costs.record(4, 4 * 0.9 * 2.0, 2.0, 4)
    _, one = costs.of_draft(2.0, 4)
    assert 0.5 * 2.0 < one < 0.8 * 2.0, "the first may have been slow"
    for passes in (1, 2, 4, 10) * 100:
        costs.record(passes, (0.4 + passes * 0.2) * 2.0, 2.0, 4)
    first, one = costs.of_draft(2.0, 3)
    assert 0.1 < first < 0.4 * 2.0 and 0.2 * 2.0 < one < 0.25 * 2.0
    assert first + 4 * one == pytest.approx((0.4 + 4 * 0.2) * 2.0, rel=0.1)


def test_more_rows_than_were_seen_are_worth_an_attempt() -> None:
    costs = DraftCosts(0.3)
    costs.record(4, 4 * 0.3, 1.0, 2)
    assert costs.knows(2) and not costs.knows(16)
    assert 0.3 * 10 / 24 < costs.of_draft(1.0, 16)[1] < 0.25, "part of it were fixed costs"
    assert costs.of_draft(1.0, 1) == pytest.approx((0.0, 0.3), abs=1e-9)
    for _ in range(300):
        costs.record(4, 4 * 0.4, 1.0, 16)
    first, one = costs.of_draft(1.0, 16)
    assert first + 4 * one == pytest.approx(1.6, rel=0.03)
    assert costs.of_draft(1.0, 2) == pytest.approx((0.0, 0.3), abs=1e-9), "known by itself"


def test_what_drafts_cost_is_forgotten_as_steps_go_by() -> None:
    costs = VerifyCosts()
    guess = costs.step_cost(4, 4, 1.0).token
    for _ in range(50):
        costs.record(4, 8, 8 * 0.5)
    seen = costs.step_cost(4, 4, 1.0)
    for _ in range(4000):
        costs.age()
    later = costs.step_cost(4, 4, 1.0)
    assert guess < later.token < seen.token
    assert later.token == pytest.approx(guess, rel=0.1)


def test_nothing_is_drafted_before_steps_of_as_many_rows_were_seen() -> None:
    """From one row to sixteen is far: such a guess once made plain steps three times as dear."""
    controller = make(0.2, 1)
    assert trial_of(controller, view(1)) and not trial_of(controller, view(16))
    for _ in range(2):
        assert trial_of(controller, view(16)) == []
        controller.record_plain(bucket_of(16, 100), 16, 0.02)
    assert trial_of(controller, view(16))


def view(rows: int, lag: int = 0) -> RowsView:
    slots = list(range(rows))
    every = [1] * rows
    return RowsView(
        bucket_of(rows, 100),
        slots,
        [10] * rows,
        [60] * rows,
        {"draft_model": every},
        {"draft_model": [lag] * rows},
    )


def trial_of(controller: DraftLengthController, rows: RowsView) -> list[int]:
    return controller.plan(rows).lengths.get("draft_model", [])


def make(size: float, rows: int) -> DraftLengthController:
    controller = DraftLengthController(["draft_model"], 10, {"draft_model": size})
    controller.record_prefill(1.0, 1000)
    for _ in range(3):
        controller.record_plain(bucket_of(rows, 100), rows, 0.01)
    return controller


def test_a_trial_takes_as_many_rows_as_can_be_paid_for() -> None:
    small = trial_of(make(0.2, 16), view(16))
    assert sorted(small) == [0] * 12 + [4] * 4
    behind = trial_of(make(0.2, 16), view(16, lag=30))
    assert 0 < sum(map(bool, behind)) < 4, "catching up costs too"


def test_a_trial_goes_on_if_any_token_stood() -> None:
    def drafts(stood: int) -> list[int]:
        controller = make(0.2, 16)
        assert len(trial_of(controller, view(16))) == 16
        for row in range(4):
            controller.observe("draft_model", row, 1, 4, 4, stood if row == 3 else 0)
        return sorted(trial_of(controller, view(16)))

    assert drafts(0) == []
    assert drafts(1) == [0] * 8 + [4] * 8


def test_a_trial_leaves_out_rows_that_cannot_be_drafted_for() -> None:
    able = [0, 1, 1, 0]  # of the others, say, no hidden states were kept
    rows = replace(view(4), kinds={"draft_model": able})
    assert trial_of(make(0.2, 4), rows) == [4 * one for one in able]
    assert trial_of(make(0.2, 4), replace(rows, kinds={"draft_model": [0] * 4})) == []


def test_a_method_that_was_tried_is_tried_again_on_no_more_rows_than_it_takes() -> None:
    controller = make(0.1, 16)
    assert sorted(trial_of(controller, view(16))) == [0] * 12 + [4] * 4
    for row in range(4):
        controller.observe("draft_model", row, 1, 4, 4, 0)
    assert trial_of(controller, view(16)) == []
    while not (again := trial_of(controller, view(16))):
        controller.record_plain(bucket_of(16, 100), 16, 0.01)
    assert sorted(again) == [0] * 13 + [3] * 3
    for row in range(3):
        controller.observe("draft_model", row, 1, 3, 3, row)
    assert sorted(trial_of(controller, view(16))) == [0] * 13 + [3] * 3, "one looked good"


def test_what_looks_good_is_used_before_the_rest_of_its_trial_can_be_paid_for() -> None:
    def drafts(stood: int) -> list[int]:
        controller = make(0.2, 4)
        assert trial_of(controller, view(4))
        for row in range(4):
            controller.observe("draft_model", row, 1, 4, 4, stood)
        controller.ledger.record(0.0, controller.ledger.balance, is_free=False)  # nothing is left
        return trial_of(controller, view(4))

    assert drafts(4) == [4] * 4 and drafts(0) == []


def test_a_trial_that_is_too_dear_waits_until_it_can_be_paid_for() -> None:
    controller = make(2.0, 1)
    assert controller.wants_model()
    assert trial_of(controller, view(1)) == [] and not controller.wants_model()
    assert not controller.may_use("draft_model"), "nothing is kept ready meanwhile"
    for _ in range(1000):
        controller.record_plain(bucket_of(1, 100), 1, 0.01)
    assert controller.wants_model() and trial_of(controller, view(1)) == [4]


def test_nothing_is_kept_ready_during_the_pause_after_losses() -> None:
    controller = make(0.2, 1)
    assert controller.may_use("draft_model")
    controller.ledger.record(0.0, 1.0, is_free=False)
    assert trial_of(controller, view(1)) == []
    controller.ledger.credit = 1e9
    pause = 0
    while not controller.may_use("draft_model"):
        assert trial_of(controller, view(1)) == [] and not controller.wants_model()
        controller.record_plain(bucket_of(1, 100), 1, 0.01)
        pause += 1
    assert pause == 32 and trial_of(controller, view(1)) == [4]


def test_a_small_model_is_not_expected_to_catch_up_at_once() -> None:
    costs = DraftCosts(0.15)
    assert costs.per_entry_token(0.001) == pytest.approx(0.0005)
    assert DraftCosts(0.8).per_entry_token(0.001) == pytest.approx(0.0008)
    costs.record_entry(100, 0.01)
    assert costs.per_entry_token(0.001) == pytest.approx(0.0001), "once seen it is known"


def test_what_a_model_loses_does_not_end_drafts_that_need_none() -> None:
    controller = DraftLengthController(["prompt_lookup", "draft_model"], 10)
    bucket = bucket_of(1, 100)
    for _ in range(5):
        controller.record_plain(bucket, 1, 0.01)
    rows = replace(view(1), kinds={"prompt_lookup": [5], "draft_model": [1]})
    assert "draft_model" in controller.plan(rows).lengths, "a trial"
    outcome = Outcome(["draft_model"], [4], [4], [0], {"draft_model": 5.0}, {"draft_model": 4})
    controller.record(bucket, outcome, 0.02, 5.0)
    assert controller.ledger.balance < 0 < controller.ledger.free_balance
    assert set(controller.plan(rows).lengths) == {"prompt_lookup"}
    free = controller.ledger.free_balance
    nothing = replace(outcome, drafted=[0], draft_seconds={"draft_model": 1.0})
    controller.record(bucket, nothing, 0.01, 1.0)
    assert controller.ledger.free_balance > free, "nor a model that was asked in vain"


def test_looking_and_deciding_are_part_of_what_drafts_cost() -> None:
    def drafts(deciding: float) -> bool:
        controller = DraftLengthController(["prompt_lookup"], 10)
        controller.ledger.credit = 1e9  # losses do not end them
        bucket, rows = bucket_of(4, 100), replace(view(4), kinds={"prompt_lookup": [5, 0, 0, 0]})
        for _ in range(40):
            controller.record(bucket, Outcome([None] * 4, [0] * 4, [0] * 4, [0] * 4), 0.01, 0.0)
            controller.record(
                bucket,
                Outcome(["prompt_lookup", *[None] * 3], [4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0]),
                0.0105,
                deciding,
            )
        return bool(controller.plan(rows).lengths)

    assert drafts(0.0005) and not drafts(0.02)


def test_a_model_that_would_not_pay_is_looked_at_less_and_less() -> None:
    controller = make(0.5, 1)
    for _ in range(20):
        controller.observe("draft_model", 0, 1, 4, 4, 0)
    looks = []
    for step in range(400):
        if controller.wants_model():
            looks.append(step)
            controller.plan(view(1))
        controller.record_plain(bucket_of(1, 100), 1, 0.01)
    between = [b - a for a, b in itertools.pairwise(looks)]
    assert between and max(between) > 4 * min(between) and max(between) <= 70
