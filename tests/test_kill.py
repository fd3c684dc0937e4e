"""Runs that end early, by kill -9 or by their failures, in processes of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config import load_config
from pipeline.flow import batches_in_flight
from pipeline.status import read_status

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
ROWS = 200
UNIT_ROWS = 5


@pytest.fixture
def job(tmp_path, tiny_model_dir):
    return make_job(tmp_path, tiny_model_dir, ROWS)


def make_job(tmp_path: Path, model: Path, rows: int) -> Path:
    texts = [f"The mill number {n} stands by the river." for n in range(rows)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet", row_group_size=60)
    config = {
        "input": {"path": str(tmp_path / "in.parquet"), "unit_rows": UNIT_ROWS},
        "output": {"path": str(tmp_path / "out"), "rows_per_file": 50},
        "model": {"target": str(model)},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def start(job: Path, seconds_per_row: float, *options: str) -> subprocess.Popen:
    command = [sys.executable, "tests/fakes.py", job / "journal", str(seconds_per_row)]
    return subprocess.Popen(
        [*command, job / "config.yaml", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(job: Path, process: subprocess.Popen, rows: int) -> int:
    """Wait until so many rows are committed; how many are."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (job / "out" / "_run" / "plan.json").exists():
            done = read_status(str(job / "out")).snapshot.counts.rows
            if done >= rows:
                return done
        time.sleep(0.1)
    raise AssertionError(process.stdout.read() if process.poll() is not None else "too slow")


def journal(job: Path) -> list[list[str]]:
    return [line.split() for line in (job / "journal").read_text().splitlines()]


def settled_journal(job: Path) -> list[list[str]]:
    """The journal once the workers of an ended driver have followed it."""
    before, now = [], journal(job)
    while now != before:
        time.sleep(2)
        before, now = now, journal(job)
    return now


def check_output(job: Path, rows: int = ROWS) -> None:
    table = pyarrow.dataset.dataset(job / "out").to_table()
    assert table["source_row"].to_pylist() == list(range(rows))
    assert table["summary"].null_count == 0
    assert (job / "out" / "_SUCCESS").exists()


def test_killed_driver(job):
    process = start(job, 0.05)
    wait_for_rows(job, process, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = Counter(row for row, _ in settled_journal(job))
    done = read_status(str(job / "out")).snapshot.counts.rows
    assert 60 <= done < ROWS
    config = load_config([job / "config.yaml"], task="summarize")
    assert len(first) - done <= batches_in_flight(config, "cpu", UNIT_ROWS) * UNIT_ROWS

    output, _ = (second := start(job, 0.001)).communicate(timeout=200)
    assert second.returncode == 0, output
    assert f"{done} of {ROWS} rows already done" in output
    check_output(job)
    both = Counter(row for row, _ in journal(job))
    assert len(both) == ROWS
    again = sum((both - first).values()) - (ROWS - len(first))
    assert again <= len(first) - done  # only rows in flight, never committed ones


def test_killed_actor(job):
    process = start(job, 0.05)
    done = wait_for_rows(job, process, 60)
    first = {row for row, _ in journal(job)}
    actor = int(journal(job)[-1][1])
    os.kill(actor, signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_output(job)
    generated = Counter(row for row, _ in journal(job))
    assert len({pid for _, pid in journal(job)}) == 2
    assert sum(times - 1 for times in generated.values()) <= len(first) - done + 5
    assert re.search(r"200 ok", output)


def test_run_of_failures_stops_early_and_goes_on_when_told(tmp_path, tiny_model_dir):
    job = make_job(tmp_path, tiny_model_dir, 600)
    output, _ = (first := start(job, 0.01, "--fail-all")).communicate(timeout=200)
    assert first.returncode == 3, output
    assert "rows failed: stopped early" in output
    done = read_status(str(job / "out")).snapshot.counts.rows
    assert 200 <= done < 600
    generated = settled_journal(job)
    output, _ = (second := start(job, 0.0)).communicate(timeout=200)
    assert (second.returncode, journal(job)) == (3, generated), output
    assert "--retry-failed" in output
    output, _ = (third := start(job, 0.0, "--retry-failed")).communicate(timeout=200)
    assert third.returncode == 0, output
    check_output(job, 600)
