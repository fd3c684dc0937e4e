"""Linear layers packed for the CPU: the weight is laid out once as oneDNN wants it.

A plain linear layer lets oneDNN reorder its weight, or work around its layout, at every call; for
the few rows of a decode step that costs more than the product. The packed operators are those that
torch's own compiler inserts when it freezes a model on CPU. They are private, so they are tried
once per layer at load, and a layer that they do not suit stays as it was.
"""

import logging
import time
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_ROWS_HINT = 16  # packing for a decode step; it serves all row counts
_LEAST_ROWS = 4  # in float32: 1, 2 and 3 take 1.2, 1.5 and 1.1 times as long as 4
_CHECKED_ROWS = 4
_PREPARED = 4  # tokens per row of a step, and
_PREPARING = 2.0  # seconds at most for that
_LEAST_WEIGHTS = 1 << 16  # a call takes 30 us more than a plain one: as long as a smaller product
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """`nn.Linear` on a packed copy of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self.bias = linear.bias
        # Others may ask for the weight's dtype and shape. Its values are gone, to save the memory,
        # and whoever computes with them shall notice.
        hollow = torch.full((1, 1), torch.nan, dtype=weight.dtype).expand_as(weight)
        self.weight = nn.Parameter(hollow, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        rows = x.numel() // self.in_features
        if not 0 < rows < _LEAST_ROWS or x.dtype != torch.float32:
            return self._linear(x)
        padded = x.new_zeros(_LEAST_ROWS, self.in_features)
        padded[:rows] = x.reshape(rows, -1)
        return self._linear(padded)[:rows].reshape(*x.shape[:-1], -1)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return result


@torch.inference_mode()
def pack_linears(model: Any) -> int:
    """Replace the linear layers of a model on CPU in place; the number of those that could be.

    A packed weight takes the plain one's memory, unless an embedding shares that and keeps it.
    """
    if next(model.parameters()).device.type != "cpu":
        return 0
    if getattr(model, "masked_embedding", None) is not None:
        model = model.model  # ordered embeddings read the head's weight, which would be gone
    packed = failures = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype not in _DTYPES:
                continue
            if child.weight.numel() < _LEAST_WEIGHTS:
                continue
            replacement = _try_pack(child)
            if replacement is None:
                failures += 1
            else:
                setattr(parent, name, replacement)
                packed += 1
    if failures:
        logger.warning("%d of %d linear layers stay unpacked", failures, packed + failures)
    return packed


@torch.inference_mode()
def prepare_linears(model: Any, slots: int, seconds: float = _PREPARING) -> int:
    """Run linear layers of each kind and shape over 1, 2, ... tokens, up to short drafts for all
    slots or as far as time allows; how many came up.

    oneDNN compiles a kernel for a number of tokens when it first comes up, which for all layers of
    a small model takes a third of a decode step: first drafts would seem dearer than drafts are.
    """
    layers = {
        (type(one), one.in_features, one.out_features, one.bias is None): one
        for one in model.modules()
        if isinstance(one, PackedLinear) or (type(one) is nn.Linear and one.weight.is_cpu)
    }
    until = time.perf_counter() + seconds
    most = _PREPARED * slots if layers else 0
    for count in range(1, most + 1):
        if time.perf_counter() >= until:
            return count - 1
        for layer in layers.values():
            layer(torch.zeros(count, layer.in_features, dtype=layer.weight.dtype))
    return most


def _try_pack(linear: nn.Linear) -> Any:
    """The packed layer, if it computes what the plain one does; else None."""
    try:
        layer = PackedLinear(linear)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_CHECKED_ROWS, linear.in_features, generator=generator)
        x = x.to(linear.weight.dtype)
        expected, found = linear(x).float(), layer(x).float()
    except (AttributeError, RuntimeError):
        return None
    tolerance = 1e-5 if linear.weight.dtype == torch.float32 else 2e-2
    scale = expected.abs().max().clamp(min=1e-6)
    return layer if bool((found - expected).abs().max() <= tolerance * scale) else None
