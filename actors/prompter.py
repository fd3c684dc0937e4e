"""The prompt stage: renders and tokenises prompts on the CPU, apart from the engines."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import (
    is_encoder_decoder,
    materialize,
    read_config,
    resolve,
)
from pipeline.decoding.loading import load_tokenizer
from pipeline.documents import make_renderer
from pipeline.records import READ_ERROR


class PromptActor:
    """Turns input rows into tables of `records.rendered_schema`."""

    def __init__(self, config: RunConfig, max_prompt_tokens: int) -> None:
        self._renderer = load_renderer(config, max_prompt_tokens)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """One output row per input row, in order."""
        rendered = self._renderer.render_table(rows)
        errors = rows.column(READ_ERROR.name)
        return rendered if errors.null_count == rows.num_rows else _failed(rendered, errors)


def _failed(rendered: pa.Table, errors: pa.ChunkedArray) -> pa.Table:
    """The table with rows that could not be read as errors."""
    bad = pc.is_valid(errors)
    prompts = rendered.column("prompt_token_ids")
    for name, value in {
        "status": pa.scalar("error"),
        "error_type": pa.scalar("bad_line"),
        "error": errors,
        "prompt_token_ids": pa.scalar(None, prompts.type),
    }.items():
        index = rendered.schema.get_field_index(name)
        changed = pc.if_else(bad, value, rendered.column(name))
        rendered = rendered.set_column(index, rendered.schema.field(index), changed)
    return rendered


def load_renderer(config: RunConfig, max_prompt_tokens: int) -> Any:
    """The run's renderer, as `documents.TableRenderer`, with the tokenizer of its target."""
    checkpoint = resolve(config.model.target, config.model.revision)
    return make_renderer(
        config,
        load_tokenizer(materialize(checkpoint)),
        max_prompt_tokens,
        encoder_decoder=is_encoder_decoder(read_config(checkpoint)),
    )
