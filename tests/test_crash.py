"""The crash matrix: a fault at every point of a run, then the same command again."""

import itertools
import uuid
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.errors import EngineError, RunFailed
from pipeline.run import run
from pipeline.store.files import Store
from pipeline.store.ledger import Ledger
from pipeline.store.plan import SUCCESS, read_plan
from pipeline.store.verify import clean, verify
from tests import crash
from tests.crash import Fault, FaultyFileSystem, Killed
from tests.fakes import Behaviour, FakeEngine, fake_factory

FILES = {"a.parquet": 11, "sub/b.parquet": 5}  # parts of 8 rows: 3; units of 3 rows: 6
ALL = {(name, row) for name, rows in FILES.items() for row in range(rows)}
TEXT = ["source_file", "source_row", "id", "summary", "status"]

# Point of the run -> operation, path, which of them.
PUTS = {
    "lease": (r"_run/lease", 1),
    "plan": (r"_run/plan", 1),
    "first data": (r"_run/data/", 1),
    "data": (r"_run/data/", 3),
    "first marker": (r"_run/commits/", 1),
    "marker": (r"_run/commits/", 4),
    "last marker": (r"_run/commits/", 6),
    "part": (r"/part-a", 1),
    "last part": (r"/part-b", 1),
    "publication": (r"_run/published/", 2),
    "summary": (r"_run/summary", 1),
    "success": (r"/_SUCCESS", 1),
}
READS = {
    "input footer": (r"/in/", 1),
    "input": (r"/in/", 6),
    "footer of data": (r"_run/data/.*parquet", 2),
    "lease before a marker": (r"_run/lease", 5),
    "data to publish": (r"_run/data/.*parquet", 14),
    "footer of part": (r"/part-", 1),
    "markers to sum": (r"_run/published/", 1),
}
DELETES = {
    "success of before": (r"/_SUCCESS", 1),
    "published data": (r"_run/data/.*parquet", 2),
    "all data": (r"_run/data$", 1),
    "lease": (r"_run/lease", 1),
}


def matrix():
    for name, (path, nth) in PUTS.items():
        for kind, when in [
            ("kill", "before"), ("kill", "after"), ("pass", "after"), ("full", "before"),
        ]:  # fmt: skip
            yield f"put {name}: {kind} {when}", Fault("put", path, kind, when, nth)
    for name, (path, nth) in READS.items():
        for kind in ("kill", "pass"):
            yield f"read {name}: {kind}", Fault("read", path, kind, "before", nth)
    for name, (path, nth) in DELETES.items():
        for kind, when in [("kill", "before"), ("kill", "after"), ("pass", "after")]:
            yield f"delete {name}: {kind} {when}", Fault("delete", path, kind, when, nth)


MATRIX = dict(matrix())


