"""Drafts from a smaller model with another tokenizer, for all rows of a step at once.

Rows and drafts are translated, by tokens or by text (see `translation`). Which of the two is better
depends on the pair of models, so that both are tried on the first rows (see `translation_trial`).
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.cache import SlotCache
from pipeline.decoding.drafters.base import Drafter, DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, Drafting
from pipeline.decoding.drafters.feeding import Feeder
from pipeline.decoding.drafters.spelling import Spelling
from pipeline.decoding.drafters.translation import (
    TextTranslation,
    TokenTranslation,
    Translation,
    Vocabularies,
)
from pipeline.decoding.drafters.translation_trial import TranslationTrial
from pipeline.decoding.memory import UNIVERSAL_PLACES

MIN_OVERLAP = 0.3  # of the draft model's vocabulary; by tokens it could say too little with less


class UniversalDrafter(Drafter):
    """Drafts with a causal language model of whatever tokenizer: one pass per token of its own,
    over all rows that go on."""

    def __init__(
        self,
        model: Any,
        chooser: DraftChooser,
        tokenizer: Any,
        own_tokenizer: Any,
        *,
        step_tokens: int,
        prefix_token_ids: Sequence[int] = (),
        translation: str | None = None,
    ) -> None:
        """Slots are made by `resize`.

        Args:
            model: a causal language model of transformers; its attention becomes ours.
            tokenizer, own_tokenizer: the target's and the model's.
            step_tokens: prompt tokens per prefill pass at most.
            prefix_token_ids: of the target; what prompts begin with, if they have it in common.
            translation: `tokens` or `text`; None: whichever proves better.
        """
        self._feeder = Feeder(model, step_tokens)
        self.bytes_per_token = ceil(self._feeder.bytes_per_token * UNIVERSAL_PLACES)
        own_size = model.config.get_text_config().vocab_size
        both = Vocabularies(
            Spelling(tokenizer), Spelling(own_tokenizer), chooser.vocab_size, own_size
        )
        all_ways = [TokenTranslation(both, chooser, model.device), TextTranslation(both, chooser)]
        if translation is None:
            ways = all_ways if both.overlap >= MIN_OVERLAP else all_ways[1:]
        else:
            ways = [way for way in all_ways if way.name == translation]
        self.trial = TranslationTrial(ways, both.overlap)
        self._prefix_token_ids = list(prefix_token_ids)
        self._feeder.share(ways[0].ids_of(self._prefix_token_ids))
        self._of: dict[int, Translation] = {}  # by slot

    @property
    def cache(self) -> SlotCache:
        return self._feeder.cache

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        found = [self._start(row, n) for row, n in zip(rows, limits, strict=True)]
        started = sorted((d for d in found if d is not None), key=lambda d: d.row.slot)
        self._feeder.catch_up([drafting.row.slot for drafting in started])
        self.caught_up = self._feeder.caught_up
        active = started
        while active:
            logits = self._feeder.next_logits([drafting.row.slot for drafting in active])
            self._extend(active, logits)
            active = [drafting for drafting in active if not drafting.is_over]
        return [[] if drafting is None else self._finish(drafting) for drafting in found]

    def observe(self, row: DraftRow, num_drafted: int, num_accepted: int) -> None:
        """Drafts that were accepted speak for their translation."""
        if row.slot in self._of:
            self.trial.observe(self._of[row.slot], num_drafted, num_accepted)

    def lag(self, row: DraftRow) -> int | None:
        """As if both tokenizers took as many tokens for the text."""
        length = len(row.tokens)
        return self._feeder.lag(row.slot, length) if self._feeder.room(length) else None

    def release(self, row: DraftRow) -> None:
        translation = self._of.pop(row.slot, None)
        if translation is not None:
            translation.release(row.slot)
        self.trial.release(row.slot)
        self._feeder.release(row.slot)

    def resize(self, num_slots: int, max_len: int) -> None:
        """Make room anew. Rows longer than the draft model's positions get no drafts there."""
        self._feeder.resize(num_slots, ceil(max_len * UNIVERSAL_PLACES))

    def _start(self, row: DraftRow, limit: int) -> Drafting | None:
        """A draft for the row, if it may have one; readies the slot."""
        if limit <= 0:
            return None  # the slot catches up when a draft is wanted again
        translation = self._choose(row.slot)
        with self.trial.timing(translation):
            ids = translation.ids(row)
        room = self._feeder.room(len(ids))
        if not ids or not room or not self._feeder.resume(row.slot, ids):
            return None
        self.trial.begin(row.slot, translation)
        return Drafting(row, min(limit, room))

    def _choose(self, slot: int) -> Translation:
        """The row's translation. Where it is another than before, the draft model computes the row
        anew from where the spellings part."""
        if self.trial.decide() and self.trial.winner is not None:
            self._feeder.share(self.trial.winner.ids_of(self._prefix_token_ids))
        translation = self.trial.translation_of(slot)
        before = self._of.get(slot, translation)
        if before is not translation:
            before.release(slot)
        self._of[slot] = translation
        return translation

    def _extend(self, active: Sequence[Drafting], logits: Tensor) -> None:
        """Choose one more for each, by translation."""
        of = [self._of[drafting.row.slot] for drafting in active]
        for translation in dict.fromkeys(of):
            at = [i for i, one in enumerate(of) if one is translation]
            part = [active[i] for i in at]
            some = logits if len(at) == len(of) else logits[torch.tensor(at, device=logits.device)]
            with self.trial.timing(translation):
                ids = translation.extend(part, some)
            for drafting, index in zip(part, ids, strict=True):
                if not drafting.is_over:
                    self._feeder.append(drafting.row.slot, index)

    def _finish(self, drafting: Drafting) -> list[int]:
        translation = self._of[drafting.row.slot]
        with self.trial.timing(translation):
            return translation.draft(drafting)
