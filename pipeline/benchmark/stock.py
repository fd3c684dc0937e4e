"""The contender `hf`: transformers' own `generate()` on the stock model."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from pipeline.benchmark.models import Models
from pipeline.benchmark.runs import Run
from pipeline.benchmark.workload import Workload
from pipeline.decoding.drafters.mtp import know_layers
from pipeline.decoding.loading import end_tokens
from pipeline.sections import Method

_WARM_UP_TOKENS = 4


@dataclass
class _Tally:
    """Counts over the calls of `generate()` in a run. Called by it after each target pass."""

    started: float = 0.0  # of the call
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    passes: int = 0
    drafted: int = 0
    _is_first: bool = field(default=True, repr=False)

    def begin(self) -> None:
        """A call begins."""
        self.started = time.perf_counter()
        self._is_first = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """As a stopping criterion that stops nothing: bool `[batch]`."""
        if self._is_first:
            self.prefill_seconds += time.perf_counter() - self.started
            self._is_first = False
        self.passes += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _CountedDrafts:
    """A candidate generator of transformers that counts and times what it proposes."""

    def __init__(self, inner: Any, tally: _Tally) -> None:
        self._inner = inner
        self._tally = tally

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        started = time.perf_counter()
        candidates, logits = self._inner.get_candidates(input_ids, **kwargs)
        self._tally.draft_seconds += time.perf_counter() - started
        self._tally.drafted += candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class StockDrafts:
    """How `generate()` drafts: settings of its `GenerationConfig`, further arguments, and whose
    own settings bound a draft: the assistant's, or the model's if there is none."""

    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)


def stock_drafts(
    models: Models, method: Method, length: int, *, exit_layer: int | None, confidence: float
) -> StockDrafts:
    """The method in transformers, with drafts of at most `length` tokens."""
    bounds = {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": confidence,
    }
    if method == "prompt_lookup":
        return StockDrafts({"prompt_lookup_num_tokens": length})
    if method == "early_exit":
        return StockDrafts({"assistant_early_exit": exit_layer}, {}, bounds)
    if method == "mtp":
        know_layers(models.stock)
        return StockDrafts({"use_mtp": True})
    arguments = {"assistant_model": models.stock_drafter}
    if method == "universal":
        arguments["tokenizer"] = models.tokenizer
        arguments["assistant_tokenizer"] = models.drafter_files.tokenizer()
    return StockDrafts({}, arguments, bounds)


class StockContender:
    """`generate()` over the rows, `batch_size` at a time with padding on the left.

    Args:
        drafts: None for none. They need a batch size of one.
    """

    def __init__(
        self, name: str, model: Any, *, batch_size: int = 1, drafts: StockDrafts | None = None
    ) -> None:
        self.name = name
        self._model = model
        self._batch_size = batch_size
        self._drafts = drafts
        self._ends = end_tokens(model.generation_config.eos_token_id)

    def run(self, workload: Workload) -> Run:
        """Generate all rows."""
        prompts, size = workload.prompts, self._batch_size
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        ends = [] if workload.ignore_end else self._ends
        self._generate(prompts[:1], _WARM_UP_TOKENS, ends, _Tally())
        tally, tokens = _Tally(), []
        started = time.perf_counter()
        for batch in batches:
            tokens += self._generate(batch, workload.max_new_tokens, ends, tally)
        seconds = time.perf_counter() - started
        num_tokens = sum(map(len, tokens))
        passes = tally.passes if size == 1 else num_tokens  # each row has one token of a pass
        drafts = self._drafts is not None
        return Run(
            tokens,
            seconds,
            prefill_seconds=tally.prefill_seconds,
            draft_seconds=tally.draft_seconds if drafts else None,
            target_passes=passes,
            draft_tokens=tally.drafted if drafts else None,
            accepted_draft_tokens=num_tokens - passes if drafts else None,
        )

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        ends: list[int],
        tally: _Tally,
    ) -> list[list[int]]:
        """New tokens of each row, up to its end."""
        model = self._model
        known = (model.generation_config.pad_token_id, *self._ends, 0)
        pad = next(token for token in known if token is not None)
        width = max(map(len, prompts))
        padded = [[pad] * (width - len(row)) + list(row) for row in prompts]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
        drafts = self._drafts or StockDrafts()
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, **drafts.settings
        )
        # What is unset is filled from the models' own settings, so these take their place.
        neutral = GenerationConfig(eos_token_id=ends or None, pad_token_id=pad, **drafts.bounds)
        assistant = drafts.arguments.get("assistant_model")
        with (
            torch.inference_mode(),
            _counted(model, tally),
            _settings(model, neutral),
            _settings(assistant, neutral),
        ):
            tally.begin()
            out = model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([tally]),
                **drafts.arguments,
            )
        return [_until_end(row, ends) for row in out[:, width:].tolist()]


@contextmanager
def _counted(model: Any, tally: _Tally) -> Iterator[None]:
    """Have `generate()` of this instance count its drafts."""
    make_generator = model._get_candidate_generator

    def counted(*args: Any, **kwargs: Any) -> _CountedDrafts:
        return _CountedDrafts(make_generator(*args, **kwargs), tally)

    model._get_candidate_generator = counted
    try:
        yield
    finally:
        del model._get_candidate_generator  # uncovers the class's own


@contextmanager
def _settings(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Give a model, if there is one, other settings of its own for a while."""
    if model is None:
        yield
        return
    before, model.generation_config = model.generation_config, copy.deepcopy(settings)
    try:
        yield
    finally:
        model.generation_config = before


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """A padded row's tokens up to and with its end token."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: at + 1]
