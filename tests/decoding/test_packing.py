"""Packed linear layers against plain ones, for every number of rows that is treated apart."""

import pytest
import torch
from torch import nn

from pipeline.decoding.packing import PackedLinear, pack_linears, prepare_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_compute_the_same(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 320, bias=bias).to(dtype)
    model = nn.Sequential(plain)
    if not pack_linears(model):
        pytest.skip("this build of torch cannot pack")
    packed = model[0]
    assert type(packed) is PackedLinear
    with torch.inference_mode():
        for shape in ((1,), (2,), (3,), (4,), (5,), (17,), (1, 3), (2, 1), (1, 9), (0,)):
            x = torch.randn(*shape, 256, dtype=torch.float32).to(dtype)
            found, expected = packed(x), plain(x)
            assert found.shape == expected.shape and found.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
        columns = torch.randn(2, 300)[:, 9 : 9 + 256].to(dtype)  # not contiguous
        assert torch.allclose(packed(columns), plain(columns), rtol=2e-2, atol=2e-2)


def test_layers_are_run_over_every_number_of_tokens_that_short_drafts_make() -> None:
    sizes = [(256, 320), (320, 8), (256, 320)]
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    pack_linears(model)  # the second is too small for that
    assert prepare_linears(nn.Sequential(nn.ReLU()), 2) == 0
    seen: list[tuple[int, int]] = []
    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda _, x, __, i=index: seen.append((i, len(x[0]))))
    assert prepare_linears(model, 2, seconds=0.0) == 0 and not seen
    assert prepare_linears(model, 2, seconds=60.0) == 8
    shapes = {(0 if i == 2 else i, count) for i, count in seen}  # those of the first and last
    assert shapes == {(i, count) for i in (0, 1) for count in range(1, 9)}
    assert len(seen) == len(shapes), "one layer of each shape"
