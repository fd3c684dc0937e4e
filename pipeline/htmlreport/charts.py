"""From a run's evidence to the cards of the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from pipeline.htmlreport import svg
from pipeline.htmlreport.evidence import Moment, Rows
from pipeline.records import STATUSES

_MAX_BINS = 40
_STATUS_STYLES = {"ok": "good", "error": "bad", "timeout": "warn", "skipped": "quiet"}
_TIME = "minutes since the start"
_SHARES = ("prefill", "verify", "draft", "idle")


@dataclass(frozen=True)
class Card:
    """A chart with its heading; `legend`: (class, label) of each colour, if there are several."""

    title: str
    note: str
    chart: Markup
    legend: list[tuple[str, str]] = field(default_factory=list)


def rows_by_status(totals: dict[str, Any]) -> Card:
    """One bar of all rows."""
    counts = {s: totals[f"rows_{s}"] for s in STATUSES if totals[f"rows_{s}"]}
    whole = sum(counts.values()) or 1
    parts = [(_STATUS_STYLES[s], n / whole, f"{s}: {n:,}") for s, n in counts.items()]
    legend = [
        (_STATUS_STYLES[s], f"{s} {n:,} ({100 * n / whole:.1f} %)") for s, n in counts.items()
    ]
    return Card(
        "Rows by status", f"{whole:,} rows of the whole output.", svg.share_bar(parts), legend
    )


def time_shares(shares: dict[str, float]) -> Card | None:
    """Where the engines' time went."""
    if not shares:
        return None
    styles = ("s1", "s2", "s3", "quiet")
    named = [(style, shares[name], name) for style, name in zip(styles, _SHARES, strict=True)]
    parts = [(style, share, f"{name}: {100 * share:.1f} %") for style, share, name in named]
    legend = [(style, f"{name} {100 * share:.1f} %") for style, share, name in named]
    note = "Of the engines' time; verify includes plain decode passes."
    return Card("Where the time went", note, svg.share_bar(parts), legend)


