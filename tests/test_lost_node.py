"""A node of the cluster is lost while it works: its rows are done on those that are left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray

from pipeline.config import load_config
from pipeline.run import run
from tests.fakes import Behaviour, fake_factory
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]
RAY = Path(sys.executable).parent / "ray"
ROWS = 120


@pytest.fixture
def second_node():
    """Another node of two CPUs on this host."""
    names = ["node-manager-port", "object-manager-port", "dashboard-agent-listen-port"]
    names += ["dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    known = {node["NodeID"] for node in ray.nodes()}
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
    deadline = time.monotonic() + 60
    while not (fresh := [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in known]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)

    def lose():
        os.killpg(process.pid, signal.SIGKILL)

    yield fresh[0]["NodeID"], lose
    if process.poll() is None:
        lose()
    process.wait()


def test_rows_of_a_lost_node_are_done_elsewhere(tmp_path, tiny_model_dir, second_node):
    node, lose = second_node
    texts = [f"The mill number {n} stands by the river." for n in range(ROWS)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet", row_group_size=20)
    sets = [
        f"input.path={tmp_path / 'in.parquet'}",
        "input.unit_rows=4",
        f"output.path={tmp_path / 'out'}",
        f"model.target={tiny_model_dir}",
        "resources.num_actors=2",
        "resources.num_cpus=0.7",
    ]
    journal = tmp_path / "journal"

    def lose_when_both_work():
        while len({line.split()[1] for line in _lines(journal)}) < 2:
            time.sleep(0.1)
        lose()

    threading.Thread(target=lose_when_both_work, daemon=True).start()
    behaviour = Behaviour(journal=str(journal), seconds_per_row=0.1)
    config = load_config([], sets, task="summarize")
    assert run(config, make_factory=fake_factory(behaviour)) == 0
    assert not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == node)
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert table["source_row"].to_pylist() == list(range(ROWS))
    assert set(table["status"].to_pylist()) == {"ok"}
    generated = Counter(line.split()[0] for line in _lines(journal))
    assert len(generated) == ROWS
    assert sum(generated.values()) > ROWS  # those in flight on the lost node


def _lines(journal):
    return journal.read_text().splitlines() if journal.exists() else []
