"""What a running cluster tells of a run: Prometheus metrics and structured logs."""

import json
import logging
import re
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import logs
from pipeline.config import load_config
from pipeline.run import Options, run
from tests.fakes import Behaviour, fake_factory

ROWS = 23
SECRET = "A prompt that no log may show."
COUNTED = {
    "ray_rows_total mode=job status=ok": ROWS - 1,
    "ray_rows_total mode=job status=error": 1,
    "ray_tokens_generated_total mode=job": 5 * (ROWS - 1),
    "ray_draft_tokens_total mode=job": 4 * (ROWS - 1),
    "ray_draft_accepted_total mode=job": 2 * (ROWS - 1),
    "ray_row_latency_seconds_count mode=job": ROWS - 1,
    "ray_speedup_ratio_count mode=job": ROWS - 1,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model_dir, ray_cluster):
    """A run of 23 rows with structured logs: its output and what was on the metrics port before."""
    import os

    folder = tmp_path_factory.mktemp("metrics")
    texts = [f"{SECRET} {n}" for n in range(ROWS)]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    config = load_config(
        [],
        [
            f"input.path={folder / 'in.parquet'}",
            f"output.path={folder / 'out'}",
            f"model.target={tiny_model_dir}",
            "input.unit_rows=5",
            "faults.max_error_rate=0.5",
        ],
        task="summarize",
    )
    before = settled()
    os.environ["DRAFTMILL_LOG"] = "json"
    try:
        fake = Behaviour(fail_rows=("in.parquet:7",))
        assert run(config, Options(), fake_factory(fake)) == 0
    finally:
        del os.environ["DRAFTMILL_LOG"]
    return folder / "out", before


def scrape() -> dict[str, float]:
    """The metrics port of the node: name and labels that tell rows apart -> value."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(ray_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        known = re.findall(r'(status|mode|le)="([^"]*)"', labels)
        key = name + "".join(f" {label}={found}" for label, found in sorted(known))
        gauge = name.endswith(("_timestamp", "_depth"))  # several processes: sums mean nothing
        known_value = values.get(key, 0.0)
        values[key] = max(known_value, float(value)) if gauge else known_value + float(value)
    return values


def settled() -> dict[str, float]:
    """As `scrape`, once what earlier tests counted has come: workers tell every ten seconds."""
    deadline = time.monotonic() + 120
    values = scrape()
    while time.monotonic() < deadline:
        time.sleep(12)
        before, values = values, scrape()
        if all(before.get(name, 0.0) == values.get(name, 0.0) for name in COUNTED):
            return values
    raise AssertionError("rows are still being counted")


@pytest.mark.ray
def test_metrics_are_on_the_metrics_port(finished):
    _, before = finished
    deadline = time.monotonic() + 40
    while True:
        now = scrape()
        found = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in COUNTED}
        if found == COUNTED or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert found == COUNTED
    assert abs(now["ray_last_success_timestamp mode=job"] - time.time()) < 120
    assert "ray_queue_depth mode=job" in now


@pytest.mark.ray
def test_workers_log_json_with_run_and_unit(finished):
    import ray

    output, _ = finished
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    run_id = json.loads((output / "_run" / "summary.json").read_text())["run_id"]
    lines = []
    for file in folder.glob("worker-*.err"):
        text = file.read_text(errors="replace")
        assert SECRET not in text
        lines += [json.loads(x) for x in text.splitlines() if x.startswith("{") and run_id in x]
    commits = [line for line in lines if line["message"] == "committed"]
    assert sum(line["rows"] for line in commits) == ROWS
    assert {line["level"] for line in commits} == {"INFO"}
    units = {line["unit"].partition(":")[2] for line in commits}
    assert units == {f"{n}-{min(n + 5, ROWS)}" for n in range(0, ROWS, 5)}


def test_json_lines_have_bound_and_own_fields_and_the_traceback():
    formatter = logs.JsonFormatter()
    try:
        raise ValueError("no")
    except ValueError:
        import sys

        record = logging.makeLogRecord(
            {"name": "pipeline.x", "levelname": "ERROR", "msg": "of %d", "args": (3,)}
            | {"exc_info": sys.exc_info(), "unit": "a:0-4"}
        )
    line = json.loads(formatter.format(record))
    assert (line["message"], line["level"], line["unit"]) == ("of 3", "ERROR", "a:0-4")
    assert "ValueError: no" in line["traceback"]
    assert line["time"].endswith("+00:00")
