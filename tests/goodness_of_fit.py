"""Does a sample follow an exact distribution? Pearson's chi-square test."""

import torch
from torch import Tensor

_LEAST = 5.0  # expected counts below this are pooled: the usual rule for the approximation to hold


def chi_square_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of a sample at least as far from its expectation as this one.

    Args:
        counts: of each outcome, any shape.
        probabilities: of each outcome, same shape, summing to 1. An outcome of probability 0 that
            occurred makes the result 0.
    """
    counts, expected = counts.flatten().double(), probabilities.flatten().double() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < _LEAST
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(freedom, statistic / 2).item()
