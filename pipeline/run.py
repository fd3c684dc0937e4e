"""A run from config to `_SUCCESS`: plan, generate what is missing, publish, report.

The exit code is the caller's to use: 0 done or nothing to do, 3 error rate exceeded; errors of
other kinds are raised (`pipeline.errors`).
"""

import json
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline import auditing, logs, quality, report
from pipeline.config import RunConfig
from pipeline.errors import DraftmillError, ErrorRateExceeded, RunFailed, StoreError
from pipeline.htmlreport import REPORT_NAME
from pipeline.htmlreport.page import write_report
from pipeline.prepare import Job, plan_run, prepare
from pipeline.progress import Progress, is_working
from pipeline.stats import RunTotals, fails_early
from pipeline.store.files import Store
from pipeline.store.lease import Lease
from pipeline.store.ledger import DATA, Ledger, read_totals
from pipeline.store.plan import PLAN_NAME, RUN_FOLDER, SUCCESS, Plan, Unit
from pipeline.store.publish import failed_units, unpublished
from pipeline.store.retry import take_retries

logger = logging.getLogger(__name__)

SUMMARY_NAME = f"{RUN_FOLDER}/summary.json"
_EXIT_ERRORS = ErrorRateExceeded.exit_code
_READERS = 16  # markers are small and, on object stores, far away


@dataclass(frozen=True)
class Options:
    """What the caller adds to the config."""

    new_run: bool = False
    retry_failed: bool = False
    # What the endpoint changes when it runs a batch:
    prompter: type | None = None  # the prompt stage, in place of `actors.prompter`
    shares: Any = None  # `flow.Shares` of the generation actors
    show_rows: bool = True


@dataclass(frozen=True)
class Executed:
    """`seconds`: of generating and publishing. `audit`: see `auditing.summarize`; None: none.

    `retries`: requests to the stores that had to be repeated.
    """

    seconds: float
    audit: dict[str, Any] | None = None
    retries: int = 0

    def __add__(self, later: "Executed") -> "Executed":
        seconds, retries = self.seconds + later.seconds, self.retries + later.retries
        return Executed(seconds, self.audit or later.audit, retries)


def run(config: RunConfig, options: Options = Options(), make_factory: Any = None) -> int:
    """Run a job to its end; the exit code.

    Args:
        make_factory: `(job, shares) -> engine factory` in place of the configured model.

    Raises:
        DraftmillError: see `pipeline.errors` for the kinds and their exit codes.
    """
    job = prepare(config)
    run_id = new_run_id()
    with Lease(job.store, run_id) as lease:
        plan = _begin(job, options)
        return work(job, plan, Work(run_id, lease, make_factory, options))


@dataclass(frozen=True)
class Work:
    """One invocation: its name, its lease, and what it was asked for."""

    run_id: str
    lease: Lease
    make_factory: Any = None
    options: Options = Options()


