"""A million rows through the flow: `make soak`. Prints what it measures."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import yaml

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[1]


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


def start(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "tests/fakes.py", folder / "journal", "0", folder / "config.yaml"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def measure(folder: Path) -> tuple[float, float, float]:
    """Run to the end: MiB of the driver at most, seconds in all, seconds of planning."""
    started = time.monotonic()
    process = start(folder)
    lines, planned = [], 0.0
    for line in process.stdout:
        lines.append(line)
        if not planned and "units to do" in line:
            planned = time.monotonic() - started
    assert process.wait() == 0, "".join(lines[-30:])
    peak = int(re.search(r"driver peak: (\d+) MiB", "".join(lines)).group(1))
    return peak, time.monotonic() - started, planned


def test_a_million_rows(tmp_path, tiny_model_dir):
    small = measure(prepare(tmp_path / "small", tiny_model_dir, 10_000))
    folder = prepare(tmp_path / "large", tiny_model_dir, 1_000_000)
    process = start(folder)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:  # a third of it, then kill -9
        markers = folder / "out" / "_run" / "commits"
        if markers.exists() and len(os.listdir(markers)) > 600:
            break
        time.sleep(0.5)
    process.kill()
    process.communicate()
    large = measure(folder)
    table = pyarrow.dataset.dataset(folder / "out").to_table(columns=["source_row"])
    rows = table["source_row"].to_pylist()
    assert rows == [*range(250_000)] * 4
    print(f"\n10 k rows: driver {small[0]} MiB, {small[1]:.0f} s, planned after {small[2]:.1f} s")
    print(f"rest of 1 M rows: driver {large[0]} MiB, {large[1]:.0f} s, planned {large[2]:.1f} s")
    assert large[0] < small[0] + 200
