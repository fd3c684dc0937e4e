"""Watches a run from the markers: progress, publication of finished parts, early stop."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from pipeline.errors import ErrorRateExceeded
from pipeline.flow import TASK_CPUS
from pipeline.prepare import Job
from pipeline.progress import WORK_THREAD, Progress
from pipeline.records import output_schema
from pipeline.stats import RunTotals, fails_early
from pipeline.store.lease import Lease, LeaseGuard
from pipeline.store.ledger import Ledger, Publication
from pipeline.store.plan import Part, Plan, Unit
from pipeline.store.publish import publish_and_count, unpublished

_MAX_PUBLISHING = 2


class Publisher:
    """Publishes each part as soon as none of its units is pending, in Ray tasks of its own."""

    def __init__(
        self,
        job: Job,
        guard: LeaseGuard,
        plan: Plan,
        ledger: Ledger,
        units: Sequence[Unit],
        metadata: dict[str, Any],
    ) -> None:
        self._guard, self._ledger, self._metadata = guard, ledger, metadata
        self._schema = output_schema(job.config.text_columns, job.kept)
        self._pending: dict[tuple[str, int], int] = {}
        self._parts = {part.key: part for part in plan.parts()}
        self._rows_per_file = plan.rows_per_file
        for unit in units:
            key = plan.part_of(unit).key
            self._pending[key] = self._pending.get(key, 0) + 1
        self._ready = [p for p in self._parts.values() if p.key not in self._pending]
        self._running: list[ray.ObjectRef] = []
        self._publish = ray.remote(num_cpus=TASK_CPUS)(publish_and_count)
        self.retries = 0  # store operations that the tasks had to try again

    def committed(self, file_id: str, start: int) -> None:
        """Note that a pending unit is committed."""
        key = (file_id, start // self._rows_per_file)
        if key not in self._pending:
            return  # an old attempt's
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]
            self._ready.append(self._parts[key])

    def step(self, block: bool = False) -> None:
        """Collect what is published and start what is ready; with `block`, finish all."""
        while True:
            self._collect(block and bool(self._running))
            while self._ready and len(self._running) < _MAX_PUBLISHING:
                self._start(self._ready.pop(0))
            if not block or not (self._ready or self._running):
                return

    def _start(self, part: Part) -> None:
        commits = unpublished(self._ledger, part)
        if commits:
            previous = self._ledger.publication(part)
            self._running.append(
                self._publish.remote(
                    self._guard, part, commits, previous, self._schema, self._metadata
                )
            )

    def _collect(self, wait: bool) -> None:
        if not self._running:
            return
        done, self._running = ray.wait(
            self._running,
            num_returns=1 if wait else len(self._running),
            timeout=None if wait else 0,
        )
        for marker, retries in ray.get(done):
            self.retries += retries
            self._ledger.add_publication(Publication.parse(marker))


def watch(
    work: Callable[[], Any],
    *,
    ledger: Ledger,
    count: Callable[[], RunTotals],
    publisher: Publisher,
    progress: Progress,
    lease: Lease,
    generation: int,
    max_error_rate: float,
) -> Any:
    """Run `work` in a thread and watch it to its end; `count` gives the progress to show.

    Returns:
        What `work` returned.

    Raises:
        ErrorRateExceeded: most of the first rows failed.
        Exception: what `work` raised, or RunFailed when the lease was lost.
    """
    failure: list[BaseException] = []
    result: list[Any] = []

    def guarded() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, name=WORK_THREAD, daemon=True)
    thread.start()
    while thread.is_alive():
        started = time.monotonic()
        for commit in ledger.refresh():
            if commit.generation == generation:
                publisher.committed(commit.file_id, commit.start)
        publisher.step()
        progress.update(count())
        lease.check()
        if not generation and fails_early(progress.new, max_error_rate):
            raise _stopped_early(progress.new)
        # Listing a million markers takes time of its own: look less often then.
        thread.join(max(1.0, 10 * (time.monotonic() - started)))
    for commit in ledger.refresh():
        if commit.generation == generation:
            publisher.committed(commit.file_id, commit.start)
    if failure:
        raise failure.pop()  # popped, for the frames in its traceback hold the list
    publisher.step(block=True)
    progress.update(count(), last=True)
    return result.pop()


def _stopped_early(new: RunTotals) -> ErrorRateExceeded:
    return ErrorRateExceeded(
        f"{new.rows_error:,} of the first {new.rows:,} rows failed: stopped early; what was "
        "generated is committed"
    )
