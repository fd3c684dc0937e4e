"""A million rows through the flow: `make soak`. Prints what it measures."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config import load_config
from pipeline.flow import batches_in_flight
from pipeline.status import read_status
from pipeline.store.files import Store
from pipeline.store.plan import read_plan
from tests.fakes import peak_mib

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[1]
ROWS = 1_000_000


@dataclass
class Figures:
    """What a driver needed."""

    peak_mib: float
    seconds: float
    planning_seconds: float  # from its start to the line that says what is to do
    done_before: int

    def __str__(self) -> str:
        return (
            f"driver {self.peak_mib:.0f} MiB, {self.seconds:.0f} s, planned after "
            f"{self.planning_seconds:.1f} s, {self.done_before:,} rows done before"
        )


def prepare(folder: Path, model: Path, rows: int) -> Path:
    """A corpus of four files, and the config of its run."""
    (folder / "in").mkdir(parents=True)
    for i in range(4):
        numbers = range(i * rows // 4, (i + 1) * rows // 4)
        texts = [f"Row {n}: the miller counts the sacks, and all are there." for n in numbers]
        pq.write_table(pa.table({"text": texts}), folder / "in" / f"{i}.parquet")
    config = {
        "input": {"path": str(folder / "in")},
        "output": {"path": str(folder / "out")},
        "model": {"target": str(model)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


class Driver:
    """A run of the fake engine in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "tests/fakes.py", folder / "journal", "0"]
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, folder / "config.yaml"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        line = self._read_until(r"(?P<done>[\d,]+) of [\d,]+ rows already done: .* units to do")
        self._done_before = int(line["done"].replace(",", ""))
        self._planned = time.monotonic() - self._started

    def finish(self) -> Figures:
        """Wait for its end, which must be a good one."""
        peak = int(self._read_until(r"driver peak: (?P<mib>\d+) MiB")["mib"])
        assert self.process.wait() == 0
        return self._figures(peak)

    def kill(self) -> Figures:
        """As `kill -9` does."""
        figures = self._figures(peak_mib(self.process.pid))
        self.process.kill()
        self.process.communicate()
        return figures

    def _figures(self, peak: float) -> Figures:
        return Figures(peak, time.monotonic() - self._started, self._planned, self._done_before)

    def _read_until(self, pattern: str) -> re.Match:
        for line in self.process.stdout:
            self._lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError("".join(self._lines[-30:]))


def wait_for_markers(folder: Path, count: int) -> None:
    markers = folder / "out" / "_run" / "commits"
    deadline = time.monotonic() + 900
    while not markers.exists() or len(os.listdir(markers)) < count:
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.5)


def generated(folder: Path) -> list[str]:
    """Row keys that the engine has completed, once the workers of an ended driver are gone."""
    size, journal = -1, folder / "journal"
    while size != journal.stat().st_size:
        size = journal.stat().st_size
        time.sleep(3)
    return [line.split()[0] for line in journal.read_text().splitlines()]


def test_a_million_rows(tmp_path, tiny_model_dir):
    small = Driver(prepare(tmp_path / "small", tiny_model_dir, 10_000)).finish()
    folder = prepare(tmp_path / "large", tiny_model_dir, ROWS)
    driver = Driver(folder)
    plan = read_plan(Store(str(folder / "out")))
    config = load_config([folder / "config.yaml"], task="summarize")
    in_flight = batches_in_flight(config, "cpu", plan.unit_rows)
    wait_for_markers(folder, ROWS // plan.unit_rows // 3)
    killed = driver.kill()
    before = generated(folder)
    committed = read_status(str(folder / "out")).snapshot.counts.rows
    lost = len(set(before)) - committed
    large = Driver(folder).finish()
    again = len(generated(folder)) - ROWS
    print(f"\n10 k rows: {small}")
    print(f"a third of 1 M rows: {killed}; {lost:,} rows lost")
    print(f"the rest: {large}")
    print(f"{(ROWS - committed) / large.seconds:,.0f} rows/s, {again:,} rows generated twice")

    assert large.done_before == committed
    assert 0 <= lost <= in_flight * plan.unit_rows  # one actor
    assert again == lost + len(before) - len(set(before))
    assert max(killed.peak_mib, large.peak_mib) < small.peak_mib + 200
    assert max(killed.planning_seconds, large.planning_seconds) < small.planning_seconds + 10
    table = pyarrow.dataset.dataset(folder / "out").to_table(columns=["source_row", "summary"])
    assert table["source_row"].to_pylist() == [*range(ROWS // 4)] * 4
    assert table["summary"].null_count == 0
    assert len(table["summary"].unique()) == ROWS
