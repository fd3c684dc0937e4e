"""Checks an output from its own files alone: each input row once, files as their markers say.

And cleans it: what dead attempts left is removed, under the lease, so never a living run's.
"""

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.records import STATUSES
from pipeline.store.files import Store
from pipeline.store.intake import INTAKE
from pipeline.store.lease import Lease
from pipeline.store.ledger import COMMITS, DATA, PUBLISHED, Commit, Ledger, Publication
from pipeline.store.plan import RUN_FOLDER, SUCCESS, Part, Plan

_READERS = 8
_FOLDERS = ("", RUN_FOLDER, COMMITS, PUBLISHED, DATA)


@dataclass
class Verdict:
    """What a check found; good without problems."""

    rows: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)
    leftovers: int = 0  # working files of dead attempts, which no reader sees


def verify(store: Store, plan: Plan) -> Verdict:
    """Read every output file against plan and markers.

    Raises:
        StoreError or OSError: the store cannot be read.
    """
    ledger = Ledger(store)
    ledger.refresh()
    sizes = store.sizes()
    verdict = Verdict(leftovers=len(_leftovers(store, plan, ledger)))
    parts = list(plan.parts())
    with ThreadPoolExecutor(_READERS) as pool:
        for part, problems in zip(
            parts,
            pool.map(lambda p: list(_check_part(store, ledger, p, sizes)), parts),
            strict=True,
        ):
            verdict.problems += [f"{part.name}: {problem}" for problem in problems]
            if not problems:
                verdict.files, verdict.rows = verdict.files + 1, verdict.rows + part.num_rows
    known = {part.name for part in parts}
    for name in store.names(INTAKE):
        if name.endswith(".done.json"):
            known.update(_check_done(store, name, sizes, verdict))
    verdict.problems += [
        f"{name}: readers see it, but it is no part of this run"
        for name in sizes
        if name.endswith(".parquet") and name not in known
    ]
    if SUCCESS in sizes and verdict.problems:
        verdict.problems.append(f"{SUCCESS}: it is there all the same")
    return verdict


def _check_done(store: Store, entry: str, sizes: dict[str, int], verdict: Verdict) -> list[str]:
    """Check the files of an input file that an incremental run has dealt with; their names."""
    body = json.loads(store.read(entry))
    rows, files = 0, [name for name in body["parts"] if name in sizes]
    for name in files:
        with store.open(name) as handle:
            rows += int(pq.ParquetFile(handle).metadata.num_rows)
    if rows == body["rows"] and len(files) == len(body["parts"]):
        verdict.rows, verdict.files = verdict.rows + rows, verdict.files + len(files)
    else:
        verdict.problems.append(f"{body['file']}: {rows:,} of {body['rows']:,} rows are there")
    return list(body["parts"])


def _check_part(store: Store, ledger: Ledger, part: Part, sizes: dict[str, int]) -> Iterator[str]:
    publication = ledger.publication(part)
    if publication is None:
        done = sum(c.stop - c.start for c in ledger.commits_in(part) if not c.generation)
        yield f"not published, {done:,} of {part.num_rows:,} rows are committed"
        yield from _check_commits(store, ledger, part)
        if part.name in sizes:
            yield "readers see it, but no marker says that it is whole"
        return
    if part.name not in sizes:
        yield "its marker is there, the file is not"
        return
    body = json.loads(store.read(publication.marker))
    if body.get("bytes", sizes[part.name]) != sizes[part.name]:
        yield f"{sizes[part.name]:,} bytes, its marker says {body['bytes']:,}"
    try:
        with store.open(part.name) as handle:
            table = pq.read_table(handle, columns=["source_file", "source_row", "status"])
    except (pa.ArrowInvalid, EOFError) as error:
        yield f"not a Parquet file: {' '.join(str(error).split())[:200]}"
        return
    yield from _check_rows(table, part, publication)


def _check_rows(table: pa.Table, part: Part, publication: Publication) -> Iterator[str]:
    rows = Counter(table["source_row"].to_pylist())
    missing = [row for row in range(part.start, part.stop) if row not in rows]
    twice = [row for row, times in rows.items() if times > 1]
    foreign = [row for row in rows if row is None or not part.start <= row < part.stop]
    for what, found in (("missing", missing), ("doubled", twice), ("foreign", foreign)):
        if found:
            yield f"{len(found):,} rows are {what}, as row {found[0]}"
    if set(table["source_file"].to_pylist()) - {part.file.name}:
        yield "it holds rows of another input file"
    counted = Counter(table["status"].to_pylist())
    for status in STATUSES:
        said = getattr(publication.counts, f"rows_{status}")
        if counted[status] != said:
            yield f"{counted[status]:,} rows are {status}, its marker says {said:,}"


def _check_commits(store: Store, ledger: Ledger, part: Part) -> Iterator[str]:
    """Data files of an unpublished part, as resuming will need them."""
    for commit in ledger.commits_in(part):
        try:
            with store.open(commit.data) as handle:
                found = pq.ParquetFile(handle).metadata.num_rows
        except FileNotFoundError:
            yield f"{commit.data} is gone, its marker is there"
        except (pa.ArrowInvalid, EOFError) as error:
            yield f"{commit.data} is broken: {' '.join(str(error).split())[:200]}"
        else:
            if found != commit.stop - commit.start:
                yield f"{commit.data} has {found:,} rows, its marker says otherwise"


def clean(store: Store, plan: Plan) -> int:
    """Remove what dead attempts left behind; how many files and uploads it was.

    The lease keeps other runs out meanwhile, and stops what is left of a dead one before its next
    commit. A marker that still came in between goes with its data: its rows are done again.

    Raises:
        LockedError: a living run holds the output.
    """
    with Lease(store, f"clean-{uuid.uuid4().hex[:6]}"):
        ledger = Ledger(store)
        ledger.refresh()
        leftovers = _leftovers(store, plan, ledger)
        store.delete(leftovers)
        gone = set(leftovers)
        late = [c.marker for c in _commits(store) if c.data in gone and not _done(plan, ledger, c)]
        store.delete(late)
        temporary = [name for folder in _FOLDERS for name in store.temporaries(folder)]
        store.delete(temporary)
        return len(leftovers) + len(temporary) + store.abort_uploads()


def _leftovers(store: Store, plan: Plan, ledger: Ledger) -> list[str]:
    """Data files without a marker, and those whose rows are published."""
    data = store.names(DATA)  # before the markers: a marker comes after its data
    needed = {c.data for c in _commits(store) if not _done(plan, ledger, c)}
    return [name for name in data if name not in needed]


def _commits(store: Store) -> Iterator[Commit]:
    """All attempts, winners or not."""
    yield from (commit for name in store.names(COMMITS) if (commit := Commit.parse(name)))


def _done(plan: Plan, ledger: Ledger, commit: Commit) -> bool:
    found = ledger.published_as(commit.file_id, commit.start // plan.rows_per_file)
    return found is not None and found.generation >= commit.generation
