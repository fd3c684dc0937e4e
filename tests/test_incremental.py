"""Incremental runs over a growing folder: each file once, and the dry run tells the truth."""

import json
import os
import shutil
import time

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline import incremental
from pipeline.config import load_config
from pipeline.errors import ConfigError, InputError, LockedError, RunFailed
from pipeline.incremental import dry_run, run_incremental
from pipeline.run import run
from pipeline.status import describe, read_status
from pipeline.store.files import Store
from pipeline.store.intake import Candidate, Entry, Intake, Selection, decide
from pipeline.store.lease import Lease
from tests.fakes import Behaviour, fake_factory

NOW = 1_700_000_000.0
DAY = 86_400.0


def file(name, age, version="a" * 12, size=10):
    return Candidate(name, size, NOW - age, version)


@pytest.fixture
def intake(tmp_path):
    """`old.parquet` is done in version aaa, `bad.parquet` is set aside."""
    store = Store(str(tmp_path / "ledger"))
    ledger = Intake(store)
    for name, state in (("old.parquet", "done"), ("bad.parquet", "bad")):
        entry = Entry(file(name, 0).file_id, "a" * 12, "f" * 16, state)
        ledger.record(entry, {"reason": "no columns"})
    ledger.note({"newest_done": NOW - DAY})
    return Intake(store)


@pytest.mark.parametrize(
    ("candidate", "options", "take", "reason"),
    [
        (file("new.parquet", 90), {}, True, "new"),
        (file("new.parquet", 30), {}, False, "modified in the last 60 s: may still be"),
        (file("new.parquet", 30), {"settle_s": 10}, True, "new"),
        (file("new.parquet", 90, size=0), {}, False, "empty: no bytes"),
        (file("old.parquet", DAY), {}, False, "done"),
        (file("old.parquet", DAY), {"full_refresh": True}, True, "done before: --full-refresh"),
        (file("old.parquet", 90, "b" * 12), {"on_change": "ignore"}, False, "changed since it was"),
        (file("old.parquet", 90, "b" * 12), {"on_change": "reprocess"}, True, "changed since it"),
        (file("bad.parquet", DAY), {}, False, "set aside: no columns"),
        (file("bad.parquet", 90, "b" * 12), {}, True, "mended since it was set aside"),
        (file("bad.parquet", DAY), {"full_refresh": True}, True, "done before: --full-refresh"),
        (file("late.parquet", DAY + 3000), {"lookback_s": 3600}, True, "new"),
        (file("late.parquet", DAY + 4000), {"lookback_s": 3600}, False, "older than what is done"),
        (file("late.parquet", 9 * DAY), {}, True, "new"),
        (file("ds=1/x.parquet", DAY), {"partitions": ("ds=1",)}, True, "new"),
        (file("ds=11/x.parquet", DAY), {"partitions": ("ds=1",)}, False, "not in partition ds=1"),
        (file("x.parquet", DAY), {"since": NOW - DAY}, True, "new"),
        (file("x.parquet", DAY + 1), {"since": NOW - DAY}, False, "modified before --since"),
        (file("x.parquet", DAY), {"until": NOW - DAY}, False, "modified at or after --until"),
    ],
)
def test_why_a_file_is_taken_or_not(intake, candidate, options, take, reason):
    (decision,) = decide([candidate], intake, Selection(**options), "f" * 16, NOW)
    assert decision.take == take
    assert decision.reason.startswith(reason)


def test_changed_files_are_refused_unless_told(intake):
    with pytest.raises(InputError, match=r"old\.parquet changed .* --on-change reprocess"):
        decide([file("old.parquet", 90, "b" * 12)], intake, Selection(), "f" * 16, NOW)


def test_other_settings_are_told_apart(intake):
    (decision,) = decide([file("old.parquet", 90)], intake, Selection(), "0" * 16, NOW)
    assert decision.reason == "done with other settings"


def test_the_oldest_come_first_and_begun_files_always(intake):
    intake.batch = {"begun": "a" * 12, "begun-changed": "b" * 12}
    files = [file("b", 100), file("c", 300), file("begun", 70), file("a", 300)]
    files.append(file("begun-changed", 200))
    decisions = decide(files, intake, Selection(max_files=2), "f" * 16, NOW)
    assert [d.name for d in decisions if d.take] == ["c", "begun", "a", "begun-changed"]
    assert [d.name for d in decisions if d.waits] == ["b"]


@pytest.fixture
def folder(tmp_path):
    """(input folder, function that makes a settled file in it)."""
    root = tmp_path / "in"
    root.mkdir()

    def make(name, numbers, age=3600.0, **columns):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        texts = [f"The mill number {n}." for n in numbers]
        pq.write_table(pa.table({"text": texts, **columns}), path)
        os.utime(path, (time.time() - age,) * 2)
        return path

    return root, make


