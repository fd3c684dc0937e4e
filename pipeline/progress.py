"""Progress for people: a bar on a terminal, a line every ten seconds elsewhere.

Computed from marker counts alone, so that `jobs/status.py` says the same from outside.
"""

import logging
import sys
import threading
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichBar

from pipeline.logs import wants_json
from pipeline.stats import RunTotals

logger = logging.getLogger(__name__)

WORK_THREAD = "generate"  # the thread in which Ray Data runs
_LINE_EVERY_S = 10.0


def is_working() -> bool:
    """Whether Ray Data still runs in this process, although its watcher has given up."""
    return any(thread.name == WORK_THREAD for thread in threading.enumerate())


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands. `new` is what this invocation did in `seconds`."""

    counts: RunTotals
    total_rows: int
    new: RunTotals
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.new.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        if not self.new.rows or self.seconds <= 0:
            return None
        return (self.total_rows - self.counts.rows) * self.seconds / self.new.rows

    def __str__(self) -> str:
        done, total = self.counts.rows, self.total_rows
        acceptance = self.counts.draft_acceptance_rate
        parts = [
            f"{done:,} of {total:,} rows ({100 * done / total if total else 100:.0f} %)",
            f"{self.tokens_per_second:,.1f} tokens/s",
            f"acceptance {acceptance:.2f}" if acceptance is not None else "no drafts",
            f"{self.counts.rows_error + self.counts.rows_timeout:,} errors",
        ]
        if done < total:
            eta = self.eta_seconds
            parts.append(f"ETA {duration(eta)}" if eta is not None else "ETA unknown")
        return ", ".join(parts)


class Progress:
    """Shows snapshots as they come. Use as a context manager."""

    def __init__(self, total_rows: int, before: RunTotals) -> None:
        """`before`: what was done when this invocation began."""
        self._total, self._before = total_rows, before
        self._counts = before
        self._started = time.monotonic()
        self._next_line = self._started + _LINE_EVERY_S
        self._bar: RichBar | None = None
        if sys.stderr.isatty():
            self._bar = RichBar(
                BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
            )
            self._task = self._bar.add_task("starting", total=total_rows)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def new(self) -> RunTotals:
        """Done by this invocation."""
        return self._counts - self._before

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, counts: RunTotals, last: bool = False) -> None:
        """Show the counts, if it is time."""
        self._counts = counts
        snapshot = Snapshot(counts, self._total, self.new, self.seconds)
        if self._bar:
            self._bar.update(self._task, completed=counts.rows, description=str(snapshot))
        elif last or time.monotonic() >= self._next_line:
            if wants_json():
                logger.info("%s", snapshot, extra={"rows_done": counts.rows, "rows": self._total})
            else:
                print(f"{time.strftime('%H:%M:%S')}  {snapshot}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + _LINE_EVERY_S


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `45 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"
