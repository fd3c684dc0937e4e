"""A draft model with K/V of its own: each row in the slot of the same number as the target's.

Only what a slot lacks is computed. A row may come back longer, with a draft accepted in part or,
where its ids are spelled anew, with other ids at its end: what it begins with in common stays.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor

from pipeline.decoding.cache import SlotCache
from pipeline.decoding.checkpoint import estimate_memory
from pipeline.decoding.prefix import SharedPrefix, common_prefix
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, packs

_FEW = 8  # ids behind: more are prefilled, since a decoding pass pads its rows to the longest
_BLOCK = 64  # ids compared at a time


@dataclass
class _Slot:
    """What the draft model has of a row: K/V of `ids[:num_cached]`."""

    ids: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def pending(self) -> list[int]:
        return self.ids[self.num_cached :]

    def resume(self, ids: Sequence[int]) -> None:
        """The row is `ids` now. The last always needs a pass, since what follows it is asked."""
        self.num_cached = _num_common(self.ids, ids, min(self.num_cached, len(ids) - 1))
        self.ids[self.num_cached :] = ids[self.num_cached :]


class Feeder:
    """Keeps a draft model at its rows: `resume` each, `catch_up`, then `next_logits` and `append`
    in turn."""

    def __init__(self, model: Any, step_tokens: int, prefix_ids: Sequence[int] = ()) -> None:
        """Slots are made by `resize`.

        Args:
            model: a causal language model of transformers; its attention becomes ours.
            step_tokens: ids per prefill pass at most.
            prefix_ids: what rows begin with, if they have it in common: computed once.
        """
        self._runner = ModelRunner(model, SlotCache(0, 0))
        self._num_embeddings: int = model.get_input_embeddings().num_embeddings
        self._step_tokens = step_tokens
        self._slots: dict[int, _Slot] = {}
        self._prefix_slot: int | None = None
        self.caught_up = 0, 0.0  # ids and seconds of the last `catch_up`
        self.share(prefix_ids)
        self.device = self._runner.device
        dtype = str(model.dtype).removeprefix("torch.")
        memory = estimate_memory(model.config.to_dict(), dtype, None)
        self.bytes_per_token = memory.kv_bytes_per_token

    @property
    def cache(self) -> SlotCache:
        return self._runner.cache

    def share(self, prefix_ids: Sequence[int]) -> None:
        """Rows begin with these ids. They need a slot, which `resize` makes."""
        known = takewhile(lambda index: index < self._num_embeddings, prefix_ids)
        self._prefix = SharedPrefix(list(known))

    def resize(self, num_slots: int, max_len: int) -> None:
        """Make room anew, as far as the model has positions."""
        config = self._runner.model.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        self._slots.clear()
        self._prefix.is_cached = False
        self._prefix_slot = num_slots if self._prefix.token_ids else None  # behind those of rows
        self._runner.cache = SlotCache(0, 0)  # let go of the old before the new is made
        extra = 1 if self._prefix.token_ids else 0
        self._runner.cache = SlotCache(num_slots + extra, min(max_len, positions or max_len))

    def release(self, slot: int) -> None:
        """Forget the slot's row; it may be empty."""
        self._slots.pop(slot, None)

    def lag(self, slot: int, num_ids: int) -> int:
        """Ids that `catch_up` would compute for the row in the slot, if it has `num_ids` now."""
        held = self._slots.get(slot)
        cached = held.num_cached if held else len(self._prefix.token_ids)
        behind = num_ids - cached
        return behind if behind > _FEW else 0

    def room(self, num_ids: int) -> int:
        """Ids that can follow on a row of `num_ids`; the last of them needs no place."""
        return max(0, self.cache.max_len + 1 - num_ids)

    def resume(self, slot: int, ids: Sequence[int]) -> bool:
        """Take a row as it is now, not empty and with room. False if the model lacks one of its
        ids: for good, since what it does not know is never cached."""
        held = self._slots.get(slot)
        if held is None:
            length = self._reuse_prefix(slot, ids)
            held = self._slots[slot] = _Slot(list(ids[:length]), length)
        held.resume(ids)
        return max(held.pending) < self._num_embeddings

    def catch_up(self, slots: Sequence[int]) -> None:
        """Bring rows that are far behind to their last id."""
        started = time.perf_counter()
        behind = [slot for slot in slots if len(self._slots[slot].pending) > _FEW]
        count = sum(len(self._slots[slot].pending) for slot in behind)
        self._prefill([self._span(slot, but_last=True) for slot in behind])
        for slot in behind:
            self._slots[slot].num_cached = len(self._slots[slot].ids) - 1
        self.caught_up = count, time.perf_counter() - started if count else 0.0

    def next_logits(self, slots: Sequence[int]) -> Tensor:
        """Logits `[len(slots), vocab]` of what follows each row, in one pass.

        Args:
            slots: in ascending order, not empty.
        """
        step = Step([self._span(slot) for slot in slots], decoding=True, device=self.device)
        logits = self._runner.forward(step, [stop - 1 for stop in step.offsets[1:]])
        for slot in slots:
            self._slots[slot].num_cached = len(self._slots[slot].ids)
        return logits

    def append(self, slot: int, index: int) -> None:
        """The row goes on, for now: `resume` tells what became of it."""
        self._slots[slot].ids.append(index)

    def _span(self, slot: int, *, but_last: bool = False) -> Span:
        held = self._slots[slot]
        return Span(slot, held.num_cached, held.pending[:-1] if but_last else held.pending)

    def _reuse_prefix(self, slot: int, ids: Sequence[int]) -> int:
        """Copy what the row shares with others, computing that first if need be; its length."""
        length = self._prefix.usable(ids)
        if not length or self._prefix_slot is None:
            return 0
        if not self._prefix.is_cached:
            shared = self._prefix.token_ids[: self.cache.max_len]
            self._prefill([Span(self._prefix_slot, 0, shared)])
            self._prefix.is_cached = True
        self.cache.copy_prefix(self._prefix_slot, slot, length)
        return length

    def _prefill(self, spans: Sequence[Span]) -> None:
        """Make K/V of prompts, as few passes as `step_tokens` allows."""
        for chunks in packs(spans, self._step_tokens):
            self._runner.forward(Step(chunks, decoding=False, device=self.device), [])


def _num_common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of what two sequences begin with in common, `limit` at most. Rows are long and differ
    at their ends, so that most is compared in blocks."""
    at = 0
    while at < limit and a[at : at + _BLOCK] == b[at : at + _BLOCK]:
        at += _BLOCK
    return min(limit, at + common_prefix(a[at : at + _BLOCK], b[at : at + _BLOCK]))
