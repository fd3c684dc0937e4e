"""Drafts from the multi-token-prediction layers that came with the target's own checkpoint.

Depth k of D predicts the token k + 2 places behind a hidden state of the target. It reads what
depth k - 1 made of that state (the first: the state itself) and the token k + 1 places behind it,
so a *place* i stands for the same chain at every depth: state i, then tokens i + 1, i + 2, ...
Each depth attends to its own places, which keep K and V like a layer of the cache.

A chain ends in draft tokens. What deeper layers made of rejected ones is computed again with the
next draft, row by row. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437,
section 2.2.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from pipeline.decoding.attention import NAME
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.checkpoint import estimate_memory
from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, Drafting, ModelDrafter, start_drafts
from pipeline.decoding.hidden import HiddenStates
from pipeline.decoding.layers import replace_layers
from pipeline.decoding.prefix import common_prefix
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, packs, running
from pipeline.errors import ConfigError

_FEW = 8  # places behind: more are prefilled, since a decoding pass pads its rows to the longest


@dataclass
class _Slot:
    """`right[k]`: leading places that depth k made of tokens which stand.

    The rest tells of the last draft: the row's tokens before it, the depths that ran.
    """

    right: list[int]
    num_tokens: int = 0
    draft: list[int] = field(default_factory=list)
    num_depths: int = 0

    def resume(self, tokens: Sequence[int]) -> None:
        """Drop what was made of rejected draft tokens: depth k read the draft's first k."""
        accepted = common_prefix(self.draft, tokens[self.num_tokens :])
        for k in range(self.num_depths):
            self.right[k] = max(0, self.right[k] - max(0, k - accepted))
        self.draft, self.num_depths = [], 0


