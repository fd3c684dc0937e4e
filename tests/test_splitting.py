"""Splitting and joining: nothing is dropped or doubled at the seams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.splitting import seams, split

WORDS = st.sampled_from(
    [*"abcXYZ .!?\n\t。」\"'", "\n\n", "  ", ". ", "e.g. ", "Mr. Smith", "\u3000", "\r\n", "日本。"]
)
TEXTS = st.lists(WORDS, max_size=80).map("".join) | st.text(max_size=60)


def lengths(texts):
    return [len(text) for text in texts]


@given(TEXTS, st.integers(1, 40), st.sampled_from(["length", "paragraph", "sentence"]))
def test_pieces_are_the_text(text, limit, at):
    pieces = split(text, limit, lengths, at)
    assert "".join(pieces) == text
    assert all(piece.strip() for piece in pieces) or not text.strip()
    assert all(len(piece.strip()) <= limit for piece in pieces)


@given(TEXTS, st.integers(1, 40), st.sampled_from(["length", "paragraph", "sentence"]))
def test_seams_keep_words_and_line_breaks(text, limit, at):
    joined = "".join(gap + core for gap, core in seams(split(text, limit, lengths, at)))
    assert "".join(joined.split()) == "".join(text.split())
    assert joined.count("\n") == text.strip().count("\n")


def test_cuts_where_a_reader_would():
    text = "One two. Three four!\n\nFive (six). Seven eight nine ten.\nEleven"
    assert split(text, 30, lengths) == [
        "One two. Three four!\n\n",
        "Five (six). ",
        "Seven eight nine ten.\nEleven",
    ]
    assert split(text, 100, lengths) == [text]
    assert split(text, 100, lengths, "sentence") == [
        *["One two. ", "Three four!\n\n", "Five (six). ", "Seven eight nine ten.\n", "Eleven"]
    ]
    assert split(text, 100, lengths, "paragraph") == [
        *["One two. Three four!\n\n", "Five (six). Seven eight nine ten.\n", "Eleven"]
    ]


@pytest.mark.parametrize(
    ("pieces", "spaced", "joined"),
    [
        (["A. ", "B.\n\n", " C"], True, "A. B.\n\n C"),
        (["日本。", "東京。\n", "京都"], True, "日本。 東京。\n京都"),  # to English
        (["A. ", "B.\n\n", "C"], False, "A.B.\n\nC"),  # to Chinese
        (["endless", "word"], True, "endlessword"),
        ([" \n A "], True, "A"),
    ],
)
def test_joins_as_the_language_does(pieces, spaced, joined):
    assert "".join(gap + core for gap, core in seams(pieces, spaced)) == joined