class Job:
    """A run in this process over a store that fails as told."""

    def __init__(self, model, folder, monkeypatch):
        self.root = f"faulty://{uuid.uuid4().hex}"
        self.store = Store(f"{self.root}/out")
        self._journal, self._monkeypatch = folder / "journal", monkeypatch
        self._processes = itertools.count(1)
        source = Store(f"{self.root}/in")
        for name, rows in FILES.items():
            texts = [f"The mill number {n} of {name} stands by the river." for n in range(rows)]
            table = pa.table({"id": [f"{name}-{n}" for n in range(rows)], "text": texts})
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, row_group_size=4)
            source.put(name, sink.getvalue().to_pybytes())
        settings = {
            "input.path": f"{self.root}/in",
            "input.id_column": "id",
            "input.unit_rows": 3,
            "output.path": f"{self.root}/out",
            "output.rows_per_file": 8,
            "model.target": model,
        }
        sets = [f"{key}={value}" for key, value in settings.items()]
        self.config = load_config([], sets, task="summarize")

    def __call__(self, fault=None, make_factory=None):
        """One process: its exit code, `killed`, or what it failed with."""
        crash.next_process(self._monkeypatch, next(self._processes))
        FaultyFileSystem.fault = fault
        factory = make_factory or fake_factory(Behaviour(journal=str(self._journal)))
        try:
            return run(self.config, make_factory=factory)
        except Killed:
            return "killed"
        except (RunFailed, EngineError, OSError) as error:
            return str(error)
        finally:
            FaultyFileSystem.fault, FaultyFileSystem.dead = None, False

    def generated(self):
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return Counter(line.rsplit(" ", 1)[0] for line in lines)

    def committed(self):
        """Keys of the rows that markers or parts hold."""
        plan, ledger = read_plan(self.store), Ledger(self.store)
        if plan is None:
            return set()
        ledger.refresh()
        pending = {
            (u.file.name, n) for u in ledger.pending_cells(plan) for n in range(u.start, u.stop)
        }
        return {f"{name}:{row}" for name, row in ALL - pending}

    def text(self):
        """The text columns of each output file."""
        names = [name for name in self.store.names() if name.endswith(".parquet")]
        found = {}
        for name in names:
            with self.store.open(name) as file:
                found[name] = pq.read_table(file, columns=TEXT).to_pydict()
        return found

    def check(self, undisturbed):
        plan = read_plan(self.store)
        verdict = verify(self.store, plan)
        assert (verdict.problems, verdict.rows, verdict.leftovers) == ([], len(ALL), 0)
        assert self.store.exists(SUCCESS)
        assert not self.store.exists("_run/lease.json")
        assert self.text() == undisturbed


@pytest.fixture
def job(tiny_model_dir, tmp_path, monkeypatch):
    crash.install(monkeypatch)
    return Job(tiny_model_dir, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash.install(monkeypatch)
        job = Job(tiny_model_dir, tmp_path_factory.mktemp("undisturbed"), monkeypatch)
        assert job() == 0
        assert set(job.generated().values()) == {1}
        return job.text()


@pytest.mark.parametrize("point", MATRIX)
def test_same_command_after_a_fault(job, undisturbed, point):
    fault = MATRIX[point]
    fault.seen, fault.struck = 0, False
    first = job(fault)
    assert fault.struck, "the run never came to this point"
    if fault.kind == "pass":
        assert first == 0
    elif fault.kind == "kill":
        assert first == "killed"
    else:
        assert "No space left on device" in first
    committed, before = job.committed(), job.generated()
    assert job() == 0
    again = job.generated() - before
    assert not committed & set(again), "committed rows were generated again"
    job.check(undisturbed)
    generated = job.generated()
    assert job() == 0
    assert job.generated() == generated


@pytest.mark.parametrize("kind", ["kill", "break"])
@pytest.mark.parametrize("row", ["a.parquet:0", "a.parquet:9", "sub/b.parquet:4"])
def test_same_command_after_a_fault_in_the_engine(job, undisturbed, kind, row):
    class Deadly(FakeEngine):
        def _complete(self, request):
            if request.row_key == row:
                FaultyFileSystem.dead = True
                raise Killed
            return super()._complete(request)

    behaviour = Behaviour(journal=str(job._journal), break_at=row if kind == "break" else None)
    engine = FakeEngine if kind == "break" else Deadly
    first = job(make_factory=lambda *_: lambda: engine(behaviour))
    assert first == "killed" if kind == "kill" else "the fake device is lost" in first
    committed, before = job.committed(), job.generated()
    assert job() == 0
    assert not committed & set(job.generated() - before)
    job.check(undisturbed)


def test_clean_between_a_kill_and_the_next_command(job, undisturbed, monkeypatch):
    assert job(Fault("put", r"_run/commits/", "kill", "before", 3)) == "killed"
    plan = read_plan(job.store)
    verdict = verify(job.store, plan)
    assert verdict.leftovers == 1
    assert any("8 rows are committed" in problem for problem in verdict.problems)
    crash.next_process(monkeypatch, 99)
    committed = job.committed()
    assert clean(job.store, plan) == 1
    assert clean(job.store, plan) == 0
    assert job.committed() == committed
    assert job() == 0
    job.check(undisturbed)


def test_matrix_is_large():
    assert len(MATRIX) >= 60
