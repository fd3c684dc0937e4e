import random
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.drafters.prompt_lookup import LONGEST_MATCH, PromptLookupDrafter
from pipeline.records import SamplingParams


@dataclass
class Row:
    slot: int
    tokens: list[int]
    num_prompt_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise_key: int = 0


class CountingList(list[int]):
    """Counts the tokens that are read from it."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()


def _naive(tokens: list[int], limit: int, sizes: range) -> tuple[list[int], int]:
    """The definition: scan back for the latest match of the longest n-gram, copy token by token."""
    for size in sizes:
        for start in range(len(tokens) - 1, size - 1, -1):
            if limit and tokens[start - size : start] == tokens[-size:]:
                text = list(tokens)
                for at in range(start, start + limit):
                    text.append(text[at])
                longest = min(LONGEST_MATCH, start)
                same = (tokens[start - n : start] == tokens[-n:] for n in range(size, longest + 1))
                return text[len(tokens) :], size - 1 + len(list(takewhile(bool, same)))
    return [], 0


def _draft(tokens: list[int], limit: int = 4, **sizes: int) -> list[int]:
    (draft,) = PromptLookupDrafter(**sizes).propose([Row(0, tokens)], [limit])
    return draft


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_drafts_are_those_of_a_rescan_however_rows_grow_and_leave(data: st.DataObject) -> None:
    """Several rows grow in random chunks; slots pass to later rows, and some rows sit steps out."""
    text = st.lists(st.integers(0, 2), max_size=12)
    low, more = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    drafter = PromptLookupDrafter(max_ngram=low + more, min_ngram=low)
    rows = [Row(slot, data.draw(text)) for slot in (5, 0, 2)]
    for _ in range(data.draw(st.integers(1, 8))):
        for at, row in enumerate(rows):
            if data.draw(st.integers(0, 5)) == 0:
                drafter.release(row)
                rows[at] = Row(row.slot, data.draw(text))
            else:
                row.tokens += data.draw(text)
        present = data.draw(st.lists(st.sampled_from(rows), unique_by=id))
        limits = data.draw(st.lists(st.integers(0, 9), min_size=3))[: len(present)]
        limits += [3] * (len(present) - len(limits))
        drafts = drafter.propose(present, limits)
        expected = [
            _naive(row.tokens, limit, range(low + more, low - 1, -1))
            for row, limit in zip(present, limits, strict=True)
        ]
        assert list(zip(drafts, drafter.match_lengths, strict=True)) == expected


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], []),
        ([7], []),
        ([7, 7], []),  # the only pair is the end itself
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 2], []),  # one token alone is no match
        ([1, 2, 8, 9, 1, 2], [8, 9, 1, 2]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),  # the latest match, read over its end
        ([3, 1, 2, 8, 6, 1, 2, 9, 3, 1, 2], [8, 6, 1, 2]),  # a longer match before a later one
        ([5] * 3, [5] * 4),
        ([5] * 100, [5] * 4),
        ([1, 2] * 3, [1, 2, 1, 2]),
    ],
)
def test_what_follows_the_longest_and_latest_match(tokens: list[int], draft: list[int]) -> None:
    assert _draft(tokens) == draft


def test_shortest_match_is_a_setting() -> None:
    assert _draft([7, 7], min_ngram=1) == [7] * 4
    assert _draft([1, 2, 3, 2], min_ngram=1) == [3, 2, 3, 2]
    assert _draft([1, 2, 3, 8, 1, 2, 3], min_ngram=3) == [8, 1, 2, 3]
    assert _draft([2, 3, 8, 1, 2, 3], min_ngram=3) == []


@pytest.mark.parametrize(("low", "high"), [(0, 3), (-1, 3), (4, 3)])
def test_impossible_sizes_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        PromptLookupDrafter(max_ngram=high, min_ngram=low)


def test_limits_are_kept_row_by_row() -> None:
    rows = [Row(slot, list(range(20)) * 2) for slot in range(4)]
    drafter = PromptLookupDrafter()
    drafts = drafter.propose(rows, [0, 1, 3, 50])
    assert [len(draft) for draft in drafts] == [0, 1, 3, 50]
    assert drafter.match_lengths == [0, 20, 20, 20]
    assert drafter.propose([], []) == [] and drafter.match_lengths == []


def test_rows_are_forgotten_at_their_release() -> None:
    drafter = PromptLookupDrafter()
    old, unseen = Row(0, [1, 2, 3] * 5), Row(1, [1, 2, 3])
    drafter.propose([old], [4])
    drafter.release(old)
    drafter.release(unseen)
    assert not drafter._indexes
    assert drafter.propose([Row(0, [4, 5, 6, 7] * 5)], [4]) == [[4, 5, 6, 7]]


def test_nothing_is_read_before_a_draft_is_wanted() -> None:
    row = Row(0, CountingList([1, 2, 3] * 100))
    drafter = PromptLookupDrafter()
    assert drafter.propose([row], [0]) == [[]]
    assert row.tokens.reads == 0 and not drafter._indexes
    assert drafter.propose([row], [2]) == [[1, 2]]


@pytest.mark.parametrize("alphabet", [1, 5, 10_000])
def test_cost_and_memory_per_token_do_not_grow_with_the_text(alphabet: int) -> None:
    """Each step reads its new tokens once per place in an n-gram, the end, the draft, and
    the match before it."""
    numbers = random.Random(0)
    row = Row(0, CountingList(numbers.randrange(alphabet) for _ in range(1000)))
    drafter = PromptLookupDrafter(max_ngram=3, min_ngram=2)
    for _ in range(3000):
        drafter.propose([row], [4])
        row.tokens.append(numbers.randrange(alphabet))
    per_token = (3 + 2) + (3 + 2) + 4 + 2 * LONGEST_MATCH
    assert len(row.tokens) < row.tokens.reads <= per_token * len(row.tokens)
    entries = [len(positions) for positions in drafter._indexes[0]._next.values()]
    assert max(entries) < len(row.tokens)


def test_copied_text_is_accepted() -> None:
    """Output stays right whatever is drafted, so only this sees a drafter that drafts badly."""
    numbers = random.Random(0)
    document = [numbers.randrange(5000) for _ in range(300)]
    row, drafter, goal = Row(0, document + document[:2]), PromptLookupDrafter(), document * 2
    drafted = accepted = 0
    while len(row.tokens) < len(goal):
        (draft,) = drafter.propose([row], [min(5, len(goal) - len(row.tokens))])
        rest = goal[len(row.tokens) :]
        hits = next((i for i, token in enumerate(draft) if token != rest[i]), len(draft))
        drafter.observe(row, len(draft), hits)
        row.tokens += rest[: hits + 1]
        drafted, accepted = drafted + len(draft), accepted + hits
    assert accepted >= 0.95 * drafted and accepted >= 200
