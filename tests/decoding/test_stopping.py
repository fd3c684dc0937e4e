import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.stopping import RowEnd, StopStrings
from tests.tiny import TEXT, make_tokenizer

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id


def _decode(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def _ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def _end_of(tokens: list[int], stop: list[str], block: int = 1, **kwargs: Any) -> RowEnd:
    """Feed `tokens` in blocks until the row is over."""
    settings = {"end_tokens": {END}, "budget": 10_000} | kwargs
    end = RowEnd(StopStrings(TOKENIZER, stop), **settings)
    for at in range(0, len(tokens), block):
        if end.push(tokens[at : at + block]):
            break
    return end


def _first_completed(tokens: list[int], stop: list[str]) -> int | None:
    """The definition: the fewest tokens whose text contains a stop string."""
    for count in range(1, len(tokens) + 1):
        if any(string in _decode(tokens[:count]) for string in stop):
            return count
    return None


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two\n\nthree", ["\n\n"], "one two"),
        ("one two.Then three", [".Then"], "one two"),
        ("one twofold three", ["fold", "two"], "one "),
        ("Über dem Bach, größer", ["öß"], "Über dem Bach, gr"),
        ("aaab", ["aab"], "a"),
        ("no such string", ["xyz"], "no such string"),
        ("smile 😀 and go", ["😀"], "smile "),
    ],
)
def test_text_ends_before_the_stop_string(
    text: str, stop: list[str], expected: str, block: int
) -> None:
    end = _end_of(_ids(text), stop, block)
    assert end.text() == expected
    assert end.reason == ("stop" if expected != text else None)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_end_is_the_first_completion_however_tokens_come(data: st.DataObject) -> None:
    """Random tokens, so also broken UTF-8 and special tokens between the letters of a stop."""
    pieces = st.one_of(st.integers(0, len(TOKENIZER) - 1), st.sampled_from(_ids(TEXT)))
    tokens = data.draw(st.lists(pieces, max_size=40))
    text = _decode([t for t in tokens if t != END])
    starts = st.integers(0, max(0, len(text) - 1))
    cuts = data.draw(st.lists(st.tuples(starts, st.integers(1, 6)), min_size=1, max_size=3))
    stop = [s for at, size in cuts if (s := text[at : at + size]) and "\ufffd" not in s] or ["zzz"]
    tokens = [t for t in tokens if t != END]
    end = _end_of(tokens, stop, data.draw(st.integers(1, 12)))
    count = _first_completed(tokens, stop)
    assert end.reason == (None if count is None else "stop")
    assert end.tokens == tokens[:count]
    assert not any(string in end.text() for string in stop)
    assert _decode(end.tokens).startswith(end.text())


def test_special_tokens_do_not_push_a_stop_string_out_of_sight() -> None:
    special = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    spaced = [token for piece in _ids("one two") for token in (piece, *[special] * 5)]
    end = _end_of(spaced, ["one two"])
    assert (end.text(), end.reason, end.tokens[-1]) == ("", "stop", _ids("one two")[-1])


def test_end_token_counts_and_is_not_text() -> None:
    tokens = [*_ids("done"), END, *_ids("never read")]
    for block in (1, 3, 100):
        end = _end_of(tokens, [], block)
        assert end.tokens == [*_ids("done"), END]
        assert (end.text(), end.reason) == ("done", "stop")


def test_end_token_that_is_an_ordinary_token() -> None:
    last = _ids("!")[0]
    end = _end_of([*_ids("hello"), last, *_ids(" you")], [], end_tokens={END, last})
    assert (end.text(), end.reason) == ("hello", "stop")


def test_models_without_end_tokens_run_to_their_budget() -> None:
    end = _end_of([END] * 50, [], block=8, end_tokens=set(), budget=20)
    assert (len(end.tokens), end.reason) == (20, "length")


def test_stop_beats_length_at_the_last_token() -> None:
    tokens = _ids("one two;")
    assert _end_of(tokens, [";"], budget=len(tokens)).reason == "stop"
    assert _end_of(tokens, [";"], budget=len(tokens) - 1).reason == "length"


def test_deadline_ends_a_row_between_steps() -> None:
    end = _end_of(_ids("one two three"), [], deadline=time.monotonic() - 1)
    assert end.timed_out and end.reason is None and len(end.tokens) == 1
    complete = _end_of([END], [], deadline=time.monotonic() - 1)
    assert not complete.timed_out and complete.reason == "stop"
    assert not _end_of(_ids("one"), [], deadline=time.monotonic() + 60).timed_out


def test_cost_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = StopStrings(TOKENIZER, ["never there"])
    longest = 0

    class Spy:
        def decode(self, tokens: list[int], **kwargs: Any) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return str(TOKENIZER.decode(tokens, **kwargs))

    stops.tokenizer = Spy()
    RowEnd(stops, {END}, 10_000).push(_ids(TEXT) * 5)
    assert longest == len("never there") + 4
