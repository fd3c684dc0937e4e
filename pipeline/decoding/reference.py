"""The reference engine: row by row through `model.generate()` of transformers.

The oracle that every other engine must equal token by token, and the path for all models that
transformers can generate with.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from pipeline.config import DecodingConfig
from pipeline.decoding.admission import room_for
from pipeline.decoding.control import ControlClock
from pipeline.decoding.loading import end_tokens, neutralize
from pipeline.decoding.observation import GuardedLookup, RowObserver
from pipeline.decoding.responses import Responses
from pipeline.decoding.sampling import Sampler
from pipeline.decoding.stopping import RowEnd, StopStrings
from pipeline.errors import ConfigError, EngineError, RowError
from pipeline.records import Completion, GenerationRequest, GenerationStats

logger = logging.getLogger(__name__)

_METHODS = ("plain", "prompt_lookup")
_WARM_UP_TOKENS = 4


class ReferenceEngine:
    """An `Engine` that decodes one row per step.

    Args:
        model: a language model of transformers, causal or encoder-decoder; its generation settings
            are neutralised.
        tokenizer: the model's.
        max_model_len: prompt and completion of a row at most, in tokens; of an encoder-decoder each
            of them.
        row_timeout_s: seconds of generation per row, or None.

    Raises:
        ConfigError: if the decoding config does not suit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        decoding: DecodingConfig,
        *,
        max_model_len: int,
        row_timeout_s: float | None = None,
    ) -> None:
        if decoding.method not in _METHODS:
            problem = f"{decoding.method} needs engine: batched; use that, or method prompt_lookup"
            raise ConfigError("decoding.method", problem)
        neutralize(model)
        self._model = model
        self._decoding = decoding
        self._max_model_len = max_model_len
        self._row_timeout_s = row_timeout_s
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._sampler = Sampler(decoding, self._vocab_size, model.device)
        self._stops = StopStrings(tokenizer, decoding.stop)
        self._responses = Responses(tokenizer, model)
        self._end_tokens = frozenset(end_tokens(model.generation_config.eos_token_id))
        self._encodes = bool(model.config.is_encoder_decoder)
        self._clock = ControlClock()
        self._queue: deque[GenerationRequest] = deque()

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a row."""
        self._queue.append(request)

    @property
    def num_unfinished(self) -> int:
        """Rows queued."""
        return len(self._queue)

    def step(self) -> list[Completion]:
        """Generate the next row.

        Raises:
            EngineError: if the device is lost; the row is lost with it.
        """
        if not self._queue:
            return []
        request = self._queue.popleft()
        try:
            return [self._generate(request)]
        except RowError as error:
            return [_failed(request, error.error_type, str(error))]
        except Exception as error:
            return [_failed(request, *_blame(error))]

    def warm_up(self) -> None:
        """Decode a few tokens, so that no row pays for first calls and misfits show at once.

        Raises:
            ConfigError: if this model cannot decode by this method.
        """
        prompt = [0] * max(1, min(8, self._max_model_len - _WARM_UP_TOKENS))
        request = GenerationRequest("warm-up", prompt)
        try:
            self._run(request, self._observer(request, _WARM_UP_TOKENS, ControlClock()))
        except ValueError as error:  # e.g. recurrent layers, whose state cannot be rolled back
            model_type = self._model.config.model_type
            problem = f"{self._decoding.method} does not work with {model_type}: {error}"
            raise ConfigError("decoding.method", f"{problem}; use plain") from error

    def _generate(self, request: GenerationRequest) -> Completion:
        prompt, limit = request.prompt_token_ids, self._max_model_len
        room = room_for(prompt, limit + self._encodes, self._vocab_size)
        if self._encodes:  # prompt and completion do not share their places
            room = limit - len(self._decoder_prompt(request))
        observer = self._observer(request, min(self._decoding.max_new_tokens, room), self._clock)
        self._run(request, observer)
        end = observer.end
        stats = observer.stats(self._decoding.method, time.perf_counter())
        stats.prompt_tokens = len(prompt)
        return Completion(
            request.row_key,
            status="timeout" if end.timed_out else "ok",
            text=end.text(),
            finish_reason=end.reason,
            stats=stats,
        )

    def _decoder_prompt(self, request: GenerationRequest) -> list[int]:
        """What the decoder has before the first new token."""
        if not self._encodes:
            return list(request.prompt_token_ids)
        start = self._model.generation_config.decoder_start_token_id
        return [start, *request.decoder_token_ids]

    def _observer(
        self, request: GenerationRequest, budget: int, clock: ControlClock
    ) -> RowObserver:
        timeout = self._row_timeout_s
        deadline = None if timeout is None else time.monotonic() + timeout
        read = partial(self._responses.text, request.prompt_token_ids)
        end = RowEnd(self._stops, self._end_tokens, budget, deadline, read)
        return RowObserver(len(self._decoder_prompt(request)), end, clock)

    def _run(self, request: GenerationRequest, observer: RowObserver) -> None:
        """Decode the row; what comes of it is with the observer."""
        device = self._model.device
        prompt = torch.tensor([list(request.prompt_token_ids)], device=device)
        given = torch.tensor([self._decoder_prompt(request)], device=device)
        settings = GenerationConfig(
            max_new_tokens=observer.end.budget,
            do_sample=False,  # the noise is in the processors: argmax samples
            use_cache=True,
        )  # what is unset comes from the model's, which is neutral: end and pad tokens
        if self._decoding.method == "prompt_lookup":
            settings.prompt_lookup_num_tokens = self._decoding.max_draft_tokens
        with torch.inference_mode(), _guarded_lookup(self._model, observer):
            self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                logits_processor=self._sampler.for_row(request.row_key, given.shape[1]),
                stopping_criteria=StoppingCriteriaList([observer]),
                **({"decoder_input_ids": given} if self._encodes else {}),
            )


@contextmanager
def _guarded_lookup(model: Any, observer: RowObserver) -> Iterator[None]:
    """Have `generate()` of this instance draft through a `GuardedLookup`."""
    make_generator = model._get_candidate_generator

    def guarded(*args: Any, **kwargs: Any) -> GuardedLookup:
        return GuardedLookup(make_generator(*args, **kwargs), observer)

    model._get_candidate_generator = guarded
    try:
        yield
    finally:
        del model._get_candidate_generator  # uncovers the class's own


def _blame(error: Exception) -> tuple[str, str]:
    """Type and message of a row error, unless it is the device that failed.

    Raises:
        EngineError: after errors that leave a GPU unusable for this process.
    """
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate" in message:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return "out_of_memory", message
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in message:
        raise EngineError(f"the device failed: {message}") from error
    logger.warning("a row failed in the engine", exc_info=error)
    return "engine_error", message


def _failed(request: GenerationRequest, error_type: str, message: str) -> Completion:
    stats = GenerationStats(prompt_tokens=len(request.prompt_token_ids))
    return Completion(
        request.row_key, status="error", error_type=error_type, error=message, stats=stats
    )
