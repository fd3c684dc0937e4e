"""Layers of a model on CPU that are replaced by faster ones, which compute the same."""

from typing import Any

from pipeline.decoding.norms import replace_norms
from pipeline.decoding.packing import pack_linears


def replace_layers(model: Any) -> None:
    """Replace what can be replaced, in place; on other devices nothing."""
    pack_linears(model)
    replace_norms(model)
