"""Which translation rows get, from made-up verifications."""

from types import SimpleNamespace
from typing import Any

from pipeline.decoding.drafters import translation_trial
from pipeline.decoding.drafters.translation_trial import TranslationTrial

TOKENS, TEXT = [SimpleNamespace(name=name) for name in ("tokens", "text")]
ONE_STRETCH, MOST = translation_trial._STRETCH, translation_trial._MAX


def make(*ways: Any) -> TranslationTrial:
    return TranslationTrial(list(ways or (TOKENS, TEXT)), 0.5)


def verify(trial: TranslationTrial, slot: int, accepted: dict[str, list[int]]) -> Any:
    """One of the row's drafts; the translation has its lengths in turn."""
    way = trial.translation_of(slot)
    trial.begin(slot, way)
    lengths = accepted[way.name]
    count = lengths[trial.tally(way).verifications % len(lengths)]
    if count is not None:
        trial.observe(way, 4, count)
    return way


def until_decided(trial: TranslationTrial, slots: int, accepted: dict[str, list[int]]) -> int:
    """Verifications until one is chosen."""
    for count in range(0, 1000, slots):
        if trial.decide():
            return count
        for slot in range(slots):
            verify(trial, slot, accepted)
    raise AssertionError("never")


def test_a_row_has_each_in_stretches() -> None:
    trial = make()
    ways = [verify(trial, 3, {"tokens": [1, 3], "text": [3, 1]}) for _ in range(3 * ONE_STRETCH)]
    first, second, third = (ways[i * ONE_STRETCH : (i + 1) * ONE_STRETCH] for i in range(3))
    assert {way.name for way in first} == {way.name for way in third} != {second[0].name}
    assert len(set(map(id, second))) == 1


def test_rows_begin_with_either() -> None:
    trial = make()
    first, second = trial.translation_of(0), trial.translation_of(1)
    assert {first.name, second.name} == {"tokens", "text"}
    verify(trial, 0, {"tokens": [1], "text": [1]})
    trial.release(0)
    assert trial.translation_of(1) is second, "it stays while its row does"
    assert trial.translation_of(0) is not trial.translation_of(2)


def test_one_that_is_clearly_better_is_chosen_soon() -> None:
    for slots in (1, 16):
        trial = make()
        count = until_decided(trial, slots, {"tokens": [0, 1], "text": [3, 4]})
        assert trial.winner is TEXT
        assert count <= 2 * ONE_STRETCH + slots
        assert trial.translation_of(0) is TEXT and trial.translation_of(99) is TEXT


def test_one_that_seems_better_is_not_chosen_at_once() -> None:
    trial = make()
    count = until_decided(trial, 2, {"tokens": [0, 4, 4, 0], "text": [4, 0, 0, 3]})
    assert count == 2 * MOST and trial.winner is TOKENS


def test_where_both_do_as_well_less_time_is_better() -> None:
    for slow, winner in ((TOKENS, TEXT), (TEXT, TOKENS)):
        trial = make()
        trial.tally(slow).seconds = 1.0
        until_decided(trial, 2, {"tokens": [0, 4], "text": [4, 0]})
        assert trial.winner is winner


def test_drafts_that_come_to_nothing_count() -> None:
    trial = make()
    until_decided(trial, 2, {"tokens": [4, None, None, None], "text": [2, 1]})
    assert trial.winner is TEXT


def test_the_only_one_needs_no_trial() -> None:
    trial = make(TEXT)
    assert trial.winner is TEXT and trial.translation_of(0) is TEXT and not trial.decide()
