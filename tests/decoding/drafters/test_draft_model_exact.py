"""With a draft model of any quality the engine gives every row the tokens that it gets alone; and
how many drafts are accepted is held to floors, since output cannot tell a broken drafter."""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.decoding.drafters.draft_model import DraftModelDrafter
from pipeline.records import Completion, GenerationRequest, SamplingParams
from tests.decoding.oracle import decode, generate, make_draft_model, make_engine
from tests.tiny import TEXT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
IDS: list[int] = TOKENIZER(TEXT)["input_ids"]
HEAD = IDS[:10]
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3),
}
BUDGETS = [20, 1, 2, 9, 30, 13, 5]  # rows finish at different times


def requests(params: SamplingParams) -> list[GenerationRequest]:
    """Rows with prompts and budgets of several lengths."""
    return [
        GenerationRequest(
            f"f:{i}", HEAD + IDS[9 * i : 9 * i + 4 + 7 * i], replace(params, max_new_tokens=budget)
        )
        for i, budget in enumerate(BUDGETS)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, list[int]]]:
    model = make_model()
    return {
        name: {
            r.row_key: generate(model, r.prompt_token_ids, r.row_key, r.sampling or params)
            for r in requests(params)
        }
        for name, params in PARAMS.items()
    }


def perturbed(scale: float) -> Any:
    """The target, its matrices a little wrong: agrees as a distilled model would."""
    model = make_model()
    generator = torch.Generator().manual_seed(5)
    for weight in (p for p in model.parameters() if p.ndim == 2):
        noise = torch.randn(weight.shape, generator=generator)
        weight.data += scale * weight.data.std() * noise
    return model


def contrary() -> Any:
    """Never chooses what the target chooses greedily."""
    model = make_model()
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)
    return model


DRAFT_MODELS = {
    "equal": make_model,
    "near": lambda: perturbed(0.1),
    "random": lambda: make_model(1, num_hidden_layers=1, hidden_size=32),
    "contrary": contrary,
    "larger vocabulary": lambda: make_model(1, vocab_size=520),
    "smaller vocabulary": lambda: make_model(1, vocab_size=500),
    "few positions": lambda: make_model(1, max_position_embeddings=48),
}


def run(
    model: Any,
    name: str,
    *,
    drafter: type[DraftModelDrafter] = DraftModelDrafter,
    slots: int = 4,
    drafts: int = 3,
    chunk: int = 64,
    confidence: float = 0.0,
    prefix: Sequence[int] = (),
    order: int = 0,
) -> tuple[dict[str, list[int]], dict[str, Completion]]:
    made = make_draft_model(
        model,
        step_tokens=chunk,
        confidence=confidence,
        end_tokens=[2],
        prefix_token_ids=prefix,
        drafter=drafter,
    )
    engine = make_engine(
        make_model(),
        TOKENIZER,
        slots,
        step_tokens=chunk,
        method="draft_model",
        drafter=made,
        num_draft_tokens=drafts,
        prefix_token_ids=prefix,
    )
    rows = requests(PARAMS[name])
    return decode(engine, random.Random(order).sample(rows, len(rows)))


def acceptance(completions: dict[str, Completion]) -> float:
    stats = [completion.stats for completion in completions.values()]
    drafted = sum(s.num_draft_tokens for s in stats)
    return sum(s.num_accepted_draft_tokens for s in stats) / drafted


GRID = list(itertools.product(PARAMS, (1, 4, 16), (1, 3, 10)))


@pytest.mark.parametrize(("name", "slots", "drafts"), GRID)
def test_the_target_as_its_own_draft_model(
    expected: Any, name: str, slots: int, drafts: int
) -> None:
    chunk, prefix = (512, 7, 64)[slots % 3], HEAD if drafts == 3 else ()
    tokens, completions = run(
        make_model(), name, slots=slots, drafts=drafts, chunk=chunk, prefix=prefix, order=slots
    )
    assert tokens == expected[name]
    assert acceptance(completions) == 1.0
    stats = completions["f:4"].stats  # 30 tokens
    passes = 1 + -(-(stats.completion_tokens - 1) // (drafts + 1))
    assert passes <= stats.num_target_forwards <= passes + 12, "control steps apart, all drafted"


@pytest.mark.parametrize("kind", [kind for kind in DRAFT_MODELS if kind != "equal"])
@pytest.mark.parametrize("name", PARAMS)
def test_no_draft_model_changes_a_row(expected: Any, name: str, kind: str) -> None:
    for order, (slots, drafts, chunk) in enumerate([(2, 10, 512), (5, 3, 7)]):
        settings: dict[str, Any] = {"slots": slots, "drafts": drafts, "chunk": chunk}
        confidence, prefix = (0.4, ()) if slots == 2 else (0.0, HEAD)
        tokens, completions = run(
            DRAFT_MODELS[kind](),
            name,
            confidence=confidence,
            prefix=prefix,
            order=order,
            **settings,
        )
        assert tokens == expected[name]
        if kind == "contrary" and name == "greedy":
            assert acceptance(completions) == 0


@pytest.mark.parametrize("name", PARAMS)
def test_a_draft_model_that_mostly_agrees(name: str) -> None:
    _, completions = run(perturbed(0.1), name)
    assert 0.3 <= acceptance(completions) <= 0.95
    _, unsure = run(perturbed(0.1), name, drafts=10, confidence=0.6)
    _, sure = run(perturbed(0.1), name, drafts=10)
    assert acceptance(unsure) > acceptance(sure) + 0.05, "stops where it would be wrong"


class OtherNoise(DraftModelDrafter):
    """Draws from the same probabilities, but not the same tokens."""

    def propose(self, rows: Any, limits: Any) -> list[list[int]]:
        others = [copy.copy(row) for row in rows]
        for row in others:
            row.noise_key ^= 1
        return super().propose(others, limits)


def test_the_same_noise_is_what_makes_sampled_drafts_fit(expected: Any) -> None:
    _, completions = run(perturbed(0.1), "sampled")
    tokens, others = run(perturbed(0.1), "sampled", drafter=OtherNoise)
    assert tokens == expected["sampled"]
    assert acceptance(completions) > acceptance(others) + 0.1


def test_rows_of_other_slots_after_running_out_of_memory(expected: Any) -> None:
    """The engine halves its slots in the middle of rows; their drafts stay right."""

    class Short(DraftModelDrafter):
        calls = 0

        def propose(self, rows: Any, limits: Any) -> list[list[int]]:
            Short.calls += 1
            drafts = super().propose(rows, limits)
            if Short.calls in (2, 6):
                raise torch.OutOfMemoryError("a test")
            return drafts

    tokens, completions = run(make_model(), "greedy", drafter=Short, slots=8)
    assert Short.calls > 6 and tokens == expected["greedy"]
    assert acceptance(completions) == 1.0
