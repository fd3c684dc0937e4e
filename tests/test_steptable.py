"""A run's decode steps: sums of rows' shares, and what they prove."""

import json
import math
import random

import pytest

from pipeline.stats import RunTotals
from pipeline.steptable import PLAIN, StepKind, StepTable


def table(*, plain: list[float], drafted_tokens: int = 300, rows: int = 4) -> StepTable:
    """Plain steps of so many seconds, and drafted steps, as the rows of the steps count them."""
    found = StepTable()
    for seconds in plain:
        for _ in range(rows):
            found.add(StepKind(4, 18, PLAIN, 0), rows, 1, seconds / rows, seconds)
    for _ in range(rows):
        kind = StepKind(4, 18, "prompt_lookup", 3)
        found.add(kind, rows, drafted_tokens // rows, 1.0, 0.0)
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


def test_the_interval_is_as_wide_as_plain_steps_spread() -> None:
    """In repeated runs the true ratio lies within in 95 of 100."""
    dice, inside = random.Random(1), 0
    for _ in range(400):
        steps = table(plain=[dice.gauss(1.0, 0.2) for _ in range(20)])
        plain = steps["4/18/plain/0"]
        seconds = 300 * plain[2] / plain[1] + plain[2]  # what a run would report
        true = 300 * 1.0 / 4 + plain[2]
        totals = RunTotals(
            rows_measured=1,
            measured_decode_seconds=50.0,
            plain_decode_seconds=seconds,
            steps=steps,
        )
        interval = totals.decode_speedup_interval
        assert interval is not None
        inside += interval[0] <= true / 50.0 <= interval[1]
    assert 0.90 <= inside / 400 <= 0.99


def test_plain_runs_are_certain_and_unknown_ones_say_nothing() -> None:
    plain = StepTable({k: v for k, v in table(plain=[1.0, 2.0, 3.0]).items() if PLAIN in k})
    assert plain.plain_error() == 0.0
    assert StepTable().plain_error() is None
    assert RunTotals().job_speedup_interval is None


def test_the_prefill_narrows_the_interval_of_the_job() -> None:
    totals = RunTotals(
        rows_measured=1,
        measured_prefill_seconds=10.0,
        measured_decode_seconds=10.0,
        plain_decode_seconds=20.0,
        steps=table(plain=[1.0, 1.2, 0.9, 1.1]),
    )
    decode, job = totals.decode_speedup_interval, totals.job_speedup_interval
    assert decode is not None and job is not None
    assert math.isclose(sum(job) / 2, 1.5)
    assert math.isclose((job[1] - job[0]) / 1.5, (decode[1] - decode[0]) / 2 * 2 / 3)
