"""Incremental runs: only the input files that are new since the last run, each as one whole.

The plan holds the files of the batch at work, and none in between; a file that is done has an entry
in the ledger (`store.intake`). So a run that was killed goes on with the batch that it left, and
the order of writes is: batch, plan, results, entries, status, empty plan.
"""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, InputError
from pipeline.prepare import (
    Job,
    check_input,
    keep_folders,
    open_output,
    prepare,
    prepare_without_input,
)
from pipeline.run import Options, Work, new_run_id, work
from pipeline.store.files import Store
from pipeline.store.intake import (
    Candidate,
    Decision,
    Entry,
    Intake,
    Selection,
    candidate,
    decide,
)
from pipeline.store.lease import Lease
from pipeline.store.ledger import COMMITS, PUBLISHED, Ledger
from pipeline.store.listing import Found, InputFile, Listing, find_input, read_file
from pipeline.store.plan import PLAN_NAME, Plan, check_same_settings, make_plan, read_plan

_MODE = {"mode": "incremental"}  # a setting: ordinary runs would take every file again


@dataclass
class Batch:
    """What a run found and decided. `bad`: (file, reason) of those taken that cannot be read."""

    found: Found
    candidates: dict[str, Candidate]
    decisions: list[Decision]
    taken: list[InputFile]
    bad: list[tuple[str, str]]

    @property
    def versions(self) -> dict[str, str]:
        return {file.name: self.candidates[file.name].version for file in self.taken}

    def listing(self) -> Listing:
        found = self.found
        return Listing(found.source, found.root, found.is_folder, self.taken, [], 0)


def run_incremental(
    config: RunConfig,
    selection: Selection,
    *,
    retry_failed: bool = False,
    make_factory: Any = None,
) -> int:
    """Process the files that `selection` takes; the exit code, as of `run.run`.

    Raises:
        DraftmillError: see `pipeline.errors`.
    """
    store, run_id = open_output(config), new_run_id()
    with Lease(store, run_id) as lease:
        stored, intake = read_plan(store), Intake(store)
        batch, bare = _choose(config, stored, intake, selection)
        show(batch)
        for name, reason in batch.bad:
            _set_aside(intake, batch.candidates[name], bare.fingerprint, reason, run_id)
        if not batch.taken:
            intake.note(_status(intake, batch, run_id))
            print("nothing new", flush=True)
            return 0
        job = prepare(config, batch.listing())
        job = replace(job, settings=job.settings | _MODE)
        plan = _begin(job, stored, intake, batch)
        code = work(
            job, plan, Work(run_id, lease, make_factory, Options(retry_failed=retry_failed))
        )
        if code == 0:
            _record(job, plan, intake, batch, run_id)
        return code


def dry_run(config: RunConfig, selection: Selection) -> Batch:
    """Print what `run_incremental` would do with each file; read footers, write nothing."""
    store = open_output(config)
    batch, _ = _choose(config, read_plan(store), Intake(store), selection)
    show(batch)
    rows = sum(file.num_rows for file in batch.taken)
    print(f"{len(batch.taken):,} files with {rows:,} rows to do")
    return batch


def show(batch: Batch) -> None:
    """A line per file: why it is taken or skipped."""
    bad = dict(batch.bad)
    for decision in batch.decisions:
        if decision.name in bad:
            print(f"set aside  {decision.name}: {bad[decision.name]}")
        else:
            print(f"{'take' if decision.take else 'skip':9}  {decision.name}: {decision.reason}")


def _choose(
    config: RunConfig, stored: Plan | None, intake: Intake, selection: Selection
) -> tuple[Batch, Job]:
    """Decide on every file, and open those that are taken."""
    if config.input.max_rows is not None:
        raise ConfigError("input.max_rows", "does not go with --incremental; use --max-files")
    found = find_input(config.input.path, config.input.storage_options, config.input.format)
    config = keep_folders(config, [name for name, _ in found.chosen])
    bare = prepare_without_input(
        config, Listing(found.source, found.root, found.is_folder, [], [], 0)
    )
    _check_settings(stored, bare, selection)
    if stored is None or (selection.full_refresh and stored.settings != bare.settings | _MODE):
        intake.batch = {}  # nothing to go on with
    planned = {file.name for file in stored.files} if stored else set()
    intake.batch = {n: v for n, v in intake.batch.items() if n in planned}
    candidates = {name: candidate(name, entry) for name, entry in found.chosen}
    decisions = decide(candidates.values(), intake, selection, bare.fingerprint)
    names = {d.name for d in decisions if d.take}
    taken, bad = _open(config, found, names, intake.status.get("columns"))
    return Batch(found, candidates, decisions, taken, bad), bare


def _check_settings(stored: Plan | None, job: Job, selection: Selection) -> None:
    if stored is None or (selection.full_refresh and stored.settings.get("mode")):
        return
    try:
        check_same_settings(stored, job.settings | _MODE)
    except ConfigError as error:
        hint = "--new-run"
        raise ConfigError(
            error.key, str(error).partition(": ")[2].replace(hint, "--full-refresh")
        ) from None