def new_run_id() -> str:
    """Names an invocation; sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def work(job: Job, plan: Plan, invocation: Work) -> int:
    """Generate what the stored plan lacks, publish, report; the exit code."""
    run_id, options = invocation.run_id, invocation.options
    logs.bind(run_id=run_id)
    ledger = Ledger(job.store)
    ledger.refresh()
    if not options.retry_failed:
        _refuse_failing_run(job, plan, ledger)
    execute = partial(
        _execute, job, plan, ledger, run_id, invocation.lease, invocation.make_factory, options
    )
    units = _pending_units(job, plan, ledger)
    sample, done = _sample(job, plan, units, options), None
    if units or sample or _parts_to_publish(plan, ledger):
        done = execute(units, sample)
    if options.retry_failed:
        units = failed_units(job.store, plan, ledger, ledger.newest_generation + 1)
        if units:
            print(f"{sum(u.num_rows for u in units):,} failed rows are tried again", flush=True)
            again = execute(units, [])
            done = done + again if done else again
    invocation.lease.guard.check()
    return _finish(job, plan, ledger, run_id, done, options.show_rows)


def _begin(job: Job, options: Options) -> Plan:
    """Settle the plan and store it, so that every later command works on the same one."""
    plan, stored = plan_run(job, new_run=options.new_run)
    if options.new_run:
        _discard(job.store)
    if plan != stored:
        job.store.put(PLAN_NAME, plan.to_json())
    return plan


def _discard(store: Store) -> None:
    """Remove the previous run. The plan goes last: a kill in between leaves a run to discard."""
    store.delete([SUCCESS])
    parts = [n for n in store.names() if n.startswith("part-") and n.endswith(".parquet")]
    store.delete(parts)
    for folder in ("published", "commits", "data"):
        store.delete_folder(f"{RUN_FOLDER}/{folder}")
    store.delete([SUMMARY_NAME, REPORT_NAME])


def _refuse_failing_run(job: Job, plan: Plan, ledger: Ledger) -> None:
    """A run that was stopped early for its failures would only fail again."""
    counts = ledger.counts(plan)
    if counts.rows < plan.num_rows and fails_early(counts, job.config.faults.max_error_rate):
        raise ErrorRateExceeded(
            f"{counts.rows_error:,} of the first {counts.rows:,} rows failed; see their errors, "
            "then start over with --new-run, go on with --retry-failed, or raise "
            "faults.max_error_rate"
        )


def _pending_units(job: Job, plan: Plan, ledger: Ledger) -> list[Unit]:
    units = list(ledger.pending_cells(plan))
    present = {file.name for file in job.listing.files}
    for unit in units:
        if unit.file.name not in present:
            raise RunFailed(
                f"input file {unit.file.name} is gone, but not all of its rows are done; bring it "
                "back, or start over with --new-run"
            )
    done, total = plan.num_rows - sum(u.num_rows for u in units), plan.num_rows
    what = f"{len(units):,} units to do" if units else "nothing to generate"
    print(f"{done:,} of {total:,} rows already done: {what}", flush=True)
    return units


def _parts_to_publish(plan: Plan, ledger: Ledger) -> bool:
    return any(unpublished(ledger, part) for part in plan.parts())


def _execute(
    job: Job,
    plan: Plan,
    ledger: Ledger,
    run_id: str,
    lease: Lease,
    make_factory: Any,
    options: Options,
    units: list[Unit],
    sample: list[Unit],
) -> Executed:
    """Start Ray, generate and publish units, audit the sample. If it breaks, say how to resume."""
    from pipeline import flow, monitor  # imports ray

    generation = units[0].generation if units else 0
    job.store.delete([SUCCESS, SUMMARY_NAME])
    started = time.monotonic()
    started_ray = flow.start_ray()
    try:
        guard, metadata = lease.guard, report.file_metadata(job)
        publisher = monitor.Publisher(job, guard, plan, ledger, units, metadata)
        shares = options.shares or flow.plan_shares(job.config, job.resolved.num_gpus)
        stages = {"prompter": options.prompter} if options.prompter else {}
        factory = (make_factory or flow.model_engine)(job, shares)
        count = partial(_count, ledger, plan, generation)
        total = sum(u.num_rows for u in units) if generation else plan.num_rows
        with Progress(total, count()) as progress:
            retries = monitor.watch(
                partial(flow.generate, job, plan, units, run_id, factory, shares, guard, **stages),
                ledger=ledger,
                count=count,
                publisher=publisher,
                progress=progress,
                lease=lease,
                generation=generation,
                max_error_rate=job.config.faults.max_error_rate,
            )
        seconds = time.monotonic() - started
        audit = _audit(job, plan, sample, factory, shares) if sample else None
        lease.check()
        return Executed(seconds, audit, retries + publisher.retries)
    except StoreError as error:
        raise RunFailed(f"{error}; {_committed(ledger, plan)}") from None
    except DraftmillError:
        raise
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; {_how_to_resume(ledger, plan)}") from None
    except Exception as error:
        logger.debug("run failed", exc_info=True)
        raise RunFailed(f"{report.root_cause(error)}; {_how_to_resume(ledger, plan)}") from error
    finally:
        # Under a working executor Ray may crash the process when it is shut down: then the end of
        # the process, which its workers share, has to do (see `cli.errors_to_exit_codes`).
        if started_ray and not is_working():
            flow.stop_ray()


def _sample(job: Job, plan: Plan, pending: list[Unit], options: Options) -> list[Unit]:
    """Units to audit. None of a finished run: that has a summary. None of a prompt stage of
    another's, such as the endpoint's batches have: the config could not repeat it."""
    fraction = job.config.decoding.audit_fraction
    if not fraction or options.prompter or (not pending and job.store.exists(SUMMARY_NAME)):
        return []
    return plan.sample(fraction)


def _audit(job: Job, plan: Plan, units: list[Unit], factory: Any, shares: Any) -> dict[str, Any]:
    """Generate the units again; what breaks here leaves the run as good as it was."""
    from pipeline import flow

    rows = sum(unit.num_rows for unit in units)
    print(f"audit: {rows:,} rows are generated again, plainly and as configured", flush=True)
    try:
        groups = flow.audit(job, plan, units, factory, shares)
    except Exception as error:
        logger.debug("audit failed", exc_info=True)
        return {"note": f"failed: {report.root_cause(error)}"}
    return auditing.summarize(groups, is_exact=job.config.decoding.ensemble_weight is None)


def _count(ledger: Ledger, plan: Plan, generation: int) -> RunTotals:
    """Progress counts: of the whole run, or of the rows tried again."""
    if not generation:
        return ledger.counts(plan)
    again = (c.counts for c in ledger.commits() if c.generation == generation)
    return sum(again, RunTotals())


def _how_to_resume(ledger: Ledger, plan: Plan) -> str:
    ledger.refresh()
    return _committed(ledger, plan)


def _committed(ledger: Ledger, plan: Plan) -> str:
    done = ledger.counts(plan).rows
    return f"{done:,} of {plan.num_rows:,} rows are committed: the same command goes on from there"


def _finish(
    job: Job,
    plan: Plan,
    ledger: Ledger,
    run_id: str,
    done: Executed | None,
    show_rows: bool,
) -> int:
    """Judge the error rate, write `_SUCCESS` or not, report. The exit code."""
    counts = ledger.counts(plan)
    limit = job.config.faults.max_error_rate
    exceeded = counts.error_rate > limit
    if done is not None:
        totals, new = _sums(job.store, plan, ledger, run_id)
        retries = done.retries + take_retries()
        summary = report.summary(job, totals, new, done.seconds, run_id, done.audit, retries)
        summary["quality"] = quality.score(job, plan)
        job.store.put(SUMMARY_NAME, json.dumps(summary, indent=1).encode())
        write_report(job, plan, ledger, summary)
        report.print_summary(summary)
        if show_rows:
            report.print_first_rows(job, plan)
    if exceeded:
        job.store.delete([SUCCESS])
        print(
            f"{counts.rows_error:,} of {counts.rows:,} rows failed, more than "
            f"faults.max_error_rate={limit:g} allows: no {SUCCESS}. Raise it to accept them, or "
            "generate them anew with --retry-failed.",
            flush=True,
        )
        _name_report(job)
        return _EXIT_ERRORS
    if not job.store.exists(SUCCESS):
        success = {"rows": counts.rows, "fingerprint": job.fingerprint, "run_id": run_id}
        job.store.put(SUCCESS, json.dumps(success).encode())
    job.store.delete_folder(DATA)  # all of it is published
    print(f"results: {job.store.url}", flush=True)
    _name_report(job)
    return 0


def _name_report(job: Job) -> None:
    if job.store.exists(REPORT_NAME):
        print(f"report:  {job.store.url}/{REPORT_NAME}", flush=True)


def _sums(store: Store, plan: Plan, ledger: Ledger, run_id: str) -> tuple[RunTotals, RunTotals]:
    """Sums over all published parts, and over what this invocation generated."""
    published = [p.marker for part in plan.parts() if (p := ledger.publication(part))]
    mine = [c.marker for c in ledger.commits() if c.run_id == run_id]
    with ThreadPoolExecutor(_READERS) as pool:
        totals, new = (
            sum(pool.map(partial(read_totals, store), markers), RunTotals())
            for markers in (published, mine)
        )
    return totals, new
