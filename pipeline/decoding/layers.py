"""Layers of a model that are replaced by faster ones, which compute the same."""

from typing import Any

from pipeline.decoding.latents import absorb_latents
from pipeline.decoding.norms import replace_norms
from pipeline.decoding.packing import pack_linears


def replace_layers(model: Any) -> None:
    """Replace what can be replaced, in place: linear layers and norms on CPU only."""
    absorb_latents(model)  # reads weights that packing takes away
    pack_linears(model)
    replace_norms(model)
