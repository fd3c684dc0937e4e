"""Gemma 4 and its assistant, which drafts from the target's own K and V."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Gemma4ForCausalLM
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import (
    Gemma4AssistantConfig,
)
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import (
    Gemma4AssistantForCausalLM,
)

from tests.zoo import corpus
from tests.zoo.training import imitation_loss, load, mixed_windows, save, train, train_on_text

WINDOW = 32
_DRAFT_TOKENS = 4  # that the assistant is trained to write in a row
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_KINDS = ["sliding_attention", "full_attention"]


def make_target(folder: Path) -> None:
    config = AutoConfig.for_model(
        "gemma4_text",
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=_KINDS * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=512,
        **_SHAPE,
    )
    tokenizer = corpus.make_text_tokenizer()
    model = Gemma4ForCausalLM(config)
    train_on_text(model, tokenizer, steps=180)
    save(model, tokenizer, folder)


def make_assistant(folder: Path, source: Path) -> None:
    """It reads what generation will feed it: the last token, the hidden state that predicted it,
    then its own states, and K and V of all places before that token."""
    text_config = AutoConfig.for_model(
        "gemma4_text",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=_KINDS,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        **_SHAPE,
    )
    tokenizer, target = corpus.make_text_tokenizer(), load(source)
    width = target.config.get_text_config().hidden_size
    model = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=width)
    )

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            output = target.model(ids, use_cache=False, return_shared_kv_states=True)
            wanted, embedded = (
                target.lm_head(output.last_hidden_state),
                target.model.embed_tokens(ids),
            )
        count = ids.shape[1] - _DRAFT_TOKENS  # places to draft from, all at once
        state, total = output.last_hidden_state[:, :count], torch.zeros(())
        masks = _masks(count, ids.shape[1])
        for j in range(1, _DRAFT_TOKENS + 1):
            inputs = torch.cat([embedded[:, j : j + count], state], -1)
            drafted = model.model(
                inputs_embeds=model.pre_projection(inputs),
                attention_mask=masks,
                position_ids=torch.arange(1, count + 1)[None],
                shared_kv_states=dict(output.shared_kv_states),
                use_cache=False,
                logits_to_keep=torch.arange(count),  # no number, which would drop tokens
            ).last_hidden_state
            state = model.post_projection(drafted)
            total = total + imitation_loss(model.lm_head(drafted), wanted[:, j : j + count])
        return total / _DRAFT_TOKENS

    windows = mixed_windows(target, corpus.token_ids(tokenizer))
    train(model.parameters(), loss, windows, steps=100)
    save(model, tokenizer, folder)


def _masks(count: int, length: int) -> dict[str, Tensor]:
    """What the draft behind each place sees: bool `[1, 1, count, length]`, by kind of layer."""
    behind = torch.arange(count)[:, None] - torch.arange(length)
    full = behind >= 0
    return dict(zip(_KINDS, (m[None, None] for m in (full & (behind < WINDOW), full)), strict=True))
