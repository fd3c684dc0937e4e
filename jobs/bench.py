"""Benchmarks, in ratios of interleaved runs: what decoding and its parts cost, and the job."""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import errors_to_exit_codes, quiet_libraries
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Measure Draftmill on this machine. Run nothing else meanwhile."""


Model = Annotated[str, typer.Option(help="Target: hub id, folder, GGUF file or `demo:smollm2`.")]
Prompts = Annotated[Path, typer.Option(help="JSON lines with a `prompt`, and perhaps a `task`.")]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Threads = Annotated[int, typer.Option(help="Of every contender.")]
CORES = os.cpu_count() or 1


@app.command()
def generate(
    model: Model,
    prompts: Prompts,
    task: Annotated[str | None, typer.Option(help="Take the prompts of this task.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first prompts only.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Per row.")] = 96,
    dtype: DType = "auto",
    slots: Annotated[str, typer.Option(help="Rows at a time.")] = "1,16",
    methods: Annotated[str, typer.Option(help="Of our engine.")] = "plain,prompt_lookup",
    drafts: Annotated[str, typer.Option(help="Draft lengths.")] = "2,3,10",
    drafter: Annotated[
        str | None, typer.Option(help="Drafter of the methods that need one.")
    ] = None,
    exit_layer: Annotated[int | None, typer.Option(help="Of early_exit.")] = None,
    draft_confidence: Annotated[float, typer.Option(help="0: drafts of full length.")] = 0.4,
    lookup_min: Annotated[int, typer.Option(help="decoding.prompt_lookup_min of ours.")] = 2,
    chat: Annotated[bool, typer.Option(help="Prompts as user turns.")] = True,
    few_shot_prefix: Annotated[
        str | None, typer.Option(help="Text before each prompt: a file, or `auto` for our own.")
    ] = None,
    share_prefix: Annotated[bool, typer.Option(help="Compute a common head once.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Decode on; peers do not.")] = False,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each contender.")] = 3,
    threads: Threads = CORES,
    peer_python: Annotated[Path | None, typer.Option(help="Python with vLLM.")] = None,
    peer_script: Annotated[Path | None, typer.Option(help="Script that runs vLLM.")] = None,
    only: Annotated[str, typer.Option(help="Contenders, by name or pattern.")] = "",
    baselines: Annotated[str, typer.Option(help="Contenders to compare with.")] = "",
    breakdown: Annotated[bool, typer.Option(help="Profile our decode steps.")] = True,
    json_: Annotated[Path | None, typer.Option("--json", help="File of the results.")] = None,
) -> None:
    """Our engine, transformers' generate() and perhaps vLLM on the same prompts."""
    with errors_to_exit_codes():
        quiet_libraries()
        from pipeline.benchmark.generate import Settings, measure
        from pipeline.benchmark.report import show
        from pipeline.benchmark.results import Results

        def save(results: Results) -> None:
            if json_ is not None:  # after every run, lest a long benchmark is cut short
                json_.write_text(json.dumps(results.to_json(), indent=1, default=str))

        settings = Settings(
            model=model,
            prompts=prompts,
            task=task,
            limit=limit,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            slots=_numbers("--slots", slots),
            methods=_words(methods),
            drafts=_numbers("--drafts", drafts),
            drafter=drafter,
            exit_layer=exit_layer,
            draft_confidence=draft_confidence,
            lookup_min=lookup_min,
            chat=chat,
            few_shot_prefix=few_shot_prefix,
            share_prefix=share_prefix,
            ignore_eos=ignore_eos,
            repeats=repeats,
            threads=threads,
            peer_python=peer_python,
            peer_script=peer_script,
            only=_words(only),
            baselines=_words(baselines),
            breakdown=breakdown,
        )
        show(measure(settings, save))


