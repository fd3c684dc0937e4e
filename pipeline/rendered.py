"""What the prompt stage makes of a row, also as values of `records.RENDERED_FIELDS`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.cells import BLANK
from pipeline.errors import RowError
from pipeline.records import RENDERED_FIELDS, GenerationRequest, SamplingParams


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt that fits; `truncated_prompt_tokens` were cut off its document."""

    token_ids: list[int]
    truncated_prompt_tokens: int
    decoder_token_ids: tuple[int, ...] = ()  # what an encoder-decoder's answer begins with


@dataclass(frozen=True)
class Piece:
    """One of several prompts of a row; see the struct in `records.RENDERED_FIELDS`."""

    key: str
    prompt: RenderedPrompt
    column: int = 0
    joint: str = ""

    @classmethod
    def from_struct(cls, struct: dict[str, Any]) -> "Piece":
        decoder = tuple(struct["decoder_token_ids"])
        prompt = RenderedPrompt(struct["token_ids"], 0, decoder)
        return cls(struct["key"], prompt, struct["column"], struct["joint"])

    def to_request(self, row_key: str, sampling: SamplingParams | None = None) -> GenerationRequest:
        """For the engine; `row_key` and `sampling` are the row's own."""
        if sampling is not None and sampling.noise_row is not None:
            sampling = replace(sampling, noise_row=sampling.noise_row + self.key)
        prompt = self.prompt
        return GenerationRequest(
            row_key + self.key, prompt.token_ids, sampling, prompt.decoder_token_ids
        )

    def to_struct(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "token_ids": self.prompt.token_ids,
            "decoder_token_ids": self.prompt.decoder_token_ids,
            "column": self.column,
            "joint": self.joint,
        }


def result_columns(rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
    """Arrays of `records.RENDERED_FIELDS` from the rows' values."""
    return [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(RENDERED_FIELDS)]


def values_of(outcome: RenderedPrompt | RowError) -> tuple[Any, ...]:
    """Values of `records.RENDERED_FIELDS`."""
    if isinstance(outcome, RenderedPrompt):
        cut = outcome.truncated_prompt_tokens
        return None, None, None, outcome.token_ids, cut, None, None, None
    return failure(outcome)


def failure(outcome: RowError) -> tuple[Any, ...]:
    """Values of `records.RENDERED_FIELDS` for a row that is not generated."""
    if outcome.error_type == BLANK:
        return "skipped", None, None, None, 0, None, None, None
    return "error", outcome.error_type, str(outcome), None, 0, None, None, None
