"""The sections of the configuration that bound a run: resources, and what faults it bears."""

from typing import Literal

from pydantic import Field, field_validator

from pipeline.sections import Section


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
    slots: Literal["auto"] | int = Field(
        "auto",
        description="Rows decoded at a time per actor, at most; `auto`: as memory allows, up to 32 "
        "on CPU and 256 on a GPU.",
    )
    step_tokens: Literal["auto"] | int = Field(
        "auto",
        description="Prompt tokens per prefill pass at most; `auto`: 1024 on CPU, 8192 on a GPU.",
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

    @field_validator("slots", "step_tokens")
    @classmethod
    def _at_least_one(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be `auto` or at least 1")
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
    row_attempts: int = Field(
        2,
        ge=1,
        description="Times that a row, generated alone, may end its actor before it becomes an "
        "`error`; two deaths together with others come first.",
    )
    row_timeout_s: float | None = Field(
        None, gt=0, description="Seconds of generation per row; then `timeout`, text kept."
    )
