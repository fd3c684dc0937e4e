"""The run configuration: pydantic models, YAML files, `--set` overrides.

Precedence: defaults < files in order < `--set`. A wrong key or value is a `ConfigError` of one line
that names the dotted key and the remedy. Every field's description is the config reference.
"""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.errors import ConfigError

Task = Literal["summarize", "translate"]
Method = Literal["plain", "prompt_lookup", "draft_model"]
DEFAULT_TEXT_COLUMN: Mapping[str, str] = {"summarize": "summary", "translate": "translation"}


class Section(BaseModel):
    """Base of all sections: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PromptConfig(Section):
    template: str | None = Field(
        None,
        description="Text of the user turn, with input columns as `{column}`; `{text}` is the "
        "document. Unset: the task's own template.",
    )
    system: str | None = Field(None, description="System turn of chat models; unset: none.")
    style: Literal["auto", "chat", "plain"] = Field(
        "auto",
        description="`chat` goes through the tokenizer's chat template, `plain` does not; `auto` "
        "is chat where the tokenizer has a template.",
    )
    few_shot: list[dict[str, str]] = Field(
        [],
        description="Worked examples before the row: the template's columns and `output` for each.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Extra arguments of the chat template, such as `enable_thinking: false`."
    )

    @field_validator("few_shot")
    @classmethod
    def _examples_have_output(cls, examples: list[dict[str, str]]) -> list[dict[str, str]]:
        for i, example in enumerate(examples):
            if "output" not in example:
                raise ValueError(f"example {i} has no `output`; add it")
        return examples


class InputConfig(Section):
    path: str = Field(description="Parquet file, folder (searched recursively) or glob.")
    format: Literal["parquet"] = Field("parquet", description="Format of the input files.")
    text_column: str = Field("text", description="Column with the document.")
    id_column: str | None = Field(
        None, description="Your row id: carried to the output, never used to resume."
    )
    keep_columns: list[str] | None = Field(
        None, description="Columns copied to the output. Unset: the id column if given, else none."
    )
    max_rows: int | None = Field(None, ge=1, description="Take only the first rows of the corpus.")
    unit_rows: Literal["auto"] | int = Field(
        "auto",
        description="Rows per unit of work and commit; `auto`: rows / (32 x actors), 1 to 512.",
    )
    storage_options: dict[str, Any] = Field({}, description="fsspec options of the input store.")

    @field_validator("unit_rows")
    @classmethod
    def _unit_rows_positive(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be `auto` or at least 1")
        return value

    @property
    def kept(self) -> list[str]:
        """Columns copied to the output."""
        if self.keep_columns is not None:
            return list(dict.fromkeys(self.keep_columns))
        return [self.id_column] if self.id_column else []


class OutputConfig(Section):
    path: str = Field(description="Folder of the results; working files live in its `_run/`.")
    text_column: str | None = Field(
        None, description="Name of the result column. Unset: `summary` or `translation`."
    )
    rows_per_file: int = Field(
        50_000, ge=1, description="Consecutive rows of one input file per output file."
    )
    storage_options: dict[str, Any] = Field({}, description="fsspec options of the output store.")


class ModelConfig(Section):
    target: str = Field(description="Hub id, local folder, GGUF file, or `demo:smollm2`.")
    revision: str | None = Field(None, description="Hub revision of the target.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="`auto`: bfloat16 on CUDA and on CPUs that compute in it, else float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto`: cuda where actors get a GPU, else cpu."
    )


class DecodingConfig(Section):
    engine: Literal["auto", "transformers"] = Field(
        "auto", description="`transformers`: row by row through `model.generate()`."
    )
    method: Method = Field("prompt_lookup", description="Where draft tokens come from.")
    num_draft_tokens: int = Field(
        10, ge=1, le=256, description="Draft tokens per verification at most."
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding.")
    top_k: int | None = Field(None, ge=1, description="Sample among the k most probable tokens.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    min_p: float | None = Field(None, ge=0, le=1, description="Floor relative to the best token.")
    repetition_penalty: float = Field(
        1.0, gt=0, description="As in transformers: over prompt and completion; 1 is none."
    )
    banned_tokens: list[int] = Field([], description="Token ids that are never generated.")
    max_new_tokens: int = Field(256, ge=1, description="Completion length at most, in tokens.")
    stop: list[str] = Field(
        [], description="Strings that end a completion; the text ends before them."
    )
    seed: int = Field(0, ge=0, description="Seed of sampling; a row's output depends on it alone.")
    on_too_long: Literal["truncate", "error"] = Field(
        "truncate", description="Prompt too long: cut the document, or make the row an error."
    )

    @field_validator("method", mode="before")
    @classmethod
    def _known_but_absent(cls, value: Any) -> Any:
        planned = ("draft_model", "early_exit", "mtp", "mtp_drafter", "universal", "auto")
        if value in planned:
            raise ValueError(f"{value} is not available yet; use plain or prompt_lookup")
        return value

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: list[str]) -> list[str]:
        if any(not s for s in value):
            raise ValueError("an empty stop string would end every completion; remove it")
        return value


class ResourcesConfig(Section):
    num_actors: int = Field(1, ge=1, description="Generation actors, each with its own model.")
    num_gpus: Literal["auto"] | float = Field(
        "auto", description="GPUs per actor; `auto`: 1 where the cluster has GPUs, else 0."
    )
    num_cpus: Literal["auto"] | float = Field(
        "auto",
        description="CPUs per actor; `auto`: cores / actors - 0.5, so that read and write tasks "
        "always find room (1 on GPU actors).",
    )
    max_model_len: Literal["auto"] | int = Field(
        "auto", description="Prompt and completion at most, in tokens; `auto`: the model's limit."
    )

    @field_validator("num_gpus", "num_cpus")
    @classmethod
    def _not_negative(cls, value: str | float) -> str | float:
        if isinstance(value, float) and value < 0:
            raise ValueError("must be `auto`, 0 or more")
        return value

    @field_validator("max_model_len")
    @classmethod
    def _room_for_a_token(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 2:
            raise ValueError("must be `auto` or at least 2")
        return value


class FaultsConfig(Section):
    max_error_rate: float = Field(
        0.05, ge=0, le=1, description="Share of rows that may end in `error` before exit code 3."
    )
    row_timeout_s: float | None = Field(
        None, gt=0, description="Seconds of generation per row; then `timeout`, text kept."
    )


class RunConfig(Section):
    """A complete run. `task` is set by the job that loads the file."""

    task: Task = Field("summarize", description="Set by the job.")
    prompt: PromptConfig = PromptConfig()
    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    decoding: DecodingConfig = DecodingConfig()
    resources: ResourcesConfig = ResourcesConfig()
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> "RunConfig":
        limit = self.resources.max_model_len
        if isinstance(limit, int) and self.decoding.max_new_tokens >= limit:
            raise ValueError(
                f"decoding.max_new_tokens: {self.decoding.max_new_tokens} leaves no room for a "
                f"prompt in resources.max_model_len={limit}; lower it"
            )
        return self

    @property
    def text_column(self) -> str:
        """Name of the result column in the output."""
        return self.output.text_column or DEFAULT_TEXT_COLUMN[self.task]


def load_config(
    files: Sequence[str | Path], overrides: Iterable[str] = (), *, task: Task
) -> RunConfig:
    """Merge YAML files and `a.b=value` overrides over the defaults.

    Raises:
        ConfigError: naming the file or the dotted key, and the remedy.
    """
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, _read_yaml(Path(file)))
    for override in overrides:
        _merge(merged, _parse_override(override))
    if merged.setdefault("task", task) != task:
        raise ConfigError("task", f"the file is for {merged['task']!r}; run its own job instead")
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise _first_problem(error) from None


def dump_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that `--config` accepts again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("--config", f"no file {path}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError("--config", f"{path} is not valid YAML: {line}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path} holds no mapping; write `section:` and keys below")
    return {key: value for key, value in content.items() if value is not None}  # empty sections


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError("--set", f"{text!r} is not of the form section.key=value")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(key, f"{value!r} is not valid YAML; quote it") from None
    for part in reversed(parts):
        parsed = {part: parsed}
    nested: dict[str, Any] = parsed
    return nested


def _merge(base: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _first_problem(error: ValidationError) -> ConfigError:
    """One line for the first problem; a union reports each branch, the last names the value."""
    problem = error.errors(include_url=False)[0]
    location = [str(part) for part in problem["loc"]]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return ConfigError(".".join(location), "unknown key; " + _suggest(location))
    if problem["type"] == "missing":
        if len(location) == 1:  # a whole section: name the key that it must hold
            section = _section_type(RunConfig.model_fields[location[0]].annotation) or RunConfig
            location += [name for name, f in section.model_fields.items() if f.is_required()][:1]
        return ConfigError(".".join(location), "is required; set it in the config or with --set")
    message = problem["msg"].removeprefix("Value error, ")
    location = _without_union_branch(location)
    if not location:  # a check over several sections names its own key
        key, _, message = message.partition(": ")
        return ConfigError(key, message)
    depth = len(location)
    same = [p["msg"] for p in error.errors() if [str(x) for x in p["loc"][:depth]] == location]
    message = " or ".join(dict.fromkeys(m.removeprefix("Value error, ") for m in same))
    given = problem.get("input")
    shown = "" if isinstance(given, dict) else f" (got {given!r})"
    return ConfigError(".".join(location), message[:1].lower() + message[1:] + shown)


def _without_union_branch(location: list[str]) -> list[str]:
    """Drop the tail that names a branch of a union, which is no key of the config."""
    kept: list[str] = []
    section: type[BaseModel] | None = RunConfig
    for part in location:
        if section is None or part not in section.model_fields:
            break
        kept.append(part)
        section = _section_type(section.model_fields[part].annotation)
    return kept


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        return next((t for a in get_args(annotation) if (t := _section_type(a))), None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _suggest(location: list[str]) -> str:
    """`did you mean ...?` or the section's keys."""
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        section = _section_type(section.model_fields[part].annotation) or section
    known = list(section.model_fields)
    close = difflib.get_close_matches(location[-1], known, n=1)
    prefix = ".".join(location[:-1])
    if close:
        return f"did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    return f"known keys: {', '.join(known)}"
