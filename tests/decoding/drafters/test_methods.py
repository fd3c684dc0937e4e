"""Drafters that read the target itself: early exit, MTP layers, shared K/V. Untrained here, so they
are mostly wrong: rows must be right all the same, however they are batched."""

import itertools
from typing import Any

import pytest
import torch

from pipeline.config import DecodingConfig
from pipeline.decoding.drafters.early_exit import EarlyExitDrafter, layers_path, shallow_view
from pipeline.decoding.drafters.mtp import load_layers
from pipeline.errors import ConfigError
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.architectures import FITTING, make
from tests.decoding.drafters.random_drafters import make_assistant, make_mtp
from tests.decoding.oracle import decode, generate, make_engine
from tests.decoding.small import Files, drafter_for
from tests.tiny import TEXT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
IDS: list[int] = TOKENIZER(TEXT)["input_ids"]
HEAD = IDS[:12]
# One token, short, beyond the sliding window, with and without the head that most share.
PROMPTS = [IDS[:1], IDS[5:9], *(HEAD + IDS[20 + i : 24 + 5 * i] for i in range(5)), IDS[:14], HEAD]
REQUESTS = [GenerationRequest(f"f:{i}", prompt) for i, prompt in enumerate(PROMPTS)]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=16, end_tokens=(7, 11)),
    "sampled": SamplingParams(max_new_tokens=16, end_tokens=(), temperature=0.9, top_k=40, seed=5),
}
METHODS = ["early_exit", "mtp", "mtp_drafter"]


def make_target(method: str) -> Any:
    wide: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 512}
    if method == "mtp":
        return make("deepseek_v3", num_nextn_predict_layers=3, **wide)
    if method == "mtp_drafter":
        return make("gemma4_text", vocab_size_per_layer_input=512, **wide)
    return make_model(num_hidden_layers=3)


def make_drafter(method: str, target: Any) -> Any:
    if method == "mtp":
        return make_mtp(target, 3, step_tokens=16)
    if method == "mtp_drafter":
        return drafter_for(target, Files(make_assistant(target)), method=method)
    return drafter_for(target, method=method, exit_layer=2)


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    return {method: make_target(method) for method in METHODS}


@pytest.fixture(scope="module")
def expected(targets: dict[str, Any]) -> dict[tuple[str, str], dict[str, list[int]]]:
    return {
        (method, name): {
            r.row_key: generate(targets[method], r.prompt_token_ids, r.row_key, rule)
            for r in REQUESTS
        }
        for method, (name, rule) in itertools.product(METHODS, PARAMS.items())
    }


def engine_for(method: str, target: Any, slots: int, **settings: Any) -> Any:
    settings = {"num_draft_tokens": 3, "prefix_token_ids": HEAD} | settings
    return make_engine(
        target, TOKENIZER, slots, method=method, drafter=make_drafter(method, target), **settings
    )


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_are_right(targets: Any, expected: Any, method: str, name: str, slots: int) -> None:
    settings: dict[str, Any] = {
        1: {"step_tokens": 64, "num_draft_tokens": 5},
        4: {"step_tokens": 7, "prefix_token_ids": ()},
        16: {"step_tokens": 512},
    }[slots]
    engine = engine_for(method, targets[method], slots, params=PARAMS[name], **settings)
    tokens, completions = decode(engine, REQUESTS)
    assert tokens == expected[method, name]
    stats = [completion.stats for completion in completions.values()]
    assert sum(row.num_draft_tokens for row in stats) > 50
    for row in stats:
        whole = row.num_target_forwards + row.num_accepted_draft_tokens
        assert row.completion_tokens in (whole, whole - 1)
        assert row.num_lossy_draft_tokens == 0


@pytest.mark.parametrize("method", METHODS)
def test_drafts_in_bursts(targets: Any, expected: Any, method: str) -> None:
    """Steps without drafts come in between, of any number: nothing is missed meanwhile."""
    engine = engine_for(method, targets[method], 4, params=PARAMS["greedy"])
    calls = itertools.count()
    engine._is_control = lambda rows, bucket: next(calls) % 9 > 3
    tokens, _ = decode(engine, REQUESTS)
    assert tokens == expected[method, "greedy"]


