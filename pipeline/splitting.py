"""Long documents in pieces: cut at paragraphs, else sentences, else words, else anywhere.

The pieces of a text, one after the other, are the text, character by character.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

SplitAt = Literal["length", "paragraph", "sentence"]
Sizes = Callable[[Sequence[str]], Sequence[int]]

# What ends a part, with the white space behind it; strongest first. Sentence ends are those of
# Unicode's UAX 29 in essence: a full stop, its closing quotes and a space, but not before a small
# letter; or a stop of scripts that write no spaces.
_ENDS = [
    re.compile(r"[^\S\n]*\n[^\S\n]*\n\s*"),
    re.compile(r"[^\S\n]*\n[^\S\n]*"),
    re.compile(
        r"[.!?\u2026]+[\"'\u2019\u201d\u00bb)\]]*\s+(?![a-z\s])"
        r"|[\u3002\uff01\uff1f\uff61][\u300d\u300f\u201d\u2019\uff09]*\s*"
    ),
    re.compile(r"\s+"),
]
_LINE, _SENTENCE = 1, 2
_UNSPACED = re.compile(r"[\u3000-\u9fff\uf900-\ufaff\uff00-\uffef]$")


def split(text: str, limit: int, sizes: Sizes, at: SplitAt = "length") -> list[str]:
    """Cut a text into pieces of at most `limit`, by `sizes` (tokens of each of some texts).

    At "length" pieces are as large as they may be; at "paragraph" and "sentence" each is a piece of
    its own, cut further only if it is too large. A single character is never cut, and no piece is
    all white space, unless the text is.
    """
    if at == "length":
        pieces = _pack([text], 0, limit, sizes)
    else:
        level = _LINE if at == "paragraph" else _SENTENCE
        parts = [text]
        for pattern in _ENDS[: level + 1]:
            parts = [part for whole in parts for part in _cut(whole, pattern)]
        pieces = [piece for part in parts for piece in _pack([part], level + 1, limit, sizes)]
    return _without_blanks(pieces)


def seams(pieces: Sequence[str], spaced: bool = True) -> list[tuple[str, str]]:
    """(what joins it to the piece before, its text without white space around) of each piece.

    Line breaks stay as they are. Sentences are joined as the language of the result does it:
    `spaced` or not, whatever the document's did.
    """
    joined, gap, previous = [], "", ""
    for piece in pieces:
        core = piece.strip()
        gap += piece[: len(piece) - len(piece.lstrip())]
        if previous and "\n" not in gap:
            gap = " " if spaced and (gap or _UNSPACED.search(previous)) else ""
        joined.append((gap if previous else "", core))
        gap, previous = piece[len(piece.rstrip()) :], core
    return joined


def _pack(parts: Sequence[str], level: int, limit: int, sizes: Sizes) -> list[str]:
    """Join neighbours while they fit; cut what does not fit by itself at the next weaker ends."""
    pieces: list[str] = []
    room = 0
    for part, size in zip(parts, sizes(parts), strict=True):
        if size > limit and len(part) > 1:
            pieces += _pack(_finer(part, level), level + 1, limit, sizes)
            room = limit - sizes(pieces[-1:])[0]
        elif pieces and size <= room:
            pieces[-1] += part
            room -= size
        else:
            pieces.append(part)
            room = limit - size
    return pieces


def _finer(text: str, level: int) -> list[str]:
    """The text cut at the ends of this level, or in halves where there is no level left."""
    if level < len(_ENDS):
        return _cut(text, _ENDS[level])
    middle = len(text) // 2
    return [text[:middle], text[middle:]]


def _cut(text: str, end: re.Pattern[str]) -> list[str]:
    borders = [0, *(m.end() for m in end.finditer(text) if 0 < m.end() < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


def _without_blanks(pieces: Sequence[str]) -> list[str]:
    """White space that stands alone goes to the piece before, at the beginning to the next."""
    result: list[str] = []
    for piece in pieces:
        if result and (not piece.strip() or not result[-1].strip()):
            result[-1] += piece
        else:
            result.append(piece)
    return result
