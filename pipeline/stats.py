"""Run totals: integers and seconds that add up; every rate is derived from the sums."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import add, sub
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.records import GenerationStats
from pipeline.steptable import StepTable


@dataclass
class RunTotals:
    """Sums over rows. Merge with `+`; ratios of sums are properties, never averages of ratios."""

    rows_ok: int = 0
    rows_error: int = 0
    rows_timeout: int = 0
    rows_skipped: int = 0
    prompt_tokens: int = 0
    truncated_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    num_target_forwards: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_lossy_draft_tokens: int = 0
    num_control_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    control_seconds: float = 0.0
    idle_seconds: float = 0.0
    busy_seconds: float = 0.0
    # Rows whose plain time is known.
    rows_measured: int = 0
    measured_prefill_seconds: float = 0.0
    measured_decode_seconds: float = 0.0
    plain_decode_seconds: float = 0.0
    # Draft tokens, and accepted ones, by their position in the draft.
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    steps: StepTable = field(default_factory=StepTable)

    def __post_init__(self) -> None:
        self.steps = StepTable(self.steps)  # from JSON it is a plain dict

    def __add__(self, other: "RunTotals") -> "RunTotals":
        mine, theirs = vars(self), vars(other)
        return RunTotals(**{name: _combine(add, mine[name], theirs[name]) for name in mine})

    def __sub__(self, other: "RunTotals") -> "RunTotals":
        mine, theirs = vars(self), vars(other)
        return RunTotals(**{name: _combine(sub, mine[name], theirs[name]) for name in mine})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "RunTotals":
        """Totals from a marker's body; names that it lacks are zero."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    @classmethod
    def from_rows(cls, rows: Iterable[GenerationStats]) -> "RunTotals":
        """What the speedups need; all else is zero."""
        totals = cls()
        for stats in rows:
            totals.prefill_seconds += stats.prefill_seconds
            totals.decode_seconds += stats.decode_seconds
            totals.steps += stats.steps
            if stats.plain_decode_seconds is not None:
                totals.rows_measured += 1
                totals.measured_prefill_seconds += stats.prefill_seconds
                totals.measured_decode_seconds += stats.decode_seconds
                totals.plain_decode_seconds += stats.plain_decode_seconds
        return totals

    @classmethod
    def from_table(cls, table: pa.Table) -> "RunTotals":
        """Sums over a table of `records.completed_schema`."""
        status = table.column("status")
        counts = {f"rows_{v['values']}": v["counts"] for v in pc.value_counts(status).to_pylist()}
        names = {f.name for f in fields(cls)}
        sums = {
            name.lstrip("_"): _column_sum(table.column(name))
            for name in table.column_names
            if name.lstrip("_") in names and name not in ("plain_decode_seconds", "_steps")
        }
        measured = table.filter(pc.is_valid(table.column("plain_decode_seconds")))
        return cls(
            **counts,
            **sums,
            rows_measured=measured.num_rows,
            measured_prefill_seconds=_sum(measured, "prefill_seconds"),
            measured_decode_seconds=_sum(measured, "decode_seconds"),
            plain_decode_seconds=_sum(measured, "plain_decode_seconds"),
            steps=StepTable.parse(
                table.column("_steps").to_pylist() if "_steps" in table.column_names else ()
            ),
        )

    @property
    def rows(self) -> int:
        return self.rows_ok + self.rows_error + self.rows_timeout + self.rows_skipped

    @property
    def error_rate(self) -> float:
        """Share of rows that ended in `error`."""
        return self.rows_error / self.rows if self.rows else 0.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_draft_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per verification: 1 + accepted / verifications (vLLM's definition)."""
        if not self.num_spec_steps:
            return None
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def decode_speedup(self) -> float | None:
        """Plain decode time / decode time."""
        _, decode, plain = self._compared
        return plain / decode if decode > 0 else None

    @property
    def job_speedup(self) -> float | None:
        """As `decode_speedup`, with the prefill on both sides: the headline."""
        prefill, decode, plain = self._compared
        return (prefill + plain) / (prefill + decode) if decode > 0 else None

    @property
    def decode_speedup_interval(self) -> tuple[float, float] | None:
        """95 % interval of `decode_speedup`, from the spread of the plain steps behind it."""
        return self._interval(self.decode_speedup, 1.0)

    @property
    def job_speedup_interval(self) -> tuple[float, float] | None:
        """95 % interval of `job_speedup`; the prefill is measured on both sides."""
        prefill, _, plain = self._compared
        return self._interval(self.job_speedup, plain / (prefill + plain) if plain else 0.0)

    @property
    def _compared(self) -> tuple[float, float, float]:
        """Seconds of prefill, of decoding, and of decoding plainly; zeros where that is unknown.

        Plain decoding's own schedule, if the engine kept one, counts all rows beside those that
        they would have been decoded with. Else it is what rows know of themselves.
        """
        plain = self.steps.plain_seconds()
        if plain is not None:
            return self.prefill_seconds, self.decode_seconds, plain
        if not self.rows_measured:
            return 0.0, 0.0, 0.0
        return (
            self.measured_prefill_seconds,
            self.measured_decode_seconds,
            self.plain_decode_seconds,
        )

    def _interval(self, speedup: float | None, plain_share: float) -> tuple[float, float] | None:
        error = self.steps.plain_error()
        if speedup is None or error is None:
            return None
        half = speedup * error * plain_share
        return speedup - half, speedup + half


EARLY_ROWS = 200
EARLY_ERROR_RATE = 0.5


def fails_early(counts: RunTotals, max_error_rate: float) -> bool:
    """Whether most of the first rows failed, so that the rest would only cost time."""
    limit = max(EARLY_ERROR_RATE, max_error_rate)
    return counts.rows >= EARLY_ROWS and counts.error_rate > limit


def _combine(operation: Callable[[Any, Any], Any], mine: Any, theirs: Any) -> Any:
    """Numbers, or lists of them by position."""
    if isinstance(mine, list):
        return [operation(a, b) for a, b in zip_longest(mine, theirs, fillvalue=0)]
    return operation(mine, theirs)


def _column_sum(column: pa.ChunkedArray) -> Any:
    if pa.types.is_list(column.type):
        lists = (values or [] for values in column.to_pylist())
        return [sum(position) for position in zip_longest(*lists, fillvalue=0)]
    return pc.sum(column).as_py() or 0


def _sum(table: pa.Table, column: str) -> float:
    return float(pc.sum(table.column(column)).as_py() or 0.0)
