"""Benchmarks, in ratios of interleaved runs: `python jobs/bench.py overhead --config CONF`."""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import errors_to_exit_codes, quiet_libraries
from pipeline.config import RunConfig, load_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Measure Draftmill on this machine. Run nothing else meanwhile."""


@app.command()
def overhead(
    config: Annotated[list[Path], typer.Option(help="The run to measure.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each contender.")] = 3,
) -> None:
    """What the job costs over the bare engine loop: same rows, same process count of threads."""
    with errors_to_exit_codes():
        quiet_libraries()
        loaded = load_config(config, set_ or [], task="summarize")
        runs = [(_job(loaded), _bare(loaded)) for _ in range(repeats)]
    jobs, bares = zip(*runs, strict=True)
    result = {
        "rows": jobs[0]["rows"],
        "job_rows_per_second": [job["rows_per_second"] for job in jobs],
        "bare_rows_per_second": [bare["rows_per_second"] for bare in bares],
        "ratio": statistics.median(
            job["rows_per_second"] / bare["rows_per_second"] for job, bare in runs
        ),
        "idle_share": statistics.median(job["idle_share"] for job in jobs),
    }
    print(json.dumps(result, indent=1))


def _job(config: RunConfig) -> dict[str, Any]:
    """The whole job; its rate is from the engine's first row to its last, idle time included."""
    from pipeline.run import SUMMARY_NAME, run

    with tempfile.TemporaryDirectory() as folder:
        output = config.output.model_copy(update={"path": folder})
        run(config.model_copy(update={"output": output}))
        totals = json.loads((Path(folder) / SUMMARY_NAME).read_text())["totals"]
    rows = totals["rows_ok"]
    seconds = totals["busy_seconds"] + totals["idle_seconds"]
    return {
        "rows": rows,
        "rows_per_second": rows / seconds,
        "idle_share": totals["idle_seconds"] / seconds,
    }


def _bare(config: RunConfig) -> dict[str, Any]:
    """The engine alone, in this process, on the same rendered prompts."""
    import os

    from pipeline.decoding.checkpoint import materialize
    from pipeline.decoding.loading import load_tokenizer
    from pipeline.decoding.reference import build_engine
    from pipeline.prepare import plan_run, prepare
    from pipeline.prompts import PromptRenderer
    from pipeline.records import GenerationRequest
    from pipeline.store.source import read_unit

    job = prepare(config)
    plan, _ = plan_run(job, new_run=True)
    resolved = job.resolved
    limit = resolved.max_model_len - config.decoding.max_new_tokens
    renderer = PromptRenderer(config, load_tokenizer(materialize(job.checkpoint)), limit)
    engine = build_engine(
        config,
        dtype=resolved.dtype,
        device=resolved.device,
        max_model_len=resolved.max_model_len,
        num_cpus=float(os.cpu_count() or 1),
    )
    for part in plan.parts():
        for unit in plan.cells(part):
            table = read_unit(unit, job.schema, config.input.storage_options)
            for row in renderer.render_table(table).to_pylist():
                key = f"{row['source_file']}:{row['source_row']}"
                engine.add_request(GenerationRequest(key, row["prompt_token_ids"]))
    rows, started = engine.num_unfinished, time.perf_counter()
    while engine.num_unfinished:
        engine.step()
    return {"rows": rows, "rows_per_second": rows / (time.perf_counter() - started)}


if __name__ == "__main__":
    app()
