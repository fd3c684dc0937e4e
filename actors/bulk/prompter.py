"""The prompt stage of a batch of requests: bodies become tokens and sampling."""

import json

import pyarrow as pa

from actors.bulk.bodies import parse_body
from actors.bulk.errors import ApiError
from actors.bulk.rendering import Prompt, RequestRenderer
from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.loading import load_tokenizer
from pipeline.records import RENDERED_FIELDS, rendered_schema


class RequestPrompter:
    """Turns rows with `url` and `body` into tables of `records.rendered_schema`."""

    def __init__(self, config: RunConfig, max_prompt_tokens: int) -> None:
        checkpoint = resolve(config.model.target, config.model.revision)
        tokenizer = load_tokenizer(materialize(checkpoint))
        length = max_prompt_tokens + config.decoding.max_new_tokens
        self._renderer = RequestRenderer(config, tokenizer, length)
        self._kept = config.input.kept

    def __call__(self, rows: pa.Table) -> pa.Table:
        """One output row per input row, in order."""
        pairs = zip(rows.column("url").to_pylist(), rows.column("body").to_pylist(), strict=True)
        results = [self._render(url, body) for url, body in pairs]
        columns = [
            pa.array([row[i] for row in results], f.type) for i, f in enumerate(RENDERED_FIELDS)
        ]
        carried = rows.select(["source_file", "source_row", *self._kept])
        schema = rendered_schema([rows.schema.field(name) for name in self._kept])
        return pa.table([*carried.columns, *columns], schema=schema)

    def _render(self, url: str, body: str) -> tuple[object, ...]:
        """Values of `records.RENDERED_FIELDS`; an error carries its answer as JSON."""
        try:
            prompt: Prompt = one_prompt(self._renderer, url, json.loads(body))
        except ApiError as error:
            told = json.dumps({"status": error.status, "body": error.body()})
            return "error", error.code or "invalid_request", told, None, 0, None, None, None
        sampling = prompt.sampling.to_json()
        cut = prompt.truncated_prompt_tokens
        return None, None, None, prompt.token_ids, cut, sampling, None, None


def one_prompt(renderer: RequestRenderer, url: str, body: object) -> Prompt:
    """The single prompt of a batch's line.

    Raises:
        ApiError: it has several, or makes no sense.
    """
    parsed = parse_body(url, body)
    if parsed.stream:
        raise ApiError(400, "stream: not in a batch", "unsupported_value", "stream")
    prompts = renderer.render(parsed)
    if len(prompts) != 1:
        raise ApiError(400, "prompt: a batch's line has one prompt", "invalid_value", "prompt")
    return prompts[0]
