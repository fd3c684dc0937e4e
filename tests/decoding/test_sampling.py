import hashlib
import math
from collections import Counter

import pytest
import torch

from pipeline.config import DecodingConfig
from pipeline.decoding.sampling import (
    CoupledChoice,
    Sampler,
    gumbel_noise,
    gumbel_noise_block,
    noise_key,
)
from pipeline.errors import ConfigError

VOCAB = 8
MASK = (1 << 64) - 1


def _mixed(z: int) -> int:
    """splitmix64's finalizer, from its publication."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _noise(seed: int, row_key: str, t: int, token: int) -> float:
    """The noise of one token in plain Python integers and floats."""
    golden = 0x9E3779B97F4A7C15
    digest = hashlib.blake2b(f"{seed}:{row_key}".encode(), digest_size=8).digest()
    start = _mixed(int.from_bytes(digest, "little") ^ _mixed((t + 1) * golden & MASK))
    bits = _mixed((start + (token + 1) * golden) & MASK)
    uniform = (2 * (bits >> 12) + 1) / 2**53
    assert 0.0 < uniform < 1.0
    return -math.log(-math.log(uniform))


def test_noise_equals_the_reference() -> None:
    tokens = torch.tensor([0, 1, 2, 49_151, 262_143])
    for seed, row_key, t in [(0, "a.parquet:0", 0), (7, "ä/b:12", 1), (2**63, "x", 100_000)]:
        expected = [_noise(seed, row_key, t, token) for token in tokens.tolist()]
        found = gumbel_noise(noise_key(seed, row_key), t, tokens)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_noise_of_many_rows_is_that_of_each() -> None:
    at = [(noise_key(0, "f:0"), 0), (noise_key(0, "f:0"), 1), (noise_key(9, "f:1"), 70_000)]
    tokens = torch.tensor([[5, 1, 49_151], [0, 2, 7], [3, 3, 3]])
    alone = [gumbel_noise(*pair, own) for pair, own in zip(at, tokens, strict=True)]
    torch.testing.assert_close(gumbel_noise_block(at, tokens), torch.stack(alone))
    shared = [gumbel_noise(*pair, tokens[0]) for pair in at]
    torch.testing.assert_close(gumbel_noise_block(at, tokens[:1]), torch.stack(shared))


def test_noise_is_finite_at_the_ends_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.decoding import sampling

    ends = torch.tensor([0, -1])  # all bits clear, all bits set
    monkeypatch.setattr(sampling, "_mix_tensor", lambda z: ends)
    low, high = gumbel_noise(0, 0, torch.tensor([0, 1])).tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)))
    assert high == pytest.approx(53 * math.log(2))


def test_noise_depends_on_row_seed_and_index_and_nothing_else() -> None:
    tokens = torch.arange(100)
    base = gumbel_noise(noise_key(0, "f:1"), 5, tokens)
    assert torch.equal(base, gumbel_noise(noise_key(0, "f:1"), 5, tokens))
    assert torch.equal(base[[7, 50]], gumbel_noise(noise_key(0, "f:1"), 5, torch.tensor([7, 50])))
    for seed, row_key, t in [(1, "f:1", 5), (0, "f:2", 5), (0, "g:1", 5), (0, "f:1", 6)]:
        other = gumbel_noise(noise_key(seed, row_key), t, tokens)
        assert not torch.isclose(base, other).any()
    assert noise_key(1, "1:f") != noise_key(11, ":f")


def test_noise_is_gumbel_distributed() -> None:
    noise = torch.cat(
        [gumbel_noise(noise_key(0, f"f:{i}"), i, torch.arange(20_000)) for i in (0, 9)]
    )
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.03)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
    neighbours = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]
    assert abs(neighbours.item()) < 0.03


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "banned_tokens": [0]},
        {"temperature": 1.0, "repetition_penalty": 1.5},
    ],
)
def test_choices_follow_the_exact_probabilities(settings: dict[str, object]) -> None:
    """Over rows, at several indices: each row and index is one draw."""
    logits = torch.tensor([[1.2, 0.3, -0.5, 0.9, -1.5, 0.0, 2.0, -0.2]])
    *processors, _ = Sampler(DecodingConfig.model_validate(settings), VOCAB).for_row("f:0", 3)
    rows = 500
    for t in (0, 1, 17):
        ids = torch.zeros((1, 3 + t), dtype=torch.long)
        scores = logits
        for processor in processors:
            scores = processor(ids, scores)
        draws = (CoupledChoice(noise_key(0, f"f:{i}"), 3)(ids, scores) for i in range(rows))
        counts = Counter(int(draw.argmax()) for draw in draws)
        probabilities = scores.double().softmax(-1)[0].tolist()
        expected = {i: rows * p for i, p in enumerate(probabilities) if p > 0}
        assert set(counts) <= set(expected), "a token that the processors forbid was chosen"
        statistic = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
        assert statistic < 26  # chi-square, at most 7 degrees of freedom: 1 in 2000; fixed seeds


def test_order_of_processors_and_none_at_temperature_zero() -> None:
    everything = {
        "repetition_penalty": 1.1,
        "banned_tokens": [3],
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
    }
    sampled = Sampler(DecodingConfig.model_validate(everything), VOCAB).for_row("f:0", 3)
    assert [type(p).__name__ for p in sampled] == [
        "RepetitionPenaltyLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "CoupledChoice",
    ]
    greedy = Sampler(DecodingConfig.model_validate(everything | {"temperature": 0}), VOCAB)
    names = [type(p).__name__ for p in greedy.for_row("f:0", 3)]
    assert names == ["RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor"]
    assert not Sampler(DecodingConfig(), VOCAB).for_row("f:0", 3)


def test_the_choice_is_exact_where_float32_would_tie() -> None:
    ids = torch.zeros((1, 1), dtype=torch.long)
    for i in range(50):
        key = noise_key(0, f"f:{i}")
        scores = torch.full((1, VOCAB), -(2.0**30))  # float32 cannot tell neighbours here apart
        noise = gumbel_noise(key, 0, torch.arange(VOCAB))
        chosen = CoupledChoice(key, 1)(ids, scores)
        assert chosen.argmax() == noise.argmax()
        assert (chosen > -torch.inf).sum() == 1


def test_noise_is_asked_for_survivors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.decoding import sampling

    asked: list[list[int]] = []

    def spy(key: int, t: int, tokens: torch.Tensor) -> torch.Tensor:
        asked.append(tokens.tolist())
        return gumbel_noise(key, t, tokens)

    monkeypatch.setattr(sampling, "gumbel_noise", spy)
    sampler = Sampler(DecodingConfig(temperature=1.0, top_k=2), VOCAB)
    sampler.for_row("f:0", 3)(torch.zeros((1, 3), dtype=torch.long), torch.arange(8.0)[None])
    assert asked == [[6, 7]]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_banned_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ConfigError, match=rf"^decoding.banned_tokens: {token} is not in the voc"):
        Sampler(DecodingConfig(banned_tokens=[1, token]), VOCAB)
