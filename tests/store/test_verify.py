"""`--verify` finds what is wrong with an output; `--clean` removes what nobody needs."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.errors import LockedError
from pipeline.records import output_schema
from pipeline.store.commit import Committer
from pipeline.store.lease import Lease
from pipeline.store.ledger import Ledger
from pipeline.store.plan import PLAN_NAME, SUCCESS
from pipeline.store.publish import publish_part, unpublished
from pipeline.store.verify import clean, verify
from tests.store.test_commit import finished
from tests.store.test_lease import foreign

ROOT = Path(__file__).parents[2]


@pytest.fixture
def complete(store, guard, plan):
    """An output whose every part is published."""
    for name, rows in (("a.parquet", 23), ("b.parquet", 4)):
        Committer(guard, plan, 0).commit(finished(name, 0, rows))
    ledger = Ledger(store)
    ledger.refresh()
    for part in plan.parts():
        commits = unpublished(ledger, part)
        publish_part(guard, part, commits, None, output_schema(["summary"], []), {})
    store.put(PLAN_NAME, plan.to_json())
    store.put(SUCCESS, b"{}")
    return store


def parts(store):
    return sorted(name for name in store.names() if name.endswith(".parquet"))


def rewrite(store, change):
    """Change the rows of the first part."""
    path = store.path(parts(store)[0])
    pq.write_table(change(pq.read_table(path)), path)


def test_complete_output_is_fine(complete, plan):
    verdict = verify(complete, plan)
    assert (verdict.problems, verdict.rows, verdict.files) == ([], 27, 4)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda s: s.delete(parts(s)[:1]), "its marker is there, the file is not"),
        (lambda s: s.put(parts(s)[0], b"PAR1 cut"), "bytes, its marker says"),
        (lambda s: s.put(parts(s)[0], b"PAR1 cut"), "not a Parquet file"),
        (lambda s: rewrite(s, lambda t: t.slice(1)), "1 rows are missing, as row 0"),
        (lambda s: rewrite(s, lambda t: t.take([*range(10), 3])), "1 rows are doubled, as row 3"),
        (lambda s: s.put(parts(s)[0], s.read(parts(s)[1])), "10 rows are foreign"),
        (lambda s: s.put(parts(s)[0], s.read(parts(s)[3])), "rows of another input file"),
        (lambda s: s.put("part-x.parquet", b""), "part-x.parquet: readers see it, but it is no"),
        (lambda s: s.delete(s.names("_run/published")[:1]), "no marker says that it is whole"),
        (lambda s: s.delete(s.names("_run/published")[:1]), f"{SUCCESS}: it is there all the same"),
    ],
)
def test_damage_is_found(complete, plan, damage, problem):
    damage(complete)
    found = verify(complete, plan).problems
    assert any(problem in line for line in found), found


def test_commits_without_their_data_are_found(store, guard, plan):
    Committer(guard, plan, 0).commit(finished("b.parquet", 0, 4))
    data = store.names("_run/data")
    store.put(data[0], b"broken")
    assert any("is broken" in problem for problem in verify(store, plan).problems)
    store.delete(data)
    assert any("is gone, its marker is there" in p for p in verify(store, plan).problems)


def test_clean_removes_only_what_nobody_needs(store, plan):
    with Lease(store, "run") as lease:
        Committer(lease.guard, plan, 0).commit(finished("b.parquet", 0, 4))
        needed = store.names("_run/data")
        orphan = needed[0].replace("-", "-dead", 1).replace(".g0.", ".g0.x")
        store.put(orphan, b"orphan")
        (Path(store.path("_run/commits")) / ".tmp-1").write_bytes(b"half")
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            clean(store, plan)
        assert orphan in store.names("_run/data")
    assert verify(store, plan).leftovers == 1
    assert clean(store, plan) == 2
    assert store.names("_run/data") == needed
    assert clean(store, plan) == 0


def test_clean_never_touches_a_lease_that_beats_elsewhere(store, plan, monkeypatch):
    foreign(store)
    store.put("_run/data/orphan.parquet", b"")
    monkeypatch.setattr("pipeline.store.lease.PERIOD_S", 2.0)
    beat = threading.Timer(0.5, lambda: foreign(store, counter=1))
    beat.start()
    with pytest.raises(LockedError, match="on elsewhere"):
        clean(store, plan)
    beat.join()
    assert store.names("_run/data") == ["_run/data/orphan.parquet"]


def test_from_the_command_line(complete, tmp_path):
    def status(*options):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "jobs/status.py", complete.url, *options]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    good = status("--verify")
    assert (good.returncode, good.stdout) == (0, "27 rows in 4 files are as they should be\n")
    complete.delete(parts(complete)[:1])
    bad = status("--verify", "--storage-options", json.dumps({}))
    assert bad.returncode == 1
    assert "the file is not" in bad.stdout
    locked = status("--clean")
    assert locked.returncode == 75, locked.stderr
    wrong = status("--storage-options", "[]")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
