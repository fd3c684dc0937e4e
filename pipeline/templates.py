"""Prompt templates: from the columns of a row to the text that is tokenised.

Three layers. Cells are read as text, or as the reason why they are none. `Template` is the user's
text with `{column}` placeholders. A `Wrapper` puts the filled template into what surrounds it: the
model's chat markup, or system text and worked examples.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RowError

DOCUMENT = "text"  # `{text}` is the document, whatever its column is called
DEFAULT_TEMPLATES: Mapping[tuple[str, str], str] = {
    ("summarize", "chat"): "Provide a concise, objective summary of the following text in up "
    "to three sentences.\n\n{text}",
    ("summarize", "plain"): "Text: {text}\n\nSummary:",
}
BLANK = "blank"  # error type of a row without text: it is skipped, which is no error
CellText = str | RowError
# White space and what shows nothing: control and format characters such as ZWSP, BOM, NUL.
_INVISIBLE = "".join(
    c
    for c in map(chr, [*range(0x3001), 0xFEFF])
    if c.isspace() or unicodedata.category(c) in "CcCf"
)
_SENTINEL = "DraftmillUserTurn"
_PROBES = (
    " lead and trail \n",
    "\n\n\tindented\r\n a\u00a0\u3000\u2028b\u00a0",
    '{{ x }} {% if y %} <b>&amp; "quoted" \\n',
    "E\u0301 \u65e5\u672c\u8a9e \U0001f600 a\n\n\nb  c",
)


@dataclass(frozen=True)
class Template:
    """A parsed template: literal text, each piece followed by a column (None at the end)."""

    pieces: tuple[tuple[str, str | None], ...]
    columns: tuple[str, ...]  # in order of first use, the document first

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with the row's values; what a value contains is never read as a placeholder."""
        return "".join(
            literal if column is None else literal + values[column]
            for literal, column in self.pieces
        )

    def occurrences(self, column: str) -> int:
        return sum(name == column for _, name in self.pieces)


def check_template(config: RunConfig, columns: Sequence[str]) -> None:
    """Check template and worked examples against the input's columns; needs no tokenizer.

    Raises:
        ConfigError: naming `prompt.template`, `prompt.few_shot` or `input.text_column`.
    """
    known = ", ".join(columns)
    if config.input.text_column not in columns:
        problem = f"the input has no column {config.input.text_column!r}; it has: {known}"
        raise ConfigError("input.text_column", problem)
    for style in ("chat", "plain") if config.prompt.template is None else ("chat",):
        template = parse_template(config, style)
        for column in template.columns:
            if column not in columns:
                problem = f"the input has no column {column!r}; it has: {known}"
                raise ConfigError("prompt.template", problem)
        example_turns(config, template)


def template_columns(config: RunConfig) -> list[str]:
    """Input columns that the template needs, the document's first.

    Raises:
        ConfigError: the template cannot be parsed.
    """
    return list(parse_template(config, "chat").columns)


def parse_template(config: RunConfig, style: str) -> Template:
    """The template of the config, else the task's own for this style.

    Raises:
        ConfigError: `prompt.template` is malformed, lacks the document, or the task has none.
    """
    text = config.prompt.template
    if text is None:
        text = DEFAULT_TEMPLATES.get((config.task, style))
    if text is None:
        problem = f"task {config.task} has no template of its own; set one that contains {{text}}"
        raise ConfigError("prompt.template", problem)
    document = config.input.text_column
    pieces = _parse(text, document)
    columns = tuple(dict.fromkeys(column for _, column in pieces if column is not None))
    if document not in columns:
        raise ConfigError("prompt.template", "lacks the document; add {text}")
    return Template(pieces, (document, *(c for c in columns if c != document)))


def example_turns(config: RunConfig, template: Template) -> list[tuple[str, str]]:
    """The worked examples as (filled template, output).

    Raises:
        ConfigError: an example lacks a column of the template.
    """
    turns = []
    document = config.input.text_column
    for i, example in enumerate(config.prompt.few_shot):
        values = dict(example)
        if DOCUMENT in example:
            values[document] = example[DOCUMENT]
        lacking = [c for c in template.columns if c not in values]
        if lacking:
            names = ", ".join(DOCUMENT if c == document else c for c in lacking)
            problem = f"example {i} lacks {names}; give it the template's columns and `output`"
            raise ConfigError("prompt.few_shot", problem)
        turns.append((template.fill(values), example["output"]))
    return turns


def _parse(text: str, document: str) -> tuple[tuple[str, str | None], ...]:
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        problem = f"{str(error).lower()}; write {{{{ and }}}} for braces that are text"
        raise ConfigError("prompt.template", problem) from None
    pieces: list[tuple[str, str | None]] = []
    for literal, field, spec, conversion in parsed:
        if field is not None:
            _check_placeholder(field, spec, conversion)
        pieces.append((literal, document if field == DOCUMENT else field))
    return tuple(pieces)


def _check_placeholder(field: str, spec: str | None, conversion: str | None) -> None:
    """Only plain column names: anything more would run code or formats on a row's values."""
    if not field or field.isdigit():
        problem = f"{{{field}}} names no column; write {{text}} or another column's name"
    elif spec or conversion or any(c in field for c in ".[]{}"):
        problem = (
            f"placeholder {field!r} is more than a column's name; "
            "use {column} alone, and {{ and }} for braces that are text"
        )
    else:
        return
    raise ConfigError("prompt.template", problem)


@dataclass(frozen=True)
class Splice:
    """Constant text around the user turn: chat markup rendered once, or plain text."""

    before: str
    after: str
    trim: bool  # the chat template strips the user turn
    add_special_tokens: bool  # whether the tokenizer still adds its own, such as BOS

    def __call__(self, user_turn: str) -> str:
        return self.before + (user_turn.strip() if self.trim else user_turn) + self.after


