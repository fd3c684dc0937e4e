"""The prompt stage: rows of the input become token ids, before any actor sees them.

Order of things for a row: read its columns as text, fill the template, wrap it (chat markup or
plain), tokenise, cut the document if the prompt is too long. A row at fault gets a status and
leaves its neighbours alone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.cells import CellText, break_up, column_texts, text_of
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages
from pipeline.records import rendered_schema
from pipeline.rendered import RenderedPrompt, result_columns, values_of
from pipeline.templates import (
    check_template,
    control_tokens,
    make_wrapper,
    parse_template,
    prompt_style,
    template_columns,
)

__all__ = ["PromptRenderer", "check_template", "template_columns"]

_BATCH_CHARS = 1 << 21  # a tokenizer call needs about 100 bytes of memory per token
_CHUNK_CHARS = 1 << 19  # longer texts are counted in pieces of this size
_OVERLAP_CHARS = 1 << 12
_AGREEING_TOKENS = 32  # where two pieces are joined, this many tokens must be the same
_SLACK_TOKENS = 2  # a cut that leaves no more than this unused is good enough


class PromptRenderer:
    """Renders rows with one config and tokenizer; pickles as the tokenizer does."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        max_prompt_tokens: int,
        languages: Languages | None = None,
    ) -> None:
        """`max_prompt_tokens`: what `max_model_len` leaves beside the completion. `languages`: of
        translations.

        Raises:
            ConfigError: template, style or tokenizer cannot be used.
        """
        if not getattr(tokenizer, "is_fast", False):
            problem = "its tokenizer gives no text offsets; use a model with a tokenizer.json"
            raise ConfigError("model.target", problem)
        style = prompt_style(config, tokenizer)
        self._template = parse_template(config, style, languages)
        self._wrapper = make_wrapper(config, tokenizer, style, self._template, languages)
        self._tokenizer = tokenizer
        self._max_tokens = max_prompt_tokens
        self._truncate = config.on_too_long == "truncate"
        self._document = config.input.text_column
        self._kept = config.kept
        self._control = control_tokens(tokenizer, style)
        neutral = self._prompt(dict.fromkeys(self._template.columns, "x"))
        self._expected_control = self._control_in(self._encode([neutral])[0])

    def render(self, row: Mapping[str, Any]) -> RenderedPrompt:
        """One row, from column names to Python values.

        Raises:
            RowError: the row's fault; type `blank` where there is no text, which is no error.
        """
        texts = {c: text_of(row.get(c), c, c == self._document) for c in self._template.columns}
        outcome = self.render_texts([texts])[0]
        if isinstance(outcome, RowError):
            raise outcome
        return outcome

    def render_table(self, table: pa.Table) -> pa.Table:
        """Rows with their address to `records.rendered_schema`, one for one and in order.

        Kept columns are carried as they are, whatever they hold; other input columns are dropped.
        """
        document = self._document
        texts = {c: column_texts(table.column(c), c, c == document) for c in self._template.columns}
        cells = zip(*texts.values(), strict=True)
        outcomes = self.render_texts([dict(zip(texts, row, strict=True)) for row in cells])
        carried = table.select(["source_file", "source_row", *self._kept])
        schema = rendered_schema([table.schema.field(c) for c in self._kept])
        return pa.table(
            [*carried.columns, *result_columns([values_of(o) for o in outcomes])], schema=schema
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns that the template needs, the document's first."""
        return self._template.columns

    def room(self, values: Mapping[str, str]) -> int:
        """Tokens of the document that fit beside the row's other values."""
        bare = self._encode([self._prompt({**values, self._document: ""})])[0]
        return (self._max_tokens - len(bare)) // self._template.occurrences(self._document)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text by itself, without those that the tokenizer adds."""
        return [len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def render_texts(
        self, rows: Sequence[Mapping[str, CellText]]
    ) -> list[RenderedPrompt | RowError]:
        """The prompts of rows, given as text by column."""
        drafts = [self._draft(row) for row in rows]
        encoded = self._encode_all([d[1] for d in drafts if not isinstance(d, RowError)])
        return [d if isinstance(d, RowError) else self._settle(*d, next(encoded)) for d in drafts]

    def _draft(self, row: Mapping[str, CellText]) -> tuple[dict[str, str], str] | RowError:
        """The row's values and whole prompt text, or why there is none."""
        values: dict[str, str] = {}
        for column, text in row.items():
            if isinstance(text, RowError):
                return text
            values[column] = text
        try:
            return values, self._prompt(values)
        except RowError as error:
            return error

    def _prompt(self, values: Mapping[str, str]) -> str:
        return self._wrapper(self._template.fill(values))

    def _settle(
        self, values: dict[str, str], prompt: str, ids: list[int] | None
    ) -> RenderedPrompt | RowError:
        """Cut and disarm the prompt as needed. `ids`: its tokens, None where it is very long."""
        try:
            for _ in range(4):  # text broken up can, if oddly, hold another control token
                total = self._count(prompt) if ids is None else len(ids)
                kept = self._fit(values, ids, total)
                injected = self._injected(kept)
                if not injected:
                    return RenderedPrompt(kept, total - len(kept))
                values = {column: break_up(text, injected) for column, text in values.items()}
                prompt = self._prompt(values)
                ids = next(self._encode_all([prompt]))
        except RowError as error:
            return error
        return RowError("control_tokens", "the text holds control tokens of the model")

    def _fit(self, values: dict[str, str], ids: list[int] | None, total: int) -> list[int]:
        if total <= self._max_tokens:
            return self._encode([self._prompt(values)])[0] if ids is None else ids
        if self._truncate:
            return self._cut(values)
        problem = f"the prompt has {total} tokens, {self._max_tokens} fit; raise "
        problem += "resources.max_model_len or set decoding.on_too_long=truncate"
        raise RowError("prompt_too_long", problem)

    def _cut(self, values: dict[str, str]) -> list[int]:
        """Token ids with as much of the document's head as fits.

        Only a bounded head of the document is tokenised, a longer one where that fits as a whole
        because the chat template shrinks it.
        """
        document = values[self._document]
        bare = self._encode([self._prompt({**values, self._document: ""})])[0]
        room = self._max_tokens - len(bare)
        best: list[int] | None = None
        needed = room + 1
        while room > 0:
            cuts = self._cuts(document, needed)
            low, best = self._longest_head(values, cuts, room)
            if low < len(cuts) - 1 or len(cuts) < needed:
                break
            needed *= 4
        if best is None:
            problem = (
                f"the prompt without its document has {len(bare)} tokens, {self._max_tokens} fit: "
                "no room for the document; raise resources.max_model_len or shorten the prompt"
            )
            raise RowError("prompt_too_long", problem)
        return best

    def _longest_head(
        self, values: dict[str, str], cuts: list[int], room: int
    ) -> tuple[int, list[int] | None]:
        """The most document tokens that fit, less than all of `cuts`, and the prompt's ids.

        The first guess is nearly right; a few tries correct what changes where the head meets the
        rest of the template.
        """
        best: list[int] | None = None
        uses = self._template.occurrences(self._document)
        low, high, guess = 0, len(cuts), room // uses  # keeping `low` tokens fits, `high` does not
        for attempt in range(32):
            if high - low <= 1:
                break
            guess = min(max(guess, low + 1), high - 1)
            head = values[self._document][: cuts[guess - 1]]
            ids = self._encode([self._prompt({**values, self._document: head})])[0]
            slack = self._max_tokens - len(ids)
            if slack < 0:
                high = guess
            else:
                low, best = guess, ids if head else None
                if slack <= _SLACK_TOKENS:
                    break
            guess = guess + slack // uses if attempt < 8 else (low + high) // 2
        return low, best

    def _cuts(self, document: str, needed: int) -> list[int]:
        """Where the document may be cut: entry k-1 keeps its first k tokens, in characters.

        Covers at least `needed` tokens, or the whole document. Positions are between characters,
        also where a token holds but a part of one.
        """
        chars = needed * 8 + 64
        while True:
            spans = self._spans(document[:chars])
            if len(spans) >= needed or chars >= len(document):
                return [end for _, _, end in spans]
            chars *= 4

    def _encode_all(self, prompts: Sequence[str]) -> Iterator[list[int] | None]:
        """Token ids of each prompt, None for very long ones; memory stays bounded."""
        batch: list[str] = []
        chars = 0
        for prompt in prompts:
            chars += len(prompt)
            very_long = len(prompt) > _CHUNK_CHARS
            if very_long or chars > _BATCH_CHARS:
                yield from self._encode(batch)
                batch, chars = [], len(prompt)
            if very_long:
                yield None
            else:
                batch.append(prompt)
        yield from self._encode(batch)

    def _encode(self, prompts: list[str]) -> list[list[int]]:
        if not prompts:
            return []
        encoded = self._tokenizer(
            prompts,
            add_special_tokens=self._wrapper.add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        """(token id, start, end) in characters, without the tokenizer's own special tokens."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(token, start, end) for token, (start, end) in pairs]

    def _count(self, text: str) -> int:
        """Tokens of a very long text, tokenised once in overlapping pieces.

        In one piece, 20 MB of text would take 3 GB of memory. Two pieces are joined where both
        have a token border followed by the same tokens: what follows a border no longer depends
        on how the piece began.
        """
        total = 0
        if self._wrapper.add_special_tokens:
            total = int(self._tokenizer.num_special_tokens_to_add(pair=False))
        start, first, piece = 0, 0, self._spans(text[:_CHUNK_CHARS])
        while start + _CHUNK_CHARS < len(text):
            step = _CHUNK_CHARS - _OVERLAP_CHARS
            next_piece = self._spans(text[start + step : start + step + _CHUNK_CHARS])
            joint = _joint(piece, next_piece, step)
            if joint is None:  # a text without any borders, such as one endless word
                return len(self._encode([text])[0])
            total += joint[0] - first
            start, first, piece = start + step, joint[1], next_piece
        return total + len(piece) - first

    def _control_in(self, ids: Sequence[int]) -> list[int]:
        control = self._control
        return [token for token in ids if token in control]

    def _injected(self, ids: Sequence[int]) -> list[str]:
        """Control tokens that the row's own text brought in.

        Raises:
            RowError: the row's text changed the prompt's control tokens in another way.
        """
        found = self._control_in(ids)
        if found == self._expected_control:
            return []
        extra = Counter(found) - Counter(self._expected_control)
        if not extra:
            raise RowError("control_tokens", "the text changes the control tokens of the prompt")
        return [self._control[token] for token in extra]


def _joint(
    left: Sequence[tuple[int, int, int]], right: Sequence[tuple[int, int, int]], step: int
) -> tuple[int, int] | None:
    """Token indices (left, right) of a common border; `right` begins `step` characters later."""
    at = {start: i for i, (_, start, _) in reversed(list(enumerate(left))) if start >= step}
    for j, (_, start, _) in enumerate(right):
        i = at.get(start + step)
        if i is None:
            continue
        ours = [token for token, _, _ in left[i : i + _AGREEING_TOKENS]]
        theirs = [token for token, _, _ in right[j : j + _AGREEING_TOKENS]]
        if len(ours) == _AGREEING_TOKENS and ours == theirs:
            return i, j
        if start > _OVERLAP_CHARS:
            return None
    return None
