"""What crosses the borders between rooms: requests, completions and the Arrow schemas.

Schemas are fixed and explicit, never inferred: a column of nothing but nulls keeps its type.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Literal

import pyarrow as pa

from pipeline.errors import ConfigError
from pipeline.steptable import StepTable

Status = Literal["ok", "error", "timeout", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "error", "timeout", "skipped")
FAILED: tuple[Status, ...] = ("error", "timeout")  # what --retry-failed generates anew
FinishReason = Literal["stop", "length"]
SpeedupBasis = Literal["control_steps", "none"]


@dataclass(frozen=True)
class SamplingParams:
    """How one row is decoded. Names and meaning as in transformers; temperature 0 is greedy.

    `end_tokens`: ids that end the row; None: those of the model. `timeout_s`: seconds from the
    row's first pass to its deadline. `noise_row` names the row for its noise in place of its key.
    `num_draft_tokens`: per verification at most; None: as many as the engine's own limit.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    banned_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] | None = None
    seed: int = 0
    timeout_s: float | None = None
    noise_row: str | None = None
    num_draft_tokens: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SamplingParams":
        values = json.loads(text)
        for name in ("banned_tokens", "stop", "end_tokens"):
            values[name] = values[name] if values[name] is None else tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class GenerationRequest:
    """One row for an engine.

    `row_key` is the row's identity, `<path relative to the input root>:<index in the file>`, and
    `:<language>` or `:<piece>` where it has several: with the seed it fixes the sampling noise, so
    that no retry, batch or actor changes the output. `sampling`: the row's own; None: the run's.
    `decoder_token_ids`: what the answer of an encoder-decoder begins with, such as its language.
    """

    row_key: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams | None = None
    decoder_token_ids: Sequence[int] = ()


@dataclass
class GenerationStats:
    """What a row cost, counted while it was decoded (design: events are counted, rates derived).

    Seconds are the row's share of its steps. `plain_decode_seconds` is what the same tokens would
    have taken without drafts, from control steps; None when there is not enough evidence.
    """

    method: str = "plain"
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    num_target_forwards: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_lossy_draft_tokens: int = 0  # accepted ones that the target alone would have rejected
    latency_seconds: float = 0.0  # wall time from its first pass to its end
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plain_decode_seconds: float | None = None
    draft_seconds: float = 0.0  # part of decode_seconds spent in the drafter
    num_control_steps: int = 0  # plain decode steps observed while this row was decoded
    control_seconds: float = 0.0  # their time
    steps: StepTable = field(default_factory=StepTable)  # its shares of decode steps, by kind
    drafted_at: list[int] = field(default_factory=list)  # draft tokens by position in the draft
    accepted_at: list[int] = field(default_factory=list)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """A verification of `drafted` tokens, of which the first `accepted` stood."""
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        missing = [0] * (drafted - len(self.drafted_at))
        self.drafted_at += missing
        self.accepted_at += missing
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted; None without drafts."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_draft_tokens / self.num_draft_tokens

    @property
    def speedup(self) -> float | None:
        """plain_decode_seconds / decode_seconds; None where unknown or nothing was decoded."""
        if self.plain_decode_seconds is None or self.decode_seconds <= 0:
            return None
        return self.plain_decode_seconds / self.decode_seconds

    @property
    def speedup_basis(self) -> SpeedupBasis:
        return "none" if self.speedup is None else "control_steps"


def sum_stats(parts: Sequence[GenerationStats]) -> GenerationStats:
    """Of a row that took several prompts: sums; the plain time only where all of it is known."""
    total = GenerationStats(method=max(parts, key=lambda p: p.num_accepted_draft_tokens).method)
    for name in (f.name for f in fields(GenerationStats)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):  # by position
            setattr(total, name, [sum(at) for at in zip_longest(*values, fillvalue=0)])
        elif name == "steps":
            setattr(total, name, sum(values, StepTable()))
        elif name != "method":
            setattr(total, name, None if None in values else sum(values))
    return total


@dataclass
class Completion:
    """The end of one row: text and statistics, or the reason why there is none.

    `token_ids`: what the text was made of, with the end token; None where the engine does not tell.
    """

    row_key: str
    status: Status
    text: str | None = None
    finish_reason: FinishReason | None = None
    error_type: str | None = None
    error: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    token_ids: Sequence[int] | None = None


