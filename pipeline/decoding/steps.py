"""The layout of one pass: which tokens of which rows, where they lie in the slot cache."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

# Rows of different lengths in one call read K/V up to the longest. On CPU a call costs little: 16
# rows of 292 to 1,376 tokens took 1.3 ms a layer in pairs, 1.4 to 2.1 in fours, 2.3 in one call.
GROUP_ROWS = 2


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one row: `token_ids` go to positions `start`, `start + 1`, ..."""

    slot: int
    start: int
    token_ids: Sequence[int]

    @property
    def stop(self) -> int:
        """Tokens of the row that are in the cache once the pass is over."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """Neighbouring decoding rows that attend in one call: `spans[first:last]`, adjacent slots."""

    first: int
    last: int
    width: int  # tokens of its longest span
    kv_len: int  # places that its longest row attends to


class Step:
    """Spans of distinct slots, packed into one sequence of N tokens without padding.

    `decoding`: spans are short and attend together with their neighbours, padded to the longest;
    otherwise they are prompt chunks, each of which attends by itself.
    """

    def __init__(self, spans: Sequence[Span], *, decoding: bool, device: Any = "cpu") -> None:
        self.spans = sorted(spans, key=lambda span: span.slot)
        self.decoding = decoding
        self.device = torch.device(device)
        self.counts = [len(span.token_ids) for span in self.spans]
        self.offsets = [0, *accumulate(self.counts)]  # of each span in the sequence, and the end
        self.first_slot = self.spans[0].slot
        self.num_slots = self.spans[-1].slot + 1 - self.first_slot  # that storage views take in
        self.max_count = max(self.counts)
        self.kv_len = max(span.stop for span in self.spans)
        self.masks: dict[Any, torch.Tensor] = {}  # kept by the attention, by its own keys
        self.tasks: dict[Any, Any] = {}  # the same of what is compiled
        self._places: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """int64 `[1, N]`."""
        return self._tensor([t for span in self.spans for t in span.token_ids])[None]

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, N]`: place in the row, which is the place in its slot too."""
        return self.positions[None]

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 `[N]`."""
        return self._tensor([p for span in self.spans for p in range(span.start, span.stop)])

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 `[N]`: slot of each token, counted from `first_slot`."""
        return self._tensor(
            [span.slot - self.first_slot for span in self.spans for _ in span.token_ids]
        )

    @cached_property
    def span_indices(self) -> torch.Tensor:
        """int64 `[N]`: span of each token."""
        return self._tensor([i for i, count in enumerate(self.counts) for _ in range(count)])

    @cached_property
    def columns(self) -> torch.Tensor:
        """int64 `[N]`: place of each token in its span."""
        return self._tensor([j for count in self.counts for j in range(count)])

    @cached_property
    def row_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per row: slot counted from `first_slot`, first position, offset; int64 `[rows]`, and
        `[rows + 1]` for the offsets."""
        return (
            self._tensor([span.slot - self.first_slot for span in self.spans]),
            self._tensor([span.start for span in self.spans]),
            self._tensor(self.offsets),
        )

    def places(self, heads: int, length: int) -> torch.Tensor:
        """Where the tokens' heads lie in storage `[slots, heads, length, ...]` whose first three
        axes are one: int64 `[N * heads]`, token by token."""
        found = self._places.get((heads, length))
        if found is None:
            of_heads = torch.arange(heads, device=self.device)
            slots = (self.slots + self.first_slot)[:, None]
            found = ((slots * heads + of_heads) * length + self.positions[:, None]).flatten()
            self._places[heads, length] = found
        return found

    @cached_property
    def is_even(self) -> bool:
        """Whether the spans are equally long, so that they need no padding."""
        return min(self.counts) == self.max_count

    @cached_property
    def groups(self) -> list[Group]:
        """The spans, cut where slots are not adjacent and after `GROUP_ROWS` on a CPU."""
        limit = GROUP_ROWS if self.device.type == "cpu" else len(self.spans)
        groups, first = [], 0
        for i in range(1, len(self.spans) + 1):
            if (
                i == len(self.spans)
                or i - first == limit
                or self.spans[i].slot != self.spans[i - 1].slot + 1
            ):
                kv_len = max(span.stop for span in self.spans[first:i])
                groups.append(Group(first, i, max(self.counts[first:i]), kv_len))
                first = i
        return groups

    def last_index(self, slot: int) -> int:
        """Index of the row's last token in the packed sequence."""
        index = next(i for i, span in enumerate(self.spans) if span.slot == slot)
        return self.offsets[index + 1] - 1

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def packs(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """The spans in packs of `size` tokens, cut where a pack is full."""
    pack: list[Span] = []
    room = size
    for span in spans:
        taken = 0
        while taken < len(span.token_ids):
            chunk = Span(span.slot, span.start + taken, span.token_ids[taken : taken + room])
            pack.append(chunk)
            taken += len(chunk.token_ids)
            room -= len(chunk.token_ids)
            if not room:
                yield pack
                pack, room = [], size
    if pack:
        yield pack


class _Active(threading.local):
    step: Step | None = None


_active = _Active()


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make `step` what the attention and the cache of this thread work on."""
    previous, _active.step = _active.step, step
    try:
        yield
    finally:
        _active.step = previous


def is_decoding() -> bool:
    """Whether this thread is running a decode step."""
    return _active.step is not None and _active.step.decoding


def active_step() -> Step:
    """The step that this thread is running.

    Raises:
        RuntimeError: outside of `running`.
    """
    if _active.step is None:
        raise RuntimeError("the model was called outside of an engine step")
    return _active.step
