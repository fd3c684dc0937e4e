"""The compiled attention, and the one that serves without a compiler, against exact arithmetic."""

from typing import Any

import pytest
import torch

from pipeline.decoding import native
from pipeline.decoding.attention import ragged_attention
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.steps import Span, Step, running

ROWS = [(0, 0, 1), (1, 36, 5), (3, 20, 2), (4, 99, 1), (7, 1, 3)]  # slot, start, tokens
FEW = [(3, 90, 5)]  # whose tokens threads share out
KINDS = {
    "plain": {},
    "window": {"sliding_window": 8},
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])},
    "all": {"sliding_window": 3, "softcap": 5.0, "s_aux": torch.linspace(-2, 2, 6)},
}


def exact(step: Step, query: Any, key: Any, value: Any, scale: float, **kind: Any) -> torch.Tensor:
    """`[N, heads, value_dim]` in float64, token by token and head by head."""
    out = torch.zeros(step.num_tokens, query.shape[1], value.shape[3], dtype=torch.float64)
    for i, span in enumerate(step.spans):
        for j in range(len(span.token_ids)):
            place, token = span.start + j, step.offsets[i] + j
            first = max(0, place + 1 - kind.get("sliding_window", 1 << 30))
            for head in range(query.shape[1]):
                kv = head * key.shape[1] // query.shape[1]
                seen = slice(first, place + 1)
                row = span.slot - step.first_slot
                scores = key[row, kv, seen].double() @ query[0, head, token].double() * scale
                if "softcap" in kind:
                    scores = torch.tanh(scores / kind["softcap"]) * kind["softcap"]
                if "s_aux" in kind:
                    scores = torch.cat([scores, kind["s_aux"][head : head + 1].double()])
                weights = torch.softmax(scores, 0)[: place + 1 - first]
                out[token, head] = weights @ value[row, kv, seen].double()
    return out


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "threads"), [(ROWS, 1), (ROWS, 2), (FEW, 1), (FEW, 2), (FEW, 5)])
def test_decoding_rows(
    rows: Any,
    threads: int,
    kind: str,
    dtype: torch.dtype,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiled and not native.available():
        pytest.skip("no C compiler here")
    monkeypatch.setattr(native, "available", lambda: compiled)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    storage = torch.randn(9, 3, 128, 20, generator=generator).to(dtype)
    step = Step([Span(slot, start, [0] * n) for slot, start, n in rows], decoding=True)
    slots = slice(step.first_slot, step.first_slot + step.num_slots)
    key, value = storage[slots, :, : step.kv_len], (storage + 1)[slots, :, : step.kv_len, :12]
    for row, (slot, start, n) in zip(step.spans, rows, strict=True):  # nobody may look further
        assert row.slot == slot
        key[slot - step.first_slot, :, start + n :] = 1e4
        value[slot - step.first_slot, :, start + n :] = 1e4
    query = torch.randn(1, 6, step.num_tokens, 20, generator=generator).to(dtype)
    with running(step):
        out, _ = ragged_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.3, **KINDS[kind]
        )
    assert out.shape == (1, step.num_tokens, 6, 12) and out.dtype == dtype
    expected = exact(step, query, key, value, 0.3, **KINDS[kind])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (out[0].double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_chunks(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    step = Step(
        [Span(0, 0, [0] * 40), Span(2, 17, [0] * 30), Span(3, 300, [0] * 300)], decoding=False
    )
    key = torch.randn(4, 3, 700, 20, generator=generator)[:, :, : step.kv_len]
    value = torch.randn(4, 3, 700, 12, generator=generator)[:, :, : step.kv_len]
    query = torch.randn(1, 6, step.num_tokens, 20, generator=generator)
    with running(step):
        out, _ = ragged_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.3, **KINDS[kind]
        )
    expected = exact(step, query, key, value, 0.3, **KINDS[kind])
    assert (out[0].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [3, 1])  # one head: K and V lie side by side
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_decoding_rows(
    dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip("no C compiler here")
    # the first slot is not the cache's first
    step = Step([Span(slot + 1, start, [0] * n) for slot, start, n in ROWS], decoding=True)
    generator = torch.Generator().manual_seed(3)
    # the shapes of rotated keys, and of values as a view of a projection's output
    keys = torch.randn(1, heads, step.num_tokens, 20, generator=generator).to(dtype)
    values = torch.randn(1, step.num_tokens, heads, 12, generator=generator).to(dtype)
    values = values.transpose(1, 2)
    caches = []
    for compiled in (True, False):
        monkeypatch.setattr(native, "available", lambda compiled=compiled: compiled)
        cache = SlotCache(9, 128)
        with running(step):
            for layer in range(2):
                views = cache.update(keys + layer, values - layer, layer)
                assert [v.shape[1:] for v in views] == [(heads, 100, 20), (heads, 100, 12)]
        caches.append(cache)
    assert "tasks" in vars(step) and step.tasks  # the first was compiled
    for mine, torchs in zip(*(c._layers.values() for c in caches), strict=True):
        for found, expected in zip(mine, torchs, strict=True):
            assert torch.equal(found, expected) and found.count_nonzero()


def test_writing_beyond_the_storage_is_refused() -> None:
    if not native.available():
        pytest.skip("no C compiler here")
    cache = SlotCache(2, 16)
    for span in (Span(1, 15, [0, 0]), Span(2, 0, [0])):
        with (
            running(Step([span], decoding=True)),
            pytest.raises(IndexError, match="beyond 2 slots"),
        ):
            part = torch.ones(1, 3, len(span.token_ids), 8)
            cache.update(part, part, 0)
    assert not any(part.count_nonzero() for part in cache._layers[0])


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("INFO", logger="pipeline.decoding.native")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    native._library.cache_clear()
    native.available.cache_clear()
    try:
        assert not native.available()
        assert "no C compiler" in caplog.text
    finally:
        native._library.cache_clear()
        native.available.cache_clear()


def test_arithmetic_stays_as_it_was() -> None:
    """A library linked with -ffast-math would flush subnormal numbers in the whole process."""
    native.available()
    tiny = torch.tensor([1e-40]) * torch.tensor([1.0])
    assert tiny.item() > 0 and 5e-324 * 1.0 > 0
