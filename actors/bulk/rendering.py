"""From a request to tokens and sampling: chats, bare prompts, and documents of the jobs' tasks.

Used by replicas for interactive requests and by the prompt stage of batches, so that both give the
same text; only a document to translate is one prompt here and, as in the job, several there.
"""

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from actors.bulk.bodies import ChatBody, CompletionBody, Settings
from actors.bulk.errors import ApiError, invalid, row_error
from pipeline.cells import break_up, text_of
from pipeline.config import RunConfig
from pipeline.decoding.choosing import params_of
from pipeline.documents import DocumentRenderer
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages
from pipeline.prompts import PromptRenderer
from pipeline.records import SamplingParams
from pipeline.rendered import Piece
from pipeline.templates import control_tokens


@dataclass(frozen=True)
class Prompt:
    """A request's prompt, ready for an engine."""

    token_ids: list[int]
    sampling: SamplingParams
    truncated_prompt_tokens: int = 0


class RequestRenderer:
    """Renders the requests of one model."""

    def __init__(self, config: RunConfig, tokenizer: Any, max_model_len: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._sampling = params_of(config.decoding, config.faults.row_timeout_s)
        style = "chat" if tokenizer.chat_template else "plain"
        self._control = list(control_tokens(tokenizer, style).values())
        self._tasks: dict[tuple[str | None, ...], _Task] = {}

    def render(self, body: ChatBody | CompletionBody) -> list[Prompt]:
        """The prompts of a request: one for a chat, one or more for completions.

        Raises:
            ApiError: the request cannot be done, with the status to tell.
        """
        sampling = self._row_sampling(body)
        if body.task is not None:
            return [self._document(body, text, sampling) for text in _documents(body)]
        if isinstance(body, ChatBody):
            return [self._fitting(self._chat(body), body, sampling)]
        tokens = [self._bare(prompt) for prompt in body.prompts]
        return [self._fitting(ids, body, sampling) for ids in tokens]

    def pieces(self, body: ChatBody | CompletionBody) -> tuple[list[Piece], SamplingParams] | None:
        """The document of a line in a batch as the job splits it; None of other requests.

        Raises:
            ApiError: as of `render`.
        """
        if body.task != "translate" or len(documents := _documents(body)) > 1:
            return None
        sampling = self._row_sampling(body)
        task = self._task(body, sampling)
        column, limit = self._config.input.text_column, {"max_new_tokens": sampling.max_new_tokens}
        decoding = task.config.decoding.model_copy(update=limit)
        config = task.config.model_copy(update={"decoding": decoding})
        values = dict.fromkeys(task.prompts.columns, "")
        try:
            text = text_of(documents[0], column, True)
            if isinstance(text, RowError):
                raise text
            values[column] = text
            renderer = DocumentRenderer(config, lambda _: task.prompts)
            return renderer.pieces(values, task.languages), sampling
        except RowError as error:
            raise row_error(error.error_type, str(error)) from None

    def _row_sampling(self, body: Settings) -> SamplingParams:
        given: dict[str, Any] = {
            "max_new_tokens": body.token_limit,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "stop": body.stops,
        }
        sampling = replace(self._sampling, **{k: v for k, v in given.items() if v is not None})
        if body.seed is not None:  # then the text depends on prompt and seed alone
            sampling = replace(sampling, seed=body.seed, noise_row="")
        if body.method is None or body.method == self._config.decoding.method:
            return sampling
        if body.method == "plain":
            return replace(sampling, num_draft_tokens=0)
        known = dict.fromkeys([self._config.decoding.method, "plain"])
        raise invalid(
            f"method: {body.method!r} is not loaded here; this endpoint has {', '.join(known)}",
            "method",
            "unsupported_value",
        )

    def _chat(self, body: ChatBody) -> list[int]:
        if not self._tokenizer.chat_template:
            problem = "This model has no chat template; use /v1/completions."
            raise invalid(problem, "messages", "no_chat_template")
        messages = [
            {"role": "system" if m.role == "developer" else m.role, "content": self._tame(m.text)}
            for m in body.messages
        ]
        kwargs = self._config.prompt.chat_template_kwargs
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except Exception as error:  # the template is a program of the model's author
            reason = " ".join(str(error).split()) or type(error).__name__
            raise invalid(f"the chat template refuses it: {reason}", "messages") from None
        return self._encode(text, add_special_tokens=False)

    def _bare(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return self._encode(self._tame(prompt), add_special_tokens=True)

    def _tame(self, text: str) -> str:
        """The text with the model's control tokens broken up, so that it stays mere text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid("the text has a lone surrogate", code="invalid_utf8") from None
        found = [token for token in self._control if token in text]
        return break_up(text, found) if found else text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _fitting(self, ids: list[int], body: Settings, sampling: SamplingParams) -> Prompt:
        wanted = body.token_limit or 1
        if len(ids) + wanted > self._max_model_len:
            raise invalid(
                f"This model's maximum context length is {self._max_model_len} tokens; the prompt "
                f"has {len(ids)} and {wanted} are asked for.",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        return Prompt(ids, sampling)

    def _document(self, body: Settings, text: str, sampling: SamplingParams) -> Prompt:
        try:
            row = {self._config.input.text_column: text}
            found = self._task(body, sampling).prompts.render(row)
        except RowError as error:
            raise row_error(error.error_type, str(error)) from None
        return Prompt(found.token_ids, sampling, found.truncated_prompt_tokens)

    def _task(self, body: Settings, sampling: SamplingParams) -> "_Task":
        room = self._max_model_len - sampling.max_new_tokens
        if room < 1:
            problem = f"max_tokens: {sampling.max_new_tokens} leaves no room for the document"
            raise invalid(problem, "max_tokens", "context_length_exceeded")
        key = (body.task, body.source_lang, body.target_lang, str(room))
        if key not in self._tasks:
            if len(self._tasks) > 64:  # clients choose the keys
                self._tasks.clear()
            try:
                config = task_config(self._config, body.task, body.source_lang, body.target_lang)
                languages = None
                if body.task == "translate":
                    languages = Languages(body.source_lang, body.target_lang)
                prompts = PromptRenderer(config, self._tokenizer, room, languages)
            except ValidationError as error:
                problem = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
                raise invalid(f"task: {problem}", "task", "unsupported_value") from None
            except ConfigError as error:
                raise invalid(f"task: {error}", "task", "unsupported_value") from None
            self._tasks[key] = _Task(config, languages, prompts)
        return self._tasks[key]


@dataclass(frozen=True)
class _Task:
    """A task in its languages, with room for prompts of a certain length."""

    config: RunConfig
    languages: Languages | None
    prompts: PromptRenderer


def task_config(
    config: RunConfig, task: str | None, source_lang: str | None, target_lang: str | None
) -> RunConfig:
    """The endpoint's config for another task or other languages.

    Raises:
        ValidationError: a language is none, or the config does not go with the task.
    """
    values = config.model_dump()
    values["prompt"] |= {"source_lang": source_lang, "target_lang": target_lang}
    return RunConfig.model_validate(values | {"task": task})


def _documents(body: ChatBody | CompletionBody) -> list[str]:
    if isinstance(body, ChatBody):
        return [body.messages[0].text]
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if len(texts) < len(body.prompts):
        raise ApiError(400, "prompt: a document is text, not tokens", "invalid_value", "prompt")
    return texts
