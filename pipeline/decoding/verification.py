"""Which draft tokens stand: the one rule for every drafter, greedy and sampled.

The target's choice at each position is a pure function of the tokens before it, since sampling
noise is fixed by row and index (see `sampling`). So a draft token is accepted while it equals the
choice; the first choice that differs is emitted in its place, and after a draft accepted whole the
next choice is a bonus. The output is the same as without drafts, token by token: no probability of
the drafter is read, so a wrong or even hostile draft can cost time but never change a row.

Source: Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv 2408.07978.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def accept(draft: Sequence[int], choices: Sequence[int]) -> tuple[int, list[int]]:
    """Verify the draft of one row.

    Args:
        draft: k draft tokens; k may be 0.
        choices: k + 1 choices of the target; the i-th holds if the first i draft tokens stand.

    Returns:
        The number of accepted draft tokens, and the row's new tokens: those and one choice more.
        A choice that could not be made (a negative number, see `choosing`) is never equal to a
        draft token, so it comes last if it is reached at all, and then it is the row's fault.

    Raises:
        ValueError: if there is not one choice more than draft tokens.
    """
    if len(choices) != len(draft) + 1:
        raise ValueError(f"{len(draft)} draft tokens need one choice more, not {len(choices)}")
    accepted = 0
    while accepted < len(draft) and draft[accepted] == choices[accepted]:
        accepted += 1
    return accepted, list(choices[: accepted + 1])


@dataclass(frozen=True)
class Verified:
    """What came of a draft.

    `tokens`: the row's new ones, as from `accept`. `lossy`: for each accepted draft token whether
    the target alone would have rejected it, which happens in ensemble verification only.
    """

    tokens: list[int]
    lossy: list[bool]

    @property
    def num_accepted(self) -> int:
        return len(self.lossy)


def verify(
    draft: Sequence[int], choices: Sequence[int], targets: Sequence[int] | None = None
) -> Verified:
    """`accept`, and what the target's own choices `targets` say of it; None: they are `choices`."""
    accepted, tokens = accept(draft, choices)
    own = choices if targets is None else targets
    lossy = [token != choice for token, choice in zip(draft[:accepted], own, strict=False)]
    return Verified(tokens, lossy)
