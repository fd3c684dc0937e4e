"""The shared prefix: what all prompts of a run begin with is computed once and then copied."""

from collections.abc import Sequence

MIN_LENGTH = 8  # below, copying is not worth a pass of its own


class SharedPrefix:
    """The constant head of the prompts. K/V depend on the tokens before a place only, so every
    prompt that begins with some of it can take over as much."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """`token_ids`: may be empty."""
        self.token_ids = list(token_ids) if len(token_ids) >= MIN_LENGTH else []
        self.is_cached = False

    def usable(self, tokens: Sequence[int]) -> int:
        """Leading tokens that a row can take over; its last token always needs a pass."""
        limit = min(len(self.token_ids), len(tokens) - 1)
        length = common_prefix(self.token_ids[:limit], tokens)
        return length if length >= MIN_LENGTH else 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of what two sequences begin with in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
