"""Ray Data sink: commits blocks of finished rows. Data file, footer check, then the marker."""

import io
import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.datasource import Datasink

from pipeline.errors import RunFailed
from pipeline.records import EVIDENCE_FIELDS
from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.ledger import Commit, write_marker
from pipeline.store.listing import file_id
from pipeline.store.plan import Plan

COMPRESSION = "zstd"


class CommitSink(Datasink[list[str]]):  # type: ignore[misc]
    """Writes each unit as one attempt: a retried task commits anew, readers take one of them."""

    def __init__(
        self, store: Store, schema: pa.Schema, plan: Plan, run_id: str, generation: int
    ) -> None:
        """`schema`: `records.completed_schema`."""
        self._store = store
        self._schema = schema
        self._rows_per_file, self._unit_rows = plan.rows_per_file, plan.unit_rows
        self._run_id = run_id
        self._generation = generation

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> list[str]:
        """Commit the blocks; the names of their markers."""
        return [
            commit_rows(self._store, rows, self._run_id, self._generation)
            for block in blocks
            for rows in self._units(block.cast(self._schema))
        ]

    def _units(self, block: pa.Table) -> Iterator[pa.Table]:
        """Cut a block into units: normally it is one, but Ray may have joined some."""
        files = block.column("source_file").to_pylist()
        rows = block.column("source_row").to_pylist()
        begin = 0
        for i in range(1, len(rows) + 1):
            if (
                i == len(rows)
                or (files[i], rows[i]) != (files[i - 1], rows[i - 1] + 1)
                or rows[i] % self._rows_per_file % self._unit_rows == 0
            ):
                yield block.slice(begin, i - begin)
                begin = i


def commit_rows(store: Store, rows: pa.Table, run_id: str, generation: int) -> str:
    """Commit rows of one file with consecutive `source_row`; the marker's name.

    Raises:
        RunFailed: what was written does not read back with as many rows.
    """
    totals = RunTotals.from_table(rows)
    source_file = rows.column("source_file")[0].as_py()
    start = rows.column("source_row")[0].as_py()
    commit = Commit(
        file_id(source_file),
        start,
        start + rows.num_rows,
        generation,
        f"{run_id}-{uuid.uuid4().hex[:8]}",
        totals,
    )
    data = to_parquet(rows.drop_columns([f.name for f in EVIDENCE_FIELDS]))
    store.put(commit.data, data)
    check_written(store, commit.data, rows.num_rows)
    body = {"source_file": source_file, "data": commit.data, "bytes": len(data), "run_id": run_id}
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
    with store.fs.open(store.path(name), "rb") as handle:
        found = pq.ParquetFile(handle).metadata.num_rows
    if found != num_rows:
        raise RunFailed(f"{name} was written with {num_rows} rows but reads back with {found}")
