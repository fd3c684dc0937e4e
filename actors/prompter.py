"""The prompt stage: renders and tokenises prompts on the CPU, apart from the engines."""

from typing import Any

import pyarrow as pa

from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import (
    is_encoder_decoder,
    materialize,
    read_config,
    resolve,
)
from pipeline.decoding.loading import load_tokenizer
from pipeline.documents import make_renderer


class PromptActor:
    """Turns input rows into tables of `records.rendered_schema`."""

    def __init__(self, config: RunConfig, max_prompt_tokens: int) -> None:
        self._renderer = load_renderer(config, max_prompt_tokens)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """One output row per input row, in order."""
        return self._renderer.render_table(rows)


def load_renderer(config: RunConfig, max_prompt_tokens: int) -> Any:
    """The run's renderer, as `documents.TableRenderer`, with the tokenizer of its target."""
    checkpoint = resolve(config.model.target, config.model.revision)
    return make_renderer(
        config,
        load_tokenizer(materialize(checkpoint)),
        max_prompt_tokens,
        encoder_decoder=is_encoder_decoder(read_config(checkpoint)),
    )
