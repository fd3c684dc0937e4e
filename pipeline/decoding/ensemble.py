"""Static ensemble verification: more drafts are accepted, and the text is no longer the target's.

At drafted positions the choice reads `w * target + (1 - w) * drafter`, both after the row's own
processors; the bonus position reads the target alone. Greedy rows take the most probable token of
the mixture. The expected acceptance is `1 - w * TV(drafter, target)`.

Source: "DIVERSED: Relaxed Speculative Decoding", arXiv 2604.07622, with its weight held constant.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pipeline.decoding.choosing import Chooser, Position


class Ensemble:
    """Chooses tokens by the mixture of two models."""

    def __init__(self, weight: float, chooser: Chooser) -> None:
        """`weight`: of the target, above 0 and below 1."""
        self._weight = weight
        self._chooser = chooser

    def choose(self, target: Tensor, drafter: Tensor, positions: Sequence[Position]) -> list[int]:
        """The token at each of n positions.

        Args:
            target, drafter: logits `[n, vocab]` given the same tokens.

        Returns:
            n token ids, or the codes of `choosing.Chooser.choose`.
        """
        scores = (self._chooser.process(logits, positions) for logits in (target, drafter))
        ours, theirs = (torch.softmax(each, -1) for each in scores)
        mixture = torch.lerp(theirs, ours, self._weight).log()
        return self._chooser.choose_processed(mixture, positions)

    def choose_drafted(
        self,
        logits: Tensor,
        drafted: Sequence[Tensor],
        positions: Sequence[Position],
        targets: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> list[int]:
        """The choices of a verification: of the mixture where a draft token stands.

        Args:
            logits: `[n, vocab]` of the target; per row one more than it has draft tokens.
            drafted: per row `[draft tokens, vocab]` of the drafter.
            targets: n choices of the target alone, taken over for the bonus.
        """
        ends = list(accumulate(len(draft) + 1 for draft in drafts))
        bonus = {end - 1 for end in ends}
        at = [i for i in range(len(positions)) if i not in bonus]
        theirs = torch.cat([each for each in drafted if len(each)])
        mixed = iter(self.choose(logits[at], theirs, [positions[i] for i in at]))
        return [targets[i] if i in bonus else next(mixed) for i in range(len(positions))]
