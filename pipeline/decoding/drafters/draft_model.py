"""Drafts from a smaller model with the target's tokenizer, for all rows of a step at once.

The draft model keeps K/V of its own, each row in the slot of the same number as the target's. Its
tokens are drawn by the row's own rule with the noise that the target will use at the same index, so
that models which agree on the probabilities agree on the token.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.decoding.cache import SlotCache
from pipeline.decoding.checkpoint import estimate_memory, materialize, resolve
from pipeline.decoding.choosing import Chooser, Position
from pipeline.decoding.drafters.base import Drafter, DraftRow
from pipeline.decoding.loading import load_model
from pipeline.decoding.packing import pack_linears
from pipeline.decoding.prefix import SharedPrefix, common_prefix
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.selftest import misfit
from pipeline.decoding.steps import Span, Step
from pipeline.errors import ConfigError

_KEY = "model.drafter"
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


@dataclass
class _Drafting:
    """A row while it is drafted for."""

    row: DraftRow
    slot: _Slot
    limit: int
    is_over: bool = False

    @property
    def pending(self) -> Span:
        """What the next pass takes of the row."""
        tokens, draft = self.row.tokens, self.slot.draft
        if draft:
            return Span(self.row.slot, len(tokens) + len(draft) - 1, draft[-1:])
        cached = self.slot.num_cached
        return Span(self.row.slot, cached, tokens[cached:])

    @property
    def position(self) -> Position:
        """Where its next token is chosen: the index that the target's choice will have."""
        row, draft = self.row, self.slot.draft
        t = len(row.tokens) - row.num_prompt_tokens + len(draft)
        return Position(row.sampling, row.noise_key, t, row.tokens, draft)


class DraftModelDrafter(Drafter):
    """Drafts with a causal language model: one pass per draft token, over all rows that go on."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        step_tokens: int,
        confidence: float = 0.0,
        end_tokens: Collection[int] = (),
        prefix_token_ids: Sequence[int] = (),
    ) -> None:
        """Slots are made by `resize`.

        Args:
            model: a causal language model of transformers; its attention becomes ours.
            vocab_size: of the target; the draft model's may be larger or smaller.
            step_tokens: prompt tokens per prefill pass at most.
            confidence: a draft ends with the first token that is less probable than this; 0: never.
            end_tokens: of the target; a draft ends with the first of them, or of the row's own.
            prefix_token_ids: what prompts begin with, if they have it in common: computed once.
        """
        self._runner = ModelRunner(model, SlotCache(0, 0))
        self._chooser = Chooser(vocab_size)
        self._vocab_size = vocab_size
        self._num_embeddings: int = model.get_input_embeddings().num_embeddings
        self._step_tokens = step_tokens
        self._confidence = confidence
        self._end_tokens = frozenset(end_tokens)
        known = takewhile(lambda token: token < self._num_embeddings, prefix_token_ids)
        self._prefix = SharedPrefix(list(known))
        self._slots: dict[int, _Slot] = {}

    @property
    def cache(self) -> SlotCache:
        return self._runner.cache

    @property
    def bytes_per_token(self) -> int:
        """Of one token's K and V, which each slot needs beside the target's."""
        model = self._runner.model
        dtype = str(model.dtype).removeprefix("torch.")
        return estimate_memory(model.config.to_dict(), dtype, None).kv_bytes_per_token

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        started = [self._start(row, limit) for row, limit in zip(rows, limits, strict=True)]
        active = [drafting for drafting in started if drafting is not None]
        active.sort(key=lambda drafting: drafting.row.slot)  # as steps sort their spans
        self._prefill(active)
        while active:
            self._extend(active)
            active = [drafting for drafting in active if not drafting.is_over]
        return [drafting.slot.draft if drafting else [] for drafting in started]

    def observe(self, row: DraftRow, num_drafted: int, num_accepted: int) -> None:
        """Nothing to do: the row's tokens tell at the next proposal what was accepted."""

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

    def _start(self, row: DraftRow, limit: int) -> _Drafting | None:
        """The row, ready to be drafted for; None if there is nothing to draft."""
        limit = min(limit, self.cache.max_len + 1 - len(row.tokens))  # the last needs no place
        if limit <= 0:
            return None  # K/V catch up when a draft is wanted again
        slot = self._slots.get(row.slot)
        if slot is None:
            slot = self._slots[row.slot] = _Slot(self._reuse_prefix(row))
        slot.resume(row.tokens)
        if max(row.tokens[slot.num_cached :]) >= self._num_embeddings:
            return None  # for good, since what it does not know is never cached
        return _Drafting(row, slot, limit)

    # Catching up

    def _prefill(self, active: list[_Drafting]) -> None:
        """Bring rows that are far behind to their last token."""
        behind = [drafting for drafting in active if len(drafting.pending.token_ids) > _FEW]
        self._feed([_but_last(drafting.pending) for drafting in behind])
        for drafting in behind:
            drafting.slot.num_cached = len(drafting.row.tokens) - 1

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
        for chunks in _packs(spans, self._step_tokens):
            self._runner.forward(Step(chunks, decoding=False, device=self._runner.device), [])

    # Drafting

    def _extend(self, active: list[_Drafting]) -> None:
        """One pass: a token more for each row."""
        spans = [drafting.pending for drafting in active]
        step = Step(spans, decoding=True, device=self._runner.device)
        logits = self._runner.forward(step, [stop - 1 for stop in step.offsets[1:]])
        logits = _fit(logits, self._vocab_size)
        tokens = self._chooser.choose(logits, [drafting.position for drafting in active])
        for drafting, token in zip(active, tokens, strict=True):
            self._add(drafting, token)
        if self._confidence and not all(drafting.is_over for drafting in active):
            probable = _probabilities(logits, tokens) >= self._confidence
            for drafting, sure in zip(active, probable.tolist(), strict=True):
                drafting.is_over |= not sure

    def _add(self, drafting: _Drafting, token: int) -> None:
        slot, sampling = drafting.slot, drafting.row.sampling
        slot.num_cached = len(drafting.row.tokens)
        if token < 0:  # no choice could be made
            drafting.is_over = True
            return
        slot.draft.append(token)
        ends = self._end_tokens if sampling.end_tokens is None else sampling.end_tokens
        drafting.is_over = len(slot.draft) == drafting.limit or token in ends


