"""Untrained MTP layers and shared-KV assistants for random targets: right only by chance."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4TextConfig
from transformers.modeling_layers import MtpModel

from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.drafters.mtp import MtpDrafter


def make_mtp(target: Any, count: int, step_tokens: int = 64, seed: int = 3) -> MtpDrafter:
    """`count` MTP layers around the target."""
    torch.manual_seed(seed)
    layers = MtpModel(target, count).eval().requires_grad_(False)
    for name, weight in [*layers.layers.named_parameters(), *layers.layers.named_buffers()]:
        if weight.is_floating_point():  # routers would stay as memory happened to be
            weight.copy_(
                torch.ones_like(weight) if "norm" in name else torch.randn_like(weight) / 4
            )
    chooser = DraftChooser(target.config.vocab_size)
    return MtpDrafter(layers, chooser, step_tokens=step_tokens)


def make_assistant(target: Any, seed: int = 3) -> Any:
    """A two-layer assistant that fits a `gemma4_text` target."""
    torch.manual_seed(seed)
    like = target.config
    text = Gemma4TextConfig(
        vocab_size=like.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.per_layer_config[0].num_key_value_heads,
        head_dim=like.per_layer_config[0].head_dim,
        global_head_dim=like.per_layer_config[1].head_dim,
        sliding_window=like.sliding_window,
        max_position_embeddings=like.max_position_embeddings,
        initializer_range=0.2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        pad_token_id=0,
    )
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=like.hidden_size)
    assistant = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return assistant.eval().requires_grad_(False)
