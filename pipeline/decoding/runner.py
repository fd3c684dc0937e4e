"""Runs a model over packed steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.decoding.attention import NAME
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.steps import Step, running


class ModelRunner:
    """A model with its slot cache.

    `hidden`: final hidden states `[N, hidden_size]` of the last pass, those that the head reads;
    None unless `keeps_hidden`. The model computes them anyway: keeping them takes no time.
    """

    def __init__(self, model: Any, cache: SlotCache) -> None:
        """`model`: a causal language model of transformers; its attention becomes ours."""
        model.set_attn_implementation(NAME)
        self.model = model
        self.cache = cache
        self.device = model.device
        self.keeps_hidden = False
        self.hidden: torch.Tensor | None = None

    def forward(self, step: Step, keep: Sequence[int]) -> torch.Tensor:
        """Run the step's tokens and write their K/V.

        Args:
            keep: indices into the packed sequence whose logits are wanted.

        Returns:
            Logits `[len(keep), vocab]` in the model's dtype.
        """
        self.hidden = None
        indices = torch.tensor(keep, dtype=torch.int64, device=self.device)
        with torch.inference_mode(), running(step), self._listening():
            output = self.model(
                input_ids=step.token_ids,
                position_ids=step.position_ids,
                cache=self.cache,
                use_cache=True,
                logits_to_keep=indices,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Take what the decoder hands to the head."""
        if not self.keeps_hidden:
            yield
            return

        def take(module: Any, args: Any, output: Any) -> None:
            self.hidden = output.last_hidden_state[0]

        handle = self.model.get_decoder().register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()
