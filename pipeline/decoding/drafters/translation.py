"""Two ways for a draft model with another tokenizer to read a row and to write drafts of it.

By tokens: what two vocabularies have in common is mapped one to one, so that the draft model's
probabilities are over the target's tokens. By text: the draft model spells in its own way, and its
text is spelled anew in the target's.

Source: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", arXiv 2502.05202 (TLI and SLEM).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, Drafting
from pipeline.decoding.drafters.spelling import Spelling, begins_character, last_index, num_whole

_WINDOW = 16  # tokens at a row's end that may be spelled anew, and that tell what comes before


class Vocabularies:
    """The target's and the draft model's; ids are the draft model's, tokens the target's."""

    def __init__(
        self, target: Spelling, draft: Spelling, target_size: int, draft_size: int
    ) -> None:
        """`target_size`, `draft_size`: logits of the models."""
        self.target_size = target_size
        self.target = target
        self.draft = draft
        self._special_ids = {text: index for index, text in draft.special.items()}
        self._silent = target.silent
        same = {token: self.same_id(token) for token in (*target.ids.values(), *target.special)}
        self.same = {
            token: index
            for token, index in sorted(same.items())
            if index is not None and token < target_size and index < draft_size
        }

    @property
    def overlap(self) -> float:
        """Share of the draft model's vocabulary that the target has too."""
        own = set(self.draft.ids.values())
        return len(own & set(self.same.values())) / max(1, len(own))

    def start(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """What a row begins with for the draft model, and how many tokens that stands for."""
        start = self.target.start
        return self.draft.start.copy(), len(start) if list(tokens[: len(start)]) == start else 0

    def same_id(self, token: int) -> int | None:
        """The id that stands for just what the token does. Special tokens are the same if both end
        a text, or if they are written alike and neither does."""
        target, draft = self.target, self.draft
        if token == target.eos:
            return draft.eos
        if token in target.special:
            index = self._special_ids.get(target.special[token])
            return None if index == draft.eos else index
        return draft.ids.get(target.spelled.get(token, b""))

    def markup(self, token: int) -> list[int]:
        """Ids of a special token: the same, or its text, so that turns stay apart."""
        index = self.same_id(token)
        if index is not None:
            return [index]
        if token in self._silent or token == self.target.eos:
            return []
        return self.draft.spell_after(b"", self.target.special[token].encode())


class Translation(Protocol):
    """Reads and writes rows for a draft model. What it keeps of a row it keeps by its slot."""

    name: str

    def ids(self, row: DraftRow) -> list[int]:
        """The row as the draft model sees it. It is not to be changed, nor kept."""
        ...

    def ids_of(self, tokens: Sequence[int]) -> list[int]:
        """The same of tokens that are not a row's."""
        ...

    def extend(self, active: Sequence[Drafting], logits: Tensor) -> list[int]:
        """Choose one more for each draft, from `[len(active), draft vocab]`; their ids."""
        ...

    def draft(self, drafting: Drafting) -> list[int]:
        """The draft in the target's tokens, as many as its limit at most."""
        ...

    def release(self, slot: int) -> None: ...


@dataclass
class _Read:
    """The first tokens of a row, by tokens."""

    ids: list[int]
    num_tokens: int


class TokenTranslation(Translation):
    """Token by token. What the draft model has no token for takes several ids, or none."""

    name = "tokens"

    def __init__(self, vocabularies: Vocabularies, chooser: DraftChooser, device: Any) -> None:
        self._vocabularies = vocabularies
        self._chooser = chooser
        self._same = vocabularies.same
        self._targets = torch.tensor(list(self._same), dtype=torch.int64, device=device)
        self._ids = torch.tensor(list(self._same.values()), dtype=torch.int64, device=device)
        self._spelled: dict[int, list[int]] = {}
        self._rows: dict[int, _Read] = {}
        self._wide: Tensor | None = None

    def ids(self, row: DraftRow) -> list[int]:
        if row.slot not in self._rows:
            self._rows[row.slot] = _Read(*self._vocabularies.start(row.tokens))
        return self._read(self._rows[row.slot], row.tokens)

    def ids_of(self, tokens: Sequence[int]) -> list[int]:
        return self._read(_Read(*self._vocabularies.start(tokens)), tokens)

    def extend(self, active: Sequence[Drafting], logits: Tensor) -> list[int]:
        """By the rule of each row, with the noise that the target will use."""
        self._chooser.extend(active, self._widen(logits))
        # where none could be chosen the draft is over, and its id of no account
        return [self._same.get(drafting.chain[-1], 0) for drafting in active]

    def draft(self, drafting: Drafting) -> list[int]:
        return drafting.draft

    def release(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def _read(self, read: _Read, tokens: Sequence[int]) -> list[int]:
        for token in tokens[read.num_tokens :]:
            if token not in self._spelled:
                self._spelled[token] = self._spell(token)
            read.ids += self._spelled[token]
        read.num_tokens = len(tokens)
        return read.ids

    def _spell(self, token: int) -> list[int]:
        both = self._vocabularies
        if token in both.target.special:
            return both.markup(token)
        data = both.target.spelled.get(token, b"")
        index = both.draft.ids.get(data)
        return both.draft.spell_after(b"", data) if index is None else [index]

    @torch.inference_mode()
    def _widen(self, logits: Tensor) -> Tensor:
        """`[n, draft vocab]` -> `[n, target vocab]`; what the draft model lacks is impossible."""
        wide = self._wide
        if wide is None or len(wide) < len(logits) or wide.dtype != logits.dtype:
            shape = (len(logits), self._chooser.vocab_size)
            wide = self._wide = logits.new_full(shape, -torch.inf)
        wide = wide[: len(logits)]  # always written at the same places
        return wide.index_copy_(1, self._targets, logits.index_select(1, self._ids))


@dataclass
class _Text:
    """A row by text: `ids` are settled, those of its first `num_settled` tokens.

    `border`: tokens up to and with the last special one. `tail`: what the row ends with of a
    character that has only begun; the draft model does not see it.
    """

    ids: list[int]
    num_settled: int
    num_read: int = 0
    border: int = 0
    tail: bytes = b""


class TextTranslation(Translation):
    """Text in the draft model's own spelling. Its drafts are greedy: it knows no target token
    whose noise it could use."""

    name = "text"

    def __init__(self, vocabularies: Vocabularies, chooser: DraftChooser) -> None:
        self._vocabularies = vocabularies
        self._target, self._own = vocabularies.target, vocabularies.draft
        self._chooser = chooser
        self._rows: dict[int, _Text] = {}

    def ids(self, row: DraftRow) -> list[int]:
        if row.slot not in self._rows:
            self._rows[row.slot] = _Text(*self._vocabularies.start(row.tokens))
        return self._read(self._rows[row.slot], row.tokens)

    def ids_of(self, tokens: Sequence[int]) -> list[int]:
        return self._read(_Text(*self._vocabularies.start(tokens)), tokens)

    def extend(self, active: Sequence[Drafting], logits: Tensor) -> list[int]:
        ids: list[int] = logits.argmax(1).tolist()
        unsure = self._chooser.unsure(logits, ids)
        for drafting, index, is_unsure in zip(active, ids, unsure, strict=True):
            drafting.add(index, None, is_unsure or index in self._own.special)
        return ids

    def draft(self, drafting: Drafting) -> list[int]:
        """Whole characters: one that has only begun would be spelled as something else."""
        row, ids = drafting.row, drafting.draft
        ends = bool(ids) and ids[-1] == self._own.eos
        data = self._own.data(ids)
        data = data[: num_whole(data)]
        text = self._rows[row.slot]
        if not data.startswith(text.tail):
            return []
        data = data[len(text.tail) :]
        before = self._before(text, row.tokens, len(row.tokens))
        tokens = self._target.spell_after(before, data) if data else []
        if ends and self._target.eos is not None:
            tokens.append(self._target.eos)
        size = self._vocabularies.target_size  # tokenizers may have more tokens than their models
        return list(takewhile(lambda token: token < size, tokens))[: drafting.limit]

    def release(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def _read(self, text: _Text, tokens: Sequence[int]) -> list[int]:
        self._settle_markup(text, tokens)
        data = self._target.data(tokens[text.num_settled :])
        whole = num_whole(data)
        text.tail = data[whole:]
        own = self._spell(text, tokens, data[:whole])
        ids = text.ids + own
        if len(tokens) - text.num_settled > 2 * _WINDOW:
            self._settle(text, tokens, own, data[:whole])
        return ids

    def _settle_markup(self, text: _Text, tokens: Sequence[int]) -> None:
        """Spell what stands before special tokens, and those."""
        for at in range(max(text.num_read, text.num_settled), len(tokens)):
            if tokens[at] not in self._target.special:
                continue
            data = self._target.data(tokens[text.num_settled : at])
            text.ids += self._spell(text, tokens, data)
            text.ids += self._vocabularies.markup(tokens[at])
            text.num_settled = text.border = at + 1
        text.num_read = len(tokens)

    def _settle(self, text: _Text, tokens: Sequence[int], own: Sequence[int], data: bytes) -> None:
        """Keep the ids up to where both spellings have a border, which what follows won't move.

        `own`: ids of the tokens that are not settled, which spell `data` but for their tail.
        """
        theirs = self._own.borders(own)
        ours = self._target.borders(tokens[text.num_settled :])
        for at in range(len(ours) - 1 - _WINDOW, 0, -1):
            left = ours[at] - len(text.tail)
            if left in theirs and begins_character(data[len(data) - left :]):
                text.ids += own[: last_index(theirs, left)]
                text.num_settled += at
                return

    def _spell(self, text: _Text, tokens: Sequence[int], data: bytes) -> list[int]:
        """Ids of what follows on the settled tokens."""
        before = self._before(text, tokens, text.num_settled)
        return self._own.spell_after(before, data) if before else self._own.spell(data)

    def _before(self, text: _Text, tokens: Sequence[int], at: int) -> bytes:
        """What the tokens before a place spell, back to a special one."""
        return self._target.data(tokens[max(text.border, at - _WINDOW) : at])
