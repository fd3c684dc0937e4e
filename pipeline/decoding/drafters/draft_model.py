"""Drafts from a smaller model with the target's tokenizer, for all rows of a step at once.

The draft model keeps K/V of its own, each row in the slot of the same number as the target's. Its
tokens are drawn by the row's own rule with the noise that the target will use at the same index, so
that models which agree on the probabilities agree on the token.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.decoding.cache import SlotCache
from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, ModelDrafter, start_drafts
from pipeline.decoding.drafters.feeding import Feeder


class DraftModelDrafter(ModelDrafter):
    """Drafts with a causal language model: one pass per draft token, over all rows that go on."""

    def __init__(
        self,
        model: Any,
        chooser: DraftChooser,
        *,
        step_tokens: int,
        prefix_token_ids: Sequence[int] = (),
    ) -> None:
        """Slots are made by `resize`.

        Args:
            model: a causal language model of transformers; its attention becomes ours.
            step_tokens: prompt tokens per prefill pass at most.
            prefix_token_ids: what prompts begin with, if they have it in common: computed once.
        """
        super().__init__(chooser)
        self._feeder = Feeder(model, step_tokens, prefix_token_ids)
        self.bytes_per_token = self._feeder.bytes_per_token

    @property
    def cache(self) -> SlotCache:
        return self._feeder.cache

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        started = active = start_drafts(
            rows, [self._limit(*pair) for pair in zip(rows, limits, strict=True)]
        )
        self._feeder.catch_up([drafting.row.slot for drafting in started])
        self.caught_up = self._feeder.caught_up
        while active:
            logits = self._feeder.next_logits([drafting.row.slot for drafting in active])
            self._chooser.extend(active, logits)
            active = [drafting for drafting in active if not drafting.is_over]
            for drafting in active:
                self._feeder.append(drafting.row.slot, drafting.chain[-1])
        return self._chooser.finish(rows, started)

    def lag(self, row: DraftRow) -> int | None:
        length = len(row.tokens)
        return self._feeder.lag(row.slot, length) if self._feeder.room(length) else None

    def release(self, row: DraftRow) -> None:
        self._feeder.release(row.slot)

    def resize(self, num_slots: int, max_len: int) -> None:
        """Make room anew. Rows longer than the draft model's positions get no drafts there."""
        self._feeder.resize(num_slots, max_len)

    def _limit(self, row: DraftRow, limit: int) -> int:
        """Tokens to draft; readies the slot if there are any."""
        limit = min(limit, self._feeder.room(len(row.tokens)))
        if limit <= 0:
            return 0  # K/V catch up when a draft is wanted again
        return limit if self._feeder.resume(row.slot, row.tokens) else 0
