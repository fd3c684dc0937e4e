"""The self-test: which models it refuses and why, what it notices, and that it leaves no trace."""

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from pipeline.decoding.attention import NAME, ragged_attention
from pipeline.decoding.selftest import misfit
from tests.decoding.architectures import FITTING, WINDOW, make

ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ),
    "marian": lambda: MarianMTModel(
        MarianConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            pad_token_id=0,
        )
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "bloom takes no position_ids"),
    "falcon": ({}, "falcon takes no custom attention"),
    "llama4_text": (
        {
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
        },
        r"layer 0 \(chunked_attention\) of llama4_text see neither all before them",
    ),
    "mamba": ({"state_size": 4}, "mamba has recurrent layers, from whose state drafts"),
    "qwen3_next": (
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "moe_intermediate_size": 16,
        },
        "qwen3_next has recurrent layers",
    ),
    "deepseek_v32": (
        FITTING["deepseek_v3"] | {"index_n_heads": 2, "index_head_dim": 8},
        "deepseek_v32 has layers of an unknown kind: indexed_attention",
    ),
    "openai-gpt": ({"n_layer": 2, "n_head": 4}, "openai-gpt takes no cache"),
    "bert": ({}, "layer 0 of bert see neither all before them nor a window"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str) -> None:
    settings, reason = REFUSED[model_type]
    found = misfit(make(model_type, **settings))
    assert found and re.search(reason, found), found


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_encoder_decoders_are_refused(model_type: str) -> None:
    assert misfit(ENCODER_DECODERS[model_type]()) == f"{model_type} is an encoder-decoder"


def test_chunks_fit_rows_that_are_shorter() -> None:
    model = make("llama4_text", **REFUSED["llama4_text"][0], num_hidden_layers=2)
    assert misfit(model, max_model_len=WINDOW + 1)
    model = make("llama4_text", **REFUSED["llama4_text"][0] | {"attention_chunk_size": 64})
    assert misfit(model, max_model_len=64) is None


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "rope", "fits"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}, 1 << 12),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 256),
        ("phi3", {"rope_type": "longrope"} | FACTORS, 64),
    ],
)
def test_rope_that_one_long_row_changes_for_all(
    model_type: str, rope: dict[str, Any], fits: int
) -> None:
    rope = {"rope_theta": 1e4} | rope
    model = make(model_type, rope_parameters=rope, original_max_position_embeddings=64)
    assert misfit(model, fits) is None
    reason = misfit(model, fits + 1)
    if rope["rope_type"] == "linear":
        assert reason is None
    else:
        assert reason and rope["rope_type"] in reason and f"over {fits} tokens" in reason


@pytest.mark.parametrize("window", [WINDOW, 4096])
def test_a_layer_that_forgets_its_window(window: int) -> None:
    """Windows far longer than any row of the test are seen too."""
    model = make("gemma3_text", sliding_window=window, max_position_embeddings=1 << 15)
    assert misfit(model) is None
    model.model.layers[0].self_attn.sliding_window = window + 1
    reason = misfit(model)
    assert reason and "layer 0 (sliding_attention) of gemma3_text" in reason
    if window > 19:  # beyond the test's own rows
        assert misfit(model, max_model_len=window) is None


def test_arguments_that_our_attention_would_ignore() -> None:
    model = make("llama")

    def biased(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"position_bias": torch.ones(1)}

    model.model.layers[1].self_attn.register_forward_pre_hook(biased, with_kwargs=True)
    assert misfit(model) == "llama gives its attention position_bias, which ours does not know"


def test_a_layer_with_an_attention_of_its_own() -> None:
    model = make("llama")
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    reason = misfit(model)  # which of the two checks finds it depends on the shapes
    assert reason is not None
    assert reason.startswith(("1 of 2 layers of llama ignore", "llama fails in packed steps"))


@pytest.mark.parametrize(
    ("model_type", "argument"),
    [
        ("gemma2", "softcap"),
        ("gpt_oss", "s_aux"),
        ("granite", "scaling"),
        ("mistral", "sliding_window"),
    ],
)
def test_wrong_attention_is_noticed(
    model_type: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*args: Any, **kwargs: Any) -> Any:
        return ragged_attention(*args, **kwargs | {argument: None})

    settings = {"attention_multiplier": 1.0} if model_type == "granite" else {}
    model = make(model_type, **settings)
    assert misfit(model) is None
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, lacking)
    reason = misfit(model)
    assert reason and f"logits of {model_type} in a packed" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", FITTING)
def test_fits_in_every_dtype(model_type: str, dtype: torch.dtype) -> None:
    assert misfit(make(model_type).to(dtype)) is None


@pytest.mark.parametrize("model_type", ["gemma4_text", "falcon", "llama4_text"])
def test_leaves_no_trace(model_type: str) -> None:
    settings = REFUSED[model_type][0] if model_type in REFUSED else {}
    model = make(model_type, **settings)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = repr(model.config.to_dict()), model.config._attn_implementation, model.training
    random_state = torch.get_rng_state()
    assert (misfit(model) is None) == (model_type in FITTING)
    after = repr(model.config.to_dict()), model.config._attn_implementation, model.training
    assert after == before and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_short_memory_is_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.model.layers[1], "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        misfit(model)
    assert model.config._attn_implementation == "sdpa"


def test_whatever_else_happens_is_a_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("token_type_ids")

    monkeypatch.setattr(model.model.layers[1], "forward", fail)
    assert misfit(model) == "llama fails in packed steps: KeyError: 'token_type_ids'"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.model
def test_costs_little(demo_model: tuple[Any, Any]) -> None:
    model, _ = demo_model
    misfit(model)  # first calls
    started = time.perf_counter()
    assert misfit(model) is None
    assert time.perf_counter() - started < 3  # 0.4 s on one core that is not shared
