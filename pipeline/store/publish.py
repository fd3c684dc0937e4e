"""Publish: compact a part's commits into one output file, in input order, in one put.

Idempotent: the file's name depends on the part alone, its rows on the winning commits, and its
publication marker is written last. Working data is deleted only after that.
"""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import RunFailed
from pipeline.records import EVIDENCE_FIELDS, FAILED
from pipeline.stats import RunTotals
from pipeline.store.commit import check_written, to_parquet
from pipeline.store.files import Store
from pipeline.store.lease import LeaseGuard
from pipeline.store.ledger import (
    Commit,
    Ledger,
    Publication,
    read_totals,
    write_marker,
)
from pipeline.store.plan import Part, Plan, Unit, part_name
from pipeline.store.retry import take_retries

_BATCH_ROWS = 1024  # decoded at once


def publish_and_count(*args: Any) -> tuple[str, int]:
    """`publish_part`, and how many store operations it had to try again."""
    return publish_part(*args), take_retries()


def publish_part(
    guard: LeaseGuard,
    part: Part,
    commits: list[Commit],
    previous: Publication | None,
    schema: pa.Schema,
    metadata: dict[str, Any],
) -> str:
    """Write the part's file and its publication marker; the marker's name.

    Args:
        commits: the winning commits that are not yet published.
        previous: the part's publication that these add to, if any.
        schema: `records.output_schema`.

    Raises:
        RunFailed: the commits do not give each row exactly once, or the lease is lost.
    """
    store = guard.store
    generation = max(commit.generation for commit in commits)
    done = _published_before(store, part, generation)
    if done:
        return done
    rows = _newest_rows(store, part, commits, previous is not None, schema)
    guard.check()
    data = to_parquet(rows, {**metadata, "draftmill.generation": generation})
    store.put(part.name, data)
    check_written(store, part.name, part.num_rows)
    totals = _totals(store, rows, commits, previous)
    publication = Publication(part.file.file_id, part.index, generation, totals)
    body = {"source_file": part.file.name, "part": part.name, "bytes": len(data)}
    write_marker(store, publication.marker, body, totals)
    store.delete(commit.data for commit in commits)
    return publication.marker


def _published_before(store: Store, part: Part, generation: int) -> str | None:
    """The marker, if this task ran before and died while it deleted what it had published."""
    names = store.names_with(Publication.prefix(*part.key, generation))
    return names[0] if names else None


def published_texts(
    store: Store, file_name: str, rows: Iterable[int], rows_per_file: int, column: str
) -> dict[int, str]:
    """What published parts hold for rows of an input file that ended `ok`: text by row."""
    wanted, found = set(rows), dict[int, str]()
    for index in sorted({row // rows_per_file for row in wanted}):
        last = max(row for row in wanted if row // rows_per_file == index)
        with store.open(part_name(file_name, index)) as handle:
            columns = ["source_row", "status", column]
            for batch in pq.ParquetFile(handle).iter_batches(_BATCH_ROWS, columns=columns):
                for row, status, text in zip(*batch.to_pydict().values(), strict=True):
                    if row in wanted and status == "ok":
                        found[row] = text
                if batch.column(0)[-1].as_py() >= last:
                    break
    return found


def unpublished(ledger: Ledger, part: Part) -> list[Commit]:
    """The part's winning commits that no publication holds yet."""
    publication = ledger.publication(part)
    done = -1 if publication is None else publication.generation
    return [commit for commit in ledger.commits_in(part) if commit.generation > done]


def failed_units(store: Store, plan: Plan, ledger: Ledger, generation: int) -> list[Unit]:
    """Units of rows that failed in published parts, to be generated anew as `generation`.

    Units are cut at the plan's cells, and never hold a row that did not fail.
    """
    units: list[Unit] = []
    for part in plan.parts():
        publication = ledger.publication(part)
        if publication is None:
            continue
        if publication.counts.rows_error + publication.counts.rows_timeout:
            units.extend(_failed_in(store, plan, part, generation))
    return units


def _failed_in(store: Store, plan: Plan, part: Part, generation: int) -> Iterable[Unit]:
    with store.open(part.name) as handle:
        table = pq.read_table(handle, columns=["source_row", "status"])
    failed = table.filter(pc.is_in(table.column("status"), pa.array(FAILED)))
    begin = previous = None
    for row in failed.column("source_row").to_pylist():
        new_cell = (row - part.start) % plan.unit_rows == 0
        if begin is not None and previous is not None and (row != previous + 1 or new_cell):
            yield Unit(part.file, begin, previous + 1, generation)
            begin = row
        begin = row if begin is None else begin
        previous = row
    if begin is not None and previous is not None:
        yield Unit(part.file, begin, previous + 1, generation)


def _newest_rows(
    store: Store, part: Part, commits: list[Commit], has_base: bool, schema: pa.Schema
) -> pa.Table:
    """Each row of the part once, in order: of the newest generation, and of its first commit."""
    names = [part.name] if has_base else []
    by_name = sorted(commits, key=lambda c: c.marker, reverse=True)  # the lowest name wins
    names += [c.data for c in sorted(by_name, key=lambda c: c.generation)]
    tables = []
    for rank, name in enumerate(names):
        with store.open(name) as handle:
            table = pq.read_table(handle).cast(schema)
        tables.append(table.append_column("_rank", pa.array([rank] * table.num_rows, pa.int32())))
    merged = pa.concat_tables(tables)
    order = pc.sort_indices(
        merged, sort_keys=[("source_row", "ascending"), ("_rank", "descending")]
    )
    merged = merged.take(order)
    rows = merged.column("source_row").to_numpy()
    first = pa.array([i for i in range(len(rows)) if i == 0 or rows[i] != rows[i - 1]], pa.int64())
    merged = merged.take(first).drop_columns(["_rank"])
    if merged.column("source_row").to_pylist() != list(range(part.start, part.stop)):
        raise RunFailed(
            f"the commits of {part.name} hold {merged.num_rows} of its {part.num_rows} rows; "
            "files below _run/ were removed: start over with --new-run"
        )
    return merged


def _totals(
    store: Store, rows: pa.Table, commits: list[Commit], previous: Publication | None
) -> RunTotals:
    """Exact sums over the published rows, and the evidence that only markers hold."""
    totals = RunTotals.from_table(rows)
    markers = [commit.marker for commit in commits]
    evidence = sum(
        (read_totals(store, m) for m in markers + ([previous.marker] if previous else [])),
        RunTotals(),
    )
    for field in EVIDENCE_FIELDS:
        name = field.name.lstrip("_")
        setattr(totals, name, getattr(evidence, name))
    return totals
