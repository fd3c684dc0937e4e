"""Which rows hold which slots, and what the next pass is for."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.decoding.rows import Row

_LOOK_AHEAD = 16  # waiting rows to choose from, and times that the first may be passed over


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens that a prefill pass takes of a row: `tokens[start:stop]`."""

    row: Row
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        return self.stop == len(self.row.tokens)


class Scheduler:
    """Continuous batching: a finished row leaves its slot at once, the next takes it.

    Prefill goes first: every empty slot makes the coming decode steps cheaper per row.
    """

    def __init__(self, num_slots: int, step_tokens: int) -> None:
        """`step_tokens`: of a prefill pass at most."""
        self.num_slots = num_slots
        self.step_tokens = step_tokens
        self.waiting: deque[Row] = deque()
        self.running: dict[int, Row] = {}  # by slot
        self._free = list(range(num_slots))  # a heap: low slots first keep the storage views short
        self._passed_over = 0  # how often the first waiting row was

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, row: Row) -> None:
        self.waiting.append(row)

    def longest_next(self) -> int:
        """Tokens that the longest of the rows needs that may be admitted next; 0 without any."""
        if not self.waiting or (self.num_slots and not self._free):
            return 0
        ahead = itertools.islice(self.waiting, self.num_slots + _LOOK_AHEAD)
        return max(row.max_tokens for row in ahead)

    def admit(self) -> list[Row]:
        """Give free slots to waiting rows; the rows that got one.

        Neighbours attend together and read as far as the longer of them, so rows of like length
        are put side by side.
        """
        slots = [heapq.heappop(self._free) for _ in range(min(len(self._free), len(self.waiting)))]
        rows = [self._take(slots[0])] if len(slots) == 1 else [self._first() for _ in slots]
        for slot, row in zip(slots, sorted(rows, key=lambda row: len(row.tokens)), strict=True):
            row.start(slot)
            self.running[slot] = row
        return rows

    def _first(self) -> Row:
        self._passed_over = 0
        return self.waiting.popleft()

    def _take(self, slot: int) -> Row:
        """The waiting row that fits the slot's neighbours best; the first in the end."""
        near = [self.running[s] for s in (slot - 1, slot + 1) if s in self.running]
        self._passed_over += 1
        if not near or self._passed_over > _LOOK_AHEAD:
            return self._first()
        wanted = sum(len(row.tokens) for row in near) / len(near)
        ahead = itertools.islice(self.waiting, _LOOK_AHEAD)
        best, row = min(enumerate(ahead), key=lambda pair: abs(len(pair[1].tokens) - wanted))
        if best == 0:
            return self._first()
        del self.waiting[best]
        return row

    def release(self, row: Row) -> None:
        """The row is over, or goes back."""
        del self.running[row.slot]
        heapq.heappush(self._free, row.slot)

    def withdraw(self, row_key: str) -> None:
        """Forget a waiting row."""
        self.waiting = deque(row for row in self.waiting if row.request.row_key != row_key)

    def prefill(self) -> list[Chunk]:
        """The chunks of the next prefill pass; empty when all running rows decode.

        Whole prompts as far as they fit; only one that is longer than a step is cut.
        """
        chunks: list[Chunk] = []
        room = self.step_tokens
        for row in self.running.values():  # in order of admission
            length = len(row.tokens) - row.num_cached
            if row.prefilling and (length <= room or not chunks):
                chunks.append(Chunk(row, row.num_cached, row.num_cached + min(length, room)))
                room -= min(length, room)
        return chunks

    def decoding(self) -> list[Row]:
        """Rows of the next decode pass, by slot."""
        return [self.running[slot] for slot in sorted(self.running)]

    def resize(self, num_slots: int) -> None:
        """Start over with fewer slots: rows in flight go back to the front of the queue, in order.

        Their tokens stay; what is lost is K/V, which the next prefill computes again.
        """
        self._requeue(self.running.values())
        self.running = {}
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    def _requeue(self, rows: Iterable[Row]) -> None:
        self.waiting.extendleft(reversed(list(rows)))
