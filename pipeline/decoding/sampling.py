"""What the next token is, given the logits: processors of the row, then noise fixed by the row.

    choice(t) = argmax over tokens of  log target_probs[t] + gumbel(seed, row, t, token)

This is sampling from `target_probs` (the Gumbel-max trick), yet a pure function of the logits: the
same row and seed give the same tokens whatever drafts, batches or retries there were, and a draft
token is accepted exactly when it equals the choice (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pipeline.config import DecodingConfig
from pipeline.errors import ConfigError

# splitmix64 (Steele, Lea, Flood 2014): a counter times the golden ratio, then rounds of mixing.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Settings(Protocol):
    """What the processors read: of a run's `DecodingConfig`, or of a row's rule."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def banned_tokens(self) -> Sequence[int]: ...


class Sampler:
    """Builds each row's logits processors, for `generate(do_sample=False)`: argmax is the choice.

    Order, as in transformers: repetition penalty, banned tokens, temperature, top-k, top-p, min-p;
    then noise. At temperature 0 only the first two.

    Raises:
        ConfigError: if a banned token is not in the vocabulary.
    """

    def __init__(self, decoding: DecodingConfig, vocab_size: int, device: Any = "cpu") -> None:
        outside = [t for t in decoding.banned_tokens if not 0 <= t < vocab_size]
        if outside:
            problem = f"{outside[0]} is not in the vocabulary of {vocab_size} tokens; remove it"
            raise ConfigError("decoding.banned_tokens", problem)
        self._seed = decoding.seed
        self._greedy = decoding.temperature == 0
        self._shared = processors(decoding, device)

    def for_row(self, row_key: str, prompt_tokens: int) -> Any:
        """A `LogitsProcessorList` for one row with a prompt of `prompt_tokens` tokens."""
        from transformers import LogitsProcessorList

        noise = (
            [] if self._greedy else [CoupledChoice(noise_key(self._seed, row_key), prompt_tokens)]
        )
        return LogitsProcessorList([*self._shared, *noise])


def processors(settings: Settings, device: Any = "cpu") -> list[Any]:
    """Those that depend on no row, in `Sampler`'s order; transformers' own classes."""
    import transformers as hf

    chain: list[Any] = []
    if settings.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    if settings.banned_tokens:
        chain.append(hf.SuppressTokensLogitsProcessor(settings.banned_tokens, device=device))
    if settings.temperature == 0:
        return chain
    if settings.temperature != 1.0:
        chain.append(hf.TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k is not None:
        chain.append(hf.TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(float(settings.top_p)))
    if settings.min_p:
        chain.append(hf.MinPLogitsWarper(float(settings.min_p)))
    return chain


class CoupledChoice:
    """The last logits processor of a sampled row: keeps the chosen token, forbids all others.

    The choice is made in float64 and handed on as a one-hot, because assisted decoding stores
    processed scores as float32, where two sums could tie that do not tie here.
    """

    def __init__(self, key: int, prompt_tokens: int) -> None:
        self._key = key
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores `[1, vocab]`, after all other processors; input_ids `[1, prompt + t]`."""
        t = input_ids.shape[-1] - self._prompt_tokens
        chosen = coupled_choice(self._key, t, scores[0])
        if chosen is None:
            return scores
        choice = torch.full_like(scores, -torch.inf)
        choice[0, chosen] = 0.0
        return choice


def coupled_choice(key: int, t: int, scores: torch.Tensor) -> torch.Tensor | None:
    """The token chosen at index `t` from processed scores `[vocab]`; None if all are forbidden."""
    survivors = torch.nonzero(scores > -torch.inf).squeeze(1)
    if not survivors.numel():
        return None
    perturbed = scores[survivors].double() + gumbel_noise(key, t, survivors)
    return survivors[perturbed.argmax()]


def noise_key(seed: int, row_key: str) -> int:
    """64 bits that name a row under a seed."""
    name = f"{seed}:{row_key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def gumbel_noise(key: int, t: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 `[n]`, for the token ids `[n]` (int64) at index `t`.

    Each value is a hash of (key, t, token): it does not depend on which other tokens are asked for.
    """
    return _gumbel(_signed(_start(key, t)), tokens)


def gumbel_noise_block(at: Sequence[tuple[int, int]], tokens: torch.Tensor) -> torch.Tensor:
    """`gumbel_noise` at n pairs of (key, t): float64 `[n, m]`, for token ids `[n or 1, m]`."""
    starts = [_signed(_start(key, t)) for key, t in at]
    return _gumbel(torch.tensor(starts, device=tokens.device).unsqueeze(1), tokens)


def _start(key: int, t: int) -> int:
    """Where the tokens' sequence of hashes begins, in 64 bits."""
    return _mix(key ^ _mix((t + 1) * _GOLDEN & _MASK))


def _gumbel(start: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = _mix_tensor((tokens + 1) * _signed(_GOLDEN) + start)
    # 52 bits, centred in their cells: an odd multiple of 2**-53, so never 0 and never 1.
    uniform = _shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()  # in place: new memory costs as much as a logarithm


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_1 & _MASK
    z = (z ^ (z >> 27)) * _MIX_2 & _MASK
    return z ^ (z >> 31)


def _mix_tensor(z: torch.Tensor) -> torch.Tensor:
    """`_mix` on int64, whose products wrap as uint64's do."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros: torch's `>>` repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(z: int) -> int:
    """The int64 with the same bits."""
    return z - (1 << 64) if z >> 63 else z
