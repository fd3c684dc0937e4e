"""The prompt stage: renders and tokenises prompts on the CPU, apart from the engines."""

import pyarrow as pa

from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.loading import load_tokenizer
from pipeline.prompts import PromptRenderer


class PromptActor:
    """Turns input rows into tables of `records.rendered_schema`."""

    def __init__(self, config: RunConfig, max_prompt_tokens: int) -> None:
        checkpoint = resolve(config.model.target, config.model.revision)
        tokenizer = load_tokenizer(materialize(checkpoint))
        self._renderer = PromptRenderer(config, tokenizer, max_prompt_tokens)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """One output row per input row, in order."""
        return self._renderer.render_table(rows)
