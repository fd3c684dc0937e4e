"""Latent attention that stays among latents against the layers' own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.decoding import native
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.latents import absorb_latents, beside
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.selftest import misfit
from pipeline.decoding.steps import Span, Step, running
from tests.decoding.architectures import LATENT, VOCAB, make

FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
ROWS = [(0, 3, 1), (1, 20, 4), (3, 9, 2)]  # slot, tokens cached, tokens to decode


def latent_model(family: str) -> Any:
    return make(family, **LATENT)


def decoded(runner: ModelRunner) -> torch.Tensor:
    """Logits of a decode step behind prompts `[tokens, vocab]`."""
    ids = list(range(3, VOCAB))
    prompts = [Span(slot, 0, ids[slot : slot + start]) for slot, start, _ in ROWS]
    runner.forward(Step(prompts, decoding=False), [0])
    step = Step(
        [Span(slot, start, ids[start : start + n]) for slot, start, n in ROWS], decoding=True
    )
    return runner.forward(step, range(step.num_tokens))


def count_products(model: Any) -> list[int]:
    """Places whose K and V each call of `kv_b_proj` makes."""
    counts: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(
            lambda _, args, __: counts.append(args[0].numel() // args[0].shape[-1])
        )
    return counts


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_steps_give_the_same_logits(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "suits", lambda *_: False)
    model = latent_model(family)
    runner = ModelRunner(model, SlotCache(5, 32))
    expected = decoded(runner)
    assert absorb_latents(model) == 2 and absorb_latents(model) == 0
    counts = count_products(model)
    found = decoded(runner)
    assert len(counts) == 2, "prompts only: no K and V of heads are made in decode steps"
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert misfit(model) is None


def test_outside_of_decode_steps_nothing_changes() -> None:
    model = latent_model("deepseek_v3")
    ids = torch.arange(3, 30)[None]
    params = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, tokens = model(ids).logits, model.generate(ids, **params)
    absorb_latents(model)
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(model.generate(ids, **params), tokens)


def test_bfloat16_is_as_near_to_float32_as_the_layers_own() -> None:
    model = latent_model("deepseek_v3")
    exact = decoded(ModelRunner(copy.deepcopy(model), SlotCache(5, 32)))
    model = model.bfloat16()
    runner = ModelRunner(model, SlotCache(5, 32))
    own = (decoded(runner).float() - exact).abs().mean()
    absorb_latents(model)
    found = (decoded(runner).float() - exact).abs().mean()
    assert 0 < found < 1.5 * own


def _biased(attention: Any) -> None:
    linear = attention.kv_b_proj
    attention.kv_b_proj = nn.Linear(linear.in_features, linear.out_features)


def _scaled(attention: Any) -> None:
    own = attention.expand_kv
    attention.expand_kv = lambda latent, rotated: own(latent * 2, rotated)


def _other_values(attention: Any) -> None:
    own = attention.expand_kv

    def expand(latent: Any, rotated: Any) -> Any:
        key, value = own(latent, rotated)
        return key, value + 1

    attention.expand_kv = expand


@pytest.mark.parametrize("change", [_biased, _scaled, _other_values])
def test_layers_that_do_something_else_are_left_alone(change: Any) -> None:
    model = latent_model("deepseek_v3")
    change(model.model.layers[0].self_attn)
    assert absorb_latents(model) == 1
    assert not hasattr(model.model.layers[0].self_attn, "absorbed")
    assert absorb_latents(make("llama")) == 0


def test_latents_lie_side_by_side_in_slots() -> None:
    cache = SlotCache(3, 16)
    step = Step([Span(1, 0, [5, 6])], decoding=True)
    latent, rotated = torch.randn(1, 1, 2, 12), torch.randn(1, 1, 2, 5)
    with running(step):
        key, value = cache.update(latent, rotated, 0)
    both = beside(key, value)
    assert both.data_ptr() == key.data_ptr()
    assert torch.equal(both, torch.cat((latent, rotated), -1))
    for other in (rotated, latent.clone()):  # elsewhere a copy
        assert torch.equal(beside(latent, other), torch.cat((latent, other), -1))
