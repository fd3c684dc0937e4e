"""Ensemble verification: the distribution it promises, and the price that it reports."""

from typing import Any

import pytest
import torch

from pipeline.config import DecodingConfig
from pipeline.decoding.choosing import Chooser, Position
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.ensemble import Ensemble
from pipeline.decoding.sampling import noise_key
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.drafters.random_drafters import make_assistant, make_mtp
from tests.decoding.oracle import decode, generate, make_draft_model, make_engine
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
from tests.tiny import TEXT, make_model, make_tokenizer

LEVEL, SURE = 1e-3, 1e-9
ROWS = 2_000
WEIGHT = 0.6
SAMPLED: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 4}]
TOKENIZER = make_tokenizer()
IDS: list[int] = TOKENIZER(TEXT)["input_ids"]
REQUESTS = [GenerationRequest(f"f:{i}", IDS[7 * i : 7 * i + 5 + 3 * i]) for i in range(6)]


def mixed(target: Any, model: Any, fields: SamplingParams) -> torch.Tensor:
    """Of texts whose first token is the prefill's, and whose others are drafted."""
    ours, theirs = (next_probabilities(each, fields) for each in (target, model))
    mixture = [WEIGHT * a + (1 - WEIGHT) * b for a, b in zip(ours, theirs, strict=True)]
    # drafts are a token long here: the second is drafted, the third then is the bonus
    return joint([ours[0], mixture[1], ours[2]])


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_twenty_thousand_choices_follow_the_mixture(fields: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    target, drafter = torch.randn((2, VOCAB), generator=generator)
    rule, rows = params(fields), 20_000
    positions = [Position(rule, noise_key(0, f"r:{i}"), 1, [1], []) for i in range(rows)]
    chooser = Chooser(VOCAB)
    chosen = Ensemble(WEIGHT, chooser).choose(
        target.expand(rows, -1), drafter.expand(rows, -1), positions
    )
    scores = [chooser.process(each[None], positions[:1])[0] for each in (target, drafter)]
    ours, theirs = (torch.softmax(each.double(), -1) for each in scores)
    counts = torch.bincount(torch.tensor(chosen), minlength=VOCAB)
    assert chi_square_p_value(counts, WEIGHT * ours + (1 - WEIGHT) * theirs) > LEVEL
    assert chi_square_p_value(counts, ours) < SURE, "the test tells the mixture from the target"


def test_greedy_takes_the_most_probable_of_the_mixture() -> None:
    target, drafter = torch.tensor([[2.0, 1.9, -9.0]]), torch.tensor([[-9.0, 3.0, 0.0]])
    position = [Position(SamplingParams(), 1, 0, [1], [])]
    chooser = Chooser(3)
    assert Ensemble(0.5, chooser).choose(target, drafter, position) == [1]
    assert Ensemble(0.999, chooser).choose(target, drafter, position) == [0]


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_rows_follow_the_mixture_where_they_are_drafted(fields: dict[str, Any]) -> None:
    target, model = make_small(spread=1.5), make_small(seed=1, spread=1.5)
    rule = params(fields)
    exact = mixed(target, model, rule)
    drafter = drafter_for(target, Files(model), method="draft_model")
    assert drafter is not None
    counts, stats = draw(target, Limited(drafter), rule, ROWS, ensemble_weight=WEIGHT)
    assert chi_square_p_value(counts, exact) > LEVEL
    assert chi_square_p_value(counts, joint(next_probabilities(target, rule))) < SURE
    lossy = sum(one.num_lossy_draft_tokens for one in stats)
    assert 0 < lossy < sum(one.num_accepted_draft_tokens for one in stats)


def Limited(drafter: Drafter) -> Drafter:
    """Drafts a token at a time, whatever the engine would take."""
    propose = drafter.propose
    drafter.propose = lambda rows, limits: propose(rows, [min(1, n) for n in limits])  # type: ignore[method-assign]
    return drafter


def setup(method: str) -> tuple[Any, Drafter]:
    if method == "mtp":
        target = make_model_like("deepseek_v3", num_nextn_predict_layers=2)
        return target, make_mtp(target, 2)
    if method == "mtp_drafter":
        target = make_model_like("gemma4_text", vocab_size_per_layer_input=512)
        drafter = drafter_for(target, Files(make_assistant(target)), method=method)
    else:
        target = make_model()
        if method == "draft_model":
            return target, make_draft_model(make_model(seed=1))
        drafter = drafter_for(target, method=method, exit_layer=1)
    assert drafter is not None
    return target, drafter


def make_model_like(model_type: str, **config: Any) -> Any:
    from tests.decoding.architectures import make

    return make(model_type, vocab_size=512, max_position_embeddings=512, **config)


def run(method: str, weight: float | None, rule: SamplingParams, slots: int = 4) -> Any:
    target, drafter = setup(method)
    engine = make_engine(
        target,
        TOKENIZER,
        slots,
        params=rule,
        drafter=drafter,
        method=method,
        num_draft_tokens=2,
        ensemble_weight=weight,
    )
    return decode(engine, REQUESTS)


RULES = [
    SamplingParams(max_new_tokens=16, end_tokens=()),
    SamplingParams(max_new_tokens=16, end_tokens=(), temperature=0.9, top_k=50, seed=4),
]
METHODS = ["draft_model", "early_exit", "mtp", "mtp_drafter"]


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_more_is_accepted_as_the_weight_falls(method: str, rule: SamplingParams) -> None:
    target, _ = setup(method)
    expected = {r.row_key: generate(target, r.prompt_token_ids, r.row_key, rule) for r in REQUESTS}
    nearly, stats = run(method, 1 - 1e-9, rule)
    assert nearly == expected
    assert all(c.stats.num_lossy_draft_tokens == 0 for c in stats.values())
    rates = []
    for weight in (0.9, 0.5, 0.001):
        tokens, completions = run(method, weight, rule)
        rows = [completion.stats for completion in completions.values()]
        accepted, lossy = (
            sum(getattr(row, f"num_{name}_draft_tokens") for row in rows)
            for name in ("accepted", "lossy")
        )
        rates.append(accepted / sum(row.num_draft_tokens for row in rows))
        assert lossy <= accepted
        for key, completion in completions.items():
            row = completion.stats
            last_drafted = row.num_target_forwards + row.num_accepted_draft_tokens
            assert row.completion_tokens in (last_drafted, last_drafted - 1)
            assert len(tokens[key]) == row.completion_tokens
    assert lossy > 0 and tokens != expected
    assert rates[0] <= rates[1] < rates[2] and rates[2] > 0.8


@pytest.mark.parametrize("method", METHODS)
def test_a_row_does_not_depend_on_its_neighbours(method: str) -> None:
    """Nor on when control steps come: they are taken besides, and the drafts go on as ever."""
    found = [run(method, 0.4, RULES[1], slots)[0] for slots in (1, 4, 16)]
    assert found[0] == found[1] == found[2]
    _, completions = run(method, 0.4, RULES[0], slots=1)
    assert any(completion.stats.num_control_steps for completion in completions.values())


def test_control_passes_are_no_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only drafting (1 s) and passes of the target (100 s) move."""
    now = [0.0]
    monkeypatch.setattr("pipeline.decoding.batched.time.perf_counter", lambda: now[0])
    target, drafter = setup("draft_model")
    engine = make_engine(
        target, TOKENIZER, 1, drafter=drafter, num_draft_tokens=2, ensemble_weight=0.4
    )
    verify, propose, proposals = engine._verify, engine._propose, [0]

    def slow_verify(*args: Any) -> Any:
        now[0] += 100
        return verify(*args)

    def slow_propose(rows: Any) -> Any:
        now[0] += 1
        proposals[0] += 1
        return propose(rows)

    engine._verify, engine._propose = slow_verify, slow_propose  # type: ignore[method-assign]
    engine.add_request(GenerationRequest("f:0", IDS[:9], RULES[0]))
    done: list[Any] = []
    while engine.num_unfinished:
        done += engine.step()
    assert done[0].stats.num_control_steps > 0
    assert engine.times.draft_seconds == proposals[0] == done[0].stats.draft_seconds


@pytest.mark.parametrize("weight", [0, 1, -0.5, 1.5])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="ensemble_weight"):
        DecodingConfig(method="draft_model", ensemble_weight=weight)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "universal", "auto"])
def test_methods_without_probabilities_are_refused(method: Any) -> None:
    with pytest.raises(ValueError, match="do without probabilities"):
        DecodingConfig(method=method, ensemble_weight=0.7)
