"""What tokens spell, in bytes, and how a tokenizer spells bytes.

Bytes are what two vocabularies have in common: a token may hold part of a character only, and one
tokenizer's `Ġthe` is another's `▁the`.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TEXT = re.compile("([\udc80-\udcff]+)")  # what `surrogateescape` makes of bytes that are none
_LONGEST = 64  # bytes of a token that is looked for; those longer are runs of spaces and the like


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a printable character: that of its own code where
    there is one, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable}
    codes |= {byte: 256 + i for i, byte in enumerate(others)}
    return {chr(code): byte for byte, code in codes.items()}


_ALPHABET = _byte_alphabet()


class Spelling:
    """A tokenizer of transformers by the bytes of its tokens.

    `spelled`: of each token that stands for text. `ids`: the other way round; of several tokens
    with the same bytes, the one that the tokenizer itself would take. `special`: the others.
    `start`: ids that it puts before a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        self.start = _start(tokenizer)
        self.special = _special_tokens(tokenizer)
        by_id = sorted((i, t) for t, i in tokenizer.get_vocab().items() if i not in self.special)
        spell = _byte_level if _is_byte_level(tokenizer) else _plain
        self.spelled = {index: data for index, token in by_id if (data := spell(token))}
        self.ids: dict[bytes, int] = {}
        # bytes that stand for themselves are a last resort, hence the last to come
        for index, _ in sorted(by_id, key=lambda pair: bool(_BYTE.fullmatch(pair[1]))):
            if index in self.spelled:
                self.ids.setdefault(self.spelled[index], index)
        self._longest = min(_LONGEST, max(map(len, self.ids), default=0))

    @property
    def silent(self) -> set[int]:
        """Special tokens that another model need not see."""
        own = self._tokenizer
        return {*self.start, own.pad_token_id, own.unk_token_id} - {self.eos}

    def data(self, tokens: Sequence[int]) -> bytes:
        """What tokens spell; special ones spell nothing."""
        return b"".join(self.spelled.get(token, b"") for token in tokens)

    def spell(self, data: bytes) -> list[int]:
        """Ids as the tokenizer has them for a text. It may put a space before it, or change what
        its model never saw."""
        text = data.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        for part in _NO_TEXT.split(text):
            if _NO_TEXT.fullmatch(part):
                ids += self._spell_by_pieces(part.encode("utf-8", "surrogateescape"))
            elif ids:
                ids += self.spell_after(b"", part.encode())
            elif part:
                ids += self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def spell_after(self, before: bytes, data: bytes) -> list[int]:
        """Ids of just `data` where it follows on `before`: the tokenizer's own, unless it would
        join the two."""
        for context in dict.fromkeys((before, b"")):
            ids = self.spell(context + data)
            borders = self.borders(ids)
            if len(data) in borders:
                own = ids[last_index(borders, len(data)) :]
                if self.data(own) == data:
                    return own
        return self._spell_by_pieces(data)

    def borders(self, ids: Sequence[int]) -> list[int]:
        """Where each token begins, and where the last one ends, in bytes from the end."""
        sizes = [len(self.spelled.get(index, b"")) for index in reversed(ids)]
        return [*accumulate(sizes, initial=0)][::-1]

    def _spell_by_pieces(self, data: bytes) -> list[int]:
        """The longest token each time; a byte that begins none is left out."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self.ids), 0)
            if size:
                ids.append(self.ids[data[at : at + size]])
            at += max(size, 1)
        return ids


def last_index(values: Sequence[int], value: int) -> int:
    """Of a value that is among them."""
    return len(values) - 1 - values[::-1].index(value)


def num_whole(data: bytes) -> int:
    """Length of `data` without a last character that has only begun."""
    for size in range(1, min(3, len(data)) + 1):
        byte = data[-size]
        if byte >= 0xC0:  # begins a character of two, three or four bytes
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - size if byte < 0xF8 and size < wanted else len(data)
        if byte < 0x80:
            break
    return len(data)


def begins_character(data: bytes) -> bool:
    """Whether the first byte does not continue a character."""
    return not data or data[0] & 0xC0 != 0x80


def _start(tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    found = tokenizer("", verbose=False)["input_ids"]
    return [bos] if bos is not None and list(found[:1]) == [bos] else []


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    special = {index: str(token) for index, token in added.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return special | dict(named)


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are written in the byte alphabet."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    return "ByteLevel" in str(backend.decoder.__getstate__())


def _byte_level(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode("utf-8", "replace")  # an added token, written as it is


def _plain(token: str) -> bytes:
    """Of a tokenizer that writes spaces as `▁` and bytes that it cannot spell as `<0xNN>`."""
    found = _BYTE.fullmatch(token)
    if found:
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")
