"""Gemma 4, with a window that is shorter than most rows."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, Gemma4ForCausalLM

from tests.zoo import corpus
from tests.zoo.training import RATE, WIDE_RATE, save, train_on_text

WINDOW = 32
KINDS = ["sliding_attention", "full_attention"]
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


WIDE_HEADS = {"head_dim": 64, "global_head_dim": 128}
_WIDE: dict[str, Any] = {"hidden_size": 384, "initializer_range": 0.03, **WIDE_HEADS}


def make_target(folder: Path) -> None:
    _train_target(folder, RATE, intermediate_size=256, num_hidden_layers=4, **SHAPE)


def make_wide_target(folder: Path) -> None:
    _train_target(folder, WIDE_RATE, intermediate_size=1024, num_hidden_layers=6, **(SHAPE | _WIDE))


def _train_target(folder: Path, rate: float, **shape: Any) -> None:
    kinds = KINDS * (shape["num_hidden_layers"] // len(KINDS))
    config = AutoConfig.for_model("gemma4_text", layer_types=kinds, **shape)
    tokenizer = corpus.make_text_tokenizer()
    model = Gemma4ForCausalLM(config)
    train_on_text(model, tokenizer, steps=180, rate=rate)
    save(model, tokenizer, folder)
