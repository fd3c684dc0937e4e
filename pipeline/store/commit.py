"""Commit finished rows: data file, footer check, then the marker."""

import io
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import RunFailed
from pipeline.records import EVIDENCE_FIELDS
from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.lease import LeaseGuard
from pipeline.store.ledger import Commit, write_marker
from pipeline.store.listing import file_id
from pipeline.store.plan import Plan

COMPRESSION = "zstd"


class Committer:
    """Commits each unit as one attempt: rows that are generated again are committed anew.

    Of several attempts the ledger takes one. Small and picklable, for it travels to the actors;
    threads may share it.
    """

    def __init__(self, guard: LeaseGuard, plan: Plan, generation: int) -> None:
        self._guard, self._store = guard, guard.store
        self._rows_per_file, self._unit_rows = plan.rows_per_file, plan.unit_rows
        self._generation = generation

    def commit(self, rows: pa.Table) -> list[str]:
        """Commit rows of `records.completed_schema`; the names of the markers.

        Raises:
            RunFailed: what was written does not read back, or another run has taken over.
            StoreError or OSError: the store refuses to write.
        """
        return [commit_rows(self._guard, unit, self._generation) for unit in self._units(rows)]

    def _units(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Cut at the units' borders: normally the rows are one unit, but Ray may join some."""
        files = rows.column("source_file").to_pylist()
        numbers = rows.column("source_row").to_pylist()
        begin = 0
        for i in range(1, len(numbers) + 1):
            if (
                i == len(numbers)
                or (files[i], numbers[i]) != (files[i - 1], numbers[i - 1] + 1)
                or numbers[i] % self._rows_per_file % self._unit_rows == 0
            ):
                yield rows.slice(begin, i - begin)
                begin = i


def commit_rows(guard: LeaseGuard, rows: pa.Table, generation: int) -> str:
    """Commit rows of one file and one run with consecutive `source_row`; the marker's name.

    Raises:
        RunFailed: what was written does not read back with as many rows, or the lease is lost.
    """
    store = guard.store
    totals = RunTotals.from_table(rows)
    first = rows.slice(0, 1).select(["source_file", "source_row", "run_id"]).to_pylist()[0]
    start, run_id = first["source_row"], first["run_id"]
    commit = Commit(
        file_id(first["source_file"]),
        start,
        start + rows.num_rows,
        generation,
        f"{run_id}-{uuid.uuid4().hex[:8]}",
        totals,
    )
    methods = rows.column("method").drop_null()
    data = to_parquet(rows.drop_columns([f.name for f in EVIDENCE_FIELDS]))
    store.put(commit.data, data)
    check_written(store, commit.data, rows.num_rows)
    body = {
        "source_file": first["source_file"],
        "data": commit.data,
        "bytes": len(data),
        "run_id": run_id,
        "methods": {v["values"]: v["counts"] for v in pc.value_counts(methods).to_pylist()},
    }
    guard.check()
    write_marker(store, commit.marker, body, totals)
    return commit.marker


def to_parquet(table: pa.Table, metadata: dict[str, Any] | None = None) -> bytes:
    """A whole Parquet file in memory; `metadata` goes to its footer as JSON values."""
    if metadata:
        encoded = {k: json.dumps(v, sort_keys=True) for k, v in metadata.items()}
        table = table.replace_schema_metadata(encoded)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=COMPRESSION)
    return buffer.getvalue()


def check_written(store: Store, name: str, num_rows: int) -> None:
    """Read the footer back, as a reader would.

    Raises:
        RunFailed: it is missing, broken or tells another number of rows.
    """
    with store.open(name) as handle:
        found = pq.ParquetFile(handle).metadata.num_rows
    if found != num_rows:
        raise RunFailed(f"{name} was written with {num_rows} rows but reads back with {found}")
