"""Drafts from a small model that attends to the target's own K and V, as Gemma 4's assistants do.

It has no cache and needs no prefill: it reads the target's last accepted hidden state and token,
and hands a state of its own on to the next draft token. All tokens of a draft are asked for at one
place, that of the row's last token: places behind it are not in the target's cache yet.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.attention import NAME
from pipeline.decoding.drafters.base import DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser, Drafting, ModelDrafter, start_drafts
from pipeline.decoding.hidden import HiddenStates
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, running
from pipeline.errors import ConfigError


class SharedKvDrafter(ModelDrafter):
    """Drafts with transformers' `Gemma4AssistantForCausalLM`: one pass per draft token."""

    wants_hidden = True

    def __init__(self, model: Any, chooser: DraftChooser, *, num_draft_tokens: int) -> None:
        """
        Args:
            model: the assistant; its attention becomes ours.
            num_draft_tokens: per row and verification at most.
        """
        super().__init__(chooser)
        model.set_attn_implementation(NAME)
        self._model = model
        self._places = num_draft_tokens + 1  # of hidden states: what one verification yields

    def attach(self, target: ModelRunner) -> None:
        """Raises ConfigError naming `model.drafter`, if it was made for another target."""
        self._target = target
        self._embed = target.model.get_input_embeddings()
        self._sources = shared_layers(target.model)
        reason = _mismatch(self._model.config, target.model.config, self._sources)
        if reason:
            raise ConfigError("model.drafter", f"{reason}; choose the target's own assistant")

    def resize(self, num_slots: int, max_len: int) -> None:
        width = self._model.config.backbone_hidden_size
        self._hidden = HiddenStates(num_slots + 1, self._places, width, self._embed.weight)

    def after_pass(self, step: Step) -> None:
        if self._target.hidden is not None:
            self._hidden.write(step, self._target.hidden)

    def lag(self, row: DraftRow) -> int | None:
        last = len(row.tokens) - 2
        return 0 if self._hidden.covers(row.slot, last, last + 1) else None

    def release(self, row: DraftRow) -> None:
        self._hidden.release(row.slot)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]`, fewer where unsure."""
        started = active = start_drafts(rows, limits)
        if not active:
            return self._chooser.finish(rows, started)
        step = self._step(active)
        hidden = self._hidden.read(step)
        while True:
            logits, hidden = self._run(step, [d.last_token for d in active], hidden)
            self._chooser.extend(active, logits)
            going = [i for i, drafting in enumerate(active) if not drafting.is_over]
            if not going:
                break
            if len(going) < len(active):
                active, hidden = [active[i] for i in going], hidden[going]
                step = self._step(active)
        return self._chooser.finish(rows, started)

    def _step(self, active: Sequence[Drafting]) -> Step:
        """Each row at its last place in the target's cache: it sees that and all before, for every
        token of its draft."""
        spans = [Span(d.row.slot, len(d.row.tokens) - 2, d.row.tokens[-1:]) for d in active]
        return Step(spans, decoding=True, device=self._target.device)

    def _run(self, step: Step, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over each row's last token: logits `[rows, vocab]` and states for the next
        `[rows, hidden_size]`."""
        model = self._model
        ids = torch.tensor(tokens, device=self._target.device)
        inputs = torch.cat([self._embed(ids), hidden], -1)
        shared = {k: self._target.cache.views(layer, step) for k, layer in self._sources.items()}
        with running(step):
            output = model.model(
                inputs_embeds=model.pre_projection(inputs)[None],
                attention_mask=dict.fromkeys(shared),  # ours needs none, and makes its own
                position_ids=step.position_ids + 1,
                shared_kv_states=shared,
                use_cache=False,
                logits_to_keep=step.positions,  # no number, lest it drops tokens of shared layers
            )
        state = output.last_hidden_state
        if model.masked_embedding is None:
            logits = model.lm_head(state)
        else:
            logits = model.masked_embedding(state, model.lm_head.weight)
        return logits[0], model.post_projection(state)[0]


def shared_layers(target: Any) -> dict[str, int]:
    """Kind of layer to the number of the layer whose K and V the target shares."""
    found = {}
    for layer in getattr(target.get_decoder(), "layers", ()):
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "store_full_length_kv", False):
            found[attention.layer_type] = attention.layer_idx
    return found


def _mismatch(drafter: Any, target: Any, shared: dict[str, int]) -> str | None:
    """Why the drafter cannot read the target's states, if so; both are configs."""
    needed = getattr(drafter, "backbone_hidden_size", None)
    if needed is None:
        return f"{drafter.model_type} does not draft from another model's K and V"
    if not shared:
        return f"the target ({target.model_type}) shares no K and V as Gemma 4 models do"
    width = target.get_text_config().hidden_size
    if needed != width:
        return f"it reads hidden states of {needed} numbers, and the target's have {width}"
    missing = set(drafter.get_text_config().layer_types) - shared.keys()
    if missing:
        return f"it attends to {', '.join(sorted(missing))}, which the target does not share"
    return None
