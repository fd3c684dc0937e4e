"""Which tokens survive top-k, top-p and min-p, without sorting a vocabulary.

The warpers of transformers decide it; here their decision is read off the most probable tokens.
Where rounding or ties leave it open whether a token survives, it is listed as possible, not as
certain. A choice among the possible ones that falls on a certain one is right whatever becomes of
the others; else the caller asks the warpers, whose sort of 49 k logits takes 3 ms a row.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.records import SamplingParams

_COMMON = 256  # tokens listed at first where there is no top-k: most nuclei are smaller
_SPARE = 32  # listed beyond k, since all that tie with the k-th survive; ties are common in bf16


class Rule(NamedTuple):
    """What of a row's `SamplingParams` bears on a choice; at temperature 0 most does not."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    banned_tokens: tuple[int, ...]

    @property
    def narrows(self) -> bool:
        """Whether it drops improbable tokens."""
        return bool(self.top_k or self.top_p or self.min_p)


class Shortlist(NamedTuple):
    """Of n rows the c most probable tokens, descending.

    `tokens` int64 `[n, c]`; `scores` float32 `[n, c]`, after temperature; `certain` and `possible`
    bool `[n, c]`: the survivors, as far as known; `complete` bool `[n]`: no other may survive.
    """

    tokens: Tensor
    scores: Tensor
    certain: Tensor
    possible: Tensor
    complete: Tensor


@lru_cache(maxsize=4096)
def rule_of(params: SamplingParams) -> Rule:
    """The rule by which a row with these settings chooses its tokens."""
    sampled = params.temperature != 0
    return Rule(
        temperature=float(params.temperature),
        top_k=params.top_k if sampled else None,
        top_p=params.top_p if sampled and params.top_p != 1.0 else None,
        min_p=params.min_p if sampled else None,
        repetition_penalty=float(params.repetition_penalty),
        banned_tokens=tuple(params.banned_tokens),
    )


def first_length(rule: Rule) -> int:
    """How many tokens to list, so that the list is mostly complete."""
    return rule.top_k + _SPARE if rule.top_k else _COMMON


def shortlist(logits: Tensor, rule: Rule, length: int) -> Shortlist:
    """List the survivors of a rule that narrows.

    logits `[n, vocab]`, penalised and with bans; `length`: tokens to list, more than the rule's
    top-k, if the vocabulary has as many.
    """
    vocab = logits.shape[1]
    top, tokens = logits.topk(min(length, vocab))  # of equals any, hence `complete`
    scores = top.float() / rule.temperature  # monotone, so the others' scores are no higher
    alive = scores > -torch.inf
    if rule.top_k:
        alive &= scores >= scores[:, min(rule.top_k, vocab) - 1, None]
    weights = (scores.double() - scores[:, :1]).exp() * alive
    certain, possible = alive, alive
    if rule.top_p:
        total = weights.sum(1, True) if rule.top_k else _total(logits, rule, scores[:, :1])
        certain, possible = _nucleus(scores, weights, total, rule.top_p, vocab)
        certain, possible = certain & alive, possible & alive
    if rule.min_p:
        # Both sides of the warper's comparison err by a few units in the last place, its exponents
        # by as many as they are large; the absolute term is for probabilities that underflow.
        margin = rule.min_p * 2.0**-16 + 1e-30
        certain = certain & (weights > rule.min_p + margin)
        possible = possible & (weights >= rule.min_p - margin)
    certain = certain | (possible & (possible.sum(1, True) == 1))  # one always survives
    # After top-k, top-p needs the sum of all survivors of top-k, not of the listed ones.
    missed = alive[:, -1] if rule.top_k else possible[:, -1]
    complete = ~missed | (tokens.shape[1] == vocab)
    return Shortlist(tokens, scores, certain, possible, complete)


def _total(logits: Tensor, rule: Rule, best: Tensor) -> Tensor:
    """Sum of all tokens' weights relative to the best score, float64 `[n, 1]`."""
    weights = (logits.float() / rule.temperature).sub_(best).exp_()
    return weights.sum(1, keepdim=True, dtype=torch.float64)


def _nucleus(
    scores: Tensor, weights: Tensor, total: Tensor, top_p: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Which tokens top-p keeps, certainly and possibly, `[n, c]`.

    The warper adds up float32 probabilities from the least on and drops tokens while their sum is
    at most 1 - top_p. Rounding: each of the vocab additions of its softmax errs by 2**-24 at most,
    of the sum so far, and exponentials and quotients by a hundred times that all together. Ties:
    which of several equal tokens it drops is up to its sort, so they are certain, or not, together.
    """
    share = (total - weights.cumsum(1) + weights) / total  # of the token and all less probable ones
    margin = (vocab + 100) * 2.0**-24
    open_or_dropped = share <= 1 - top_p + margin
    kept_or_open = share > 1 - top_p - margin
    highest = scores.where(open_or_dropped, -torch.inf).amax(1, keepdim=True)
    lowest = scores.where(kept_or_open, torch.inf).amin(1, keepdim=True)
    return scores > highest, scores >= lowest
