"""Multi-head latent attention of decode steps, among the latents themselves.

Models of DeepSeek's kind cache one latent per token, and transformers makes every head's K and V of
all that is cached at every pass. That product need not be made: the query can be taken to the
latents instead, and what the heads find there to their values (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2: the up-projections are absorbed). All heads then share one K and V. Prompts, whose
tokens are many to each place, keep the product.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.decoding.steps import is_decoding

_Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_NEEDED = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PLACES = 5  # that a layer is tried on
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the largest


class Absorbed:
    """The two halves of a layer's `kv_b_proj`, which makes K (all but the rotated part) and V."""

    def __init__(self, attention: Any) -> None:
        nope, size = attention.qk_nope_head_dim, attention.v_head_dim
        weight = attention.kv_b_proj.weight.detach()
        weight = weight.view(-1, nope + size, weight.shape[1])  # [heads, .., rank]
        self._to_latent = weight[:, :nope].contiguous()
        self._to_value = weight[:, nope:].transpose(1, 2).contiguous()

    def query(self, query: Tensor) -> Tensor:
        """`[1, heads, N, nope + rope]` to `[1, heads, N, rank + rope]`, to be held against latents
        with the rotated part beside them."""
        nope = self._to_latent.shape[1]
        latent = torch.matmul(query[0, ..., :nope], self._to_latent)
        return torch.cat((latent, query[0, ..., nope:]), -1)[None]

    def value(self, found: Tensor) -> Tensor:
        """`[1, N, heads, rank]`, found among latents, to values `[1, N, heads, v_head_dim]`."""
        values = torch.matmul(found[0].transpose(0, 1), self._to_value)
        return values.transpose(0, 1).contiguous()[None]


@torch.inference_mode()
def absorb_latents(model: Any) -> int:
    """Let latent attention layers of a model stay among latents in decode steps; their number.

    To be called before weights are packed. Outside of decode steps the layers do as they did.
    """
    layers = list(_latent_layers(model))
    for attention in layers:
        attention.absorbed = Absorbed(attention)
        attention.expand_kv = _unless_decoding(attention.expand_kv)
    return len(layers)


def beside(key: Tensor, value: Tensor) -> Tensor:
    """Both as one, `[.., key size + value size]`: no copy if they lie so, as in a slot cache."""
    size = key.shape[-1]
    together = key.data_ptr() + size * key.element_size() == value.data_ptr()
    if not together or key.stride() != value.stride():
        return torch.cat((key, value), -1)
    return key.as_strided((*key.shape[:-1], size + value.shape[-1]), key.stride())


def _unless_decoding(expand: _Expand) -> _Expand:
    def maybe(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, rotated) if is_decoding() else expand(latent, rotated)

    return maybe


def _latent_layers(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if "absorbed" in vars(module) or not all(hasattr(module, name) for name in _NEEDED):
            continue
        linear = module.kv_b_proj
        if type(linear) is nn.Linear and linear.bias is None and _is_absorbable(module):
            yield module


def _is_absorbable(attention: Any) -> bool:
    """Whether the layer's own K and V give scores and values as the absorbed halves do."""
    weight = attention.kv_b_proj.weight
    if weight.dtype not in _TOLERANCE:
        return False
    absorbed = Absorbed(attention)
    rope = attention.qk_rope_head_dim
    heads, nope, rank = absorbed._to_latent.shape
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    latent, rotated = random(1, 1, _PLACES, rank), random(1, 1, _PLACES, rope)
    query = random(1, heads, 1, nope + rope)
    key, value = attention.expand_kv(latent, rotated)
    scores = query @ key.transpose(2, 3)
    weights = torch.softmax(scores.float(), -1).to(weight)
    found = absorbed.query(query) @ beside(latent, rotated).transpose(2, 3)
    values = absorbed.value((weights @ latent).transpose(1, 2)).transpose(1, 2)
    return all(
        bool((one - own).abs().max() <= _TOLERANCE[weight.dtype] * own.abs().max())
        for one, own in ((found, scores), (values, weights @ value))
    )