def _open(
    config: RunConfig, found: Found, names: set[str], columns: dict[str, str] | None
) -> tuple[list[InputFile], list[tuple[str, str]]]:
    """Read the footers of the files that are taken; (good ones, bad ones with the reason).

    Raises:
        InputError: no file was ever good: then it is the config that is wrong.
    """
    good: list[InputFile] = []
    bad: list[tuple[str, str]] = []
    first: ConfigError | None = None
    for name, entry in found.chosen:
        if name not in names:
            continue
        try:
            file = read_file(found.source, name, entry, config.input.format)
            schema = check_input(config, [*good[:1], file])
            theirs = {field.name: str(field.type) for field in schema}
            if columns is not None and theirs != columns:
                problem = f"its columns are {theirs}, those of files before {columns}"
                raise InputError("input.path", problem)
            good.append(file)
        except ConfigError as error:
            bad.append((name, str(error)))
            if not isinstance(error, InputError) or "complete Parquet" not in str(error):
                first = first or error
    if first is not None and not good and columns is None:
        raise first
    return good, bad


def _set_aside(intake: Intake, file: Candidate, fingerprint: str, reason: str, run_id: str) -> None:
    body = {"file": file.name, "reason": reason, "run_id": run_id}
    intake.record(Entry(file.file_id, file.version, fingerprint, "bad"), body)


def _begin(job: Job, stored: Plan | None, intake: Intake, batch: Batch) -> Plan:
    """The plan of this batch: what was begun goes on, all else starts from nothing."""
    config, store = job.config, job.store
    begun = {name for name, version in batch.versions.items() if intake.batch.get(name) == version}
    planned = {file.name: file for file in stored.files} if stored else {}
    fresh = make_plan(
        batch.taken,
        max_rows=None,
        unit_rows=config.input.unit_rows if isinstance(config.input.unit_rows, int) else None,
        rows_per_file=config.output.rows_per_file,
        num_actors=config.resources.num_actors,
        settings=job.settings,
    )
    if begun and stored is not None:  # the grid must stay, and the files' place in it
        files = [planned[file.name] for file in fresh.files if file.name in begun]
        files += [file for file in fresh.files if file.name not in begun]
        fresh = replace(fresh, files=tuple(files), unit_rows=stored.unit_rows)
    ids = {file.file_id for file in [*fresh.files, *planned.values()] if file.name not in begun}
    _forget(store, ids)
    intake.begin(batch.versions)
    store.put(PLAN_NAME, fresh.to_json())
    return fresh


def _forget(store: Store, file_ids: set[str]) -> None:
    """Delete markers of files that start from nothing, lest a dead run's commits count."""
    for folder in (COMMITS, PUBLISHED):
        names = store.names(folder)
        store.delete(n for n in names if n.rpartition("/")[2].partition(".")[0] in file_ids)


def _record(job: Job, plan: Plan, intake: Intake, batch: Batch, run_id: str) -> None:
    """Enter the batch's files in the ledger, then leave an empty plan for the next run."""
    ledger = Ledger(job.store)
    ledger.refresh()
    parts: dict[str, list[str]] = {file.name: [] for file in plan.files}
    failed = dict.fromkeys(parts, 0)
    for part in plan.parts():
        parts[part.file.name].append(part.name)
        publication = ledger.publication(part)
        failed[part.file.name] += publication.counts.rows_error if publication else 0
    written = job.store.names()
    for file in plan.files:
        mine = [n for n in written if n.startswith("part-") and f"-{file.file_id}-" in n]
        job.store.delete(set(mine) - set(parts[file.name]))  # a version before had more rows
        source = batch.candidates[file.name]
        body = {
            "file": file.name,
            "size": source.size,
            "modified": source.modified,
            "rows": file.num_rows,
            "rows_error": failed[file.name],
            "parts": parts[file.name],
            "run_id": run_id,
        }
        entry = Entry(file.file_id, source.version, job.fingerprint, "done")
        intake.record(entry, body)
    newest = max(batch.candidates[file.name].modified for file in plan.files)
    status = {
        "newest_done": max(newest, intake.watermark or newest),
        "columns": {field.name: str(field.type) for field in job.schema},
    }
    intake.note(status | _status(intake, batch, run_id))
    job.store.put(PLAN_NAME, replace(plan, files=()).to_json())
    intake.finish({})
    _forget(job.store, {file.file_id for file in plan.files})


def _status(intake: Intake, batch: Batch, run_id: str) -> dict[str, Any]:
    """For monitoring: when it last went well, and how old the oldest file is that still waits."""
    now = time.time()
    waiting = [batch.candidates[d.name].modified for d in batch.decisions if d.waits]
    return {
        "last_success": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        "last_success_timestamp": now,
        "run_id": run_id,
        "files_done": intake.count("done"),
        "files_set_aside": intake.count("bad"),
        "files_waiting": len(waiting),
        "oldest_waiting_seconds": now - min(waiting) if waiting else 0.0,
    }
