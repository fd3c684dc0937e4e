"""Makers of tiny models for tests: made in a moment, real in every part.

The weights are random, so text is nonsense, but it soon repeats itself: prompt lookup then finds
drafts, of which many are accepted and many are not.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """The mill stands where the river bends. Every morning the miller opens the sluice, and
the water turns the wheel, and the wheel turns the stone. Grain goes in at the top and flour comes
out at the bottom. When the river is low the wheel turns slowly; when it is high the miller closes
the gate halfway. Über dem Bach liegt Nebel, der Müller zählt die Säcke. 12 sacks on Monday, 34 on
Tuesday, 56 on Friday: all of them are weighed, tied and written down in the book. "How many are
left?" she asks. "None," he says, "none at all." Then they load the cart and drive to the market in
the next town."""


def make_tokenizer(vocab_size: int = 512, text: str = TEXT) -> Any:
    """A byte-level BPE tokenizer with a chat template, made for `text`; it can spell any other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )


def make_model(seed: int = 0, **config: Any) -> Any:
    """A random two-layer Llama in float32 that fits `make_tokenizer()`.

    Its head is scaled up: the logits then differ as a trained model's do, so that sampled text
    repeats itself too, and rounding has no near-ties to decide.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | config))).eval()
    model.lm_head.weight.data *= 16
    return model


def make_tiny_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Save a tiny model and its tokenizer into `folder`, as a checkpoint of transformers."""
    make_model(seed, **config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