def over_time(moments: Sequence[Moment], started: float) -> list[Card]:
    """Tokens per second, acceptance and methods, from the times of commits."""
    if not moments:
        return []
    end = max(moments[-1].at, started + 1.0)
    bins = int(np.clip(len(moments) // 3, 4, _MAX_BINS))
    edges = np.linspace(0.0, end - started, bins + 1)
    index = [min(int((m.at - started) / (end - started) * bins), bins - 1) for m in moments]
    index = [max(i, 0) for i in index]
    return [
        _tokens_over_time(moments, index, edges),
        *_acceptance_over_time(moments, index, edges),
        *_methods_over_time(moments, index, edges),
    ]


def _tokens_over_time(moments: Sequence[Moment], index: list[int], edges: Any) -> Card:
    tokens = np.zeros(len(edges) - 1)
    for i, moment in zip(index, moments, strict=True):
        tokens[i] += moment.counts.completion_tokens
    rates = (tokens / np.diff(edges)).tolist()
    chart = svg.steps(
        edges.tolist(),
        rates,
        name="Tokens per second over time",
        x_title=_TIME,
        titles=[f"{_span(edges, i)}: {rate:,.1f} tokens/s" for i, rate in enumerate(rates)],
        x_format=clock,
    )
    note = "New tokens of the latest invocation, counted when their unit was committed."
    return Card("Tokens per second", note, chart)


def _acceptance_over_time(moments: Sequence[Moment], index: list[int], edges: Any) -> list[Card]:
    drafted, accepted = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for i, moment in zip(index, moments, strict=True):
        drafted[i] += moment.counts.num_draft_tokens
        accepted[i] += moment.counts.num_accepted_draft_tokens
    if not drafted.any():
        return []
    rates = [a / d if d else None for a, d in zip(accepted, drafted, strict=True)]
    chart = svg.steps(
        edges.tolist(),
        rates,
        name="Acceptance over time",
        x_title=_TIME,
        titles=[
            f"{_span(edges, i)}: {'no drafts' if rate is None else f'{rate:.3f}'}"
            for i, rate in enumerate(rates)
        ],
        x_format=clock,
    )
    return [Card("Acceptance over time", "Accepted share of draft tokens, by commit.", chart)]


def _methods_over_time(moments: Sequence[Moment], index: list[int], edges: Any) -> list[Card]:
    methods = sorted({method for moment in moments for method in moment.methods})
    if not methods:
        return []
    series = {method: np.zeros(len(edges) - 1) for method in methods}
    for i, moment in zip(index, moments, strict=True):
        for method, rows in moment.methods.items():
            series[method][i] += rows
    titles = [
        [f"{_span(edges, i)}, {method}: {rows:,.0f} rows" for i, rows in enumerate(values)]
        for method, values in series.items()
    ]
    chart = svg.stacked(
        [values.tolist() for values in series.values()],
        [clock(edge) for edge in edges[:-1]],
        name="Rows by method over time",
        x_title=_TIME,
        titles=titles,
    )
    note = "Rows by the method that gave them most accepted tokens; plain where none were."
    legend = [(f"s{i + 1}", method) for i, method in enumerate(methods)]
    return [Card("Method over time", note, chart, legend)]


def by_position(totals: dict[str, Any]) -> Card | None:
    """Acceptance of the first, second, ... token of a draft."""
    drafted, accepted = totals["drafted_at"], totals["accepted_at"]
    if not drafted:
        return None
    rates = [a / d for a, d in zip(accepted, drafted, strict=True)]
    counts = zip(drafted, accepted, rates, strict=True)
    chart = svg.bars(
        rates,
        [str(i + 1) for i in range(len(rates))],
        name="Acceptance by draft position",
        x_title="position in the draft",
        titles=[
            f"token {i + 1}: {a:,} of {d:,} accepted ({r:.3f})"
            for i, (d, a, r) in enumerate(counts)
        ],
    )
    note = "Of drafts long enough, how many had this token accepted (and so all before it)."
    return Card("Acceptance by draft position", note, chart)


def histogram(
    arrays: Sequence[np.ndarray],
    title: str,
    note: str,
    x_title: str,
    label: Callable[[float], str],
    limits: tuple[float, float] | None = None,
) -> Card | None:
    """Rows by a figure of theirs; values beyond the 99.5th percentile count into the last bar."""
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    if not len(values):
        return None
    low, high = limits or (float(values.min()), float(np.quantile(values, 0.995)))
    high = high if high > low else low + max(abs(low), 1.0) * 0.1
    counts, edges = np.histogram(np.clip(values, low, high), bins=min(20, max(5, len(values))))
    chart = svg.bars(
        counts.tolist(),
        [label(edge) for edge in edges[:-1]],
        name=title,
        x_title=x_title,
        whole=True,
        titles=[
            f"{label(a)} to {label(b)}: {n:,} rows"
            for a, b, n in zip(edges, edges[1:], counts.tolist(), strict=False)
        ],
    )
    return Card(title, note, chart)


def percentiles(rows: Rows) -> list[tuple[str, list[str]]]:
    """Table rows of (figure, p50, p90, p99, highest)."""
    table = []
    for name, arrays in (
        ("wall time in a slot", rows.latency),
        ("share of the engine's time", rows.engine),
    ):
        values = np.concatenate(arrays) if arrays else np.zeros(0)
        if len(values):
            found = [*np.percentile(values, [50, 90, 99]), values.max()]
            table.append((name, [seconds(float(value)) for value in found]))
    return table


def seconds(value: float) -> str:
    """`101 s`, `99.8 s`, `0.41 s`, `12.0 ms`."""
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} s"


def clock(value: float) -> str:
    """`1:20`, minutes and seconds; `2:05:00` from an hour on."""
    whole = round(value)
    minutes = f"{whole % 3600 // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes:0>5}" if whole >= 3600 else minutes


def _span(edges: Any, i: int) -> str:
    return f"{clock(edges[i])} to {clock(edges[i + 1])}"
