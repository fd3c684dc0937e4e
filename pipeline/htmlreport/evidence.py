"""What the report rests on: markers with their times, and statistics columns of published parts."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.ledger import COMMITS, Commit, Ledger
from pipeline.store.plan import Plan

_MAX_PARTS = 500  # read one by one
_MAX_ROWS = 200_000  # rows whose statistics are read; of larger outputs a sample of whole parts
_MAX_MARKERS = 1_000  # markers whose bodies are read, for the methods over time
_SLOWEST = 10
_READERS = 16
_COLUMNS = [
    *("source_file", "source_row", "status", "error_type", "error", "method"),
    *("prompt_tokens", "completion_tokens", "latency_seconds", "prefill_seconds"),
    *("decode_seconds", "speedup", "draft_acceptance_rate"),
]


@dataclass(frozen=True)
class Moment:
    """A commit of the latest invocation. `at`: Unix seconds by the store's clock."""

    at: float
    counts: RunTotals
    methods: dict[str, int]  # rows by the method that gave them their tokens


@dataclass
class Rows:
    """Statistics of the published rows, or of a sample of them."""

    num_rows: int = 0
    of_rows: int = 0
    is_sample: bool = False  # else rows may only be missing
    speedup: list[np.ndarray] = field(default_factory=list)
    acceptance: list[np.ndarray] = field(default_factory=list)
    latency: list[np.ndarray] = field(default_factory=list)
    engine: list[np.ndarray] = field(default_factory=list)  # seconds of the engine's steps
    methods: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # error type -> where and why
    slowest: list[dict[str, Any]] = field(default_factory=list)


def moments(store: Store, ledger: Ledger, run_id: str) -> list[Moment]:
    """The commits of an invocation in order of time."""
    mine = {c.marker.rpartition("/")[2]: c for c in ledger.commits() if c.run_id == run_id}
    if not mine:
        return []
    times = [(when, mine[name]) for name, when in store.modified(COMMITS) if name in mine]
    times.sort(key=lambda pair: pair[0])
    stride = -(-len(times) // _MAX_MARKERS)

    def methods(commit: Commit) -> dict[str, int]:
        body: dict[str, int] = json.loads(store.read(commit.marker)).get("methods", {})
        return body

    with ThreadPoolExecutor(_READERS) as pool:
        read = list(pool.map(lambda pair: methods(pair[1]), times[::stride]))
    return [
        Moment(when, commit.counts, read[i // stride] if i % stride == 0 else {})
        for i, (when, commit) in enumerate(times)
    ]


def read_rows(store: Store, plan: Plan) -> Rows:
    """Statistics of all published rows; of too many, those of parts spread evenly over them."""
    parts = list(plan.parts())
    stride = max(-(-plan.num_rows // _MAX_ROWS), -(-len(parts) // _MAX_PARTS), 1)
    rows = Rows(of_rows=plan.num_rows, is_sample=stride > 1)
    for part in parts[::stride]:
        try:
            with store.open(part.name) as handle:
                table = pq.read_table(handle, columns=_COLUMNS)
        except FileNotFoundError:
            continue  # not published
        _add(rows, table)
    return rows


def _add(rows: Rows, table: pa.Table) -> None:
    rows.num_rows += table.num_rows
    for column, into in (("speedup", rows.speedup), ("draft_acceptance_rate", rows.acceptance)):
        into.append(table.column(column).drop_null().to_numpy().astype(np.float32))
    generated = table.filter(pc.greater(table.column("completion_tokens"), 0))
    engine = pc.add(generated.column("prefill_seconds"), generated.column("decode_seconds"))
    rows.latency.append(generated.column("latency_seconds").to_numpy().astype(np.float32))
    rows.engine.append(engine.to_numpy().astype(np.float32))
    for counts, column in ((rows.methods, "method"), (rows.errors, "error_type")):
        found = pc.value_counts(table.column(column).drop_null()).to_pylist()
        counts.update({item["values"]: item["counts"] for item in found})
    failed = table.filter(pc.is_valid(table.column("error_type"))).slice(0, 1000)
    for row in failed.select(["source_file", "source_row", "error_type", "error"]).to_pylist():
        where = f"{row['source_file']}, row {row['source_row']}: {row['error']}"
        rows.examples.setdefault(row["error_type"], where)
    keep = min(_SLOWEST, generated.num_rows)
    order = pc.select_k_unstable(generated, k=keep, sort_keys=[("latency_seconds", "descending")])
    slowest = rows.slowest + generated.take(order).to_pylist()
    rows.slowest = sorted(slowest, key=lambda r: -(r["latency_seconds"] or 0))[:_SLOWEST]
