"""The results of a benchmark as tables."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.benchmark.breakdown import Breakdown
from pipeline.benchmark.results import Results

_WIDTH = 190  # where the output is no terminal


def show(results: Results) -> None:
    """Print the contenders' medians and the steps' breakdown."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_contenders(results.to_json()))
    if results.breakdowns:
        console.print(_steps(results.breakdowns))


def show_auto(results: Mapping[str, Any]) -> None:
    """Print the verdicts on `method: auto`."""
    settings = results["settings"]
    table = Table(title=f"{settings['model']} {settings['dtype']}, decode tokens/s by medians")
    heads = (
        "workload",
        "slots",
        "best fixed",
        "plain",
        "best",
        "auto",
        "auto/plain",
        "auto/better",
    )
    for head in (*heads, "job speedup\nmeasured", "estimated", "estimate/\nmeasured", "plain's"):
        table.add_column(head, justify="right")
    for case in results["cases"]:
        rates, interval = case["tokens_per_second"], case["measured_interval"]
        between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        figures = ("estimated_job_speedup", "estimate_over_measured", "estimated_plain_speedup")
        table.add_row(
            case["workload"],
            str(case["slots"]),
            case["best"],
            *(f"{rates[name]:.1f}" for name in ("plain", "best", "auto")),
            f"{case['auto_over_plain']:.2f}",
            f"{case['auto_over_better']:.2f}",
            f"{case['measured_job_speedup']:.2f}{between}",
            *("-" if case[name] is None else f"{case[name]:.2f}" for name in figures),
        )
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _contenders(results: Mapping[str, Any]) -> Table:
    baselines: Sequence[str] = results["baselines"]
    workload, settings = results["workload"], results["settings"]
    title = (
        f"{settings['model']} {settings['dtype']}, {workload['rows']} rows, "
        f"{workload['prompt_tokens']} prompt tokens, {results['machine']['threads']} threads, "
        f"median of {settings['repeats']}"
    )
    table = Table(title=title)
    table.add_column("contender", no_wrap=True)
    heads = ("total s", "prefill s", "decode s", "tokens", "tokens/s", "accepted", "per pass")
    for head in (*heads, *map(_against, baselines), "rows equal", "others'\nCPU %"):
        table.add_column(head, justify="right")
    for entry in results["contenders"]:
        table.add_row(entry["name"], *_cells(entry, baselines))
    return table


def _against(baseline: str) -> str:
    """Head of a column of speedups: narrow, names are long."""
    family, _, rest = baseline.partition("/")
    return f"times {family}\n{rest}\ntotal, decode"


def _cells(entry: Mapping[str, Any], baselines: Sequence[str]) -> list[str]:
    median = entry["median"]
    if not median:
        return ["failed"]
    return [
        _number(median["total_seconds"], 2),
        _number(median["prefill_seconds"], 2),
        _number(median["decode_seconds"], 2),
        _number(median["tokens"], 0),
        _number(median["tokens_per_second"], 1),
        _number(median["acceptance"], 3),
        _number(median["tokens_per_target_pass"], 2),
        *(_speedup(entry["speedup"].get(name)) for name in baselines),
        _agreement(entry["runs"][0]["agreement"]),
        _number(100 * median["others_cpu"], 0),
    ]


def _steps(breakdowns: Sequence[Breakdown]) -> Table:
    table = Table(title="A decode step, in ms; the parts are of the profiled step")
    table.add_column("engine", no_wrap=True)
    parts = ("draft", "matrix", "attention", "other ops", "host")
    for head in ("rows", "tokens", "context", "step", "profiled", *parts):
        table.add_column(head, justify="right")
    for one in breakdowns:
        ops = (one.matrix_ms, one.attention_ms, one.other_ops_ms)
        times = (one.step_ms, one.profiled_ms, one.draft_ms, *ops, one.host_ms)
        counts = (_number(one.rows, 1), _number(one.tokens, 1), _number(one.context, 0))
        table.add_row(one.setup, *counts, *(_number(time, 1) for time in times))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _speedup(pair: Mapping[str, float | None] | None) -> str:
    if pair is None:
        return "-"
    return f"{_number(pair['total'], 2)}, {_number(pair['decode'], 2)}"


def _agreement(agreement: Mapping[str, Any] | None) -> str:
    if agreement is None:
        return "-"
    first = agreement["first_difference"]
    text = f"{agreement['rows_equal']}/{agreement['rows']}"
    return text if first is None else f"{text}, from {first['token']}"
