"""RMS norms on CPU in one call: transformers' take seven operators, each of which costs more to
call than to compute in a decode step.

Families differ in what the weight means and in where they round. Which of these a layer does is
found by trying it; a layer that does none of them stays as it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.decoding import native

_ROWS = 4  # that a layer is tried on
_ANY_SIZE = 64  # of a layer without a weight
# Of the largest number: sums may be taken in another order, which may flip the last bit.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class _Kind:
    """`scale`: float32 `[size]` or None; `rounds`: before it too."""

    scale: Tensor | None
    rounds: bool


class NativeRmsNorm:
    """What a layer is to do instead of its own `forward` (see `native.rms_norm`)."""

    def __init__(self, own: Callable[[Tensor], Tensor], kind: _Kind, eps: float) -> None:
        """`own`: serves where the compiled norm cannot."""
        self._own, self._kind, self._eps = own, kind, eps

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        out = native.rms_norm(x, self._kind.scale, self._eps, rounds=self._kind.rounds)
        return self._own(x) if out is None else out


@torch.inference_mode()
def replace_norms(model: Any) -> int:
    """Replace what the RMS norms of a model on CPU do; the number of those for which it could be.

    The layers stay: transformers makes MTP layers of the target's own kinds.
    """
    like = next(model.parameters())
    if like.device.type != "cpu" or not native.available():
        return 0
    replaced = 0
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm") and "forward" not in vars(layer):
            found = _native(layer, like.dtype)
            if found is not None:
                layer.forward = found
                replaced += 1
    return replaced


def _native(norm: nn.Module, dtype: torch.dtype) -> NativeRmsNorm | None:
    """The compiled norm, if it computes what this one does for inputs of that dtype; else None."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float) or dtype not in _TOLERANCE:
        return None
    weight = getattr(norm, "weight", None)
    size = _ANY_SIZE if weight is None else weight.numel()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, size, generator=generator).to(dtype)
    try:
        expected = norm(x[None])[0]
    except Exception:  # it wants more than its input
        return None
    found = [(_differences(one(x), expected), one) for one in _candidates(norm, weight, eps)]
    (_, worst), best = min(found, key=lambda pair: pair[0])
    return best if worst <= _TOLERANCE[dtype] else None


def _candidates(norm: nn.Module, weight: Tensor | None, eps: float) -> Iterator[NativeRmsNorm]:
    if weight is None:
        yield NativeRmsNorm(norm.forward, _Kind(None, rounds=False), eps)
        return
    own = weight.detach().float().contiguous()
    for scale in (own, 1 + own):
        for rounds in (True, False):
            yield NativeRmsNorm(norm.forward, _Kind(scale, rounds), eps)


def _differences(found: Tensor, expected: Tensor) -> tuple[int, float]:
    """How many numbers differ, and by how much at most, of the largest."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return found.numel() + 1, float("inf")
    gaps = (found.float() - expected.float()).abs()
    largest = expected.float().abs().max().clamp(min=1e-6)
    return int((gaps > 0).sum()), float(gaps.max() / largest)
