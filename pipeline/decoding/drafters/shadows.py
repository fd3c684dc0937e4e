"""What drafts would have become that were not submitted, or only in part.

A draft that costs nothing can be compared with the tokens that come, whoever drafted them: that is
exact for greedy decoding and for sampling alike, since drafts never change a row's tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.prefix import common_prefix


@dataclass(frozen=True)
class Shadow:
    """A draft of class `kind` for the row in `slot`, after the first `start` of its tokens."""

    slot: int
    kind: int
    start: int
    draft: Sequence[int]


class Shadows:
    """One draft per row under watch; the next only when it is known what became of it."""

    def __init__(self) -> None:
        self._watched: dict[int, Shadow] = {}

    def watch(self, row: DraftRow, kind: int, draft: Sequence[int]) -> None:
        """Follow a draft for the row, unless one is being followed."""
        if draft and row.slot not in self._watched:
            self._watched[row.slot] = Shadow(row.slot, kind, len(row.tokens), draft)

    def settled(self, rows: Sequence[DraftRow]) -> Iterator[tuple[Shadow, int]]:
        """Drafts whose end is known by now, and how many of their tokens came."""
        for row in rows:
            shadow = self._watched.get(row.slot)
            if shadow is None:
                continue
            came = row.tokens[shadow.start : shadow.start + len(shadow.draft)]
            right = common_prefix(shadow.draft, came)
            if right == len(shadow.draft) or right < len(came):
                del self._watched[row.slot]
                yield shadow, right

    def release(self, slot: int) -> None:
        """The row is over: what it did not reach stays unknown."""
        self._watched.pop(slot, None)
