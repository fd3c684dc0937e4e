"""What an audit found: its groups of rows as a table, their sums, and the words for the summary."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.stats import RunTotals
from pipeline.steptable import StepTable

ESTIMATE = ("prefill_seconds", "decode_seconds")  # of `RunTotals`, and its steps
GROUP_SCHEMA = pa.schema(  # a row per group of rows that were decoded together
    [
        pa.field("rows", pa.int64()),
        pa.field("agree", pa.int64()),
        pa.field("near_ties", pa.int64()),
        pa.field("errors", pa.int64()),
        pa.field("differing", pa.list_(pa.string())),  # row keys of the errors
        pa.field("plain_seconds", pa.float64()),
        pa.field("assisted_seconds", pa.float64()),
        *(pa.field(name, pa.float64()) for name in ESTIMATE),
        pa.field("steps", pa.string()),  # a `StepTable` as JSON
        pa.field("note", pa.string()),  # why nothing was audited
    ]
)
_COUNTS = ("rows", "agree", "near_ties", "errors")
_SHOWN = 5
_NOTHING = "not done: the sample has no row to generate again, rows in pieces apart"
_LEAST_GROUPS = 3


def summarize(groups: Sequence[Mapping[str, Any]], is_exact: bool) -> dict[str, Any]:
    """The `audit` of a summary.

    Args:
        groups: rows of `GROUP_SCHEMA`.
        is_exact: the text must not depend on drafts; false under `ensemble_weight`.
    """
    notes = [group["note"] for group in groups if group["note"]]
    timed = [group for group in groups if group["note"] is None]
    if not timed:
        return {"note": notes[0] if notes else _NOTHING}
    plain, assisted = (
        math.fsum(group[name] for group in timed) for name in ("plain_seconds", "assisted_seconds")
    )
    differing = [key for group in timed for key in group["differing"]]
    sums = {name: math.fsum(group[name] for group in timed) for name in ESTIMATE}
    steps = StepTable.parse(group["steps"] for group in timed)
    estimate = RunTotals.from_mapping({**sums, "steps": steps})
    return {
        **{name: sum(group[name] for group in timed) for name in _COUNTS},
        "is_exact": is_exact,
        "differing": sorted(differing)[:_SHOWN],
        "groups": len(timed),
        "plain_seconds": plain,
        "assisted_seconds": assisted,
        "measured_speedup": plain / assisted,
        "measured_speedup_interval": ratio_interval(
            [group["plain_seconds"] / group["assisted_seconds"] for group in timed]
        ),
        "estimated_speedup": estimate.job_speedup,
        "note": None,
    }


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean ratio: Student's, of the logarithms. None for fewer than 3."""
    n = len(ratios)
    if n < _LEAST_GROUPS:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    half = student_95(n - 1) * statistics.stdev(logs) / math.sqrt(n)
    mean = statistics.fmean(logs)
    return math.exp(mean - half), math.exp(mean + half)


def student_95(freedom: int) -> float:
    """The 0.975 quantile of Student's t, within 1 % from 2 degrees of freedom on.

    Source: Abramowitz & Stegun 1964, 26.7.5, at the normal quantile 1.960.
    """
    terms = (1.960, 2.372, 2.823, 2.556, 1.588)
    return math.fsum(c * freedom ** float(-i) for i, c in enumerate(terms))


def audit_lines(audit: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """For the table at the end of a run; none where nothing was to be audited."""
    if audit is None:
        return []
    if audit["note"]:
        return [("audit", str(audit["note"]))]
    rows, agree = audit["rows"], audit["agree"]
    if audit["is_exact"]:
        found = f"{agree:,} agree, {audit['near_ties']:,} near-ties, {audit['errors']:,} errors"
    else:
        found = f"{agree:,} agree; an ensemble's text is its own"
    lines = [("audit", f"{rows:,} rows generated again, plainly and as configured: {found}")]
    if audit["errors"]:
        where = ", ".join(audit["differing"])
        lines.append((f"audit: {audit['errors']:,} rows differ", f"and must not: {where}"))
    interval, estimate = audit["measured_speedup_interval"], audit["estimated_speedup"]
    spread = f"{interval[0]:.2f} to {interval[1]:.2f}, " if interval else ""
    groups = f"{audit['groups']:,} group{'s' if audit['groups'] != 1 else ''} of rows"
    measured = f"{audit['measured_speedup']:.2f}x ({spread}{groups})"
    beside = f"{estimate:.2f}x" if estimate else "unknown"
    lines.append(("measured speedup", f"{measured}; estimate of the same rows: {beside}"))
    return lines
