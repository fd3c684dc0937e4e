"""Drafts from the target's own first layers, its final norm and its head.

The layers' K and V are the target's: drafting continues them, and verification writes over what it
drafted with the same. So there is no second cache, no prefill, and nothing to correct.

Source: Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative
Decoding", arXiv 2404.16710. Models must be trained for it; of others hardly a draft is accepted.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, ModelDrafter, start_drafts
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step
from pipeline.errors import ConfigError


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first layers of the target: one shallow pass per draft token."""

    def __init__(self, exit_layer: int, chooser: DraftChooser) -> None:
        """`exit_layer`: layers to run, at least 1 and fewer than there are."""
        super().__init__(chooser)
        self._exit_layer = exit_layer

    def attach(self, target: ModelRunner) -> None:
        """Raises ConfigError naming `decoding.exit_layer`, if the target has no such layer."""
        self._target = target
        try:
            view = shallow_view(target.model, self._exit_layer)
        except ValueError as error:
            raise ConfigError("decoding.exit_layer", f"{error}; choose another") from None
        self._runner = ModelRunner(view, target.cache)

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        self._runner.cache = self._target.cache
        started = active = start_drafts(rows, limits)
        while active:
            spans = [
                Span(d.row.slot, len(d.row.tokens) + len(d.chain) - 1, [d.last_token])
                for d in active
            ]
            step = Step(spans, decoding=True, device=self._runner.device)
            self._chooser.extend(active, self._runner.forward(step, range(step.num_tokens)))
            active = [drafting for drafting in active if not drafting.is_over]
        return self._chooser.finish(rows, started)


def shallow_view(model: Any, num_layers: int) -> Any:
    """The model with its first layers only. It shares all weights, and the model stays as it is.

    Raises:
        ValueError: if the model's layers are not found, or not more than `num_layers`.
    """
    path = layers_path(model)
    layers = model.get_submodule(path)
    if not 0 < num_layers < len(layers):
        raise ValueError(f"must be 1 to {len(layers) - 1}, since the model has {len(layers)}")
    view = module = _view(model)
    *parents, name = path.split(".")
    for parent in parents:
        module._modules[parent] = module = _view(module._modules[parent])
    module._modules[name] = nn.ModuleList(list(layers)[:num_layers])
    return view


def layers_path(model: Any) -> str:
    """Dotted name of the list of decoder layers.

    Raises:
        ValueError: if there is none of the length that the config tells.
    """
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            prefix = next(n for n, m in model.named_modules() if m is decoder)
            return f"{prefix}.{name}" if prefix else name
    raise ValueError(f"the layers of {model.config.model_type} are not found")


def _view(module: Any) -> Any:
    """The same module, whose children can be replaced."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
