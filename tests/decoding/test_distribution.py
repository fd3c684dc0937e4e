"""Rows drawn through the engine follow the target's exact probabilities, whatever drafts.

Two thousand rows start alike, so each is one draw of three tokens over a vocabulary of six.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.decoding.drafters.base import Drafter
from tests.decoding.architectures import VOCAB as WIDE
from tests.decoding.architectures import make
from tests.decoding.drafters.random_drafters import make_assistant, make_mtp
from tests.decoding.small import (
    VOCAB,
    Files,
    drafter_for,
    draw,
    joint,
    make_small,
    next_probabilities,
    params,
)
from tests.goodness_of_fit import chi_square_p_value

ROWS = 2_000
LEVEL = 1e-3  # a sound engine would fail one test in a thousand; the seeds are fixed
SURE = 1e-9
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
]


class Wrong(Drafter):
    """Drafts one token, over and over."""

    def propose(self, rows: Any, limits: Any) -> list[list[int]]:
        return [[4] * limit for limit in limits]


def setup(method: str) -> tuple[Any, Drafter | None]:
    """A target, and what drafts for it."""
    if method == "mtp":
        target = make_small("deepseek_v3", spread=1.5, num_nextn_predict_layers=2)
        return target, make_mtp(target, 2)
    if method == "mtp_drafter":
        target = make_small("gemma4_text", spread=1.5)
        return target, drafter_for(target, Files(make_assistant(target)), method=method)
    target = make_small(spread=1.5)
    if method == "wrong":
        return target, Wrong()
    if method == "early_exit":
        return target, drafter_for(target, method=method, exit_layer=1)
    if method == "draft_model":
        return target, drafter_for(target, Files(make_small(seed=1)), method=method)
    return target, drafter_for(target, method=method, prompt_lookup_min=1)


METHODS = ["plain", "prompt_lookup", "draft_model", "early_exit", "mtp", "mtp_drafter", "wrong"]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        *zip(METHODS, itertools.cycle(SAMPLED)),
        ("draft_model", SAMPLED[0]),
        ("mtp", SAMPLED[2]),
        ("mtp_drafter", SAMPLED[1]),
    ],
    ids=str,
)
def test_rows_follow_the_target(method: str, fields: dict[str, Any]) -> None:
    target, drafter = setup(method)
    exact = joint(next_probabilities(target, params(fields)))
    assert torch.isclose(exact.sum(), torch.tensor(1.0).double())
    counts, stats = draw(target, drafter, params(fields), ROWS)
    assert chi_square_p_value(counts, exact) > LEVEL
    drafted = sum(one.num_draft_tokens for one in stats)
    assert (drafted > ROWS / 4) == (method != "plain"), "else nothing was put to the test"
    assert sum(one.num_lossy_draft_tokens for one in stats) == 0


def test_another_seed_gives_other_rows() -> None:
    target, drafter = setup("draft_model")
    a, _ = draw(target, drafter, params(SAMPLED[0]), 200)
    target, drafter = setup("draft_model")
    b, _ = draw(target, drafter, params(SAMPLED[0], seed=1), 200)
    assert (a != b).any()


def test_finds_rows_that_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself: one key for every two rows is noise used twice."""
    import pipeline.decoding.admission as admission

    target, drafter = setup("draft_model")
    exact = joint(next_probabilities(target, params(SAMPLED[0])))
    monkeypatch.setattr(admission, "noise_key", lambda seed, key: int(key[2:]) % 20 * 7919)
    counts, _ = draw(target, drafter, params(SAMPLED[0]), ROWS)
    assert chi_square_p_value(counts, exact) < SURE


class _Constant(nn.Module):
    """A head that says the same of every state."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        logits = torch.tensor(probabilities + [0.0] * (VOCAB - len(probabilities))).log()
        self.weight = nn.Parameter(logits)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(*hidden.shape[:-1], VOCAB)


def test_a_shared_kv_drafter_that_is_always_sure() -> None:
    """Where stock assisted decoding is biased: its drafter takes the likelier of two tokens that
    it finds equally likely, and the acceptance ratio is taken as if it had drawn it."""
    target = make_small("gemma4_text")
    assistant = make_assistant(target)
    target.lm_head, assistant.lm_head = _Constant([0.6, 0.4]), _Constant([0.5, 0.5])
    drafter = drafter_for(target, Files(assistant), method="mtp_drafter")
    counts, stats = draw(target, drafter, params({"temperature": 1.0}), ROWS)
    one = torch.tensor([0.6, 0.4] + [0.0] * (VOCAB - 2), dtype=torch.float64)
    exact = one[:, None, None] * one[:, None] * one
    assert chi_square_p_value(counts, exact) > LEVEL
    assert sum(one.num_draft_tokens for one in stats) > ROWS / 2


def test_small_models_are_those_of_the_other_tests() -> None:
    assert WIDE > VOCAB and make("llama").config.vocab_size == WIDE
