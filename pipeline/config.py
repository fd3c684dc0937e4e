"""The run configuration: the sections together, YAML files, `--set` overrides.

Precedence: defaults < files in order < `--set`. A wrong key or value is a `ConfigError` of one line
that names the dotted key and the remedy.
"""

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from pipeline.endpoint import ServeConfig
from pipeline.errors import ConfigError
from pipeline.limits import FaultsConfig, ResourcesConfig
from pipeline.sections import (
    DecodingConfig,
    InputConfig,
    Method,
    ModelConfig,
    OutputConfig,
    PromptConfig,
    Section,
)

__all__ = ["DecodingConfig", "Method", "RunConfig", "Task", "dump_yaml", "load_config"]

Task = Literal["summarize", "translate"]
DEFAULT_TEXT_COLUMN: Mapping[str, str] = {"summarize": "summary", "translate": "translation"}
# What `decoding.on_too_long: auto` means, and what deals with long documents piece by piece.
_LONG_DOCUMENTS = {"summarize": ("truncate", "map_reduce"), "translate": ("split", "split")}


_SECRET = re.compile("secret|token|password|credential", re.IGNORECASE)

DRAFTER_OF = {
    "draft_model": "a smaller model with the target's tokenizer",
    "mtp_drafter": "the target's own assistant, which attends to its K and V",
    "universal": "a smaller model, of whatever tokenizer",
}


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
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> "RunConfig":
        limit = self.resources.max_model_len
        if isinstance(limit, int) and self.decoding.max_new_tokens >= limit:
            raise ValueError(
                f"decoding.max_new_tokens: {self.decoding.max_new_tokens} leaves no room for a "
                f"prompt in resources.max_model_len={limit}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _method_can_draft(self) -> "RunConfig":
        method = self.decoding.method
        kind = DRAFTER_OF.get(method)
        if kind is not None and self.model.drafter is None:
            raise ValueError(
                f"model.drafter: {method} needs it; name {kind}, or use "
                "decoding.method=prompt_lookup"
            )
        if self.decoding.engine == "transformers" and method not in ("plain", "prompt_lookup"):
            raise ValueError(
                f"decoding.engine: transformers does not draft with {method}; use engine: batched"
            )
        return self

    @model_validator(mode="after")
    def _long_documents(self) -> "RunConfig":
        given, theirs = self.decoding.on_too_long, _LONG_DOCUMENTS
        other = "map_reduce" if self.task == "translate" else "split"
        if given == other:
            raise ValueError(
                f"decoding.on_too_long: {given} does not go with jobs/{self.task}.py; use "
                f"{theirs[self.task][1]}"
            )
        return self

    @model_validator(mode="after")
    def _languages_told(self) -> "RunConfig":
        prompt = self.prompt
        if self.task != "translate":
            return self
        if not prompt.target_langs and not prompt.target_lang_column:
            raise ValueError(
                "prompt.target_lang: translations need it; give a code such as fr, or "
                "prompt.target_lang_column"
            )
        for side in ("source", "target"):
            if getattr(prompt, f"{side}_lang") and getattr(prompt, f"{side}_lang_column"):
                raise ValueError(
                    f"prompt.{side}_lang_column: prompt.{side}_lang is given too; leave out one"
                )
        return self

    @property
    def on_too_long(self) -> str:
        """`decoding.on_too_long` with `auto` resolved."""
        given = self.decoding.on_too_long
        return _LONG_DOCUMENTS[self.task][0] if given == "auto" else given

    @property
    def text_columns(self) -> list[str]:
        """Names of the result columns in the output: one, or one for each of several languages."""
        name = self.output.text_column or DEFAULT_TEXT_COLUMN[self.task]
        if self.task != "translate" or not isinstance(self.prompt.target_lang, list):
            return [name]
        return [f"{name}_{code.replace('-', '_')}" for code in self.prompt.target_langs]

    @property
    def reference_columns(self) -> list[str]:
        """Input columns with the right answers, one for each text column; or none."""
        column = self.input.reference_column
        if column is None:
            return []
        codes = self.prompt.target_langs or [""]
        return [column.replace("{target_lang}", code) for code in codes]

    @property
    def kept(self) -> list[str]:
        """Input columns copied to the output."""
        return list(dict.fromkeys([*self.input.kept, *self.reference_columns]))


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


def load_endpoint_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> RunConfig:
    """As `load_config`, of an endpoint: its input are requests.

    Raises:
        ConfigError: as `load_config`.
    """
    return load_config(files, ["input.path=(requests)", *overrides], task="summarize")


def dump_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that `--config` accepts again, secrets of stores apart."""
    dumped = config.model_dump(mode="json")
    for section in ("input", "output"):
        dumped[section]["storage_options"] = _masked(dumped[section]["storage_options"])
    return yaml.safe_dump(dumped, sort_keys=False, allow_unicode=True)


def _masked(options: Any) -> Any:
    if not isinstance(options, dict):
        return options
    return {k: "***" if _SECRET.search(str(k)) else _masked(v) for k, v in options.items()}


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
    if isinstance(problem.get("input"), dict) and problem["type"] == "value_error":
        key, _, message = message.partition(": ")  # a check over several keys names its own
        return ConfigError(".".join([*location, key]), message)
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