def load_drafter(
    reference: str,
    dtype: str,
    device: str,
    *,
    vocab_size: int,
    step_tokens: int,
    confidence: float,
    end_tokens: Collection[int] = (),
    prefix_token_ids: Sequence[int] = (),
) -> DraftModelDrafter:
    """Load the draft model that `model.drafter` names; the other arguments are the drafter's.

    Args:
        dtype, device: as of `load_model`.

    Raises:
        ConfigError: naming `model.drafter`, if the model cannot be had, loaded or batched.
    """
    folder = materialize(resolve(reference, key=_KEY))
    model = load_model(folder, dtype, device, key=_KEY)
    reason = misfit(model)
    if reason:
        raise ConfigError(_KEY, f"cannot draft for many rows: {reason}; choose another model")
    pack_linears(model)
    return DraftModelDrafter(
        model,
        vocab_size=vocab_size,
        step_tokens=step_tokens,
        confidence=confidence,
        end_tokens=end_tokens,
        prefix_token_ids=prefix_token_ids,
    )


def _but_last(span: Span) -> Span:
    return Span(span.slot, span.start, span.token_ids[:-1])


def _packs(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """The spans in packs of `size` tokens, cut where a pack is full."""
    pack: list[Span] = []
    room = size
    for span in spans:
        taken = 0
        while taken < len(span.token_ids):
            chunk = Span(span.slot, span.start + taken, span.token_ids[taken : taken + room])
            pack.append(chunk)
            taken += len(chunk.token_ids)
            room -= len(chunk.token_ids)
            if not room:
                yield pack
                pack, room = [], size
    if pack:
        yield pack


def _fit(logits: Tensor, vocab_size: int) -> Tensor:
    """`[n, any vocab]` -> `[n, vocab_size]`; what only one of the models has is impossible."""
    missing = vocab_size - logits.shape[1]
    return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]


def _probabilities(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Of one token per row of `[n, vocab]`, by the plain softmax, `[n]`."""
    scores = logits.float()
    at = torch.tensor(tokens, device=scores.device).clamp(min=0)[:, None]
    return (scores.gather(1, at)[:, 0] - scores.logsumexp(1)).exp()