class MtpDrafter(ModelDrafter):
    """Drafts with MTP layers, one depth per draft token, as many as there are layers."""

    wants_hidden = True

    def __init__(self, layers: Any, chooser: DraftChooser, *, step_tokens: int) -> None:
        """
        Args:
            layers: transformers' `MtpModel` around the target; its attention becomes ours.
            step_tokens: prompt tokens per prefill pass at most.
        """
        super().__init__(chooser)
        layers.set_attn_implementation(NAME)
        self._layers = layers
        self._depths: int = layers.num_mtp_layers
        self._step_tokens = step_tokens
        self._slots: dict[int, _Slot] = {}
        self._cache = SlotCache(0, 0)
        self._hidden_size: int = layers.config.hidden_size

    def attach(self, target: ModelRunner) -> None:
        self._target = target
        model, config = target.model, target.model.config.get_text_config()
        dtype = str(model.dtype).removeprefix("torch.")
        kv = estimate_memory(config.to_dict(), dtype, None).kv_bytes_per_token
        layers = self._depths * kv // config.num_hidden_layers
        self.bytes_per_token = model.dtype.itemsize * self._hidden_size + layers

    def resize(self, num_slots: int, max_len: int) -> None:
        self._slots.clear()
        self._cache = SlotCache(num_slots, max_len)
        like = self._layers.embed_tokens.weight
        self._hidden = HiddenStates(num_slots + 1, max_len, self._hidden_size, like)

    def after_pass(self, step: Step) -> None:
        if self._target.hidden is not None:
            self._hidden.write(step, self._target.hidden)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._hidden.copy(source, target, length)

    def release(self, row: DraftRow) -> None:
        self._slots.pop(row.slot, None)
        self._hidden.release(row.slot)

    def lag(self, row: DraftRow) -> int | None:
        slot, stop = self._slots.get(row.slot), len(row.tokens) - 1
        first = min(slot.right) if slot else 0
        if not self._hidden.covers(row.slot, first, stop):
            return None
        return stop - first if stop - first > _FEW else 0

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]` and the number of layers."""
        limits = [min(limit, self._depths) for limit in limits]
        started = start_drafts(rows, limits)
        for drafting in started:
            slot = self._slots.setdefault(drafting.row.slot, _Slot([0] * self._depths))
            slot.resume(drafting.row.tokens)
        self._catch_up(started)
        if started:
            self._draft(started)
        return self._chooser.finish(rows, started)

    def _catch_up(self, started: Sequence[Drafting]) -> None:
        """Bring rows that are far behind, such as new ones, to their last tokens, at all depths."""
        began = time.perf_counter()
        behind = []
        for drafting in started:
            slot, row = self._slots[drafting.row.slot], drafting.row
            # all chains known, and one place left to draft from
            first, stop = min(slot.right), len(row.tokens) - max(self._depths, 2)
            if stop - first > _FEW:
                behind.append(Span(row.slot, first, range(first, stop)))
                slot.right = [stop] * self._depths
        tokens = {drafting.row.slot: drafting.row.tokens for drafting in started}
        for spans in packs(behind, self._step_tokens):
            step = Step(spans, decoding=False, device=self._target.device)
            hidden = self._hidden.read(step)
            for k in range(self._depths):
                hidden = self._run(k, step, hidden, [tokens[span.slot] for span in step.spans])
        count = sum(len(span.token_ids) for span in behind)
        self.caught_up = count, time.perf_counter() - began if count else 0.0

    def _draft(self, started: list[Drafting]) -> None:
        """One token per depth for each row, from all its places that are not right yet."""
        num_depths = max(drafting.limit for drafting in started)
        spans = []
        for drafting in started:
            row, slot = drafting.row, self._slots[drafting.row.slot]
            first, stop = min(slot.right[:num_depths]), len(row.tokens) - 1
            spans.append(Span(row.slot, first, range(first, stop)))
        step = Step(spans, decoding=True, device=self._target.device)
        last = torch.tensor(step.offsets[1:], device=self._target.device) - 1
        hidden = self._hidden.read(step)
        for k in range(num_depths):
            hidden = self._run(k, step, hidden, [drafting.tokens for drafting in started])
            self._chooser.extend(started, self._layers._project_to_logits(hidden[last]))
        for drafting in started:
            slot, count = self._slots[drafting.row.slot], len(drafting.row.tokens)
            slot.right[:num_depths] = [count - 1] * num_depths
            slot.num_tokens, slot.draft, slot.num_depths = count, drafting.draft, num_depths

    def _run(self, k: int, step: Step, hidden: Tensor, tokens: Sequence[list[int]]) -> Tensor:
        """Depth k over the step's places: `[N, hidden_size]` of the depth before to its own.

        Args:
            tokens: of each span's row, with its chain so far.
        """
        ids = [
            token
            for span, row in zip(step.spans, tokens, strict=True)
            for token in row[span.start + k + 1 : span.stop + k + 1]
        ]
        with running(step):
            output: Tensor = self._layers.forward_layer(
                k,
                hidden[None],
                step.position_ids + (k + 1),
                self._cache,
                input_ids=torch.tensor([ids], device=self._target.device),
            )
        return output[0]


def know_layers(target: Any) -> None:
    """Have transformers take the layers behind the target's own for MTP layers: by itself it knows
    those of the published sizes only."""
    config = target.config.get_text_config()
    first = config.num_hidden_layers
    numbers = [rf"layers\.{n}\." for n in range(first, first + config.num_mtp_layers)]
    known = target._keys_to_ignore_on_load_unexpected or []
    target._keys_to_ignore_on_load_unexpected = [*known, *numbers]


def load_layers(target: Any) -> Any:
    """transformers' `MtpModel` with the weights in the target's own checkpoint folder.

    Raises:
        ConfigError: naming `decoding.method`, if the checkpoint has none.
    """
    config = target.config.get_text_config()
    name = config.model_type
    count = getattr(config, "num_mtp_layers", None)
    if not count:
        problem = f"mtp needs MTP layers, and this model ({name}) has no num_nextn_predict_layers"
        raise ConfigError("decoding.method", f"{problem}; use another method")
    known = target._keys_to_ignore_on_load_unexpected
    know_layers(target)
    try:
        layers = MtpModel.from_pretrained(target)
    except (RuntimeError, ValueError, OSError) as error:
        problem = f"mtp needs the {count} MTP layers that {name} names in num_nextn_predict_layers"
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            "decoding.method", f"{problem}: {reason}; use a checkpoint with them, or another method"
        ) from error
    finally:
        target._keys_to_ignore_on_load_unexpected = known
    layers.to(target.device).eval().requires_grad_(False)
    replace_layers(layers.layers)
    return layers
