"""Prompt templates: from the columns of a row to the text that is tokenised.

`Template` is the user's text with `{column}` placeholders. A `Wrapper` puts the filled template
into what surrounds it: the model's chat markup, or system text and worked examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages

DOCUMENT = "text"  # `{text}` is the document, whatever its column is called
DEFAULT_TEMPLATES: Mapping[tuple[str, str], str] = {
    ("summarize", "chat"): "Provide a concise, objective summary of the following text in up "
    "to three sentences.\n\n{text}",
    ("summarize", "plain"): "Text: {text}\n\nSummary:",
    ("translate", "chat"): "Translate the following text to {target_language}. Answer with the "
    "translation only.\n\n{text}",
    ("translate", "T5"): "translate {source_language} to {target_language}: {text}",
    ("summarize", "T5"): "summarize: {text}",
    ("translate", "plain"): "{source_language}: {text}\n{target_language}:",
}
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
        told = config.prompt.source_lang_column or config.prompt.template is None
        source = config.prompt.source_lang or ("en" if told else None)
        template = parse_template(config, style, Languages(source, "fr"))
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
    return list(parse_template(config, "chat", Languages("en", "fr")).columns)


def parse_template(config: RunConfig, style: str, languages: Languages | None = None) -> Template:
    """The template of the config, else the task's own for this style.

    Translations have `{source_lang}`, `{target_lang}` (codes) and `{source_language}`,
    `{target_language}` (names) filled in from `languages`.

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
    if config.task == "translate" and languages is not None:
        pieces = _with_languages(pieces, languages)
    columns = tuple(dict.fromkeys(column for _, column in pieces if column is not None))
    if document not in columns:
        raise ConfigError("prompt.template", "lacks the document; add {text}")
    return Template(pieces, (document, *(c for c in columns if c != document)))


def _with_languages(
    pieces: tuple[tuple[str, str | None], ...], languages: Languages
) -> tuple[tuple[str, str | None], ...]:
    """The pieces with the placeholders of languages turned into text."""
    values, filled, text = languages.fields(), [], ""
    for literal, column in pieces:
        text += literal
        if column in values:
            if not values[column]:
                key = f"prompt.{column.partition('_')[0]}_lang"
                raise ConfigError(key, "the prompt's template names the language; set it")
            text += values[column]
        else:
            filled.append((text, column))
            text = ""
    return (*filled, (text, None))


def example_turns(
    config: RunConfig, template: Template, languages: Languages | None = None
) -> list[tuple[str, str]]:
    """The worked examples as (filled template, output); of those that name a language
    (`target_lang`), the ones for this.

    Raises:
        ConfigError: an example lacks a column of the template.
    """
    turns = []
    document = config.input.text_column
    target = languages.target if languages else None
    for i, example in enumerate(config.prompt.few_shot):
        if target and example.get("target_lang", target) != target:
            continue
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


def make_wrapper(
    config: RunConfig,
    tokenizer: Any,
    style: str,
    template: Template,
    languages: Languages | None = None,
) -> Wrapper:
    """What surrounds the user turn in this style.

    Raises:
        ConfigError: the chat template refuses the system turn, examples or arguments.
    """
    examples = example_turns(config, template, languages)
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


def control_tokens(tokenizer: Any, style: str) -> dict[int, str]:
    """Ids that structure a prompt, with their text: a row's text must never produce them.

    The special tokens, and in chat style those other added tokens that the chat template writes.
    The unknown token is none: ordinary text yields it.
    """
    markup = str(tokenizer.get_chat_template()) if style == "chat" else ""
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token_id != tokenizer.unk_token_id
        and (token.special or (token.content in markup and not token.content.isspace()))
    }
