"""Gemma 4's assistant, which drafts from the target's own K and V."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import (
    Gemma4AssistantConfig,
)
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import (
    Gemma4AssistantForCausalLM,
)

from tests.zoo import corpus
from tests.zoo.gemma import KINDS, SHAPE, WIDE_HEADS, WINDOW
from tests.zoo.training import imitation_loss, load, save, text_windows, train

_DRAFT_TOKENS = 3  # that the assistant is trained to write in a row


def make_assistant(folder: Path, source: Path) -> None:
    _make_assistant(folder, source, SHAPE)


def make_wide_assistant(folder: Path, source: Path) -> None:
    """Of a target with wide heads: it is no wider itself."""
    _make_assistant(folder, source, SHAPE | WIDE_HEADS)


def _make_assistant(folder: Path, source: Path, shape: dict[str, Any]) -> None:
    """It reads what generation will feed it: the last token, the hidden state that predicted it,
    then its own states, and K and V of all places before that token."""
    tokenizer, target = corpus.make_text_tokenizer(), load(source)
    width = target.config.get_text_config().hidden_size
    text_config = AutoConfig.for_model(
        "gemma4_text",
        intermediate_size=192,
        num_hidden_layers=2,
        layer_types=KINDS,
        num_kv_shared_layers=2,
        **shape,
    )
    model = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=width)
    )
    for projection in (model.pre_projection, model.post_projection):  # states of size 1 stay so
        torch.nn.init.normal_(projection.weight, std=projection.in_features**-0.5)

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

    windows = text_windows(corpus.token_ids(tokenizer))
    train(model.parameters(), loss, windows, steps=130, rate=6e-3)
    save(model, tokenizer, folder)


def _masks(count: int, length: int) -> dict[str, Tensor]:
    """What the draft behind each place sees: bool `[1, 1, count, length]`, by kind of layer."""
    behind = torch.arange(count)[:, None] - torch.arange(length)
    full = behind >= 0
    return dict(zip(KINDS, (m[None, None] for m in (full & (behind < WINDOW), full)), strict=True))
