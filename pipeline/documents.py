"""Rows that take several prompts: one per target language, and one per piece of a long document.

A row stays one row: its pieces are generated as rows of the engine are, and put together again by
`actors.assembly`. Ordinary summaries go through `prompts` directly.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from pipeline.cells import CellText, column_texts
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages, check_language, is_spaced
from pipeline.prompts import PromptRenderer, template_columns
from pipeline.records import rendered_schema
from pipeline.rendered import Piece, RenderedPrompt, failure, result_columns
from pipeline.splitting import seams, split
from pipeline.translators import TranslatorPrompts

_TRIES = 8  # at pieces that come out longer in their prompt than by themselves
_MANY_CHARS = 64  # per token: a text of more is too long without counting

Values = Mapping[str, CellText]


class Prompts(Protocol):
    """Renders prompts of one pair of languages: `PromptRenderer`, `TranslatorPrompts`."""

    @property
    def columns(self) -> tuple[str, ...]: ...
    def room(self, values: Mapping[str, str]) -> int: ...
    def count(self, texts: Sequence[str]) -> list[int]: ...
    def render_texts(self, rows: Sequence[Values]) -> list[RenderedPrompt | RowError]: ...


class TableRenderer(Protocol):
    """Renders tables: `PromptRenderer`, `DocumentRenderer`."""

    def render_table(self, table: pa.Table) -> pa.Table: ...


def make_renderer(
    config: RunConfig, tokenizer: Any, max_prompt_tokens: int, *, encoder_decoder: bool = False
) -> TableRenderer:
    """The renderer of a run.

    Raises:
        ConfigError: template, style or tokenizer cannot be used.
    """
    if config.task == "summarize" and config.on_too_long != "map_reduce" and not encoder_decoder:
        return PromptRenderer(config, tokenizer, max_prompt_tokens)
    kind = TranslatorPrompts if encoder_decoder else PromptRenderer

    def prompts(languages: Languages | None) -> Prompts:
        return kind(config, tokenizer, max_prompt_tokens, languages)

    return DocumentRenderer(config, prompts)


class DocumentRenderer:
    """Renders rows as pieces."""

    def __init__(self, config: RunConfig, make: Callable[[Languages | None], Prompts]) -> None:
        """`make`: prompts of a pair of languages.

        Raises:
            ConfigError: as `make` does for the languages of the run.
        """
        self._config, self._make = config, make
        self._document = config.input.text_column
        self._columns = template_columns(config)
        self._in_parts = config.on_too_long in ("split", "map_reduce")
        self._cache: dict[Languages | None, Prompts] = {}
        prompt = config.prompt
        if config.task != "translate":
            self._prompts(None)
        elif not prompt.source_lang_column:
            for code in prompt.target_langs:
                self._prompts(Languages(prompt.source_lang, code))

    def render_table(self, table: pa.Table) -> pa.Table:
        """Rows with their address to `records.rendered_schema`, one for one and in order."""
        texts = {c: column_texts(table.column(c), c, c == self._document) for c in self._columns}
        cells = zip(*texts.values(), strict=True)
        rows = [dict(zip(texts, row, strict=True)) for row in cells]
        pairs = zip(rows, self._languages(table), strict=True)
        results = [self._row(row, languages) for row, languages in pairs]
        carried = table.select(["source_file", "source_row", *self._config.kept])
        schema = rendered_schema([table.schema.field(c) for c in self._config.kept])
        return pa.table([*carried.columns, *result_columns(results)], schema=schema)

    def pieces(
        self,
        values: Mapping[str, str],
        languages: Languages | None,
        prefix: str = "",
        column: int = 0,
    ) -> list[Piece]:
        """The prompts of one document in one language. `prefix`: of their keys.

        Raises:
            RowError: the row's fault.
        """
        prompts = self._prompts(languages)
        limit = self._limit(prompts, values) if self._in_parts else None
        for _ in range(_TRIES):
            parts = self._parts(values[self._document], languages, prompts, limit)
            rows = [{**values, self._document: core} for _, core in parts]
            rendered = prompts.render_texts(rows)
            failed = next((r for r in rendered if isinstance(r, RowError)), None)
            if failed is None or limit is None or failed.error_type != "prompt_too_long":
                break
            limit = limit * 3 // 4
        if failed is not None:
            raise failed
        keys = [prefix + (f":{i}" if len(parts) > 1 else "") for i in range(len(parts))]
        return [
            Piece(key, prompt, column, joint)
            for key, prompt, (joint, _) in zip(keys, rendered, parts, strict=True)
            if isinstance(prompt, RenderedPrompt)
        ]

    def _parts(
        self, text: str, languages: Languages | None, prompts: Prompts, limit: int | None
    ) -> list[tuple[str, str]]:
        """(joint, text) of each piece; the whole text where nothing is to be split."""
        at = self._config.prompt.split_at if languages else "length"
        if limit is None:
            return [("", text)]

        def sizes(texts: Sequence[str]) -> list[int]:
            fits = [t if len(t) <= _MANY_CHARS * limit else "" for t in texts]
            counts = zip(texts, fits, prompts.count(fits), strict=True)
            return [count if whole == part else limit + 1 for whole, part, count in counts]

        pieces = split(text, max(limit, 1), sizes, at)
        if len(pieces) == 1:
            return [("", text)]
        return seams(pieces, is_spaced(languages.target if languages else None))

    def _limit(self, prompts: Prompts, values: Mapping[str, str]) -> int:
        """Tokens of a piece at most. A translation may have twice as many as its document."""
        room = prompts.room(values)
        if self._config.task == "translate":
            return min(room, self._config.decoding.max_new_tokens // 2)
        if room <= 2 * self._config.decoding.max_new_tokens:
            raise RowError(
                "prompt_too_long",
                f"map_reduce needs room for two summaries, but {room} tokens are left for the "
                "document; lower decoding.max_new_tokens or raise resources.max_model_len",
            )
        return room

    def _row(
        self, values: Values, languages: Sequence[Languages | None] | RowError
    ) -> tuple[Any, ...]:
        """Values of `records.RENDERED_FIELDS`."""
        texts: dict[str, str] = {}
        try:
            for column, text in values.items():
                if isinstance(text, RowError):
                    raise text
                texts[column] = text
            if isinstance(languages, RowError):
                raise languages
            pieces: list[Piece] = []
            for index, pair in enumerate(languages):
                several = pair is not None and len(self._config.text_columns) > 1
                prefix = f":{pair.target}" if pair is not None and several else ""
                pieces += self.pieces(texts, pair, prefix, index)
        except RowError as error:
            return failure(error)
        cut = sum(piece.prompt.truncated_prompt_tokens for piece in pieces)
        structs = [piece.to_struct() for piece in pieces]
        again = list(texts.values()) if self._config.on_too_long == "map_reduce" else None
        return None, None, None, None, cut, None, structs, again

    def reduce(self, values: Sequence[str], text: str, level: int) -> list[Piece]:
        """Prompts for the summaries of a document's pieces, in place of the document.

        Raises:
            RowError: they do not fit.
        """
        texts = dict(zip(self._columns, values, strict=True))
        return self.pieces({**texts, self._document: text}, None, f":r{level}")

    def _languages(self, table: pa.Table) -> list[Sequence[Languages | None] | RowError]:
        """From what to what each row is to be translated."""
        prompt, count = self._config.prompt, table.num_rows
        if self._config.task != "translate":
            return [[None]] * count
        sources: list[Any] = [prompt.source_lang] * count
        targets: list[list[Any]] = [[*prompt.target_langs]] * count
        if prompt.source_lang_column:
            sources = table.column(prompt.source_lang_column).to_pylist()
        if prompt.target_lang_column:
            targets = [[code] for code in table.column(prompt.target_lang_column).to_pylist()]
        return [self._pairs(*pair) for pair in zip(sources, targets, strict=True)]

    def _pairs(self, source: Any, targets: list[Any]) -> Sequence[Languages] | RowError:
        prompt = self._config.prompt
        try:
            if source is not None:
                check_language(source)
            elif prompt.source_lang_column:
                raise ValueError(f"column {prompt.source_lang_column!r} is empty")
            pairs = [Languages(source, check_language(target)) for target in targets]
            for pair in pairs:
                self._prompts(pair)
        except (ValueError, ConfigError) as error:
            return RowError("bad_language", str(error))
        return pairs

    def _prompts(self, languages: Languages | None) -> Prompts:
        if languages not in self._cache:
            self._cache[languages] = self._make(languages)
        return self._cache[languages]


def estimate_prompt_tokens(renderer: TableRenderer, table: pa.Table) -> int:
    """Prompt tokens of a sample of rows, for `--dry-run`."""
    rendered = renderer.render_table(table).select(["prompt_token_ids", "pieces"])
    total = 0
    for row in rendered.to_pylist():
        total += len(row["prompt_token_ids"] or ())
        total += sum(len(piece["token_ids"]) for piece in row["pieces"] or ())
    return total
