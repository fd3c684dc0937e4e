"""Whether packed steps let each layer's tokens see what transformers' own masks would.

A window of 4,096 tokens or a chunk of 8,192 is a rule, and a rule can be asked about any position
without computing that far: one short pass, in which transformers hands its rule to a function of
ours, tells every layer's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import TransformersKwargs

from pipeline.decoding.attention import ragged_attention, visible_places
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, active_step

_NAME = "draftmill_probe"
_MAX_PLACES = 1 << 20  # a mask over them takes 8 MB
# What layers may hand to their attention besides: it concerns padding, dropout or returned weights.
_IDLE = {"dropout", "use_cache", *TransformersKwargs.__annotations__}


class _Call(NamedTuple):
    """What one layer gave its attention."""

    layer: int
    mask: Any
    window: int | None
    unknown: list[str]  # names of arguments that ours would ignore


class _Probe(Step):
    """A step that remembers what its layers see."""

    def __init__(self, token_ids: list[int], num_places: int, device: Any) -> None:
        super().__init__([Span(0, 0, token_ids)], decoding=False, device=device)
        end = num_places - 1
        positions = {0, 1, 2, end // 3, end // 2, end - 1, end}
        self.asked = self._tensor(sorted(p for p in positions if p >= 0))
        self.num_places = num_places
        self.calls: list[_Call] = []

    def differing(self) -> list[_Call]:
        """Calls whose mask is not what our attention makes of its window."""
        known: dict[tuple[int, int | None], bool] = {}
        for call in self.calls:
            key = id(call.mask), call.window
            if key not in known:
                known[key] = self._is_ours(call)
        return [call for call in self.calls if not known[id(call.mask), call.window]]

    def _is_ours(self, call: _Call) -> bool:
        ours = visible_places(self.asked, self.num_places, call.window)[None, None]
        return isinstance(call.mask, torch.Tensor) and torch.equal(call.mask, ours)


def mask_misfit(runner: ModelRunner, config: Any, token_ids: list[int], max_len: int) -> str | None:
    """Why the layers' masks are not ours, if so. Leaves a foreign attention in place.

    Args:
        config: the text model's.
        token_ids: some that the cache has room for.
        max_len: positions that matter.
    """
    runner.model.set_attn_implementation(_NAME)
    probe = _Probe(token_ids, min(max_len, _MAX_PLACES), runner.device)
    runner.forward(probe, [0])
    name, num_layers = config.model_type, config.num_hidden_layers
    attending = len({call.layer for call in probe.calls})
    if attending < num_layers:
        return f"{num_layers - attending} of {num_layers} layers of {name} ignore our attention"
    unknown = {argument for call in probe.calls for argument in call.unknown}
    if unknown:
        return f"{name} gives its attention {', '.join(sorted(unknown))}, which ours does not know"
    differing = probe.differing()
    if differing:
        layer = differing[0].layer
        kinds = getattr(config, "layer_types", None)
        kind = f" ({kinds[layer]})" if kinds else ""
        return (
            f"tokens in layer {layer}{kind} of {name} see neither all before them nor a window of "
            f"them, within {probe.num_places} tokens"
        )
    return None


def _probing_mask(
    *, mask_function: Callable[..., torch.Tensor], device: Any, **kwargs: Any
) -> torch.Tensor:
    """The mask by transformers' rule, for the tokens asked about: bool `[1, 1, asked, places]`."""
    probe = active_step()
    assert isinstance(probe, _Probe)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    places = torch.arange(probe.num_places, device=device)
    mask = mask_function(first, first, probe.asked.view(1, 1, -1, 1), places.view(1, 1, 1, -1))
    return mask.expand(1, 1, len(probe.asked), probe.num_places)


def _probing_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    probe = active_step()
    assert isinstance(probe, _Probe)
    ours = {"scaling", "sliding_window", "softcap", "s_aux"} | _IDLE
    unknown = [name for name, given in kwargs.items() if given is not None and name not in ours]
    layer = getattr(module, "layer_idx", len(probe.calls))
    probe.calls.append(_Call(layer, attention_mask, kwargs.get("sliding_window"), unknown))
    return ragged_attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_NAME, _probing_attention)
AttentionMaskInterface.register(_NAME, _probing_mask)
