"""What of a completion is the answer: models that think aloud, or call tools, mark which is which.

The markup is read by transformers' own parser, from the template that the tokenizer brings, or
else from the one that `transformers serve` knows for the kind of model.
"""

import logging
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_parsing import parse_response

logger = logging.getLogger(__name__)


class Responses:
    """Reads the answers of one model."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._template = _template(tokenizer, model)
        anchors = (self._template or {}).get("start_anchor") or []
        self._anchors = [anchors] if isinstance(anchors, str) else list(anchors)

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """A completion's text, without special tokens; of a chat, the answer alone.

        It is empty where the tokens ran out before the answer began. What the parser cannot make
        sense of is returned as it is.
        """
        plain: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if not self._anchors:
            return plain
        prefix = self._tokenizer.decode(prompt)
        if not any(anchor in prefix for anchor in self._anchors):
            return plain  # no turn of a chat
        marked = self._tokenizer.decode(tokens)
        try:
            message = parse_response(marked, self._template, prefix=prefix)
        except ValueError:  # e.g. a call of a tool that is no JSON
            return plain
        if set(message) <= {"role", "content"}:
            return plain  # nothing but an answer: leave its white space alone
        content = message.get("content")
        return content if isinstance(content, str) else ""


def _template(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """The response template, if one is known."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError as error:  # no public interface, so it may move
        logger.debug("no response templates: %s", error)
        return None
    found: dict[str, Any] | None = get_response_template(tokenizer, model)
    return found