# Rows on their way from the reader to their commit carry these, and kept columns between them.
ADDRESS_FIELDS = [
    pa.field("source_file", pa.string()),
    pa.field("source_row", pa.int64()),
]
READ_ERROR = pa.field("_read_error", pa.string())  # besides, on the way to the prompt stage
RENDERED_FIELDS = [
    pa.field("status", pa.string()),  # null: to be generated; else `skipped` or `error`
    pa.field("error_type", pa.string()),
    pa.field("error", pa.string()),
    pa.field("prompt_token_ids", pa.list_(pa.int32())),
    pa.field("truncated_prompt_tokens", pa.int64()),
    pa.field("sampling", pa.string()),  # `SamplingParams` of its own as JSON; null: the run's
    # Rows of several prompts, one for each language and piece, in place of `prompt_token_ids`.
    pa.field(
        "pieces",
        pa.list_(
            pa.struct(
                [
                    ("key", pa.string()),  # added to the row's key
                    ("token_ids", pa.list_(pa.int32())),
                    ("decoder_token_ids", pa.list_(pa.int32())),
                    ("column", pa.int16()),  # text column that the result belongs to
                    ("joint", pa.string()),  # stands before the result
                ]
            )
        ),
    ),
    pa.field("values", pa.list_(pa.string())),  # of the template's columns, for summaries in rounds
]
RESULT_FIELDS = [
    pa.field("status", pa.string()),
    pa.field("error_type", pa.string()),
    pa.field("error", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("method", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("truncated_prompt_tokens", pa.int64()),
    pa.field("cached_prompt_tokens", pa.int64()),
    pa.field("chunks", pa.int64()),  # prompts that the row took
    pa.field("completion_tokens", pa.int64()),
    pa.field("num_target_forwards", pa.int64()),
    pa.field("num_spec_steps", pa.int64()),
    pa.field("num_draft_tokens", pa.int64()),
    pa.field("num_accepted_draft_tokens", pa.int64()),
    pa.field("num_lossy_draft_tokens", pa.int64()),
    pa.field("draft_acceptance_rate", pa.float64()),
    pa.field("latency_seconds", pa.float64()),
    pa.field("prefill_seconds", pa.float64()),
    pa.field("decode_seconds", pa.float64()),
    pa.field("plain_decode_seconds", pa.float64()),
    pa.field("speedup", pa.float64()),
    pa.field("speedup_basis", pa.string()),
]
# Evidence for the run summary: the commit adds it into the marker and drops the columns.
EVIDENCE_FIELDS = [
    pa.field("_draft_seconds", pa.float64()),
    pa.field("_num_control_steps", pa.int64()),
    pa.field("_control_seconds", pa.float64()),
    pa.field("_steps", pa.string()),  # a `StepTable` as JSON
    pa.field("_idle_seconds", pa.float64()),  # engine idle since the batch before
    pa.field("_busy_seconds", pa.float64()),
    pa.field("_drafted_at", pa.list_(pa.int64())),
    pa.field("_accepted_at", pa.list_(pa.int64())),
]


def rendered_schema(kept: Iterable[pa.Field]) -> pa.Schema:
    """Schema between the prompt stage and the actors."""
    return pa.schema([*ADDRESS_FIELDS, *kept, *RENDERED_FIELDS])


def output_schema(text_columns: Sequence[str], kept: Iterable[pa.Field]) -> pa.Schema:
    """Schema of the published files."""
    return pa.schema(
        [
            *ADDRESS_FIELDS,
            pa.field("run_id", pa.string()),
            *kept,
            *(pa.field(name, pa.string()) for name in text_columns),
            *RESULT_FIELDS,
        ]
    )


def completed_schema(text_columns: Sequence[str], kept: Iterable[pa.Field]) -> pa.Schema:
    """Schema of what the actors commit: the output and its evidence."""
    return pa.schema([*output_schema(text_columns, kept), *EVIDENCE_FIELDS])


def check_column_names(text_columns: Sequence[str], kept: Sequence[str]) -> None:
    """Refuse output columns that would collide.

    Raises:
        ConfigError: naming the key to change.
    """
    ours = {f.name for f in [*ADDRESS_FIELDS, *RESULT_FIELDS, *RENDERED_FIELDS]} | {"run_id"}
    for name in text_columns:
        if name in ours or name.startswith("_"):
            raise ConfigError("output.text_column", f"{name!r} is taken; choose another name")
    for column in kept:
        if column in text_columns:
            raise ConfigError(
                "output.text_column",
                f"{column!r} is also a kept input column; choose another name",
            )
        if column in ours or column.startswith("_"):
            raise ConfigError(
                "input.keep_columns",
                f"{column!r} is a column of the output; rename it in the input or leave it out",
            )
