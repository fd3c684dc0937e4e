"""How long each row's draft may be: as long as the next token is worth more than it costs.

Packed steps give every draft token a price, the time that it adds to a verification, and a value,
the chance that it stands. With survival S(i, j) of the j-th draft token of row i, rows B, the cost
T(B) of a plain step and c of a token more, a step yields

    G = (B + sum of S(i, j)) / (T(B) + c * number of draft tokens + what drafting takes)

tokens a second. It is highest when exactly those tokens are drafted whose survival exceeds c * G,
which is found by iteration (Dinkelbach 1967). Costs are what the steps of this run took: T from
control steps, c from the others. Survival is what became of earlier drafts in this run.

After "Optimizing Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_DRAFTS = 4.0  # weight of what is known in general against what a group of drafts showed
MEMORY = 400.0  # drafts that are remembered: text and machine change
MARGIN = 0.03  # by which drafting must be the better choice
_ITERATIONS = 4


class Survival:
    """How often draft tokens stood, by their place in the draft and a class of drafts.

    The classes are the method's own: prompt lookup knows how long the match was.
    """

    def __init__(self, prior: float = 0.5) -> None:
        """`prior`: chance that a token stands of which nothing is known yet."""
        self._prior = prior
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}  # (class, place): right, all

    def record(self, kind: int, num_drafted: int, num_accepted: int) -> None:
        """A draft was verified; behind its first wrong token nothing is known."""
        for place in range(min(num_drafted, num_accepted + 1)):
            right, seen = self._counts.get((kind, place), (0.0, 0.0))
            fade = 1 - 1 / MEMORY
            stood = float(place < num_accepted)
            self._counts[kind, place] = right * fade + stood, seen * fade + 1

    def conditional(self, kind: int, place: int) -> float:
        """Chance that the token stands if those before it do."""
        expected = self._prior if place == 0 else self.conditional(kind, place - 1)
        right, seen = self._counts.get((kind, place), (0.0, 0.0))
        return (right + PRIOR_DRAFTS * expected) / (seen + PRIOR_DRAFTS)

    def of(self, kind: int, length: int) -> list[float]:
        """Chance that each of the draft's tokens stands, with all before it."""
        survival, product = [], 1.0
        for place in range(length):
            product *= self.conditional(kind, place)
            survival.append(product)
        return survival

    def evidence(self, kind: int) -> float:
        """Drafts of the class that were verified, the old ones counting less."""
        return self._counts.get((kind, 0), (0.0, 0.0))[1]


@dataclass(frozen=True)
class StepCost:
    """Seconds: of a plain step of these rows, of a draft token more in it, and of drafting: for
    the step as a whole and for each further pass of the drafter."""

    plain: float
    token: float
    draft: float = 0.0
    draft_pass: float = 0.0


def best_lengths(survival: Sequence[Sequence[float]], cost: StepCost) -> list[int]:
    """Draft tokens of each row, such that the step yields the most tokens a second.

    Args:
        survival: per row, of each token that could be drafted; falling.

    Returns:
        All 0 unless drafting is better than a plain step by `MARGIN`.
    """
    rows = len(survival)
    plain = rows / cost.plain
    lengths, goodput = [0] * rows, plain
    for _ in range(_ITERATIONS):
        depth = _best_depth(survival, cost, goodput)
        lengths = [_worth(row[:depth], cost.token * goodput) for row in survival]
        found = yield_of(survival, lengths, cost)
        if abs(found - goodput) <= 1e-6 * goodput:
            break
        goodput = max(found, plain)
    if yield_of(survival, lengths, cost) <= (1 + MARGIN) * plain:
        return [0] * rows
    return lengths


def yield_of(survival: Sequence[Sequence[float]], lengths: Sequence[int], cost: StepCost) -> float:
    """Tokens a second of a step with such drafts."""
    drafted = sum(lengths)
    seconds = cost.plain + cost.token * drafted
    if drafted:
        seconds += cost.draft + cost.draft_pass * max(lengths)
    kept = sum(sum(row[:n]) for row, n in zip(survival, lengths, strict=True))
    return (len(survival) + kept) / seconds


def _worth(survival: Sequence[float], price: float) -> int:
    """Leading tokens that are worth their price."""
    for count, chance in enumerate(survival):
        if chance <= price:
            return count
    return len(survival)


def _best_depth(survival: Sequence[Sequence[float]], cost: StepCost, goodput: float) -> int:
    """Passes of the drafter: each must be worth its time to all rows together."""
    deepest = max(map(len, survival), default=0)
    if not cost.draft_pass:
        return deepest
    price, gain, best, depth = cost.token * goodput, 0.0, 0.0, 0
    for place in range(deepest):
        gains = [row[place] - price for row in survival if len(row) > place]
        gain += sum(max(0.0, each) for each in gains) - cost.draft_pass * goodput
        if gain > best:
            best, depth = gain, place + 1
    return depth
