"""Models over so few tokens that what a row becomes has exact probabilities."""

import itertools
from typing import Any

import torch
from torch import Tensor

from pipeline.config import DecodingConfig
from pipeline.decoding.choosing import Chooser, Position, params_of
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.drafters.make import DrafterFiles, make_drafter
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.architectures import make
from tests.decoding.oracle import decode, make_engine
from tests.tiny import make_tokenizer

VOCAB = 6
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]
LENGTH = 3  # tokens per row: the first by the prefill, the others drafted


class Files(DrafterFiles):
    """A draft model that is there already."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self._model, self._tokenizer = model, tokenizer

    def model(self) -> Any:
        return self._model

    def tokenizer(self) -> Any:
        return self._tokenizer


def make_small(model_type: str = "llama", seed: int = 0, spread: float = 1.0, **config: Any) -> Any:
    """A random model whose choices are open: its logits differ by about `spread`."""
    model = make(model_type, vocab_size=VOCAB, **config)
    torch.manual_seed(seed)
    head = model.get_output_embeddings()
    head.weight.copy_(torch.randn(head.weight.shape))
    logits = model(torch.tensor([PROMPT])).logits
    head.weight *= spread / logits.std()
    return model


def drafter_for(target: Any, files: Any = None, **settings: Any) -> Drafter | None:
    """The drafter of `DecodingConfig(**settings)`."""
    decoding = DecodingConfig(**({"draft_confidence": 0} | settings))
    return make_drafter(
        decoding, target, files, tokenizer=make_tokenizer(), step_tokens=64, prefix_token_ids=[]
    )


def draw(
    target: Any, drafter: Drafter | None, params: SamplingParams, rows: int, **settings: Any
) -> tuple[Tensor, list[Any]]:
    """Rows from one prompt: how often each text came, `[VOCAB] * LENGTH`, and all statistics."""
    engine = make_engine(
        target,
        make_tokenizer(),
        16,
        params=params,
        drafter=drafter,
        num_draft_tokens=2,
        method="plain" if drafter is None else "draft_model",
        **settings,
    )
    tokens, completions = decode(engine, [GenerationRequest(f"r:{i}", PROMPT) for i in range(rows)])
    counts = torch.zeros([VOCAB] * LENGTH)
    for row in tokens.values():
        counts[tuple(row)] += 1
    return counts, [completion.stats for completion in completions.values()]


def params(fields: dict[str, Any], seed: int = 0) -> SamplingParams:
    """Of rows of `LENGTH` tokens, which nothing ends."""
    config = DecodingConfig(method="plain", max_new_tokens=LENGTH, seed=seed, **fields)
    return SamplingParams(**(vars(params_of(config)) | {"end_tokens": ()}))


def next_probabilities(model: Any, fields: SamplingParams) -> list[Tensor]:
    """After the row's processors: `[VOCAB]`, `[VOCAB, VOCAB]`, ... by the tokens before."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = []
    for t in range(LENGTH):
        texts = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=t)]
        logits = model(torch.tensor(texts), use_cache=False).logits[:, -1]
        positions = [Position(fields, 0, t, text, []) for text in texts]
        scores = Chooser(VOCAB).process(logits, positions)
        found.append(torch.softmax(scores.double(), -1).view([VOCAB] * (t + 1)))
    model.set_attn_implementation(before)
    return found


def joint(conditional: list[Tensor]) -> Tensor:
    """Probability of each text, from those of each token given the ones before."""
    first, second, third = conditional
    return first[:, None, None] * second[:, :, None] * third
