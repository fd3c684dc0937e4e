"""Hidden states of the target, kept by slot and place as the cache keeps K and V."""

import torch
from torch import Tensor

from pipeline.decoding.cache import lazy_zeros
from pipeline.decoding.steps import Step


class HiddenStates:
    """Storage `[slots, places, hidden_size]`. Rejected tokens are written over, as in the cache.

    With fewer places than a row has tokens, a place takes in the latest of those that share it.
    """

    def __init__(self, num_slots: int, places: int, hidden_size: int, like: Tensor) -> None:
        """`like`: of the dtype and on the device wanted."""
        self.places = places
        self._states = lazy_zeros((num_slots, places, hidden_size), like)
        self._known: dict[int, tuple[int, int]] = {}  # by slot: places without a gap

    def write(self, step: Step, hidden: Tensor) -> None:
        """Keep the step's `[N, hidden_size]`."""
        for span in step.spans:
            first, stop = self._known.get(span.slot, (span.start, 0))
            self._known[span.slot] = (first if span.start <= stop else span.start, span.stop)
        if step.decoding:
            slots = step.slots + step.first_slot
            self._states[slots, step.positions % self.places] = hidden
            return
        for i, span in enumerate(step.spans):
            count = min(step.counts[i], self.places)
            places = torch.arange(span.stop - count, span.stop, device=hidden.device) % self.places
            end = step.offsets[i + 1]
            self._states[span.slot, places] = hidden[end - count : end]

    def read(self, step: Step) -> Tensor:
        """What is kept of the step's places, `[N, hidden_size]`."""
        return self._states[step.slots + step.first_slot, step.positions % self.places]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first places of a slot to another."""
        self._states[target, :length] = self._states[source, :length]
        if self.covers(source, 0, length):
            self._known[target] = (0, length)

    def covers(self, slot: int, first: int, stop: int) -> bool:
        """Whether the states of the row's places were kept: they are not if nobody wanted them."""
        known = self._known.get(slot)
        return known is not None and known[0] <= first and stop <= known[1]

    def release(self, slot: int) -> None:
        """The slot's row is over."""
        self._known.pop(slot, None)
