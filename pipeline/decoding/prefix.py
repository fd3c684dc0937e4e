"""The shared prefix: what all prompts of a run begin with is computed once and then copied."""

from collections.abc import Sequence
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import RowError
from pipeline.languages import Languages
from pipeline.prompts import PromptRenderer, template_columns

MIN_LENGTH = 8  # below, copying is not worth a pass of its own
_UNLIKE = ("Alpha 1.", "\u00dcber z")


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


def template_prefix(config: RunConfig, tokenizer: Any) -> list[int]:
    """Token ids that every prompt of a run begins with: what two unlike documents have in common.

    More or less than the template's true head does no harm: rows reuse as much as they share.
    """
    languages = None
    if config.task == "translate":
        if not (config.prompt.target_langs and config.prompt.source_lang):
            return []
        # The first language's: prompts of the others have less in common with it, or nothing.
        languages = Languages(config.prompt.source_lang, config.prompt.target_langs[0])
    renderer = PromptRenderer(config, tokenizer, 1 << 30, languages)
    columns = template_columns(config)
    try:
        a, b = (renderer.render(dict.fromkeys(columns, text)).token_ids for text in _UNLIKE)
    except RowError:
        return []
    return a[: common_prefix(a, b)]
