"""What the next token is, given the logits: processors of the row, then noise fixed by the row.

    choice(t) = argmax over tokens of  log target_probs[t] + gumbel(seed, row, t, token)

This is sampling from `target_probs` (the Gumbel-max trick), yet a pure function of the logits: the
same row and seed give the same tokens whatever drafts, batches or retries there were, and a draft
token is accepted exactly when it equals the choice (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

import hashlib
from typing import Any

import torch

from pipeline.config import DecodingConfig
from pipeline.errors import ConfigError

# splitmix64 (Steele, Lea, Flood 2014): a counter times the golden ratio, then rounds of mixing.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


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
        self._shared = _processors(decoding, device)

    def for_row(self, row_key: str, prompt_tokens: int) -> Any:
        """A `LogitsProcessorList` for one row with a prompt of `prompt_tokens` tokens."""
        from transformers import LogitsProcessorList

        noise = (
            [] if self._greedy else [CoupledChoice(noise_key(self._seed, row_key), prompt_tokens)]
        )
        return LogitsProcessorList([*self._shared, *noise])


def _processors(decoding: DecodingConfig, device: Any) -> list[Any]:
    """Those that depend on no row; transformers' own classes."""
    import transformers as hf

    processors: list[Any] = []
    if decoding.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(decoding.repetition_penalty)))
    if decoding.banned_tokens:
        processors.append(hf.SuppressTokensLogitsProcessor(decoding.banned_tokens, device=device))
    if decoding.temperature == 0:
        return processors
    if decoding.temperature != 1.0:
        processors.append(hf.TemperatureLogitsWarper(float(decoding.temperature)))
    if decoding.top_k is not None:
        processors.append(hf.TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None and decoding.top_p < 1.0:
        processors.append(hf.TopPLogitsWarper(float(decoding.top_p)))
    if decoding.min_p:
        processors.append(hf.MinPLogitsWarper(float(decoding.min_p)))
    return processors


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
        survivors = torch.nonzero(scores[0] > -torch.inf).squeeze(1)
        if not survivors.numel():
            return scores
        perturbed = scores[0, survivors].double() + gumbel_noise(self._key, t, survivors)
        choice = torch.full_like(scores, -torch.inf)
        choice[0, survivors[perturbed.argmax()]] = 0.0
        return choice


def noise_key(seed: int, row_key: str) -> int:
    """64 bits that name a row under a seed."""
    name = f"{seed}:{row_key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def gumbel_noise(key: int, t: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 `[n]`, for the token ids `[n]` (int64) at index `t`.

    Each value is a hash of (key, t, token): it does not depend on which other tokens are asked for.
    """
    start = _mix(key ^ _mix((t + 1) * _GOLDEN & _MASK))
    bits = _mix_tensor((tokens + 1) * _signed(_GOLDEN) + _signed(start))
    # 52 bits, centred in their cells: an odd multiple of 2**-53, so never 0 and never 1.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


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
