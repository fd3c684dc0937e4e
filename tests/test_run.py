"""Whole runs through Ray Data with a fake engine: exactly once, in order, resumable, honest."""

import json
import re
from collections import Counter
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray

from pipeline import flow, monitor
from pipeline.config import load_config
from pipeline.errors import ConfigError, ErrorRateExceeded, InputError, RunFailed
from pipeline.flow import start_ray
from pipeline.records import output_schema
from pipeline.run import Options, run
from pipeline.status import describe, read_status
from tests.fakes import Behaviour, DyingCommitter, FullCommitter, fake_factory

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def corpus(tmp_path):
    """Two files, one in a nested folder: 50 rows."""
    write(tmp_path / "in" / "a.parquet", range(30))
    write(tmp_path / "in" / "sub" / "b.parquet", range(30, 50))
    return tmp_path / "in"


def write(path: Path, numbers, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"The mill number {n} stands by the river." for n in numbers]
    table = {"id": [f"row-{n}" for n in numbers], "text": texts, **columns}
    pq.write_table(pa.table(table), path, row_group_size=7)


class Job:
    """A run with the fake engine, to be repeated with other settings."""

    def __init__(self, corpus, model, journal):
        self.output = corpus.parent / "out"
        self.journal = journal
        self._base = [
            f"input.path={corpus}",
            "input.id_column=id",
            f"output.path={self.output}",
            f"model.target={model}",
            "input.unit_rows=4",
            "output.rows_per_file=16",
        ]

    def __call__(self, *overrides, options=Options(), **behaviour):  # noqa: B008
        config = load_config([], [*self._base, *overrides], task="summarize")
        fake = Behaviour(journal=str(self.journal), **behaviour)
        try:
            return run(config, options, fake_factory(fake))
        except (RunFailed, ErrorRateExceeded):
            # As the end of the driver does. Here the log records that pytest keeps hold the frames
            # of the failed execution, these its actors, and these their CPUs.
            ray.shutdown()
            start_ray()
            raise

    def table(self):
        return pyarrow.dataset.dataset(self.output).to_table()

    def generated(self):
        """How often each row was generated."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return Counter(line.split()[0] for line in lines)


@pytest.fixture
def job(corpus, tiny_model_dir, tmp_path):
    return Job(corpus, tiny_model_dir, tmp_path / "journal")


def addresses(table):
    return list(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist(), strict=True))


ALL = [("a.parquet", i) for i in range(30)] + [("sub/b.parquet", i) for i in range(20)]


def test_every_row_once_in_order_for_every_reader(job):
    assert job() == 0
    table = job.table()
    assert addresses(table) == ALL
    assert table.schema.equals(output_schema(["summary"], [pa.field("id", pa.string())]))
    assert table["id"].to_pylist() == [f"row-{n}" for n in range(50)]
    assert set(table["status"].to_pylist()) == {"ok"}
    assert all(table["summary"].to_pylist())
    assert pd.read_parquet(job.output)["id"].tolist() == table["id"].to_pylist()
    by_ray = ray.data.read_parquet(str(job.output)).to_pandas()
    assert sorted(by_ray["id"]) == sorted(table["id"].to_pylist())
    names = sorted(path.name for path in job.output.glob("*.parquet"))
    assert [n.split("-")[1] for n in names] == ["a", "a", "b", "b"]
    assert (job.output / "_SUCCESS").exists()
    assert not (job.output / "_run" / "data").exists()


def test_finished_run_is_left_alone(job, capsys):
    job()
    files = {p: p.stat().st_mtime_ns for p in job.output.rglob("*.parquet")}
    assert job("decoding.method=plain", "decoding.num_draft_tokens=3") == 0
    assert "50 of 50 rows already done" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in job.output.rglob("*.parquet")} == files
    assert set(job.generated().values()) == {1}


def test_other_settings_are_refused_by_name_and_replaced_by_new_run(job):
    job()
    with pytest.raises(ConfigError, match=r"decoding.seed \(0 -> 7\).*--new-run"):
        job("decoding.seed=7")
    assert job("decoding.seed=7", "input.max_rows=10", options=Options(new_run=True)) == 0
    assert addresses(job.table()) == ALL[:10]


def test_new_files_are_new_work(job, corpus):
    job()
    write(corpus / "0.parquet", range(50, 53))
    assert job() == 0
    assert len(job.table()) == 53
    assert job.generated() == Counter(
        [f"{f}:{i}" for f, i in ALL] + [f"0.parquet:{i}" for i in range(3)]
    )


def test_changed_and_vanished_files_are_refused(job, corpus):
    job()
    write(corpus / "a.parquet", range(31))
    with pytest.raises(InputError, match=r"a.parquet changed since"):
        job()
    (corpus / "a.parquet").unlink()
    assert job() == 0  # all its rows are done


def test_row_that_kills_its_actor_each_time_becomes_an_error(job):
    assert job("faults.row_attempts=1", kill_at=("a.parquet:5",)) == 0
    table = job.table()
    assert addresses(table) == ALL
    bad = [row for row in table.to_pylist() if row["status"] != "ok"]
    assert [(row["source_file"], row["source_row"], row["error_type"]) for row in bad] == [
        ("a.parquet", 5, "actor_died")
    ]


def test_engines_that_only_fail_end_the_run_and_the_same_command_goes_on(job, monkeypatch):
    patient = flow._start_attempts  # allows one death in vain, as if there were fewer actors
    monkeypatch.setattr(flow, "_start_attempts", lambda actors: patient(actors - 7))
    with pytest.raises(RunFailed, match=r"fake device is lost.*of 50 rows are committed"):
        job(break_all=True)
    done = read_status(str(job.output)).snapshot.counts.rows
    assert done == 0
    assert "stopped: the same command goes on" in describe(read_status(str(job.output)))
    assert not (job.output / "_SUCCESS").exists()
    before = job.generated()
    assert job() == 0
    assert addresses(job.table()) == ALL
    again = [row for row, times in job.generated().items() if times > before[row] > 0]
    assert len(again) <= 50 - done  # committed rows were not generated again


def test_failing_commit_fails_the_run_and_the_same_command_goes_on(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(flow, "Committer", FullCommitter)
        message = r"OSError: no space left for the commit; \d+ of 50 rows are committed"
        with pytest.raises(RunFailed, match=message):
            job(seconds_per_row=0.01)
    assert read_status(str(job.output)).snapshot.counts.rows < 50
    assert job() == 0
    assert addresses(job.table()) == ALL


def test_actor_that_dies_after_its_commit_counts_no_row_twice(job, monkeypatch):
    monkeypatch.setattr(flow, "Committer", DyingCommitter)
    assert job(seconds_per_row=0.01) == 0
    assert addresses(job.table()) == ALL
    markers = [path.name for path in (job.output / "_run" / "commits").iterdir()]
    cells = Counter(name.split(".g0.")[0] for name in markers)
    assert len(cells) == 13  # of 4 rows at most; parts end at row 16
    assert max(cells.values()) == 2  # the retried task committed its unit again
    summary = json.loads((job.output / "_run" / "summary.json").read_text())
    for sums in (summary["totals"], summary["new"]):
        assert sums["rows_ok"] == 50
        assert sums["completion_tokens"] == 50 * 5
        assert sums["num_control_steps"] == 100
    assert read_status(str(job.output)).snapshot.counts.rows == 50


def test_error_rate_semantics(job, capsys):
    bad = ("a.parquet:3", "a.parquet:4", "a.parquet:5", "sub/b.parquet:0", "sub/b.parquet:19")
    assert job(fail_rows=bad) == 3
    assert "--retry-failed" in capsys.readouterr().out
    assert not (job.output / "_SUCCESS").exists()
    table = job.table()
    assert addresses(table) == ALL
    assert table["status"].to_pylist().count("error") == 5
    assert table["summary"].null_count == 5
    generated = job.generated()
    assert job() == 3  # says it again, generates nothing
    assert job("faults.max_error_rate=0.2") == 0
    assert (job.output / "_SUCCESS").exists()
    assert job.generated() == generated
    assert job() == 3  # the stricter limit holds again
    assert not (job.output / "_SUCCESS").exists()


def test_retry_failed_replaces_only_failed_rows(job):
    bad = ("a.parquet:3", "a.parquet:4", "a.parquet:5", "sub/b.parquet:0", "sub/b.parquet:19")
    assert job(fail_rows=bad) == 3
    first = job.table()
    assert job(options=Options(retry_failed=True), fail_rows=bad[:1]) == 0
    table = job.table()
    assert addresses(table) == ALL
    assert table["status"].to_pylist().count("error") == 1
    assert job.generated() == Counter([f"{f}:{i}" for f, i in ALL] + list(bad))
    changed = [i for i, (a, b) in enumerate(zip(rows(first), rows(table), strict=True)) if a != b]
    assert changed == [3, 4, 5, 30, 49]
    assert job(options=Options(retry_failed=True)) == 0
    assert set(job.table()["status"].to_pylist()) == {"ok"}
    totals = json.loads((job.output / "_run" / "summary.json").read_text())["totals"]
    assert totals["rows_ok"] == 50
    assert totals["rows_error"] == 0


def rows(table):
    return table.to_pylist()


def broken_publish(*_):
    raise OSError("no space left for the part")


def test_run_killed_before_publishing_publishes_without_generating(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "publish_and_count", broken_publish)
        with pytest.raises(RunFailed, match=r"no space left for the part; .* rows are committed"):
            job()
    assert not list(job.output.glob("*.parquet"))
    job()  # rows that were not committed when the first part failed
    generated = job.generated()
    assert addresses(job.table()) == ALL
    assert set(generated.values()) == {1}


def test_only_empty_files_are_nothing_to_do(job, corpus):
    for file in list(corpus.rglob("*.parquet")):
        file.unlink()
    write(corpus / "a.parquet", [])
    assert job() == 0
    assert (job.output / "_SUCCESS").exists()


def test_summary_counts_what_happened(job):
    assert job() == 0
    summary = json.loads((job.output / "_run" / "summary.json").read_text())
    totals = summary["totals"]
    assert totals["rows_ok"] == 50
    assert totals["completion_tokens"] == 50 * 5
    assert totals["num_control_steps"] == 100
    assert summary["rates"]["decode_speedup"] == pytest.approx(2.0)
    assert summary["rates"]["job_speedup"] == pytest.approx(5 / 3)
    assert summary["rates"]["mean_acceptance_length"] == pytest.approx(3.0)
    metadata = pq.read_metadata(next(job.output.glob("*.parquet"))).metadata
    assert json.loads(metadata[b"draftmill.fingerprint"]) == summary["fingerprint"]


def test_kept_columns_keep_their_types_and_values(job, corpus):
    numbers = range(5)
    extra = {
        "when": pa.array([None, 1, 2, 3, 4], pa.timestamp("us")),
        "tags": pa.array([["a"], [], None, ["b", "c"], []], pa.list_(pa.string())),
        "kind": pa.array(["x", "y", "x", None, "y"]).dictionary_encode(),
    }
    for file in list(corpus.rglob("*.parquet")):
        file.unlink()
    write(corpus / "a.parquet", numbers, **extra)
    assert job("input.keep_columns=[when, tags, kind]") == 0
    table = job.table()
    assert table["when"].to_pylist() == extra["when"].to_pylist()
    assert table["tags"].to_pylist() == extra["tags"].to_pylist()
    assert table["kind"].to_pylist() == extra["kind"].to_pylist()
    assert "id" not in table.column_names


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def real_runs(request, tiny_model_dir, tmp_path_factory):
    """Output folders of the real engine in float32, by method; one row of 51 is an error."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder / "in" / "a.parquet", range(50))
    broken = pa.array([b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    write(folder / "in" / "b.parquet", [50], text=broken)
    sampling = {"greedy": [], "sampled": ["decoding.temperature=0.8", "decoding.seed=5"]}
    for method in ("plain", "prompt_lookup"):
        settings = [
            f"input.path={folder / 'in'}",
            "input.id_column=id",
            f"output.path={folder / method}",
            f"model.target={tiny_model_dir}",
            "model.dtype=float32",
            f"decoding.method={method}",
            "decoding.max_new_tokens=40",
            *sampling[request.param],
        ]
        assert run(load_config([], settings, task="summarize")) == 0
    return folder


def test_drafts_change_no_byte_of_the_output(real_runs):
    plain = pyarrow.dataset.dataset(real_runs / "plain").to_table()
    lookup = pyarrow.dataset.dataset(real_runs / "prompt_lookup").to_table()
    assert plain["summary"].to_pylist() == lookup["summary"].to_pylist()
    assert plain["summary"].null_count == 1
    assert sum(lookup["num_accepted_draft_tokens"].to_pylist()) > 50
    for row in plain.to_pylist():
        assert row["completion_tokens"] == row["num_target_forwards"]
        assert row["speedup"] is None or row["speedup"] == pytest.approx(1, abs=0.03)
    for row in lookup.to_pylist():
        emitted = row["num_target_forwards"] + row["num_accepted_draft_tokens"]
        assert emitted - row["completion_tokens"] in (0, 1)
        assert row["num_accepted_draft_tokens"] <= row["num_draft_tokens"]


def test_queries_of_the_readme(real_runs):
    output = real_runs / "prompt_lookup"
    (block,) = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
    queries = block.replace("output/demo", str(output)).strip().strip(";").split(";")
    by_status, errors, best = (duckdb.sql(query).df().to_dict("records") for query in queries)
    by_status = {row["status"]: row for row in by_status}
    assert {status: row["n"] for status, row in by_status.items()} == {"ok": 50, "error": 1}
    summary = json.loads((output / "_run" / "summary.json").read_text())
    rates, totals = summary["rates"], summary["totals"]
    assert by_status["ok"]["acceptance"] == pytest.approx(rates["draft_acceptance_rate"])
    plain, decode = totals["plain_decode_seconds"], totals["measured_decode_seconds"]
    prefill = totals["measured_prefill_seconds"]
    speedup = (prefill + plain) / (prefill + decode)
    assert by_status["ok"]["speedup"] == pytest.approx(speedup)
    assert rates["job_speedup"] > 0
    assert pd.isna(by_status["error"]["acceptance"])
    assert [(row["source_file"], row["error_type"]) for row in errors] == [
        ("b.parquet", "invalid_utf8")
    ]
    speedups = [row["speedup"] for row in best]
    assert len(best) == 5
    assert speedups == sorted(speedups, reverse=True)
    assert all(row["id"].startswith("row-") and row["summary"] for row in best)
