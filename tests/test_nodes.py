"""A node of the cluster is lost while it works, and another one added: no row is."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray

from pipeline.config import load_config
from pipeline.run import run
from tests.fakes import Behaviour, fake_factory
from tests.ports import NODE_PORTS, free_ports

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]
RAY = Path(sys.executable).parent / "ray"
ROWS = 120


class Nodes:
    """More nodes of two CPUs each on this host."""

    def __init__(self):
        self.processes = []

    def add(self):
        """Start one; the process group of its processes."""
        ports = dict(zip(NODE_PORTS, free_ports(len(NODE_PORTS)), strict=True))
        address = ray.get_runtime_context().gcs_address
        process = subprocess.Popen(
            [
                *[RAY, "start", f"--address={address}", "--block", "--num-cpus=2"],
                *["--disable-usage-stats", *(f"--{name}={port}" for name, port in ports.items())],
            ],
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process.pid

    @staticmethod
    def lose(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture
def nodes():
    nodes, before = Nodes(), alive()
    yield nodes
    for process in nodes.processes:
        nodes.lose(process.pid)
        process.wait()
    deadline = time.monotonic() + 60
    while alive() > before and time.monotonic() < deadline:  # tests that follow use the same Ray
        time.sleep(0.2)


def alive():
    return sum(node["Alive"] for node in ray.nodes())


def test_a_node_lost_and_one_added(tmp_path, tiny_model_dir, nodes):
    before = alive()
    second, added = nodes.add(), []
    deadline = time.monotonic() + 60
    while alive() == before:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    texts = [f"The mill number {n} stands by the river." for n in range(ROWS)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet", row_group_size=20)
    sets = [
        f"input.path={tmp_path / 'in.parquet'}",
        "input.unit_rows=4",
        f"output.path={tmp_path / 'out'}",
        f"model.target={tiny_model_dir}",
        "resources.num_actors=2",
    ]
    journal, enough = tmp_path / "journal", tmp_path / "enough"

    def workers_of(group):
        return {pid for pid in map(int, pids(journal)) if node_of(pid) == group}

    def lose_and_add():
        while not workers_of(second):
            time.sleep(0.1)
        nodes.lose(second)
        added.append(nodes.add())
        while not workers_of(added[0]):
            time.sleep(0.1)
        enough.touch()

    thread = threading.Thread(target=lose_and_add, daemon=True)
    thread.start()
    behaviour = Behaviour(str(journal), seconds_per_row=0.5, slow_until=str(enough))
    config = load_config([], sets, task="summarize")
    assert run(config, make_factory=fake_factory(behaviour)) == 0
    thread.join(1)
    assert enough.exists(), "the added node did no work"
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert table["source_row"].to_pylist() == list(range(ROWS))
    assert set(table["status"].to_pylist()) == {"ok"}
    generated = Counter(line.split()[0] for line in journal.read_text().splitlines())
    assert len(generated) == ROWS
    assert sum(generated.values()) > ROWS  # those in flight on the lost node


def pids(journal):
    lines = journal.read_text().splitlines() if journal.exists() else []
    return {line.split()[1] for line in lines}


def node_of(pid):
    """Process group of the worker's raylet: of `ray start`, for the nodes of this test."""
    try:
        return os.getpgid(psutil.Process(pid).ppid())
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
