"""What drafts: the protocol of all methods, and what a drafter sees of a row.

Drafts are never trusted, so a drafter need not be exact; it must only be cheap, and remember
nothing about a row after its release.
"""

from collections.abc import Sequence
from typing import Protocol

from pipeline.records import SamplingParams


class DraftRow(Protocol):
    """A row as drafters see it. Rows of one engine have distinct slots while they run."""

    slot: int
    tokens: list[int]  # prompt and completion so far
    num_prompt_tokens: int
    sampling: SamplingParams
    noise_key: int


class Drafter(Protocol):
    """Proposes draft tokens for many rows at once."""

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]` (may be 0), maybe none."""
        ...

    def observe(self, row: DraftRow, num_drafted: int, num_accepted: int) -> None:
        """The row's last draft was verified; its `tokens` hold what came of it already."""
        ...

    def release(self, row: DraftRow) -> None:
        """The row leaves its slot; forget it. It may never have been proposed for."""
        ...

    def resize(self, num_slots: int, max_len: int) -> None:
        """The engine's slots change in number or length; all rows were released before."""
        ...
