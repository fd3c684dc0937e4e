"""Architectures through the batched engine: every row gets the tokens of `model.generate()`."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipeline.decoding import native
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.selftest import misfit
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.architectures import FITTING, VOCAB, make
from tests.decoding.oracle import decode, make_engine
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
NEW_TOKENS = 20
NEAR_TIE = 1e-4  # of logits: closer than this, rounding decides


def _prompts() -> list[list[int]]:
    """Of many lengths, most beyond the windows; two thirds begin alike."""
    generator = random.Random(0)
    head = [generator.randrange(3, VOCAB) for _ in range(15)]
    tails = [[generator.randrange(3, VOCAB) for _ in range(n)] for n in (1, 3, 9, 20, 27, 41)]
    return [(head if i % 3 else []) + tail for i, tail in enumerate(tails)]


PROMPTS = _prompts()
REQUESTS = [GenerationRequest(f"f:{i}", prompt) for i, prompt in enumerate(PROMPTS)]


class Guessing(Drafter):
    """Drafts of random length from the known completion, each token right with a chance of 0.8."""

    def __init__(self, truth: dict[str, list[int]]) -> None:
        self.truth, self.random = truth, random.Random(0)

    def propose(self, rows: Any, limits: Any) -> list[list[int]]:
        return [self._draft(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, row: Any, limit: int) -> list[int]:
        done = len(row.tokens) - row.num_prompt_tokens
        true = self.truth[row.request.row_key][done:][: self.random.randint(0, limit)]
        return [t if self.random.random() < 0.8 else self.random.randrange(VOCAB) for t in true]

    def observe(self, row: Any, num_drafted: int, num_accepted: int) -> None: ...

    def release(self, row: Any) -> None: ...

    def resize(self, num_slots: int, max_len: int) -> None: ...


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return list(output[0, len(prompt) :].tolist())


def assert_same(
    model: Any, prompt: list[int], found: Sequence[int], expected: Sequence[int]
) -> None:
    """`model` has its own attention. Where tokens part, its logits must be all but equal."""
    if found == expected:
        return
    pairs = zip(found, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert at is not None, f"one ends at {min(len(found), len(expected))}"
    ids = torch.tensor([prompt + list(expected[:at])])
    logits = model(ids).logits[0, -1]
    gap = float(logits[expected[at]] - logits[found[at]])
    assert abs(gap) < NEAR_TIE, f"token {at}: {found[at]} for {expected[at]}, a gap of {gap:.2g}"


@pytest.mark.parametrize("model_type", FITTING)
def test_same_tokens(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    model = make(model_type)
    attention = model.config._attn_implementation
    assert misfit(model) is None
    truth = {r.row_key: generate(model, list(r.prompt_token_ids)) for r in REQUESTS}
    assert len({token for tokens in truth.values() for token in tokens}) > 20, "a dull model"
    for drafts, step_tokens, compiled in ((5, 16, True), (5, 64, False), (0, 512, True)):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(native, "suits", lambda *_: False)
            engine = _engine(model, Guessing(truth) if drafts else None, drafts, step_tokens)
            found, completions = decode(engine, REQUESTS)
        model.set_attn_implementation(attention)
        for request in REQUESTS:
            key, prompt = request.row_key, list(request.prompt_token_ids)
            assert_same(model, prompt, found[key], truth[key])
        stats = [completion.stats for completion in completions.values()]
        assert sum(s.cached_prompt_tokens for s in stats) == 4 * 12
        if drafts:
            accepted = sum(s.num_accepted_draft_tokens for s in stats)
            assert 20 < accepted < sum(s.num_draft_tokens for s in stats)


def _engine(model: Any, drafter: Drafter | None, drafts: int, step_tokens: int) -> Any:
    return make_engine(
        model,
        TOKENIZER,
        slots=3,
        params=SamplingParams(max_new_tokens=NEW_TOKENS),
        max_model_len=128,
        step_tokens=step_tokens,
        method="draft_model" if drafter else "plain",
        drafter=drafter,
        num_draft_tokens=drafts,
        prefix_token_ids=PROMPTS[1][:12],
    )
