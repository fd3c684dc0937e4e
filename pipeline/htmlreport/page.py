"""The page: evidence and charts into one self-contained HTML file, without scripts or links."""

import calendar
import re
import time
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from pipeline.auditing import audit_lines
from pipeline.htmlreport import REPORT_NAME, charts
from pipeline.htmlreport.evidence import Rows, moments, read_rows
from pipeline.prepare import Job
from pipeline.progress import duration
from pipeline.quality import quality_lines
from pipeline.store.ledger import Ledger
from pipeline.store.plan import Plan


def write_report(job: Job, plan: Plan, ledger: Ledger, summary: dict[str, Any]) -> None:
    """Put `_run/report.html`. `summary`: all of `summary.json`."""
    run_id = summary["run_id"]
    rows = read_rows(job.store, plan)
    started = calendar.timegm(time.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%S"))
    shares = [
        charts.rows_by_status(summary["totals"]),
        charts.time_shares(summary["time_shares"]),
    ]
    cards = [
        *charts.over_time(moments(job.store, ledger, run_id), started),
        charts.by_position(summary["totals"]),
        *_histograms(rows),
    ]
    page = _template().render(
        summary=summary,
        totals=summary["totals"],
        tiles=_tiles(summary),
        shares=[card for card in shares if card is not None],
        cards=[card for card in cards if card is not None],
        percentiles=charts.percentiles(rows),
        rows=rows,
        control=_control(summary),
        audit=audit_lines(summary["audit"]),
        quality=quality_lines(summary["quality"]),
        finished=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        config=_config(job),
        output=hide_password(job.store.url),
    )
    job.store.put(REPORT_NAME, page.encode())


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"seconds": charts.seconds, "figure": _figure}
    text = files("pipeline.htmlreport").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(figure, name, explanation)."""
    totals, rates = summary["totals"], summary["rates"]
    length = rates["mean_acceptance_length"]
    return [
        (f"{summary['tokens_per_second']:,.1f}", "tokens/s", "new tokens, this invocation"),
        (_figure(rates["job_speedup"], "x"), "job speedup", "with prefill, against plain decoding"),
        (_figure(rates["decode_speedup"], "x"), "decode speedup", "without prefill"),
        (
            _figure(rates["draft_acceptance_rate"], ""),
            "acceptance",
            f"of {totals['num_draft_tokens']:,} draft tokens",
        ),
        (_figure(length, ""), "acceptance length", "tokens per verification"),
        (f"{summary['rows_per_hour']:,.0f}", "rows/hour", "this invocation"),
        (
            f"{totals['completion_tokens']:,}",
            "new tokens",
            f"from {totals['prompt_tokens']:,} of prompts",
        ),
        (duration(summary["wall_seconds"]), "wall time", "this invocation, model loading included"),
    ]


def _histograms(rows: Rows) -> list[charts.Card | None]:
    return [
        charts.histogram(
            rows.speedup,
            "Speedup by row",
            "Plain decode time by control steps over decode time; 1 is no gain.",
            "speedup",
            lambda x: f"{x:.2f}",
        ),
        charts.histogram(
            rows.acceptance,
            "Acceptance by row",
            "Accepted share of each row's draft tokens.",
            "acceptance rate",
            lambda x: f"{x:.2f}",
            (0.0, 1.0),
        ),
        charts.histogram(
            rows.latency,
            "Latency by row",
            "Wall time from a row's first pass to its end, beside others in the same passes.",
            "seconds",
            lambda x: f"{x:.3g}",
        ),
    ]


def _control(summary: dict[str, Any]) -> list[tuple[str, str]]:
    control, totals = summary["control"], summary["totals"]
    step = control["seconds_per_step"]
    return [
        ("control steps", f"{control['num_control_steps']:,}"),
        ("mean time of one, as a row's share", "-" if step is None else charts.seconds(step)),
        ("rows with a measured speedup", f"{totals['rows_measured']:,}"),
        ("their decode time", charts.seconds(totals["measured_decode_seconds"])),
        ("their plain decode time", charts.seconds(totals["plain_decode_seconds"])),
    ]


def _figure(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _config(job: Job) -> str:
    """The resolved config as YAML, without what may be secret."""
    config = job.config.model_dump(mode="json")
    for section in ("input", "output"):
        if config[section]["storage_options"]:
            config[section]["storage_options"] = "(not shown)"
    return hide_password(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def hide_password(text: str) -> str:
    """URLs without their `user:password@`."""
    return re.sub(r"(\w://)[^/@\s]+@", r"\1", text)
