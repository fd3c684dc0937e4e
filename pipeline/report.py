"""The run summary: `_run/summary.json`, the table at the end, the metadata of each file."""

import importlib.metadata
import platform
import re
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from pipeline.auditing import audit_lines
from pipeline.errors import DraftmillError
from pipeline.prepare import Job
from pipeline.progress import duration
from pipeline.quality import quality_lines
from pipeline.records import STATUSES
from pipeline.stats import RunTotals
from pipeline.store.plan import Plan

_PACKAGES = ("draftmill", "torch", "transformers", "ray", "pyarrow")
_MANY_DRAFTS, _FEW_ACCEPTED = 200, 0.1
_USELESS = {
    "early_exit": "this model was probably not trained to exit early",
    "draft_model": "the draft model writes other text than the target",
    "universal": "the draft model writes other text than the target",
    "mtp_drafter": "the assistant was probably made for another target",
}
_SHOWN_STEPS = 8
_RATES = (
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "decode_speedup",
    "decode_speedup_interval",
    "job_speedup",
    "job_speedup_interval",
)
_FIRST_ROWS = 3
_RAISED = re.compile(r"^((?:\w+\.)*[A-Z]\w+): (.+)$", re.MULTILINE)


def versions() -> dict[str, str]:
    """Versions of what the output depends on."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in _PACKAGES
    }


def file_metadata(job: Job) -> dict[str, Any]:
    """What the footer of each output file says of its origin. No storage options: no secrets."""
    return {
        "draftmill.fingerprint": job.fingerprint,
        "draftmill.settings": job.settings,
        "draftmill.versions": versions(),
    }


def summary(
    job: Job,
    totals: RunTotals,
    new: RunTotals,
    seconds: float,
    run_id: str,
    audit: dict[str, Any] | None = None,
    store_retries: int = 0,
) -> dict[str, Any]:
    """All of `_run/summary.json`.

    Args:
        totals: sums over the whole output, earlier invocations included.
        new: sums over what this invocation generated, in `seconds` of wall time.
        store_retries: requests to the stores that this invocation had to repeat.
        audit: as of `auditing.summarize`.
    """
    return {
        "run_id": run_id,
        "fingerprint": job.fingerprint,
        "model": job.config.model.target,
        "dtype": job.resolved.dtype,
        "device": job.resolved.device,
        "method": job.config.decoding.method,
        "wall_seconds": seconds,
        "rows_per_hour": 3600 * new.rows / seconds,
        "tokens_per_second": new.completion_tokens / seconds,
        "store_retries": store_retries,
        "new": vars(new),
        "totals": vars(totals),
        "rates": {name: getattr(totals, name) for name in _RATES},
        "time_shares": _time_shares(totals),
        "control": _control(totals),
        "steps": totals.steps.rates(),
        "audit": audit,
        "versions": versions(),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The table at the end of a run."""
    totals, new = summary["totals"], summary["new"]
    rows = ", ".join(f"{totals[f'rows_{s}']:,} {s}" for s in STATUSES if totals[f"rows_{s}"])
    wall = duration(summary["wall_seconds"])
    lines = [
        ("rows", rows or "none"),
        ("tokens", f"{totals['prompt_tokens']:,} prompt, {totals['completion_tokens']:,} new"),
        ("truncated", f"{totals['truncated_prompt_tokens']:,} prompt tokens"),
        ("this run", f"{sum(new[f'rows_{s}'] for s in STATUSES):,} rows in {wall}"),
        ("tokens/s", f"{summary['tokens_per_second']:.1f}"),
        ("rows/hour", f"{summary['rows_per_hour']:,.0f}"),
        *_rate_lines(summary),
        *_notes(summary),
        *quality_lines(summary["quality"]),
        *audit_lines(summary["audit"]),
        *_store_line(summary),
        ("time", _shares_line(summary["time_shares"])),
    ]
    table = Table(show_header=False, title=f"{summary['model']}, {summary['method']}")
    for name, value in lines:
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
    _print_steps(summary["steps"])


def _print_steps(steps: list[dict[str, Any]]) -> None:
    """What decode steps yielded, the kinds that took most of the time: plain steps are the
    evidence behind the speedups."""
    shown = sorted(steps, key=lambda step: -step["steps"])[:_SHOWN_STEPS]
    table = Table("rows in a step", "drafts by", "draft tokens", "steps", "tokens/s")
    for step in steps:
        if step in shown:
            rate = step["tokens_per_second"]
            table.add_row(
                f"up to {step['occupancy']}",
                step["method"],
                str(step["draft_tokens"] or "-"),
                f"{step['steps']:,}",
                f"{rate:,.1f}" if rate else "-",
            )
    if shown:
        Console(soft_wrap=True).print(table)


