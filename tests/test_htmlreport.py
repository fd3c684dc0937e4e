"""The report of a run, looked at in a real browser: complete, self-contained, without errors."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.htmlreport import evidence
from pipeline.htmlreport.charts import seconds
from pipeline.htmlreport.page import hide_password, write_report
from pipeline.htmlreport.svg import _ticks, short, steps
from pipeline.prepare import prepare
from pipeline.run import Options, run
from pipeline.store.ledger import Ledger
from pipeline.store.plan import read_plan
from tests.fakes import Behaviour, fake_factory

CHROMIUM = shutil.which("chromium")
ROWS = 40


def config_of(folder, output, model):
    sets = [
        f"input.path={folder / 'mills & <b>.parquet'}",
        f"output.path={output}",
        "output.storage_options={auto_mkdir: true}",
        "output.rows_per_file=8",
        f"model.target={model}",
        "input.unit_rows=4",
        "faults.max_error_rate=0.5",
    ]
    return load_config([], sets, task="summarize")


@pytest.fixture(scope="module")
def report(tmp_path_factory, tiny_model_dir, ray_cluster) -> Path:
    """The report of a run of 40 rows, three of which fail."""
    folder = tmp_path_factory.mktemp("report")
    texts = [f"Mill number {n}." for n in range(ROWS - 1)] + [""]
    pq.write_table(pa.table({"text": texts}), folder / "mills & <b>.parquet")
    config = config_of(folder, folder / "out", tiny_model_dir)
    failing = tuple(f"mills & <b>.parquet:{n}" for n in (3, 17, 30))
    with (folder / "said").open("w") as said, contextlib.redirect_stdout(said):
        assert run(config, Options(), fake_factory(Behaviour(fail_rows=failing))) == 0
    return folder / "out" / "_run" / "report.html"


def chromium(page: Path, *options: str) -> subprocess.CompletedProcess:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run(
        [*command, profile, "--dump-dom", *options, f"file://{page}"],
        capture_output=True,
        text=True,
        timeout=100,
    )


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL).split())


@pytest.mark.ray
def test_report_says_what_ran(report):
    html = report.read_text()
    text = text_of(html)
    summary = json.loads((report.parent / "summary.json").read_text())
    assert "ok 36 (90.0 %)" in text and "error 3 (7.5 %)" in text and "skipped 1 (2.5 %)" in text
    assert f"{summary['tokens_per_second']:,.1f} tokens/s" in text
    assert f"{summary['rates']['job_speedup']:.2f}x job speedup" in text
    for heading in (
        *("Rows by status", "Where the time went", "Tokens per second", "Acceptance over time"),
        *("Method over time", "Acceptance by draft position", "Speedup by row"),
        *("Acceptance by row", "Latency by row", "Latency percentiles", "Control steps"),
        *("Versions", "Errors by kind", "Slowest rows", "Config"),
    ):
        assert f"<h2>{heading}</h2>" in html or f"<summary>{heading}</summary>" in html, heading
    assert "fake 3 mills &amp; &lt;b&gt;.parquet, row 3: as asked" in text
    assert "transformers 5." in text and "unit_rows: 4" in text
    assert "storage_options: (not shown)" in text and "auto_mkdir" not in html
    # positions: 36 rows drafted 4 tokens each, of which the first two were accepted
    assert "token 1: 36 of 36 accepted (1.000)" in html
    assert "token 3: 0 of 36 accepted (0.000)" in html


@pytest.mark.ray
def test_run_ends_by_naming_it(report):
    said = (report.parents[2] / "said").read_text()
    assert said.splitlines()[-1] == f"report:  {report}"


@pytest.mark.ray
def test_report_needs_nothing_from_outside(report):
    html = report.read_text()
    assert re.findall(r'(?:src|href|action)="([^"]*)"', html) == ["data:,"]
    assert not re.search(r"<script|@import|url\(|https?://", html)


@pytest.mark.ray
def test_browser_finds_no_error(report, tmp_path):
    shown = chromium(report)
    assert "Acceptance by draft position" in shown.stdout
    assert "CONSOLE" not in shown.stderr, shown.stderr
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace("</body>", "<script>nothing()</script></body>"))
    assert "CONSOLE" in chromium(broken).stderr  # so the check above can fail


@pytest.mark.ray
@pytest.mark.parametrize("width", [340, 1200])
def test_page_is_never_wider_than_its_window(report, tmp_path, width):
    """Seen in a frame, for windows of headless browsers have a least width."""
    inner = tmp_path / "inner.html"
    measure = "<script>document.title = document.documentElement.scrollWidth</script></body>"
    inner.write_text(report.read_text().replace("</body>", measure))
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="inner.html" width="{width}" height="900" frameborder="0" onload='
        "\"document.body.append(this.contentDocument.title + ' wide')\"></iframe>"
    )
    shown = chromium(outer, "--allow-file-access-from-files", "--window-size=1300,1000")
    assert int(re.search(r"(\d+) wide", shown.stdout)[1]) <= width, shown.stdout[-300:]


@pytest.mark.ray
def test_sample_of_many_parts_is_called_one(report, tiny_model_dir, tmp_path, monkeypatch):
    assert "of a sample" not in report.read_text()
    folder, output = report.parents[2], tmp_path / "out"
    shutil.copytree(report.parents[1], output)
    job = prepare(config_of(folder, output, tiny_model_dir))
    plan, ledger = read_plan(job.store), Ledger(job.store)
    ledger.refresh()
    monkeypatch.setattr(evidence, "_MAX_PARTS", 2)  # of five: each third is read
    write_report(job, plan, ledger, json.loads((report.parent / "summary.json").read_text()))
    text = text_of((output / "_run" / "report.html").read_text())
    assert "Figures by row are of a sample: 16 of 40 rows." in text


def test_ticks_are_round_and_reach_the_top():
    for top in (0.003, 0.7, 1.0, 1.4, 3, 9.99, 10, 47, 99, 1234.5):
        ticks = _ticks(top, whole=False)
        assert ticks[-1] >= top * 0.999 and 2 <= len(ticks) <= 7, (top, ticks)
    assert _ticks(2, whole=True) == [0, 1, 2]
    assert [short(v) for v in (0, 0.25, 12, 1200, 3.4e6)] == ["0", "0.25", "12", "1.2k", "3.4M"]


def test_what_is_unknown_is_a_gap():
    chart = steps([0, 1, 2, 3, 4], [None, 2.0, None, 1.0], name="", x_title="", titles=[""] * 4)
    lines = re.findall(r'<polyline.*?points="([\d.]+),[\d.]+ ([\d.]+),[\d.]+"', chart)
    (_, end), (begin, _) = lines
    assert float(end) < float(begin)


def test_seconds_in_few_characters():
    shown = [seconds(value) for value in (0.012, 0.41, 9.994, 12.34, 99.99, 1234.5)]
    assert shown == ["12.0 ms", "0.41 s", "9.99 s", "12.3 s", "100 s", "1,234 s"]


def test_passwords_in_urls_are_hidden():
    assert hide_password("path: ftp://me:secret@host/x") == "path: ftp://host/x"
