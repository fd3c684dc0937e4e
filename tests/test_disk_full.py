"""A disk that really is full: nothing half-written is seen, and the same command goes on."""

import os
import subprocess

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.errors import RunFailed
from pipeline.run import run
from pipeline.store.files import Store
from pipeline.store.plan import read_plan
from pipeline.store.verify import verify
from tests import crash
from tests.fakes import Behaviour, fake_factory


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a file system: root only")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk(small_disk, tmp_path, tiny_model_dir, monkeypatch):
    crash.install(monkeypatch)
    texts = [f"The mill number {n} stands by the river." for n in range(60)]
    pads = [os.urandom(1000).hex() for _ in texts]
    pq.write_table(pa.table({"text": texts, "pad": pads}), tmp_path / "in.parquet")
    sets = [
        f"input.path={tmp_path / 'in.parquet'}",
        "input.keep_columns=[pad]",
        "input.unit_rows=4",
        f"output.path={small_disk / 'out'}",
        "output.rows_per_file=60",
        f"model.target={tiny_model_dir}",
    ]
    config = load_config([], sets, task="summarize")
    factory = fake_factory(Behaviour())
    with pytest.raises(RunFailed, match=r"No space left on device.* of 60 rows are committed"):
        run(config, make_factory=factory)
    store = Store(str(small_disk / "out"))
    left = [path for path in (small_disk / "out").rglob("*") if path.name.startswith(".tmp-")]
    assert left == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert run(config, make_factory=factory) == 0
    assert verify(store, read_plan(store)).problems == []
    table = pyarrow.dataset.dataset(small_disk / "out").to_table()
    assert table["pad"].to_pylist() == pads
