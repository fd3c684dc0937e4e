"""A run's decode steps: sums of rows' shares, and what they prove."""

import json
import math
import random

import pytest

from pipeline.stats import RunTotals
from pipeline.steptable import BESIDES, PLAIN, StepKind, StepTable


def table(*, plain: list[float], drafted_tokens: int = 300, rows: int = 4) -> StepTable:
    """Plain steps of so many seconds, and drafted steps, as the rows of the steps count them.
    Plain decoding would have had as many rows in its steps."""
    found = StepTable()
    for seconds in plain:
        for _ in range(rows):
            found.add(StepKind(4, 18, PLAIN, 0), rows, 1, seconds / rows, seconds)
    for _ in range(rows):
        kind = StepKind(4, 18, "prompt_lookup", 3)
        found.add(kind, rows, drafted_tokens // rows, 1.0, 0.0)
    tokens = drafted_tokens + rows * len(plain)
    found.add_scheduled((4, 18), tokens // rows, tokens)
    return found


def prices(**seconds: float) -> StepTable:
    """Plain steps by the rows in them, `of_4=1.0`: three steps of a second each."""
    found = StepTable()
    for name, value in seconds.items():
        rows = int(name.removeprefix("of_"))
        for _ in range(3 * rows):
            found.add(StepKind(rows, 18, PLAIN, 0), rows, 1, value / rows, value)
    return found


def test_shares_of_rows_add_up_to_steps() -> None:
    rates = table(plain=[1.0, 2.0]).rates()
    assert [(r["method"], r["draft_tokens"], r["steps"], r["tokens"]) for r in rates] == [
        ("plain", 0, 2, 8),
        ("prompt_lookup", 3, 1, 300),
    ]
    assert rates[0]["tokens_per_second"] == pytest.approx(8 / 3)
    assert rates[1]["tokens_per_second"] == pytest.approx(300 / 4)


def test_tables_add_subtract_and_travel_as_json() -> None:
    one, two = table(plain=[1.0]), table(plain=[3.0, 4.0])
    both = one + two
    assert StepTable.parse([json.dumps(one), None, json.dumps(two)]) == both
    left = both - two
    assert {k: pytest.approx(v) for k, v in one.items()} == left
    totals = RunTotals(rows_ok=1, steps=one) + RunTotals(rows_ok=2, steps=two)
    assert totals.steps == both
    again = RunTotals.from_mapping(json.loads(json.dumps(vars(totals))))
    assert isinstance(again.steps, StepTable)
    assert again == totals


def test_tokens_cost_what_they_would_have_beside_more_rows() -> None:
    """Drafts let all but one row end early; plain decoding would have had them together."""
    steps = prices(of_4=4.0, of_1=2.0)  # a token: 1 and 2 seconds
    steps.add(StepKind(1, 18, "prompt_lookup", 3), 1, 85, 30.0, 0.0)
    steps.add_scheduled((4, 18), 25, 100)
    totals = RunTotals(prefill_seconds=20.0, decode_seconds=50.0, steps=steps)
    assert steps.plain_seconds() == pytest.approx(100.0)
    assert totals.decode_speedup == pytest.approx(2.0)
    assert totals.job_speedup == pytest.approx(120 / 70)
    assert [rate["method"] for rate in steps.rates()] == ["plain", "plain", "prompt_lookup"]


def test_a_bucket_without_plain_steps_has_the_price_of_the_nearest() -> None:
    steps = prices(of_4=4.0)
    steps.add(StepKind(4, 18, "prompt_lookup", 3), 4, 88, 30.0, 0.0)
    steps.add_scheduled((4, 18), 13, 50)
    steps.add_scheduled((4, 19), 3, 10)
    steps.add_scheduled((1, 18), 40, 40)  # 9 in place of 12 for 4 rows
    assert steps.plain_seconds() == pytest.approx(50 * 1.0 + 10 * 1.0 + 40 * 3.0)
    steps.add_scheduled((1, 18), 21, 21)
    assert steps.plain_seconds() is None, "most tokens are without"


def test_neighbours_in_context_lend_each_other_their_steps() -> None:
    steps = StepTable()
    for context, seconds in ((17, 1.0), (18, 2.0), (19, 3.0), (22, 50.0)):
        for _ in range(4):
            steps.add(StepKind(4, context, PLAIN, 0), 4, 1, seconds / 4, seconds)
    steps.add(StepKind(4, 18, "prompt_lookup", 3), 4, 84, 9.0, 0.0)
    steps.add_scheduled((4, 18), 25, 100)
    assert steps.plain_seconds() == pytest.approx(4 * 0.5 + 96 * 0.5)
    error = steps.plain_error()
    assert error is not None and error > 0.3
    steps.add_scheduled((4, 20), 20, 80)
    assert steps.plain_seconds() is not None
    steps.add_scheduled((4, 20), 30, 120)
    assert steps.plain_seconds() is None, "two of 19 and 22 are too few"


def test_two_plain_steps_prove_nothing() -> None:
    assert table(plain=[1.0, 2.0]).plain_seconds() is None
    assert table(plain=[1.0, 2.0, 3.0]).plain_seconds() == pytest.approx(312 * 2.0 / 4)


def test_a_run_that_was_cut_short_counts_what_it_decoded() -> None:
    steps = table(plain=[1.0, 2.0, 3.0])
    half = steps["4/18/scheduled/0"]
    half[:] = [value / 2 for value in half]
    assert steps.plain_seconds() == pytest.approx(312 * 2.0 / 4)


def test_passes_besides_tell_prices_and_yield_no_tokens() -> None:
    steps = StepTable()
    for _ in range(12):
        steps.add(StepKind(4, 18, BESIDES, 0), 4, 1, 1.0, 4.0)
    steps.add(StepKind(4, 18, "draft_model", 3), 4, 60, 9.0, 0.0)
    steps.add_scheduled((4, 18), 15, 60)
    assert steps.plain_seconds() == pytest.approx(60.0)
    assert steps.plain_error() == 0.0


def test_without_a_schedule_it_is_what_the_rows_know() -> None:
    totals = RunTotals(
        rows_measured=1,
        decode_seconds=9.0,
        measured_decode_seconds=4.0,
        plain_decode_seconds=8.0,
        steps=prices(of_4=4.0),
    )
    assert totals.decode_speedup == 2.0 and totals.decode_speedup_interval is None
    assert RunTotals(decode_seconds=9.0).job_speedup is None


def test_the_interval_is_as_wide_as_plain_steps_spread() -> None:
    """In repeated runs the true ratio lies within in 95 of 100."""
    dice, inside = random.Random(1), 0
    for _ in range(400):
        steps = table(plain=[dice.gauss(1.0, 0.2) for _ in range(20)])
        true = 300 * 1.0 / 4 + steps["4/18/plain/0"][2]
        totals = RunTotals(decode_seconds=50.0, steps=steps)
        interval = totals.decode_speedup_interval
        assert interval is not None
        inside += interval[0] <= true / 50.0 <= interval[1]
    assert 0.90 <= inside / 400 <= 0.99


def test_plain_runs_are_certain_and_unknown_ones_say_nothing() -> None:
    plain = table(plain=[1.0, 2.0, 3.0], drafted_tokens=0)
    assert plain.plain_error() == 0.0 and plain.plain_seconds() == pytest.approx(6.0)
    assert StepTable().plain_error() is None and StepTable().plain_seconds() is None
    assert RunTotals().job_speedup_interval is None


def test_the_prefill_narrows_the_interval_of_the_job() -> None:
    steps = prices(of_4=4.0)
    steps["4/18/plain/0"][3] += 0.5  # they vary
    steps.add(StepKind(4, 18, "prompt_lookup", 3), 4, 8, 7.0, 0.0)
    steps.add_scheduled((4, 18), 5, 20)
    totals = RunTotals(prefill_seconds=10.0, decode_seconds=10.0, steps=steps)
    decode, job = totals.decode_speedup_interval, totals.job_speedup_interval
    assert decode is not None and job is not None
    assert math.isclose(sum(decode) / 2, 2.0)
    assert math.isclose(sum(job) / 2, 1.5)
    assert math.isclose((job[1] - job[0]) / 1.5, (decode[1] - decode[0]) / 2 * 2 / 3)