class Runs:
    """Incremental runs with the fake engine over one folder."""

    def __init__(self, source, output, model, journal, *extra):
        self.output, self.journal = output, journal
        sets = [f"input.path={source}", f"output.path={output}", f"model.target={model}", *extra]
        self.config = load_config([], [*sets, "input.unit_rows=4"], task="summarize")

    def __call__(self, **options):
        """Files taken; the dry run must have said the same."""
        selection = Selection(**options)
        foretold = dry_run(self.config, selection)
        told = []
        original = incremental.show
        incremental.show = told.append
        try:
            behaviour = Behaviour(journal=str(self.journal))
            factory = fake_factory(behaviour)
            assert run_incremental(self.config, selection, make_factory=factory) == 0
        finally:
            incremental.show = original
        (batch,) = told
        assert batch.decisions == foretold.decisions and batch.bad == foretold.bad
        return [f.name for f in batch.taken]

    def generated(self):
        """Rows generated since the last call, by file."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        self.journal.unlink(missing_ok=True)
        counts = {}
        for line in lines:
            name = line.partition(":")[0]
            counts[name] = counts.get(name, 0) + 1
        return counts

    def rows(self):
        table = pyarrow.dataset.dataset(str(self.output), exclude_invalid_files=True).to_table()
        found = {}
        for row in table.select(["source_file", "source_row"]).to_pylist():
            found.setdefault(row["source_file"], []).append(row["source_row"])
        return found


@pytest.fixture
def runs(folder, tmp_path, tiny_model_dir):
    return Runs(folder[0], tmp_path / "out", tiny_model_dir, tmp_path / "journal")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_growing_folder(folder, runs, capsys):
    root, make = folder
    make("a.parquet", range(6))
    (root / "broken.parquet").write_bytes(b"PAR1 but no more")
    os.utime(root / "broken.parquet", (1e9, 1e9))
    assert runs() == ["a.parquet"] and runs.generated() == {"a.parquet": 6}
    assert runs() == [] and runs.generated() == {}
    assert "nothing new" in capsys.readouterr().out

    make("young.parquet", range(3), age=5)
    make("c.parquet", range(5))
    make("wrong.parquet", range(5)).unlink()
    pq.write_table(pa.table({"other": ["x"]}), root / "wrong.parquet")
    os.utime(root / "wrong.parquet", (1e9, 1e9))
    make("sub/b.parquet", range(4), age=7200)
    assert runs(max_files=2) == ["sub/b.parquet"]  # and wrong.parquet, older still
    assert runs() == ["c.parquet"]
    assert runs.generated() == {"sub/b.parquet": 4, "c.parquet": 5}
    shutil.rmtree(root / "sub")  # a landing folder may be emptied
    make("a.parquet", range(9), age=1800)
    with pytest.raises(InputError, match=r"a\.parquet changed"):
        dry_run(runs.config, Selection())
    assert runs(on_change="ignore") == []
    assert runs(on_change="reprocess") == ["a.parquet"]
    assert runs.generated() == {"a.parquet": 9}
    rows = {"a.parquet": range(9), "sub/b.parquet": range(4), "c.parquet": range(5)}
    assert runs.rows() == {name: list(numbers) for name, numbers in rows.items()}
    status = json.loads((runs.output / "_run/intake/status.json").read_text())
    assert (status["files_done"], status["files_waiting"], status["files_set_aside"]) == (3, 1, 2)
    assert 0 < status["oldest_waiting_seconds"] < 120
    assert abs(status["last_success_timestamp"] - time.time()) < 60
    assert "incremental: 3 files done, 1 wait, 2 set aside" in describe(
        read_status(str(runs.output))
    )
    with Lease(Store(str(runs.output)), "other"), pytest.raises(LockedError):
        run_incremental(runs.config, Selection())
    (root / "broken.parquet").unlink()
    (root / "wrong.parquet").unlink()
    with pytest.raises(ConfigError, match=r'mode \("incremental" -> null\)'):
        run(runs.config)
    other = runs.config.model_copy(
        update={"prompt": runs.config.prompt.model_copy(update={"system": "Be brief."})}
    )
    with pytest.raises(ConfigError, match=r"prompt\.system .* --full-refresh"):
        run_incremental(other, Selection(on_change="ignore"))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("where", ["batch", "plan", "entry", "status", "empty"])
def test_killed_anywhere_and_run_again(folder, runs, monkeypatch, where):
    """A kill between two writes of the driver leaves what the next run goes on from."""
    _, make = folder
    make("a.parquet", range(6))
    make("b.parquet", range(5))
    put, written = Store.put, []
    names = {"batch": "intake/batch", "plan": "_run/plan.json", "entry": ".done.json"}
    names |= {"status": "intake/status", "empty": "_run/plan.json"}
    nth = 2 if where == "empty" else 1

    def dying(store, name, data):
        written.append(name)
        if sum(names[where] in n for n in written) == nth and names[where] in name:
            raise RunFailed("killed")
        put(store, name, data)

    monkeypatch.setattr(Store, "put", dying)
    with pytest.raises(RunFailed, match="killed"):
        runs()
    monkeypatch.setattr(Store, "put", put)
    runs()
    assert runs() == []
    assert runs.generated() == {"a.parquet": 6, "b.parquet": 5}
    assert runs.rows() == {"a.parquet": list(range(6)), "b.parquet": list(range(5))}
    assert (runs.output / "_SUCCESS").exists()


def test_wrong_config_sets_no_file_aside(folder, runs):
    _, make = folder
    make("a.parquet", range(2))
    wrong = runs.config.model_copy(
        update={"input": runs.config.input.model_copy(update={"text_column": "body"})}
    )
    with pytest.raises(ConfigError, match="no column 'body'"):
        run_incremental(wrong, Selection())
    assert Intake(Store(str(runs.output))).count("bad") == 0
