"""Drafts from a smaller model with the target's tokenizer, for all rows of a step at once.

The draft model keeps K/V of its own, each row in the slot of the same number as the target's. Its
tokens are drawn by the row's own rule with the noise that the target will use at the same index, so
that models which agree on the probabilities agree on the token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pipeline.decoding.cache import SlotCache
from pipeline.decoding.checkpoint import estimate_memory
from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, Drafting, ModelDrafter, start_drafts
from pipeline.decoding.prefix import SharedPrefix, common_prefix
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, packs

_FEW = 8  # tokens behind: more are prefilled, since a decoding pass pads its rows to the longest


@dataclass
class _Slot:
    """What the draft model has of a row: K/V of `tokens[:num_cached]`, then of `draft[:-1]`.

    No pass followed the last drafted token, so it has none yet, even if the draft is accepted.
    """

    num_cached: int = 0
    draft: list[int] = field(default_factory=list)

    def resume(self, tokens: Sequence[int]) -> None:
        """Keep what was accepted of the last draft; the row's last token always needs a pass."""
        made = self.draft[:-1]
        accepted = common_prefix(made, tokens[self.num_cached : self.num_cached + len(made)])
        self.num_cached = min(self.num_cached + accepted, len(tokens) - 1)
        self.draft = []


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
        self._runner = ModelRunner(model, SlotCache(0, 0))
        self._num_embeddings: int = model.get_input_embeddings().num_embeddings
        self._step_tokens = step_tokens
        known = takewhile(lambda token: token < self._num_embeddings, prefix_token_ids)
        self._prefix = SharedPrefix(list(known))
        self._slots: dict[int, _Slot] = {}
        dtype = str(model.dtype).removeprefix("torch.")
        memory = estimate_memory(model.config.to_dict(), dtype, None)
        self.bytes_per_token = memory.kv_bytes_per_token

    @property
    def cache(self) -> SlotCache:
        return self._runner.cache

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        started = start_drafts(
            rows, [self._limit(*pair) for pair in zip(rows, limits, strict=True)]
        )
        self._prefill(started)
        active = started
        while active:
            spans = [self._pending(drafting) for drafting in active]
            step = Step(spans, decoding=True, device=self._runner.device)
            logits = self._runner.forward(step, [stop - 1 for stop in step.offsets[1:]])
            self._chooser.extend(active, logits)
            active = [drafting for drafting in active if not drafting.is_over]
        for drafting in started:
            slot = self._slots[drafting.row.slot]
            slot.num_cached, slot.draft = len(drafting.row.tokens), drafting.draft
        return self._chooser.finish(rows, started)

    def release(self, row: DraftRow) -> None:
        self._slots.pop(row.slot, None)

    def resize(self, num_slots: int, max_len: int) -> None:
        """Make room anew. Rows longer than the draft model's positions get no drafts there."""
        config = self._runner.model.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        self._slots.clear()
        self._prefix.is_cached = False
        self._runner.cache = SlotCache(0, 0)  # let go of the old before the new is made
        extra = 1 if self._prefix.token_ids else 0
        self._runner.cache = SlotCache(num_slots + extra, min(max_len, positions or max_len))

    def _limit(self, row: DraftRow, limit: int) -> int:
        """Tokens to draft; readies the slot if there are any."""
        limit = min(limit, self.cache.max_len + 1 - len(row.tokens))  # the last needs no place
        if limit <= 0:
            return 0  # K/V catch up when a draft is wanted again
        slot = self._slots.get(row.slot)
        if slot is None:
            slot = self._slots[row.slot] = _Slot(self._reuse_prefix(row))
        slot.resume(row.tokens)
        if max(row.tokens[slot.num_cached :]) >= self._num_embeddings:
            return 0  # for good, since what it does not know is never cached
        return limit

    def _pending(self, drafting: Drafting) -> Span:
        """What the next pass takes of the row."""
        row = drafting.row
        if drafting.chain:
            return Span(row.slot, len(drafting.tokens) - 1, drafting.chain[-1:])
        cached = self._slots[row.slot].num_cached
        return Span(row.slot, cached, row.tokens[cached:])

    # Catching up

    def _prefill(self, started: list[Drafting]) -> None:
        """Bring rows that are far behind to their last token."""
        behind = [d for d in started if len(self._pending(d).token_ids) > _FEW]
        self._feed([_but_last(self._pending(drafting)) for drafting in behind])
        for drafting in behind:
            self._slots[drafting.row.slot].num_cached = len(drafting.row.tokens) - 1

    def _reuse_prefix(self, row: DraftRow) -> int:
        """Copy what the row shares with others, computing that first if need be; its length."""
        length = self._prefix.usable(row.tokens)
        if not length:
            return 0
        last = self.cache.num_slots - 1  # behind those of rows
        if not self._prefix.is_cached:
            self._feed([Span(last, 0, self._prefix.token_ids[: self.cache.max_len])])
            self._prefix.is_cached = True
        self.cache.copy_prefix(last, row.slot, length)
        return length

    def _feed(self, spans: Sequence[Span]) -> None:
        """Make K/V of prompts, as few passes as `step_tokens` allows."""
        for chunks in packs(spans, self._step_tokens):
            self._runner.forward(Step(chunks, decoding=False, device=self._runner.device), [])


def _but_last(span: Span) -> Span:
    return Span(span.slot, span.start, span.token_ids[:-1])