@app.command()
def auto(
    model: Model,
    prompts: Prompts,
    workloads: Annotated[
        str, typer.Option(help="Tasks of the prompts, `random` and `copy`.")
    ] = "summarization,translation,random,copy",
    slots: Annotated[str, typer.Option(help="Rows at a time.")] = "1,4,16",
    methods: Annotated[str, typer.Option(help="Fixed choices to compare with.")] = "prompt_lookup",
    drafts: Annotated[str, typer.Option(help="Their draft lengths.")] = "1,3,5,10",
    drafter: Annotated[str | None, typer.Option(help="Drafter that auto may use.")] = None,
    exit_layer: Annotated[int | None, typer.Option(help="Exit that auto may use.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Per row.")] = 64,
    rows_per_slot: Annotated[int, typer.Option(help="Rows are as many times the slots.")] = 6,
    least_rows: Annotated[int, typer.Option(help="Rows at least.")] = 4,
    repeats: Annotated[int, typer.Option(help="Runs side by side.")] = 5,
    dtype: DType = "auto",
    threads: Threads = CORES,
    chat: Annotated[bool, typer.Option(help="Prompts as user turns.")] = True,
    json_: Annotated[Path | None, typer.Option("--json", help="File of the results.")] = None,
) -> None:
    """`method: auto` against plain and the best fixed method and length, found by one run each."""
    with errors_to_exit_codes():
        quiet_libraries()
        from pipeline.benchmark.auto import AutoSettings, check, measure_auto
        from pipeline.benchmark.report import show_auto
        from pipeline.decoding.loading import set_threads

        def save(results: dict[str, Any]) -> None:
            if json_ is not None:
                json_.write_text(json.dumps(results, indent=1, default=str))

        settings = AutoSettings(
            model=model,
            prompts=prompts,
            workloads=_words(workloads),
            slots=_numbers("--slots", slots),
            methods=_words(methods),  # type: ignore[arg-type]
            lengths=_numbers("--drafts", drafts),
            drafter=drafter,
            exit_layer=exit_layer,
            max_new_tokens=max_new_tokens,
            rows_per_slot=rows_per_slot,
            least_rows=least_rows,
            repeats=repeats,
            threads=threads,
            dtype=dtype,
            chat=chat,
        )
        check(settings)
        set_threads(threads)
        show_auto(measure_auto(settings, save))


@app.command()
def step(
    model: Model,
    dtype: DType = "auto",
    rows: Annotated[int, typer.Option(help="Rows of a step, and tokens of the pass.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens that each row has.")] = 700,
    repeats: Annotated[int, typer.Option(help="Interleaved measurements.")] = 30,
    threads: Threads = CORES,
) -> None:
    """A decode step of many rows against one pass over as many tokens of one row."""
    with errors_to_exit_codes():
        quiet_libraries()
        from pipeline.benchmark.models import Models
        from pipeline.benchmark.steps import measure_step
        from pipeline.decoding.loading import set_threads

        set_threads(threads)
        models = Models(model, None, dtype)
        result = measure_step(models, rows=rows, context=context, repeats=repeats)
    print(json.dumps(result, indent=1))


@app.command()
def prefix(
    model: Model,
    prompts: Prompts,
    task: Annotated[str | None, typer.Option(help="Take the prompts of this task.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first prompts only.")] = 16,
    dtype: DType = "auto",
    few_shot_prefix: Annotated[str, typer.Option(help="Head: a file, or `auto`.")] = "auto",
    slots: Annotated[int, typer.Option(help="Rows at a time.")] = 16,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each kind.")] = 3,
    threads: Threads = CORES,
) -> None:
    """Prefill of few-shot prompts with their head computed once, against once per row."""
    with errors_to_exit_codes():
        quiet_libraries()
        from pipeline.benchmark.generate import head_text
        from pipeline.benchmark.models import Models
        from pipeline.benchmark.steps import measure_prefix
        from pipeline.benchmark.workload import load_workload
        from pipeline.decoding.loading import set_threads

        set_threads(threads)
        models, head = Models(model, None, dtype), head_text(few_shot_prefix)
        workload = load_workload(
            prompts, models.tokenizer, task=task, limit=limit, max_new_tokens=1, head=head
        )
        result = measure_prefix(models, workload, slots=slots, repeats=repeats)
    print(json.dumps(result, indent=1))


def _words(option: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in option.split(",") if word.strip())


def _numbers(name: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(option)))
    except ValueError:
        raise ConfigError(name, f"{option!r} is no list of numbers; write it as 1,16") from None


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
    from pipeline.decoding.build import build_engine
    from pipeline.decoding.checkpoint import materialize
    from pipeline.decoding.loading import load_tokenizer
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
        num_cpus=float(CORES),
    )
    for part in plan.parts():
        for unit in plan.cells(part):
            table = read_unit(job.listing.source, unit, job.schema)
            for row in renderer.render_table(table).to_pylist():
                key = f"{row['source_file']}:{row['source_row']}"
                engine.add_request(GenerationRequest(key, row["prompt_token_ids"]))
    rows, started = engine.num_unfinished, time.perf_counter()
    while engine.num_unfinished:
        engine.step()
    return {"rows": rows, "rows_per_second": rows / (time.perf_counter() - started)}


if __name__ == "__main__":
    app()
