"""The prompt stage of a batch of requests: bodies become tokens and sampling."""

import json

import pyarrow as pa

from actors.bulk.bodies import parse_body
from actors.bulk.errors import ApiError
from actors.bulk.rendering import Prompt, RequestRenderer
from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.loading import load_tokenizer
from pipeline.records import SamplingParams, rendered_schema
from pipeline.rendered import Piece, result_columns


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
        carried = rows.select(["source_file", "source_row", *self._kept])
        schema = rendered_schema([rows.schema.field(name) for name in self._kept])
        return pa.table([*carried.columns, *result_columns(results)], schema=schema)

    def _render(self, url: str, body: str) -> tuple[object, ...]:
        """Values of `records.RENDERED_FIELDS`; an error carries its answer as JSON."""
        try:
            request = parse_body(url, json.loads(body))
            if request.stream:
                raise ApiError(400, "stream: not in a batch", "unsupported_value", "stream")
            if document := self._renderer.pieces(request):
                return _in_pieces(*document)
            return _alone(self._renderer.render(request))
        except ApiError as error:
            told = json.dumps({"status": error.status, "body": error.body()})
            return "error", error.code or "invalid_request", told, None, 0, None, None, None


def _in_pieces(pieces: list[Piece], sampling: SamplingParams) -> tuple[object, ...]:
    cut = sum(piece.prompt.truncated_prompt_tokens for piece in pieces)
    structs = [piece.to_struct() for piece in pieces]
    return None, None, None, None, cut, sampling.to_json(), structs, None


def _alone(prompts: list[Prompt]) -> tuple[object, ...]:
    if len(prompts) != 1:
        raise ApiError(400, "prompt: a batch's line has one prompt", "invalid_value", "prompt")
    (prompt,) = prompts
    cut, sampling = prompt.truncated_prompt_tokens, prompt.sampling.to_json()
    return None, None, None, prompt.token_ids, cut, sampling, None, None
