"""Prompts of encoder-decoder models: the encoder's tokens, and the language that the answer is in.

Each family tells languages in its own way: NLLB, M2M100 and mBART by tokens of both sides, the
multilingual Marian models by a `>>code<<` before the text, T5 in words. The single-pair Marian
models know but one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.cells import CellText, break_up
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages, closest
from pipeline.rendered import RenderedPrompt
from pipeline.templates import DEFAULT_TEMPLATES, Template, parse_template

_LANGUAGE_TOKEN = re.compile(r"__([a-z]{2,3})__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})|>>([A-Za-z_]+)<<")
_REGION = re.compile(r"_(XX|[A-Z]{2})$")  # of mBART's codes; a language is told without


class TranslatorPrompts:
    """As `prompts.PromptRenderer`, for encoder-decoders."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        max_prompt_tokens: int,
        languages: Languages | None = None,
    ) -> None:
        """`max_prompt_tokens`: what the encoder takes.

        Raises:
            ConfigError: the model does not know a language.
        """
        self._tokenizer, self._max_tokens = tokenizer, max_prompt_tokens
        self._truncate = config.on_too_long == "truncate"
        self._document = config.input.text_column
        known = _language_tokens(tokenizer)
        self._source: str | None = None
        self._decoder: tuple[int, ...] = ()
        prefix = ""
        if languages is not None and hasattr(tokenizer, "src_lang"):
            self._source = _code(_pick(known, languages.source, "source"), tokenizer)
            target = _pick(known, languages.target, "target")
            self._decoder = (int(tokenizer.convert_tokens_to_ids(target)),)
        elif languages is not None and known:
            prefix = _pick(known, languages.target, "target") + " "
        self._template = _template(config, languages, tokenizer, prefix)

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns that the template needs, the document's first."""
        return self._template.columns

    def room(self, values: Mapping[str, str]) -> int:
        """Tokens of the document that fit beside the row's other values."""
        return self._max_tokens - len(self._encode({**values, self._document: ""}))

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text by itself."""
        return [len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def render_texts(
        self, rows: Sequence[Mapping[str, CellText]]
    ) -> list[RenderedPrompt | RowError]:
        """The prompts of rows, given as text by column."""
        return [self._render(row) for row in rows]

    def _render(self, row: Mapping[str, CellText]) -> RenderedPrompt | RowError:
        values: dict[str, str] = {}
        for column, text in row.items():
            if isinstance(text, RowError):
                return text
            special = [token for token in self._tokenizer.all_special_tokens if token in text]
            values[column] = break_up(text, special) if special else text
        ids = self._encode(values)
        over = len(ids) - self._max_tokens
        if over > 0 and not self._truncate:
            problem = f"the text has {len(ids)} tokens, {self._max_tokens} fit; set "
            problem += "decoding.on_too_long=split or truncate"
            return RowError("prompt_too_long", problem)
        if over > 0:
            ids = self._encode(values, truncation=True, max_length=self._max_tokens)
        return RenderedPrompt(ids, max(over, 0), self._decoder)

    def _encode(self, values: Mapping[str, str], **options: Any) -> list[int]:
        if self._source is not None:
            self._tokenizer.src_lang = self._source
        ids: list[int] = self._tokenizer(
            self._template.fill(values), return_attention_mask=False, verbose=False, **options
        )["input_ids"]
        return ids


def _template(
    config: RunConfig, languages: Languages | None, tokenizer: Any, prefix: str
) -> Template:
    """The config's template, else the family's; `{text}` for those that need no words."""
    if config.prompt.template is None:
        style = "T5" if type(tokenizer).__name__.startswith("T5") else "plain"
        text = DEFAULT_TEMPLATES.get((config.task, "T5"), "{text}") if style == "T5" else "{text}"
        prompt = config.prompt.model_copy(update={"template": text})
        config = config.model_copy(update={"prompt": prompt})
    template = parse_template(config, "plain", languages)
    (literal, column), *rest = template.pieces
    return Template(((prefix + literal, column), *rest), template.columns)


def _language_tokens(tokenizer: Any) -> dict[str, str]:
    """The tokens that name languages, by BCP 47 code as near as it comes."""
    tokens = list(tokenizer.added_tokens_encoder) + list(getattr(tokenizer, "lang_token_to_id", ()))
    tokens += getattr(tokenizer, "supported_language_codes", ())
    found = {}
    for token in tokens:
        match = _LANGUAGE_TOKEN.fullmatch(token)
        if match:
            code = next(group for group in match.groups() if group)
            found[_REGION.sub("", code).replace("_", "-")] = token
    return found


def _pick(known: Mapping[str, str], code: str | None, side: str) -> str:
    """The token of a language."""
    key = f"prompt.{side}_lang"
    if code is None:
        raise ConfigError(key, "this model must be told the language; set it")
    found = closest(code, known)
    if found is None:
        some = ", ".join(sorted(known)[:12])
        raise ConfigError(key, f"the model does not know {code}; it knows {some}, ...")
    return known[found]


def _code(token: str, tokenizer: Any) -> str:
    """The language as the tokenizer's `src_lang` wants it."""
    return token.strip("_") if hasattr(tokenizer, "lang_code_to_token") else token
