"""Whether two tokenizers share their vocabulary, so that one model's tokens are the other's."""

import re
from typing import Any

# Converters fill a vocabulary up to the size of its embedding with such tokens.
_PADDING = re.compile(r"[<\[].*(pad|unused|reserved|dummy|extra).*[>\]]", re.IGNORECASE)


def mismatch(target: Any, drafter: Any) -> str | None:
    """The first difference between two tokenizers of transformers in words; None if they agree.

    One of them may have added tokens (special ones, padding) that the other lacks, though no other
    in their place.
    """
    ours, theirs = _by_id(target), _by_id(drafter)
    for index in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(index), theirs.get(index)
        if a == b or (b is None and _is_extra(a, target)) or (a is None and _is_extra(b, drafter)):
            continue
        return f"token {index} is {_shown(b)} in its vocabulary, {_shown(a)} in the target's"
    return None


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _is_extra(token: str | None, tokenizer: Any) -> bool:
    return token is not None and (
        token in tokenizer.get_added_vocab() or _PADDING.fullmatch(token) is not None
    )


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