def print_first_rows(job: Job, plan: Plan) -> None:
    """The first results, to see at a glance whether they are any good."""
    console = Console(soft_wrap=True, highlight=False)
    shown = 0
    for part in plan.parts():
        with job.store.open(part.name) as handle:
            names = job.config.text_columns
            columns = ["source_file", "source_row", "status", "error", *names]
            batches = pq.ParquetFile(handle).iter_batches(_FIRST_ROWS, columns=columns)
            for row in next(batches).to_pylist():
                texts = [row[name].strip() for name in names if row[name] is not None]
                body = "\n".join(texts) if texts else row["error"] or row["status"]
                where = f"{row['source_file']}, row {row['source_row']}: "
                console.print(where, end="", style="bold", markup=False)
                console.print(body, markup=False)
                shown += 1
                if shown == _FIRST_ROWS:
                    return


def root_cause(error: BaseException) -> str:
    """The first cause in one line. Across processes Ray keeps it only as text of a traceback."""
    if isinstance(error, DraftmillError):
        return str(error)
    text = str(error)
    for name, message in _RAISED.findall(text):
        if not name.startswith("ray."):
            kind = name.rsplit(".", 1)[-1]
            return message if name.startswith("pipeline.") else f"{kind}: {message}"
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _rate_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rates, totals, control = summary["rates"], summary["totals"], summary["control"]
    acceptance, length = rates["draft_acceptance_rate"], rates["mean_acceptance_length"]
    lines = [
        (
            "acceptance",
            "no drafts"
            if acceptance is None
            else f"{acceptance:.3f} of {totals['num_draft_tokens']:,} draft tokens",
        ),
        (
            "mean acceptance length",
            "-"
            if length is None
            else f"{length:.2f} tokens in each of {totals['num_spec_steps']:,} verifications",
        ),
    ]
    evidence = (
        f"{control['num_control_steps']:,} plain control steps of "
        f"{1000 * control['seconds_per_step']:.1f} ms"
        if control["num_control_steps"]
        else "too few control steps"
    )
    for name, label in (("job_speedup", "job speedup"), ("decode_speedup", "decode speedup")):
        value = rates[name]
        interval = rates[f"{name}_interval"]
        between = f"{interval[0]:.2f} to {interval[1]:.2f}; " if interval else ""
        figure = f"{value:.2f}x ({between}{evidence})" if value else f"unknown ({evidence})"
        lines.append((label, figure))
    return lines


def _notes(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What a user should know about the drafts."""
    totals, notes = summary["totals"], []
    drafted, accepted = totals["num_draft_tokens"], totals["num_accepted_draft_tokens"]
    if drafted >= _MANY_DRAFTS and accepted < _FEW_ACCEPTED * drafted:
        reason = _USELESS.get(summary["method"], "these drafts do not fit the text")
        notes.append(("note", f"drafts cost more than they save: {reason}; use another method"))
    lossy = totals["num_lossy_draft_tokens"]
    if lossy:
        share = 100 * lossy / totals["completion_tokens"]
        notes.append(("ensemble", f"{lossy:,} tokens ({share:.1f} %) are not the target's own"))
    return notes


def _store_line(summary: dict[str, Any]) -> list[tuple[str, str]]:
    retries = summary["store_retries"]
    return [("store", f"{retries:,} requests had to be repeated")] if retries else []


def _control(totals: RunTotals) -> dict[str, Any]:
    """The plain steps that the speedups rest on."""
    steps = totals.num_control_steps
    return {
        "num_control_steps": steps,
        "seconds_per_step": totals.control_seconds / steps if steps else None,
    }


def _time_shares(totals: RunTotals) -> dict[str, float]:
    """Shares of the engines' time: draft, verify (with plain decode), prefill, idle."""
    whole = totals.busy_seconds + totals.idle_seconds
    if whole <= 0:
        return {}
    return {
        "draft": totals.draft_seconds / whole,
        "verify": (totals.decode_seconds - totals.draft_seconds) / whole,
        "prefill": totals.prefill_seconds / whole,
        "idle": totals.idle_seconds / whole,
    }


def _shares_line(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()) or "unknown"
