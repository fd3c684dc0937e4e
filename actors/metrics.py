"""Prometheus metrics of what actors generate, exported by Ray on each node's metrics port.

Ray puts `ray_` before the names. No label tells rows or documents apart.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa
from ray.util.metrics import Counter, Gauge, Histogram

Mode = Literal["job", "serve"]
_LATENCIES = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]
_SPEEDUPS = [0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10]
_COLUMNS = [
    *("status", "completion_tokens", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("latency_seconds", "speedup"),
]


class RowMetrics:
    """Counts rows as they end. `mode`: rows of offline jobs, or of the endpoint."""

    def __init__(self, mode: Mode) -> None:
        self._mode = {"mode": mode}
        tags = ("mode",)
        self._rows = Counter("rows_total", "Rows that ended, by status.", ("status", "mode"))
        self._tokens = Counter("tokens_generated_total", "Completion tokens.", tags)
        self._drafted = Counter("draft_tokens_total", "Draft tokens that were verified.", tags)
        self._accepted = Counter("draft_accepted_total", "Draft tokens that stood.", tags)
        self._latency = Histogram(
            "row_latency_seconds", "Wall time from first pass to end.", _LATENCIES, tags
        )
        self._speedup = Histogram(
            "speedup_ratio", "Plain decode time over decode time, by row.", _SPEEDUPS, tags
        )
        self._queue = Gauge("queue_depth", "Rows that wait for a slot or hold one.", tags)
        self._success = Gauge(
            "last_success_timestamp", "Unix time at which a row last ended well.", tags
        )

    def add_table(self, rows: pa.Table) -> None:
        """Rows of `records.output_schema`."""
        for row in rows.select(_COLUMNS).to_pylist():
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """A row by its output columns."""
        self._rows.inc(1, {"status": row["status"], **self._mode})
        for counter, name in (
            (self._tokens, "completion_tokens"),
            (self._drafted, "num_draft_tokens"),
            (self._accepted, "num_accepted_draft_tokens"),
        ):
            if row[name]:
                counter.inc(row[name], self._mode)
        if row["latency_seconds"]:
            self._latency.observe(row["latency_seconds"], self._mode)
        if row["speedup"]:
            self._speedup.observe(row["speedup"], self._mode)
        if row["status"] == "ok":
            self._success.set(time.time(), self._mode)

    def queue(self, depth: int) -> None:
        """Rows that the engine holds."""
        self._queue.set(depth, self._mode)
