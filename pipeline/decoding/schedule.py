"""Which steps plain decoding would have had for the same rows: the other side of a run's speedup.

Drafts let rows end at other times. Where slots run dry, at the end of a run, a token is then
decoded beside fewer rows than it would have been plainly, and a plain step of so few rows is not
what plain decoding would have paid for it. How many tokens each row has and in which order the
rows came is known, though, and with as many slots plain decoding's steps follow from that.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.decoding.control import Bucket, bucket_of
from pipeline.steptable import StepTable


@dataclass
class PlannedRow:
    """A row in a slot. `context`: tokens that its next decode step attends to; `left`: decode
    steps that it still needs, None while nobody knows."""

    context: int
    left: int | None = None


class PlainSchedule:
    """Decodes rows of known lengths in thought, a token per row and step."""

    def __init__(self) -> None:
        self._waiting: deque[PlannedRow] = deque()
        self._running: list[PlannedRow] = []

    def admit(self, prompt_tokens: int) -> PlannedRow:
        """A row took a slot. Its first token is the prefill's."""
        row = PlannedRow(prompt_tokens + 1)
        self._waiting.append(row)
        return row

    def finish(
        self, row: PlannedRow, completion_tokens: int, num_slots: int, *, is_last: bool
    ) -> StepTable:
        """The row is over. The steps that are certain now, of which no call before told.

        Args:
            is_last: no other row is queued or running, so that slots may stay empty.
        """
        row.left = max(0, completion_tokens - 1)
        table = StepTable()
        while self._fill(num_slots) or (is_last and self._running):
            for bucket, steps in self._decode():
                table.add_scheduled(bucket, steps, steps * len(self._running))
            self._running = [row for row in self._running if row.left]
        return table

    def _fill(self, num_slots: int) -> bool:
        """Rows into free slots, as far as their lengths are known; whether all slots are taken."""
        while len(self._running) < num_slots and self._waiting:
            if self._waiting[0].left is None:
                return False
            row = self._waiting.popleft()
            if row.left:
                self._running.append(row)
        return len(self._running) >= max(1, num_slots)

    def _decode(self) -> Iterator[tuple[Bucket, int]]:
        """Steps until a row ends, by bucket."""
        count = len(self._running)
        steps = min(row.left or 0 for row in self._running)
        total = sum(row.context for row in self._running)
        for row in self._running:
            row.context += steps
            row.left = (row.left or 0) - steps
        while steps:
            bucket = bucket_of(count, total / count)
            # every step the mean context grows by one; the next bucket begins where it is this long
            bound = 2 ** ((bucket.context + 1) / 2)
            part = min(steps, max(1, math.ceil(bound - total / count)))
            yield bucket, part
            total += part * count
            steps -= part
