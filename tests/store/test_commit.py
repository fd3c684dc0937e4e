"""Commits and the ledger: units cut at the grid, and one attempt of several counted."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import RunFailed
from pipeline.records import completed_schema, output_schema
from pipeline.store.commit import Committer
from pipeline.store.lease import LEASE_NAME
from pipeline.store.ledger import COMMITS, DATA, Ledger, read_totals
from pipeline.store.listing import file_id
from pipeline.store.plan import Plan
from pipeline.store.publish import publish_part, unpublished

SCHEMA = completed_schema(["summary"], [])


def finished(file, start, stop, text="text", run_id="run"):
    """Rows [start, stop) of a file as the actors commit them."""
    rows = [
        {
            "source_file": file,
            "source_row": row,
            "run_id": run_id,
            "summary": f"{text} {row}",
            "status": "ok",
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "_busy_seconds": 1.0,
            "_num_control_steps": 1,
        }
        for row in range(start, stop)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def ranges(ledger):
    return sorted((commit.file_id, commit.start, commit.stop) for commit in ledger.commits())


def test_joined_units_are_committed_apart(store, guard, plan):
    joined = pa.concat_tables([finished("a.parquet", 4, 23), finished("b.parquet", 0, 4)])
    markers = Committer(guard, plan, 0).commit(joined)
    ledger = Ledger(store)
    assert len(ledger.refresh()) == len(markers) == 7
    a, b = file_id("a.parquet"), file_id("b.parquet")
    cells = [(4, 8), (8, 10), (10, 14), (14, 18), (18, 20), (20, 23)]
    assert ranges(ledger) == sorted([(a, *cell) for cell in cells] + [(b, 0, 4)])
    assert [unit.start for unit in ledger.pending_cells(plan)] == [0]
    assert store.names(COMMITS) == sorted(markers)


def test_runs_of_failed_rows_in_one_cell_are_committed_apart(store, guard, plan):
    joined = pa.concat_tables([finished("a.parquet", 4, 5), finished("a.parquet", 6, 8)])
    Committer(guard, plan, 1).commit(joined)
    ledger = Ledger(store)
    ledger.refresh()
    assert [(c.start, c.stop, c.generation) for c in ledger.commits()] == [(4, 5, 1), (6, 8, 1)]


def test_run_that_lost_its_lease_commits_and_publishes_nothing(store, guard, plan):
    part = next(part for part in plan.parts() if part.file.name == "b.parquet")
    Committer(guard, plan, 0).commit(finished("b.parquet", 0, 4))
    ledger = Ledger(store)
    ledger.refresh()
    store.put(LEASE_NAME, store.read(LEASE_NAME).replace(guard.token.encode(), b"another"))
    with pytest.raises(RunFailed, match="took over"):
        Committer(guard, plan, 0).commit(finished("a.parquet", 0, 4))
    with pytest.raises(RunFailed, match="took over"):
        publish_part(
            guard, part, unpublished(ledger, part), None, output_schema(["summary"], []), {}
        )
    assert ledger.refresh() == []
    assert [name for name in store.names() if name.endswith(".parquet")] == []


def test_nothing_is_nothing_to_commit(store, guard, plan):
    assert Committer(guard, plan, 0).commit(SCHEMA.empty_table()) == []
    assert store.names(COMMITS) == []


def test_committer_is_small_on_the_wire(store, guard, plan):
    many = Plan(plan.files * 10_000, plan.unit_rows, plan.rows_per_file, plan.settings)
    committer = Committer(guard, many, 0)
    assert len(pickle.dumps(committer)) < 10_000
    assert len(pickle.loads(pickle.dumps(committer)).commit(finished("b.parquet", 0, 4))) == 1


@pytest.mark.parametrize("seen_in_between", [True, False])
def test_second_attempt_at_a_unit_is_counted_once(store, guard, plan, seen_in_between):
    """An actor that dies after its commit and before its task returns: the task runs again."""
    committer, ledger = Committer(guard, plan, 0), Ledger(store)
    fresh, attempts = [], {}
    for text in ("first", "second"):
        rows = finished("b.parquet", 0, 4, text)
        (marker,) = committer.commit(rows)
        attempts[marker] = [f"{text} {row}" for row in range(4)]
        if seen_in_between:
            fresh += ledger.refresh()
    fresh += ledger.refresh()
    assert len(fresh) == 1  # the publisher counts units down by these
    assert len(list(ledger.commits())) == 1
    assert ledger.counts(plan).rows == 4
    assert ledger.counts(plan).completion_tokens == 20

    part = next(part for part in plan.parts() if part.file.name == "b.parquet")
    commits = unpublished(ledger, part)
    assert [commit.marker for commit in commits] == [min(attempts)]
    marker = publish_part(guard, part, commits, None, output_schema(["summary"], []), {})
    table = pq.read_table(store.path(part.name))
    assert table["summary"].to_pylist() == attempts[min(attempts)]
    totals = read_totals(store, marker)
    assert (totals.rows, totals.completion_tokens) == (4, 20)
    assert (totals.busy_seconds, totals.num_control_steps) == (4.0, 4)

    ledger.refresh()
    assert ledger.counts(plan).rows == 4
    assert unpublished(ledger, part) == []
    assert len(store.names(DATA)) == 1  # the loser's, until the end of the run


def test_attempt_after_the_publication_changes_nothing(store, guard, plan):
    committer, ledger = Committer(guard, plan, 0), Ledger(store)
    part = next(part for part in plan.parts() if part.file.name == "b.parquet")
    committer.commit(finished("b.parquet", 0, 4, "first"))
    ledger.refresh()
    publish_part(guard, part, unpublished(ledger, part), None, output_schema(["summary"], []), {})
    while len(store.names(COMMITS)) < 8:  # some sort before the first, some after
        committer.commit(finished("b.parquet", 0, 4, "late"))
    assert ledger.refresh() == []
    for known in (ledger, Ledger(store)):
        known.refresh()
        assert unpublished(known, part) == []
        assert known.counts(plan).rows == 4
        assert [unit for unit in known.pending_cells(plan) if unit.file.name == "b.parquet"] == []


def test_publishing_again_after_a_death_in_the_middle_of_deleting(store, guard, plan):
    committer, ledger = Committer(guard, plan, 0), Ledger(store)
    part = next(part for part in plan.parts() if part.file.name == "a.parquet")
    committer.commit(finished("a.parquet", part.start, part.stop))
    ledger.refresh()
    again = (guard, part, unpublished(ledger, part), None, output_schema(["summary"], []), {})
    marker = publish_part(*again)
    assert store.names(DATA) == []
    written = store.read(part.name)
    assert publish_part(*again) == marker
    assert store.read(part.name) == written
