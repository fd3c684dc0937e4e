"""Llamas: a target, draft models for it, and one whose first layers are models by themselves."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.zoo import corpus
from tests.zoo.training import (
    RATE,
    WIDE_RATE,
    imitation_loss,
    load,
    mixed_windows,
    next_token_loss,
    save,
    text_windows,
    train,
    train_on_text,
)

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
_WIDE: dict[str, Any] = {  # so that steps are mostly arithmetic
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "initializer_range": 0.03,
}
EXIT_LAYER = 2
_DROPPED = 0.2  # of the last layer; those before it less


def make_target(folder: Path) -> None:
    _train_target(folder, _model(), RATE)


def make_wide_target(folder: Path) -> None:
    _train_target(folder, _model(**_WIDE), WIDE_RATE)


def _train_target(folder: Path, model: Any, rate: float) -> None:
    tokenizer = corpus.make_text_tokenizer()
    train_on_text(model, tokenizer, steps=180, rate=rate)
    save(model, tokenizer, folder)


def make_draft(folder: Path, target: Path) -> None:
    """Distilled from the target."""
    tokenizer = corpus.make_text_tokenizer()
    teacher, model = load(target), _model(**_SMALL)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits
        return imitation_loss(model(ids, use_cache=False).logits, wanted)

    windows = mixed_windows(teacher, corpus.token_ids(tokenizer))
    train(model.parameters(), loss, windows, steps=300)
    save(model, tokenizer, folder)


def make_other_tokenizer(folder: Path) -> None:
    """Of the same text, cut into other tokens."""
    tokenizer = corpus.make_text_tokenizer(380)
    model = _model(vocab_size=len(tokenizer), **_SMALL)
    train_on_text(model, tokenizer, steps=200)
    save(model, tokenizer, folder)


def make_layerskip(folder: Path) -> None:
    """Source: Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710: layers are left out at random,
    the later the more often, and the head learns to read earlier layers too."""
    _train_layerskip(folder, _model(num_hidden_layers=6), RATE)


def make_wide_layerskip(folder: Path) -> None:
    _train_layerskip(folder, _model(**_WIDE), WIDE_RATE)


def _train_layerskip(folder: Path, model: Any, rate: float) -> None:
    tokenizer = corpus.make_text_tokenizer()
    layers = model.model.layers
    dice = random.Random(0)

    def loss(ids: Tensor) -> Tensor:
        hidden = model.model.embed_tokens(ids)
        places = torch.arange(ids.shape[1])[None]
        rotary = model.model.rotary_emb(hidden, places)
        also = dice.randrange(1, len(layers))  # one more exit, another each time
        total = torch.zeros(())
        for i, layer in enumerate(layers):
            if i < EXIT_LAYER or dice.random() > _DROPPED * i / (len(layers) - 1):
                hidden = layer(hidden, position_embeddings=rotary, position_ids=places)
            scale = {len(layers): 1.0, EXIT_LAYER: 0.7}.get(i + 1, 0.2 if i + 1 == also else 0.0)
            if scale:
                logits = model.lm_head(model.model.norm(hidden))
                total = total + scale * next_token_loss(logits, ids)
        return total

    windows = text_windows(corpus.token_ids(tokenizer))
    train(model.parameters(), loss, windows, steps=150, rate=rate)
    save(model, tokenizer, folder)


def _model(**settings: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | settings)))