@pytest.mark.parametrize("method", METHODS)
def test_out_of_memory_in_the_middle_of_a_draft(targets: Any, expected: Any, method: str) -> None:
    engine = engine_for(method, targets[method], 8, params=PARAMS["greedy"])
    chooser, calls = engine._drafter._chooser, itertools.count(1)
    extend = chooser.extend

    def short(active: Any, logits: Any) -> None:
        extend(active, logits)
        if next(calls) in (2, 11):
            raise torch.OutOfMemoryError("a test")

    chooser.extend = short
    tokens, _ = decode(engine, REQUESTS)
    assert next(calls) > 11 and tokens == expected[method, "greedy"]


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_draft_leaves_the_target_as_it_was(
    targets: Any, expected: Any, method: str
) -> None:
    target = targets[method]
    engine = engine_for(method, target, 4, params=PARAMS["greedy"])

    def broken(active: Any, logits: Any) -> None:
        raise RuntimeError("a test")

    engine._drafter._chooser.extend = broken
    with pytest.raises(RuntimeError, match="a test"):
        decode(engine, REQUESTS)
    plain = make_engine(target, TOKENIZER, 4, params=PARAMS["greedy"])
    assert decode(plain, REQUESTS)[0] == expected[method, "greedy"]
    again = engine_for(method, target, 4, params=PARAMS["greedy"])
    assert decode(again, REQUESTS)[0] == expected[method, "greedy"]


# Early exit


def test_all_layers_but_none_less_draft_what_the_target_says() -> None:
    """A last layer that adds nothing: the layers before it are the model."""
    target = make_model(num_hidden_layers=3)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        target.model.layers[2].get_submodule(name).weight.data.zero_()
    engine = engine_for("early_exit", target, 4, params=PARAMS["sampled"])
    _, completions = decode(engine, REQUESTS)
    stats = [completion.stats for completion in completions.values()]
    drafted = sum(row.num_draft_tokens for row in stats)
    assert drafted == sum(row.num_accepted_draft_tokens for row in stats) > 50


@pytest.mark.parametrize("model_type", [*FITTING])
def test_a_shallow_view_is_what_a_shallow_model_would_be(model_type: str) -> None:
    model = make(model_type)
    ids = torch.arange(3, 40)[None]
    before, path = model(ids).logits, layers_path(model)
    view = shallow_view(model, 1)
    assert len(view.get_submodule(path)) == 1
    shallow = view(ids).logits
    assert not torch.allclose(shallow, before)
    assert torch.equal(model(ids).logits, before), "the model itself is untouched"
    layers = model.get_submodule(path)
    kept = list(layers)
    del layers[1:]
    torch.testing.assert_close(model(ids, use_cache=False).logits, shallow)
    layers.extend(kept[1:])


@pytest.mark.parametrize("layer", [3, 4])
def test_an_exit_layer_that_is_none(layer: int) -> None:
    target = make_model(num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"^decoding\.exit_layer: must be 1 to 2.*choose another"):
        engine_for_layer(target, layer)
    with pytest.raises(ValueError, match=r"exit_layer: early_exit needs it"):
        DecodingConfig(method="early_exit")


def engine_for_layer(target: Any, layer: int) -> None:
    drafter = drafter_for(target, method="early_exit", exit_layer=layer)
    assert isinstance(drafter, EarlyExitDrafter)
    make_engine(target, TOKENIZER, drafter=drafter, num_draft_tokens=2)


# Models that do not fit


def test_no_mtp_layers() -> None:
    with pytest.raises(ConfigError, match=r"^decoding\.method: .*llama.*num_nextn_predict_layers"):
        load_layers(make_model())


def test_mtp_layers_that_the_checkpoint_lacks(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    make("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = target._keys_to_ignore_on_load_unexpected
    with pytest.raises(ConfigError, match=r"^decoding\.method: .*1 MTP layers.*deepseek_v3"):
        load_layers(target)
    assert target._keys_to_ignore_on_load_unexpected == before


@pytest.mark.parametrize(
    ("target", "drafter", "problem"),
    [
        (lambda: make("llama"), lambda: make("llama"), "llama does not draft from another"),
        (lambda: make("llama"), lambda: make_assistant(make("gemma4_text")), "shares no K and V"),
        (
            lambda: make("gemma4_text", hidden_size=16),
            lambda: make_assistant(make("gemma4_text")),
            "hidden states of 32 numbers",
        ),
    ],
)
def test_an_assistant_of_another_target(target: Any, drafter: Any, problem: str) -> None:
    made = target()
    with pytest.raises(ConfigError, match=rf"^model\.drafter: .*{problem}.*own assistant"):
        make_engine(
            made,
            TOKENIZER,
            drafter=drafter_for(made, Files(drafter()), method="mtp_drafter"),
            num_draft_tokens=2,
        )
