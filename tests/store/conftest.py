"""An output folder, a plan of two files, and the lease over it."""

import pytest

from pipeline.store.files import Store
from pipeline.store.lease import Lease
from pipeline.store.plan import Plan, PlannedFile


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "out"))


@pytest.fixture
def guard(store):
    with Lease(store, "run") as lease:
        yield lease.guard


@pytest.fixture
def plan():
    files = [PlannedFile(name, name, 1, "", (rows,), rows) for name, rows in FILES.items()]
    return Plan(tuple(files), unit_rows=4, rows_per_file=10, settings={})


FILES = {"a.parquet": 23, "b.parquet": 4}
