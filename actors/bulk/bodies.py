"""Request bodies: what is understood, what only its neutral value is accepted of, what is refused.

Nothing is ignored silently: an unknown field is an error, and so is a field that we know but do not
do, unless its value asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from actors.bulk.errors import ApiError, invalid

Task = Literal["summarize", "translate"]
Text = Annotated[str, StringConstraints(min_length=1)]
_MAX_PROMPTS = 64

# What OpenAI's API also has, and the values of it that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
}
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # about the client only


class Body(BaseModel):
    """Base of all bodies: fields of the wrong type are errors, and so are unknown ones."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class Settings(Body):
    """What chat and completions share."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions, as vLLM has them
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    # Our own
    task: Task | None = None
    source_lang: Text | None = None
    target_lang: Text | None = None
    method: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for name, neutral in _NEUTRAL.items():
            if name in kept and name not in cls.model_fields:
                value = kept.pop(name)
                if value is not None and not any(
                    value == one and isinstance(value, bool) == isinstance(one, bool)
                    for one in neutral
                ):
                    raise ValueError(f"{name}: not supported here; leave it out")
        for name in _LABELS:
            kept.pop(name, None)
        return kept

    @model_validator(mode="after")
    def _languages_go_with_translate(self) -> "Settings":
        for name in ("source_lang", "target_lang"):
            if getattr(self, name) is not None and self.task != "translate":
                raise ValueError(f"{name}: goes with task: translate")
        if self.task == "translate" and self.target_lang is None:
            raise ValueError("target_lang: translate needs it, a code such as `de`")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: goes with stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...] | None:
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatBody(Settings):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _a_document_alone(self) -> "ChatBody":
        users = [m for m in self.messages if m.role == "user"]
        if self.task is not None and (len(users) != 1 or len(self.messages) != 1):
            raise ValueError(f"messages: task {self.task} takes one user message, the document")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(Settings):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, one or more."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return list(prompt)


BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


def parse_body(url: str, body: Any) -> ChatBody | CompletionBody:
    """A body of a batch's line.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return BODIES[url].model_validate(body)
    except ValidationError as error:
        raise first_problem(error.errors(include_url=False)) from None


def first_problem(problems: list[Any], skip: int = 0) -> ApiError:
    """The first of pydantic's problems; `skip`: leading parts of its place that are not ours."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"][skip:]]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        name = ".".join(place)
        return invalid(f"Unknown parameter: {name[:200]!r}", name[:200], "unknown_parameter")
    if problem["type"] == "value_error" and ": " in message:
        name, _, rest = message.partition(": ")
        return invalid(f"{name}: {rest}", ".".join([*place, name]), "unsupported_value")
    if problem["type"] == "missing":
        return invalid(f"{'.'.join(place)} is required", ".".join(place), "missing_parameter")
    where = ".".join(place)[:200] or None
    return invalid(f"{where}: {message}" if where else message, where, "invalid_value")
