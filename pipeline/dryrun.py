"""`--dry-run`: what a run would do and need, from footers, a few rows and the model's config."""

from dataclasses import replace
from math import ceil
from typing import Any

from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    ModelSize,
    count_parameters,
    estimate_memory,
    read_config,
)
from pipeline.decoding.loading import load_checkpoint_tokenizer
from pipeline.decoding.memory import UNIVERSAL_PLACES, slot_budget
from pipeline.documents import estimate_prompt_tokens, make_renderer
from pipeline.prepare import Job, plan_run, prepare
from pipeline.store.ledger import Ledger
from pipeline.store.plan import Plan
from pipeline.store.publish import failed_units
from pipeline.store.source import read_unit

_SAMPLE_UNITS = 8
_SHOWN = 20
GIB = 1 << 30


def dry_run(config: RunConfig, *, new_run: bool, retry_failed: bool) -> None:
    """Print the plan; load no model, write nothing.

    Raises:
        ConfigError: as the run itself would.
    """
    job = prepare(config)
    plan, stored = plan_run(job, new_run=new_run)
    ledger = Ledger(job.store)
    if stored is not None:
        ledger.refresh()
    _print_files(job, plan)
    units = list(ledger.pending_cells(plan))
    if retry_failed and not units:
        units = failed_units(job.store, plan, ledger, ledger.newest_generation + 1)
    rows = sum(unit.num_rows for unit in units)
    print(f"rows       {plan.num_rows:,}, of which {plan.num_rows - rows:,} already done")
    print(f"units      {len(units):,} to do, of {plan.unit_rows:,} rows at most")
    if units:
        print(f"prompts    {_prompt_tokens(job, units, rows)}")
    print(f"output     {job.store.url}, {sum(1 for _ in plan.parts()):,} files")
    print(f"model      {config.model.target}, {job.resolved.dtype} on {job.resolved.device}")
    if job.drafter is not None:
        print(f"drafter    {job.drafter.reference}")
    for line in _memory(job):
        print(line)


def _print_files(job: Job, plan: Plan) -> None:
    print(f"input      {len(plan.files):,} files below {job.listing.root}")
    for file in plan.files[:_SHOWN]:
        print(f"           {file.name}: {file.num_rows:,} rows")
    if len(plan.files) > _SHOWN:
        print(f"           and {len(plan.files) - _SHOWN:,} more")
    for name, reason in job.listing.skipped[:_SHOWN]:
        print(f"skipped    {name}: {reason}")
    if job.listing.num_skipped > _SHOWN:
        print(f"skipped    {job.listing.num_skipped - _SHOWN:,} more")


def _prompt_tokens(job: Job, units: list[Any], rows: int) -> str:
    """Estimate from a few units spread over the work."""
    renderer = make_renderer(
        job.config,
        load_checkpoint_tokenizer(job.checkpoint),
        job.max_prompt_tokens,
        encoder_decoder=job.encoder_decoder,
    )
    step = max(1, len(units) // _SAMPLE_UNITS)
    sampled = tokens = 0
    for unit in units[::step][:_SAMPLE_UNITS]:
        table = read_unit(job.listing.source, unit, job.schema).slice(0, 64)
        tokens += estimate_prompt_tokens(renderer, table)
        sampled += table.num_rows
    mean = tokens / sampled
    return f"about {mean * rows:,.0f} tokens ({mean:,.0f} a row, by a sample of {sampled:,})"


def _memory(job: Job) -> list[str]:
    """Weights and KV cache, those of the draft model too, against what the device has."""
    if job.encoder_decoder:
        parameters = count_parameters(job.checkpoint)
        itemsize = ITEMSIZE[job.resolved.dtype]
        return [f"weights    {parameters * itemsize / GIB:.2f} GiB per actor"] if parameters else []
    sizes = [_size(job, model) for model in (job.checkpoint, job.drafter) if model is not None]
    resources, resolved = job.config.resources, job.resolved
    known = [size.weight_bytes for size in sizes if size.weight_bytes is not None]
    weights = sum(known) if len(known) == len(sizes) else None
    token = sum(size.kv_bytes_per_token for size in sizes)
    lines = [
        f"weights    {weights / GIB:.2f} GiB per actor" if weights else "weights    unknown yet",
        f"KV cache   {token:,} bytes a token",
    ]
    if weights is not None and job.config.decoding.engine != "transformers":
        budget = slot_budget(
            resources.slots,
            bytes_per_token=token,
            device=resolved.device,
            actors_on_host=resources.num_actors,
            gpu_share=resolved.num_gpus or 1.0,
            weight_bytes=weights,
        )
        slots, length = budget.fit(1, resolved.max_model_len)
        lines.append(
            f"slots      {slots:,} rows at a time per actor, of up to {length:,} tokens each: "
            f"{slots * length * token / GIB:.2f} GiB"
        )
    return lines


def _size(job: Job, checkpoint: Checkpoint) -> ModelSize:
    parameters = count_parameters(checkpoint)
    size = estimate_memory(read_config(checkpoint), job.resolved.dtype, parameters)
    if checkpoint is job.drafter and job.config.decoding.method == "universal":
        return replace(size, kv_bytes_per_token=ceil(size.kv_bytes_per_token * UNIVERSAL_PLACES))
    return size