@dataclass(frozen=True)
class ChatTurns:
    """The chat template run for each row: the path of templates that do more than insert."""

    tokenizer: Any
    messages: tuple[Mapping[str, str], ...]
    kwargs: Mapping[str, Any]
    add_special_tokens: bool = False

    def __call__(self, user_turn: str) -> str:
        """Raises RowError where the chat template refuses the row's text."""
        messages = [*self.messages, {"role": "user", "content": user_turn}]
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.kwargs
            )
        except Exception as error:  # the template is a program of the model's author
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"the chat template refuses the row: {reason}"
            raise RowError("chat_template", problem) from None
        return text


Wrapper = Splice | ChatTurns  # text of the whole prompt from the filled template


def prompt_style(config: RunConfig, tokenizer: Any) -> str:
    """`chat` or `plain`, with `auto` resolved.

    Raises:
        ConfigError: `chat` is asked for and the tokenizer has no chat template.
    """
    style = config.prompt.style
    if style == "auto":
        return "chat" if tokenizer.chat_template else "plain"
    if style == "chat" and not tokenizer.chat_template:
        problem = "the tokenizer of model.target has no chat template; use plain or auto"
        raise ConfigError("prompt.style", problem)
    return style


def make_wrapper(config: RunConfig, tokenizer: Any, style: str, template: Template) -> Wrapper:
    """What surrounds the user turn in this style.

    Raises:
        ConfigError: the chat template refuses the system turn, examples or arguments.
    """
    examples = example_turns(config, template)
    if style == "plain":
        return _plain(config.prompt.system, examples)
    messages = [{"role": "system", "content": config.prompt.system}] if config.prompt.system else []
    for user, output in examples:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": output})
    kwargs = config.prompt.chat_template_kwargs
    per_row = ChatTurns(tokenizer, tuple(messages), kwargs)
    return _spliced(per_row) or per_row


def _plain(system: str | None, examples: Sequence[tuple[str, str]]) -> Splice:
    blocks = [system] if system else []
    for user, output in examples:
        gap = "" if user[-1:].isspace() else " "
        blocks.append(user + gap + output)
    return Splice("".join(b.rstrip("\n") + "\n\n" for b in blocks), "", False, True)


def _spliced(chat: ChatTurns) -> Splice | None:
    """The chat template rendered once, if it does no more than insert (or strip) the user turn.

    Jinja for each row costs as much as the tokenizer. Probes decide, so that a template which
    rewrites its messages is never shortened.
    """
    try:
        rendered = chat(_SENTINEL)
    except RowError as error:
        problem = f"{error}; check prompt.system and chat_template_kwargs, or use plain"
        raise ConfigError("prompt.style", problem.replace(" the row", "")) from None
    before, found, after = rendered.partition(_SENTINEL)
    if not found or _SENTINEL in after:
        return None
    for trim in (False, True):
        splice = Splice(before, after, trim, chat.add_special_tokens)
        if all(_agrees(chat, splice, probe) for probe in _PROBES):
            return splice
    return None


def _agrees(chat: ChatTurns, splice: Splice, probe: str) -> bool:
    try:
        return chat(probe) == splice(probe)
    except RowError:
        return False


def column_texts(column: pa.ChunkedArray, name: str, is_document: bool) -> list[CellText]:
    """One text per row of a column of any type.

    Parquet strings can hold invalid UTF-8, which Arrow does not check on reading: each value is
    decoded by itself, so that a bad one does not spoil its neighbours.
    """
    if isinstance(column.type, pa.BaseExtensionType) and _is_text(column.type.storage_type):
        storage = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(storage, column.type.storage_type)
    if pat.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_text(column.type):
        values = column.cast(pa.large_binary()).to_pylist()
    elif is_document or pat.is_nested(column.type):
        values = [
            _not_text(name, column.type) if v else None for v in column.is_valid().to_pylist()
        ]
    else:
        values = _plain_values(column)
    return [text_of(value, name, is_document) for value in values]


def text_of(value: Any, name: str, is_document: bool) -> CellText:
    """A cell as text. Null is "" in a column, and like empty or blank text no document at all."""
    if isinstance(value, RowError):
        return value
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"column {name!r} is not valid UTF-8 at byte {error.start}"
            return RowError("invalid_utf8", problem)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"column {name!r} has a lone surrogate at character {error.start}"
            return RowError("invalid_utf8", problem)
    elif value is not None and (is_document or isinstance(value, list | tuple | dict)):
        return _not_text(name, type(value).__name__)
    text = "" if value is None else str(value)
    if is_document and not text.strip(_INVISIBLE):
        return RowError(BLANK, f"column {name!r} has no text")
    return text


def break_up(text: str, tokens: Sequence[str]) -> str:
    """The text with a space inside each of the tokens, so that it reads as ordinary text.

    A space, not an invisible character: normalizers of some tokenizers drop those.
    """
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.sub(pattern, lambda m: f"{m[0][:1]} {m[0][1:]}" if len(m[0]) > 1 else " ", text)


def _is_text(kind: pa.DataType) -> bool:
    checks = [
        *(pat.is_string, pat.is_large_string, pat.is_string_view),
        *(pat.is_binary, pat.is_large_binary, pat.is_binary_view, pat.is_fixed_size_binary),
    ]
    return any(check(kind) for check in checks)


def _plain_values(column: pa.ChunkedArray) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):  # a date or time beyond what Python has
        values = column.cast(pa.string()).to_pylist()
    return values


def _not_text(name: str, kind: Any) -> RowError:
    return RowError("not_text", f"column {name!r} is of type {kind}, not text")
