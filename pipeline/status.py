"""The state of an output folder, read from markers alone: no Ray, no model."""

import calendar
import time
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import ConfigError, StoreError
from pipeline.progress import Snapshot
from pipeline.records import STATUSES
from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.intake import Intake
from pipeline.store.lease import describe_holder
from pipeline.store.ledger import Commit, Ledger
from pipeline.store.plan import SUCCESS, Plan, read_plan
from pipeline.store.verify import clean, verify

State = Literal["finished", "running", "stopped", "unaccepted"]


@dataclass(frozen=True)
class Status:
    """Where a run stands: rows by status, rates of the latest invocation."""

    state: State
    holder: str | None
    snapshot: Snapshot
    num_parts: int
    num_published: int
    intake: dict[str, Any]  # of incremental runs: see `store.intake`


def read_status(output: str, options: dict[str, Any] | None = None) -> Status:
    """Read the status of an output folder.

    Raises:
        ConfigError: no run was begun there.
    """
    store, plan = _open_run(output, options)
    ledger = Ledger(store)
    ledger.refresh()
    holder = describe_holder(store)
    state: State = "stopped"
    if store.exists(SUCCESS):
        state = "finished"
    elif holder is not None:
        state = "running"
    elif ledger.counts(plan).rows == plan.num_rows:
        state = "unaccepted"
    parts = list(plan.parts())
    return Status(
        state,
        holder,
        _snapshot(store, plan, ledger, running=state == "running"),
        len(parts),
        sum(1 for part in parts if ledger.publication(part)),
        Intake(store).status,
    )


def verify_output(output: str, options: dict[str, Any] | None = None) -> tuple[bool, str]:
    """Check every output file; whether all is well, and the findings for a person.

    Raises:
        ConfigError: no run was begun there.
    """
    verdict = verify(*_open_run(output, options))
    lines = [f"{verdict.rows:,} rows in {verdict.files:,} files are as they should be"]
    if verdict.leftovers:
        lines.append(f"{verdict.leftovers:,} files of dead attempts, unseen by readers: --clean")
    lines += [f"problem: {problem}" for problem in verdict.problems]
    return not verdict.problems, "\n".join(lines)


def clean_output(output: str, options: dict[str, Any] | None = None) -> str:
    """Remove what dead attempts left; what was done, for a person.

    Raises:
        ConfigError: no run was begun there.
        LockedError: a living run holds it.
    """
    return f"removed {clean(*_open_run(output, options)):,} leftovers of dead attempts"


def _open_run(output: str, options: dict[str, Any] | None) -> tuple[Store, Plan]:
    try:
        store = Store(output, options)
        plan = read_plan(store)
    except StoreError as error:
        raise ConfigError("OUTPUT", str(error)) from None
    except (ValueError, ImportError) as error:
        raise ConfigError("OUTPUT", f"cannot open {output}: {error}") from None
    if plan is None:
        raise ConfigError("OUTPUT", f"no run was begun in {output}; check the path")
    return store, plan


def describe(status: Status) -> str:
    """The status for a person."""
    counts = status.snapshot.counts
    by_status = ", ".join(f"{getattr(counts, f'rows_{name}'):,} {name}" for name in STATUSES)
    hint = {
        "finished": "finished",
        "running": f"running: {status.holder}",
        "stopped": "stopped: the same command goes on from here",
        "unaccepted": f"all rows are done, but there is no {SUCCESS}: the same command says why",
    }[status.state]
    found = status.intake
    return "\n".join(
        [
            *([_incremental(found)] if found else []),
            hint,
            str(status.snapshot),
            by_status,
            f"{status.num_published:,} of {status.num_parts:,} output files published",
        ]
    )


def _incremental(found: dict[str, Any]) -> str:
    return (
        f"incremental: {found['files_done']:,} files done, {found['files_waiting']:,} wait, "
        f"{found['files_set_aside']:,} set aside; last success {found['last_success']}"
    )


def _snapshot(store: Store, plan: Plan, ledger: Ledger, *, running: bool) -> Snapshot:
    """Rates of the latest invocation, from its start (in its run id) to now or its last commit."""
    counts = ledger.counts(plan)
    commits = list(ledger.commits())
    if not commits:
        return Snapshot(counts, plan.num_rows, RunTotals(), 0.0)
    run_id = max(commit.run_id for commit in commits)
    mine = [commit for commit in commits if commit.run_id == run_id]
    new = sum((commit.counts for commit in mine), RunTotals())
    started = calendar.timegm(time.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%S"))
    ended = time.time() if running else _last_commit(store, mine)
    return Snapshot(counts, plan.num_rows, new, max(ended - started, 0.0))


def _last_commit(store: Store, commits: list[Commit]) -> float:
    """When the newest of the markers was written, by the store's clock (Unix seconds)."""
    wanted = {commit.marker.rpartition("/")[2] for commit in commits}
    return max(when for name, when in store.modified("_run/commits") if name in wanted)
