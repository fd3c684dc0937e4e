"""Steps of a plain run, told from rows' lengths alone, and the factor that comes of them."""

import random
from collections import Counter

import pytest

from pipeline.decoding.control import bucket_of
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.schedule import PlainSchedule
from pipeline.records import GenerationRequest, SamplingParams
from pipeline.stats import RunTotals
from pipeline.steptable import SCHEDULED, StepTable
from tests.decoding.oracle import decode, make_engine
from tests.tiny import TEXT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()


def replayed(rows: list[tuple[int, int]], slots: int) -> Counter[tuple[int, int]]:
    """Tokens by bucket, step by step: rows are (prompt tokens, completion tokens)."""
    waiting = [(prompt + 1, tokens - 1) for prompt, tokens in rows if tokens > 1]
    running: list[tuple[int, int]] = []
    found: Counter[tuple[int, int]] = Counter()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        mean = sum(context for context, _ in running) / len(running)
        found[bucket_of(len(running), mean)] += len(running)
        running = [(context + 1, left - 1) for context, left in running if left > 1]
    return found


def tokens_of(table: StepTable, scheduled: bool) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for kind, sums in table.kinds():
        if (kind.method == SCHEDULED) == scheduled:
            found[kind[:2]] += round(sums[1])
    return found


@pytest.mark.parametrize("slots", [1, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_in_whatever_order_rows_end(slots: int, seed: int) -> None:
    dice = random.Random(seed)
    rows = [(dice.randrange(1, 400), dice.choice((1, 2, 9, 70, 300))) for _ in range(40)]
    schedule, total = PlainSchedule(), StepTable()
    under_way, ahead = [], list(rows)
    while under_way or ahead:
        while ahead and len(under_way) < slots:
            under_way.append((schedule.admit(ahead[0][0]), ahead.pop(0)[1]))
        row, tokens = under_way.pop(dice.randrange(len(under_way)))
        total += schedule.finish(row, tokens, slots, is_last=not (under_way or ahead))
    assert tokens_of(total, scheduled=True) == replayed(rows, slots)


def test_nothing_is_told_before_it_is_certain() -> None:
    schedule = PlainSchedule()
    first, second = schedule.admit(10), schedule.admit(10)
    assert not schedule.finish(second, 5, 2, is_last=False), "the first may be long or short"
    table = schedule.finish(first, 3, 2, is_last=False)
    assert sum(tokens_of(table, True).values()) == 4, "then a third row may come"
    rest = schedule.finish(schedule.admit(10), 2, 2, is_last=True)
    assert sum(tokens_of(rest, True).values()) == 3


# --- In the engine


def run(slots: int, **settings: object) -> tuple[StepTable, RunTotals]:
    ids = TOKENIZER(TEXT)["input_ids"]
    rows = [
        GenerationRequest(f"f:{i}", (ids * 2)[: 4 + 9 * i], SamplingParams(max_new_tokens=n))
        for i, n in enumerate((16, 1, 2, 40, 20, 5, 12, 1, 30))
    ]
    engine = make_engine(make_model(), TOKENIZER, slots, **settings)
    _, completions = decode(engine, rows)
    stats = [completion.stats for completion in completions.values()]
    return sum((one.steps for one in stats), StepTable()), RunTotals.from_rows(stats)


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_a_plain_run_is_its_own_schedule(slots: int) -> None:
    table, totals = run(slots)
    assert tokens_of(table, scheduled=True) == tokens_of(table, scheduled=False)
    if slots < 16:  # else most buckets have too few steps
        assert totals.decode_speedup == pytest.approx(1)
        assert totals.job_speedup == pytest.approx(1)


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_drafts_do_not_change_the_schedule(slots: int) -> None:
    plain, _ = run(slots)
    lookup = PromptLookupDrafter(3, 1)
    drafted, _ = run(slots, method="prompt_lookup", drafter=lookup, num_draft_tokens=5)
    assert tokens_of(drafted, scheduled=True) == tokens_of(plain, scheduled=True)
    kinds = {kind.method for kind, _ in drafted.kinds()}
    assert "prompt_lookup" in kinds
