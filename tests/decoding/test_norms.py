"""Compiled RMS norms against transformers' own, of every family's kind."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from pipeline.decoding import native
from pipeline.decoding.norms import NativeRmsNorm, replace_norms

SIZE = 72
KINDS: dict[str, Any] = {
    "llama": lambda: LlamaRMSNorm(SIZE, 1e-5),
    "gemma3": lambda: Gemma3RMSNorm(SIZE, 1e-6),
    "gemma4": lambda: Gemma4RMSNorm(SIZE, 1e-6),
    "gemma4_unscaled": lambda: Gemma4RMSNorm(SIZE, 1e-6, with_scale=False),
    "gpt_oss": lambda: GptOssRMSNorm(SIZE, 1e-5),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def compiled() -> None:
    if not native.available():
        pytest.skip("no C compiler here")


def holder(norm: nn.Module, dtype: torch.dtype) -> Any:
    """A model with one norm, whose weights are not all alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), norm).to(dtype)
    for weight in norm.parameters():
        nn.init.normal_(weight, mean=weight.detach().mean().item(), std=0.3)
    return model.requires_grad_(False)


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x = torch.randn(1, 5, 2 * SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {
        "rows": x[..., :SIZE].contiguous() * 50,
        "columns": x[..., 7 : 7 + SIZE],  # of a wider matrix
        "heads": x.view(1, 5, 2, SIZE),
        "transposed": x.view(1, 5, 2, SIZE).transpose(1, 2),
        "one row": x[0, 0, :SIZE],
        "lone heads": x[..., :SIZE]
        .contiguous()
        .transpose(0, 1),  # strides of axes of 1 say nothing
        "zeros": torch.zeros(1, 2, SIZE, dtype=dtype),
        "none": x[:, :0, :SIZE],
        "many rows": x[..., :SIZE].repeat(1, 200, 1),  # threads share them
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_replaced_norms_compute_the_same(kind: str, dtype: torch.dtype) -> None:
    model = holder(KINDS[kind](), dtype)
    original = type(model[1]).forward
    assert replace_norms(model) == 1 and type(model[1].forward) is NativeRmsNorm
    assert replace_norms(model) == 0  # once is enough
    for name, x in inputs(dtype).items():
        expected, found = original(model[1], x), model[1](x)
        assert found.shape == expected.shape and found.dtype == dtype, name
        if not x.numel():
            continue
        # in bfloat16 another order of sums may flip a last bit, and does so rarely
        assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-6), name
        most = 0.0 if dtype == torch.float32 else 0.02
        gaps = (found.float() - expected.float()).abs() > 1e-5 * expected.float().abs() + 1e-6
        assert gaps.float().mean() <= most, name


def test_nan_stays_nan() -> None:
    model = holder(LlamaRMSNorm(SIZE), torch.bfloat16)
    replace_norms(model)
    x = torch.ones(1, 2, SIZE, dtype=torch.bfloat16)
    x[0, 1, 3] = torch.nan
    found = model[1](x)
    assert found[0, 0].isfinite().all() and found[0, 1].isnan().all()


def test_other_layers_stay() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1

    odd = holder(OddRMSNorm(SIZE), torch.float32)
    gated = holder(Qwen3NextRMSNormGated(SIZE), torch.float32)
    half = holder(LlamaRMSNorm(SIZE), torch.float16)
    assert [replace_norms(model) for model in (odd, gated, half)] == [0, 0, 0]
    assert not any("forward" in vars(model[1]) for model in (odd, gated, half))


def test_other_inputs_go_the_old_way() -> None:
    model = holder(LlamaRMSNorm(SIZE), torch.float32)
    expected = type(model[1]).forward
    replace_norms(model)
    x = torch.randn(2, SIZE, dtype=torch.float64)
    assert torch.equal(model[1](x), expected(model[1], x))


def test_without_a_compiler_norms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    model = holder(LlamaRMSNorm(SIZE), torch.float32)
    assert replace_norms(model) == 0 and "forward" not in vars(model[1])
