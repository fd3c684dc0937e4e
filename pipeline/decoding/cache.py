"""The slot cache: K and V of all rows in flight, one row per slot, in the shape of a `Cache`.

The place of a token in its slot is its position in the row. So rejected draft tokens need no
cropping: the next pass writes over them, and until then no mask lets anyone see them.
"""

import math
import mmap
from typing import Any

import torch

from pipeline.decoding import native
from pipeline.decoding.steps import Step, active_step


class SlotCache:
    """Preallocated storage `[slots, kv_heads, max_len, head_dim]` for K and for V of each layer.

    Layers are made when a model first writes to them: how many there are, and of what shape, is the
    model's affair (K and V may differ in head_dim; layers that share another's K/V write none).
    Duck-types what decoders ask of transformers' `Cache`.
    """

    is_compileable = False

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the active step's K `[1, kv_heads, N, head_dim]` and V; return the storage.

        Returns:
            Views `[step.num_slots, kv_heads, step.kv_len, head_dim]` of the layer.
        """
        step = active_step()
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._allocate(keys, values)
        storage, new = self._layers[layer_idx], (keys[0], values[0])
        if not (step.decoding and native.write_rows(step, storage, new)):
            for part, one in zip(storage, new, strict=True):
                _write(part, one, step)
        return self.views(layer_idx, step)

    def views(self, layer_idx: int, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V as far as the step reads: see `update`."""
        keys, values = self._layers[layer_idx]
        slots = slice(step.first_slot, step.first_slot + step.num_slots)
        return keys[slots, :, : step.kv_len], values[slots, :, : step.kv_len]

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        for part in (part for layer in self._layers.values() for part in layer):
            part[target, :, :length] = part[source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot: what is masked is multiplied all the same, by zero."""
        for part in (part for layer in self._layers.values() for part in layer):
            part[slot] = 0

    @property
    def num_bytes(self) -> int:
        """Of all layers made so far."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer)

    @property
    def bytes_per_token(self) -> int:
        """Of one position of one slot."""
        return self.num_bytes // (self.num_slots * self.max_len)

    def _allocate(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # What no row has written yet is masked, but 0 * nan would not be 0.
        (_, heads, _, size), value_size = keys.shape, values.shape[3]
        shape = (self.num_slots, heads, self.max_len)
        if heads == 1 and size != value_size:  # latents and their rotated parts are read as one
            both = lazy_zeros((*shape, size + value_size), keys)
            return both[..., :size], both[..., size:]
        return lazy_zeros((*shape, size), keys), lazy_zeros((*shape, value_size), values)

    # What decoders ask of a cache before they call `update`. Positions and masks are ours, so the
    # answers only must not fail.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def __len__(self) -> int:
        return len(self._layers)


def _write(part: torch.Tensor, new: torch.Tensor, step: Step) -> None:
    """`new` `[kv_heads, N, head_dim]` into its places in `part`, a layer's storage."""
    if step.decoding:
        rows = part.view(-1, part.shape[3])  # a copy by rows takes a third of indexing's time
        places = step.places(part.shape[1], part.shape[2])
        rows.index_copy_(0, places, new.transpose(0, 1).reshape(-1, part.shape[3]))
        return
    for i, span in enumerate(step.spans):  # long runs: plain copies
        tokens = slice(step.offsets[i], step.offsets[i + 1])
        part[span.slot, :, span.start : span.stop] = new[:, tokens]


def lazy_zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and on the device of `like`. On a CPU they take memory page by page, when
    they are first written.

    torch zeroes everything at once, and numpy asks for huge pages, of which a row that fills a
    fifth of its slot touches all: 4 s for the first 8 rows of a 135M model.
    """
    num_bytes = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(shape)
