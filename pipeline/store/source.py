"""Ray Data source: one read task and one block per unit.

Ray merges and cuts blocks by size as it likes; a task that reads one unit keeps block = unit =
commit all the way to the actors (see `flow.py` for the context flags that this needs).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipeline.records import ADDRESS_FIELDS, READ_ERROR
from pipeline.store import jsonl
from pipeline.store.filesystem import FileSystem
from pipeline.store.listing import partitions
from pipeline.store.plan import PlannedFile, Unit
from pipeline.store.retry import take_retries

_BATCH_ROWS = 256  # decoded at once: rows may be megabytes each


class UnitSource(Datasource):  # type: ignore[misc]
    """Reads units of Parquet files, with the address of each row in front of its columns."""

    def __init__(
        self,
        files: FileSystem,
        units: Sequence[Unit],
        schema: pa.Schema,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Args:
        schema: the columns to read, in the types that every file is cast to.
        report: told how many requests a task had to try again, if any. Picklable.
        """
        self._files = files
        self._units = list(units)
        self._schema = schema
        self._report = report

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task per unit, whatever parallelism Ray would like."""
        return [self._read_task(unit) for unit in self._units]

    def _read_task(self, unit: Unit) -> ReadTask:
        files, schema, report = self._files, self._schema, self._report

        def read() -> Iterable[pa.Table]:
            rows = read_unit(files, unit, schema)
            retries = take_retries()
            if retries and report:
                report(retries)
            return [rows]

        metadata = BlockMetadata(
            num_rows=unit.num_rows, size_bytes=None, input_files=[unit.file.path], exec_stats=None
        )
        return ReadTask(read, metadata, pa.schema([*ADDRESS_FIELDS, *schema, READ_ERROR]))


def read_unit(files: FileSystem, unit: Unit, schema: pa.Schema) -> pa.Table:
    """The unit's rows: `source_file`, `source_row`, columns of `schema`, `records.READ_ERROR`."""
    if unit.file.offsets:
        rows, errors = _read_lines(files, unit, schema)
    else:
        cursor = _cursor(files, unit, schema.names)
        rows, errors = cursor.read(unit.start, unit.stop), [None] * unit.num_rows
        rows = with_partitions(rows, unit.file.name, schema)
    rows = cast_rows(rows.select(schema.names), schema)
    address = [
        pa.array([unit.file.name] * unit.num_rows, pa.string()),
        pa.array(range(unit.start, unit.stop), pa.int64()),
    ]
    columns = [*address, *rows.columns, pa.array(errors, READ_ERROR.type)]
    return pa.table(columns, schema=pa.schema([*ADDRESS_FIELDS, *schema, READ_ERROR]))


def with_partitions(rows: pa.Table, name: str, schema: pa.Schema) -> pa.Table:
    """The rows with the columns that only the file's folders give."""
    values = partitions(name)
    for column in schema.names:
        if column not in rows.column_names and column in values:
            constant = pa.array([values[column]] * rows.num_rows, pa.string())
            rows = rows.append_column(column, constant)
    return rows


def _read_lines(
    files: FileSystem, unit: Unit, schema: pa.Schema
) -> tuple[pa.Table, list[str | None]]:
    """Rows of JSON lines, and what is wrong with each."""
    file, folders = unit.file, partitions(unit.file.name)
    lines: list[bytes] = []
    first = 0  # row that the group begins with
    for number, rows in enumerate(file.row_groups):
        if first < unit.stop and unit.start < first + rows:
            group = _group(files, file, number)
            lines += group[max(unit.start - first, 0) : unit.stop - first]
        first += rows
    given = pa.schema([f for f in schema if f.name not in folders])
    table, errors = jsonl.to_table(lines, given)
    return with_partitions(table, file.name, schema), errors


@functools.lru_cache(maxsize=2)  # units go forwards: the same group again and again
def _group(files: FileSystem, file: PlannedFile, number: int) -> list[bytes]:
    stop = file.offsets[number + 1] if number + 1 < len(file.offsets) else file.size
    return jsonl.read_block(files, file.path, file.offsets[number], stop)


def cast_rows(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast storage variants (large_string, dictionary, null) to the schema's types.

    Invalid UTF-8 must survive to become its own row's error, so strings are cast unchecked.
    """
    columns = []
    for column, field in zip(rows.columns, schema, strict=True):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type, safe=False)
        columns.append(column.cast(field.type, safe=not pa.types.is_string(field.type)))
    return pa.table(columns, schema=schema)


class _Cursor:
    """An open file read forwards, so that units of one large row group decode it once."""

    def __init__(self, files: FileSystem, unit: Unit, columns: list[str]) -> None:
        self.key = (unit.file.path, unit.file.digest, tuple(columns))
        self._handle = files.open_file(unit.file.path, unit.file.size)
        self._parquet = pq.ParquetFile(self._handle)
        there = self._parquet.schema_arrow.names
        self._columns = [column for column in columns if column in there]
        self._groups = unit.file.row_groups
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._position = 0  # row that the next batch begins with
        self._rest: pa.Table | None = None  # decoded, not yet handed out; ends at _position
        self._seek(unit.start)

    def read(self, start: int, stop: int) -> pa.Table:
        """Rows [start, stop)."""
        at = self._position - (self._rest.num_rows if self._rest is not None else 0)
        if start < at or self._group_of(start) > self._group_of(max(self._position - 1, 0)):
            self._seek(start)
            at = self._position
        pieces = [self._rest] if self._rest is not None else []
        while self._position < stop:
            pieces.append(self._next_batch())
            if self._position <= start:  # skip without piling up
                pieces, at = [], self._position
        rows = pa.concat_tables(pieces)
        self._rest = rows.slice(stop - at)
        return rows.slice(start - at, stop - start)

    def close(self) -> None:
        self._handle.close()

    def _next_batch(self) -> pa.Table:
        batch = next(self._batches)
        self._position += batch.num_rows
        return pa.Table.from_batches([batch])

    def _seek(self, row: int) -> None:
        group = self._group_of(row)
        self._position = sum(self._groups[:group])
        self._rest = None
        self._batches = self._parquet.iter_batches(
            _BATCH_ROWS, row_groups=range(group, len(self._groups)), columns=self._columns
        )

    def _group_of(self, row: int) -> int:
        end = 0
        for group, rows in enumerate(self._groups):
            end += rows
            if row < end:
                return group
        return max(len(self._groups) - 1, 0)


_open: list[_Cursor] = []  # at most one per process


def _cursor(files: FileSystem, unit: Unit, columns: list[str]) -> _Cursor:
    """This process's cursor if it is at the unit's file, else a new one."""
    key = (unit.file.path, unit.file.digest, tuple(columns))
    if _open and _open[0].key != key:
        _open.pop().close()
    if not _open:
        _open.append(_Cursor(files, unit, columns))
    return _open[0]
