"""Makers of tokenizers that spell in other ways than that of `tests.tiny`, and of the same model
with another vocabulary."""

import copy
import functools
import json
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pipeline.records import SamplingParams
from tests.tiny import TEXT, make_model, make_tokenizer

_SPECIAL = ["<unk>", "<s>", "</s>"]
OTHER_SCRIPTS = "Größe, naïve, Ωμέγα, 中文字符, 🙂🚀 und 日本. "


@dataclass
class DraftedRow:
    """A row as drafters see it."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int = 0
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009, it is frozen
    noise_key: int = 7

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)


def _wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@functools.cache
def metaspace_tokenizer(vocab_size: int = 620) -> Any:
    """BPE as sentencepiece has it: a space before the text, `▁` for spaces, bytes for characters
    that it does not know, a token that begins the text."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*_SPECIAL, *alphabet], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in _SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    begin = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=begin)
    return _wrapped(tokenizer)


@functools.cache
def unigram_tokenizer() -> Any:
    """Without bytes: what it does not know it cannot spell. It changes text, too."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(Regex("[\\n\\t]"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return _wrapped(tokenizer)


def permutation(size: int, seed: int = 1) -> list[int]:
    """The place of each of `size` tokens in another order."""
    return random.Random(seed).sample(range(size), size)


def permuted_tokenizer(tokenizer: Any, places: list[int]) -> Any:
    """The same tokens, each at another place."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: places[index] for token, index in vocab.items()}
    for added in content["added_tokens"]:
        added["id"] = places[added["id"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )


def permuted_model(model: Any, places: list[int]) -> Any:
    """The same model over the vocabulary in another order."""
    other = copy.deepcopy(model)
    for weight in (other.get_input_embeddings().weight, other.get_output_embeddings().weight):
        rows = weight.data.clone()
        weight.data[torch.tensor(places)] = rows
    return other


@functools.cache
def trained_model(steps: int = 90) -> Any:
    """A tiny model that has learnt `TEXT` by heart, so that it writes text."""
    ids = torch.tensor(make_tokenizer()(TEXT + OTHER_SCRIPTS + TEXT)["input_ids"])
    model = make_model().train()
    model.lm_head.weight.data /= 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 64, (8,), generator=generator)
        batch = torch.stack([ids[start : start + 64] for start in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
