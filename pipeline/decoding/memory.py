"""How many rows a device can hold at once, and how long each may be."""

from dataclasses import dataclass
from typing import Literal

import psutil

MAX_SLOTS = {"cpu": 32, "cuda": 256}  # beyond, a step only takes longer
# Of the memory that is free once the weights are in. On CPU others need some too, and what is not
# written is not taken.
_SHARE = {"cpu": 0.5, "cuda": 0.9}
_ROUNDING = 64
# K/V places of a draft model with another tokenizer for each of the target's: it may take more
# tokens for the same text.
UNIVERSAL_PLACES = 1.5


@dataclass(frozen=True)
class SlotBudget:
    """What the KV cache may take: rows in flight at most, and bytes for all of them."""

    max_slots: int
    kv_bytes: int
    bytes_per_token: int  # K and V of one token in all layers

    def fit(self, longest: int, max_model_len: int, extra_slots: int = 0) -> tuple[int, int]:
        """Slots and their length in tokens, such that a row of `longest` tokens fits.

        As long as may be needed at all, if that costs no slot; then as many as there is room for,
        and at least one. `extra_slots` are not for rows.
        """
        tokens = self.kv_bytes // max(1, self.bytes_per_token)
        roomy = tokens // (self.max_slots + extra_slots)
        needed = -(-longest // _ROUNDING) * _ROUNDING
        length = min(max(needed, roomy), max_model_len)
        return max(1, min(self.max_slots, tokens // length - extra_slots)), length


def slot_budget(
    slots: int | Literal["auto"],
    *,
    bytes_per_token: int,
    device: str,
    actors_on_host: int = 1,
    gpu_share: float = 1.0,
    weight_bytes: int = 0,
) -> SlotBudget:
    """The budget of one engine, measured now.

    Args:
        weight_bytes: of weights that are still to be loaded.
        actors_on_host: that share the host's memory.
        gpu_share: of the device that this engine may use (fractional `num_gpus`).
    """
    free = max(0, free_bytes(device, gpu_share, actors_on_host) - weight_bytes)
    limit = MAX_SLOTS[device] if slots == "auto" else slots
    return SlotBudget(limit, int(_SHARE[device] * free), bytes_per_token)


def free_bytes(device: str, gpu_share: float = 1.0, actors_on_host: int = 1) -> int:
    """Memory that one engine may still take, weights included."""
    if device == "cpu":
        return int(psutil.virtual_memory().available) // actors_on_host
    import torch

    if not torch.cuda.is_available():  # a driver without the actors' GPU
        return 0
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    return max(0, min(free, int(min(1.0, gpu_share) * total) - own))
