"""From a request to a row: what makes no sense is refused before it costs a slot."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from pipeline.decoding.choosing import validate_params
from pipeline.decoding.loading import end_tokens
from pipeline.decoding.responses import Responses
from pipeline.decoding.rows import Row
from pipeline.decoding.sampling import noise_key
from pipeline.decoding.stopping import RowEnd, StopStrings
from pipeline.errors import RowError
from pipeline.records import GenerationRequest, SamplingParams


def room_for(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> int:
    """Completion tokens that the model has room for behind a prompt.

    Raises:
        RowError: if there is none, or the prompt makes no sense.
    """
    room = max_model_len - len(prompt)
    if not len(prompt):
        raise RowError("empty_prompt", "the prompt has no tokens")
    if room < 1:
        problem = f"the prompt has {len(prompt)} tokens; {max_model_len - 1} fit the model"
        raise RowError("prompt_too_long", problem)
    if min(prompt) < 0 or max(prompt) >= vocab_size:  # on a GPU it would end the process
        raise RowError("bad_token", f"a token id is outside 0 to {vocab_size - 1}")
    return room


class Admission:
    """Makes an engine's rows.

    Args:
        model: its vocabulary and end tokens bound what rows may ask for.
        sampling: of rows that bring none of their own.
        max_model_len: prompt and completion of a row at most, in tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sampling: SamplingParams, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._responses = Responses(tokenizer, model)
        self.sampling = sampling
        self._max_model_len = max_model_len
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._end_tokens = tuple(end_tokens(model.generation_config.eos_token_id))
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def row(self, request: GenerationRequest) -> Row:
        """The row of a request.

        Raises:
            RowError: for a request that makes no sense.
        """
        prompt = request.prompt_token_ids
        room = room_for(prompt, self._max_model_len, self._vocab_size)
        sampling = request.sampling or self.sampling
        validate_params(sampling, self._vocab_size)
        if sampling.stop not in self._stops:
            self._stops[sampling.stop] = StopStrings(self._tokenizer, sampling.stop)
        ends = self._end_tokens if sampling.end_tokens is None else sampling.end_tokens
        budget = min(sampling.max_new_tokens, room)
        read = partial(self._responses.text, prompt)
        end = RowEnd(self._stops[sampling.stop], frozenset(ends), budget, read=read)
        name = request.row_key if sampling.noise_row is None else sampling.noise_row
        return Row(request, sampling, noise_key(sampling.seed, name), end)
