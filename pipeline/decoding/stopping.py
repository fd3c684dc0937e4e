"""Where a completion ends: end tokens, stop strings, length, deadline. Token by token, so that the
end is the same whether tokens come singly or several at a time from an accepted draft."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pipeline.records import FinishReason

_CHARACTER_BYTES = 4  # a UTF-8 character at most; as many tokens may be needed to complete one


class StopStrings:
    """The stop strings of a run and the tokenizer that spells them; `scan` starts a row."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        self.special = {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        longest = max((len(s.encode("utf-8", "surrogatepass")) for s in strings), default=0)
        self.window = longest + _CHARACTER_BYTES

    def scan(self) -> "StopScan":
        return StopScan(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def cut(self, text: str) -> str:
        """`text` up to the first stop string in it."""
        found = [at for at in map(text.find, self.strings) if at >= 0]
        return text[: min(found)] if found else text


class StopScan:
    """Watches one row's tokens for a stop string.

    A token that is not special spells at least one byte, so a stop string of n bytes ends within
    the text of the last n tokens: the window decoded per token is bounded, whatever the length.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._tail: deque[int] = deque(maxlen=stops.window)

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        stops = self._stops
        if not stops.strings or token in stops.special:
            return False
        self._tail.append(token)
        text = stops.decode(list(self._tail))
        return any(string in text for string in stops.strings)


class RowEnd:
    """Takes a row's new tokens as they come and keeps those up to its end."""

    def __init__(
        self,
        stops: StopStrings,
        end_tokens: Collection[int],
        budget: int,
        deadline: float | None = None,
        read: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """
        Args:
            budget: completion tokens at most.
            deadline: on `time.monotonic()`'s clock.
            read: makes text of tokens; None: the tokenizer, without special tokens.
        """
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.timed_out = False
        self._stops = stops
        self._scan = stops.scan()
        self._end_tokens = end_tokens
        self.budget = budget
        self.deadline = deadline
        self._read = stops.decode if read is None else read

    def push(self, tokens: Iterable[int]) -> bool:
        """Take the tokens of one step, up to the row's end; True once the row is over."""
        for token in tokens:
            self.tokens.append(token)
            if token in self._end_tokens or self._scan.push(token):
                self.reason = "stop"
                return True
            if len(self.tokens) >= self.budget:
                self.reason = "length"
                return True
        self.timed_out = self.deadline is not None and time.monotonic() >= self.deadline
        return self.timed_out

    def text(self) -> str:
        """The completion as text: without end token, cut before a stop string."""
        tokens = self.tokens
        if tokens and tokens[-1] in self._end_tokens:
            tokens = tokens[:-1]  # an end token that is not marked special would be spelled out
        text = self._read(tokens)
        return self._stops.cut(text) if self.reason == "stop" else text
