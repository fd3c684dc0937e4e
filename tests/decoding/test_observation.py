"""The observer on a scripted clock: which second is charged to what."""

from typing import Any

import pytest
import torch

from pipeline.decoding import observation
from pipeline.decoding.control import ControlClock, bucket_of
from pipeline.decoding.observation import GuardedLookup, RowObserver
from pipeline.decoding.stopping import RowEnd, StopStrings
from tests.tiny import make_tokenizer

PROMPT = 100


class Time:
    """`time.perf_counter()` that moves only when told to."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"time.{name} is not scripted")


class Row:
    """Plays the part of `generate()`: asks for drafts, runs passes, reports them."""

    def __init__(self, clock: ControlClock, time: Time, end_at: int) -> None:
        end = RowEnd(StopStrings(make_tokenizer(), []), {2}, budget=end_at)
        self.time, self.ids = time, torch.arange(PROMPT)[None]
        self.observer = RowObserver(PROMPT, end, clock)
        self.found: list[int] = []
        self.guard = GuardedLookup(self, self.observer)
        self.max_length, self.logits_processor = 10_000, None

    def get_candidates(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.time.now += 0.25  # what drafting costs
        return torch.cat([ids, torch.tensor([self.found], dtype=torch.long)], dim=1), None

    def step(self, yielded: list[int], seconds: float, found: list[int] | None = None) -> bool:
        self.found = found or []
        self.guard.get_candidates(self.ids)
        self.time.now += seconds
        self.ids = torch.cat([self.ids, torch.tensor([yielded])], dim=1)
        return bool(self.observer(self.ids, None).item())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(observation, "time", time)
    return time


def test_every_second_of_the_call_is_charged_once(scripted: Time) -> None:
    clock = ControlClock()
    row = Row(clock, scripted, end_at=9)
    scripted.now += 0.5  # before the first pass
    assert not row.step([10], 2.0, found=[11])  # the prefill does not draft
    assert not row.step([11], 1.0)  # nothing found: 0.25 of drafting, then a plain step
    assert not row.step([12], 1.0)
    assert not row.step([13], 4.0)
    assert not row.step([14, 15, 16], 3.0, found=[14, 15, 99, 98])
    assert row.step([17, 18, 19], 3.0, found=[17, 18, 19])  # its ninth token ends the row
    scripted.now += 0.125  # after the last pass
    stats = row.observer.stats("prompt_lookup", scripted.now)
    assert stats.prefill_seconds == 0.5 + 2.0 + 0.125
    assert stats.decode_seconds == 3 * 0.25 + 6.0 + 2 * (0.25 + 3.0)
    assert stats.draft_seconds == 5 * 0.25
    assert (stats.num_control_steps, stats.control_seconds) == (3, 6.0)
    assert clock.plain_seconds(bucket_of(1, PROMPT + 1)) == 2.0, "without the futile drafting"
    assert stats.plain_decode_seconds == 6.0 + 5 * 2.0
    assert stats.completion_tokens == 9 and stats.num_target_forwards == 6
    assert (stats.num_spec_steps, stats.num_draft_tokens) == (2, 4 + 2), "up to the row's end"
    assert stats.num_accepted_draft_tokens == 2 + 2
    assert stats.method == "prompt_lookup"


def test_control_steps_do_without_drafts(scripted: Time) -> None:
    row = Row(ControlClock(), scripted, end_at=100)
    row.step([10], 2.0)
    drafted = []
    for _ in range(8):
        row.step([11], 1.0, found=[99])
        drafted.append(row.observer.steps[-1].drafted)
    assert drafted == [1, 1, 1, 0, 1, 1, 1, 0]
    assert row.observer.stats("prompt_lookup", scripted.now).draft_seconds == 6 * 0.25


def test_drafts_end_before_the_last_position(scripted: Time) -> None:
    row = Row(ControlClock(), scripted, end_at=100)
    row.step([10], 2.0)
    row.max_length = PROMPT + 4
    row.found = [11, 12, 13, 14]
    candidates, _ = row.guard.get_candidates(row.ids)
    assert candidates[0, PROMPT:].tolist() == [10, 11, 12]
    assert row.observer.draft == [11, 12]
