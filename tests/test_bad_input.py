"""Rows at fault, files at fault, wrong configs: everything accounted for, one clear line each."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError, InputError
from pipeline.prepare import prepare
from pipeline.run import run
from tests.fakes import Behaviour, fake_factory

ROOT = Path(__file__).parents[1]

TEXTS = [
    ("plain", b"The mill stands by the river.", "ok"),
    ("null", None, "skipped"),
    ("empty", b"", "skipped"),
    ("blank", " \t\n\u3000".encode(), "skipped"),
    ("long", b"The mill stands by the river. " * 6_700, "ok"),
    ("emoji", "👩‍👩‍👧‍👦🏳️‍🌈 a family by the mill".encode(), "ok"),
    ("rtl", "الطاحونة بجانب النهر، وبيت الطحان".encode(), "ok"),
    ("invalid", b"caf\xe9 by the \xff\xfe mill", "error"),
    ("plain", b"A second row with the same id.", "ok"),
]


def strings(values: list[bytes | None]) -> pa.Array:
    """A string column that may hold invalid UTF-8, as files of other writers do."""
    return pa.array(values, pa.binary()).cast(pa.string(), safe=False)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    (folder / "deep" / "er").mkdir(parents=True)
    ids, texts, _ = zip(*TEXTS, strict=True)
    table = pa.table({"id": list(ids), "text": strings(list(texts))})
    pq.write_table(table, folder / "deep" / "er" / "odd.parquet", row_group_size=4)
    pq.write_table(table.slice(0, 0), folder / "empty.parquet")
    with pq.ParquetWriter(folder / "groups.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 1))
        writer.write_table(table.slice(0, 0), row_group_size=1)
        writer.write_table(table.slice(5, 2))
    (folder / ".groups.parquet.crc").write_bytes(b"crc")
    (folder / "notes.crc").write_bytes(b"crc")
    return folder


def config(corpus, model, *overrides):
    base = [
        f"input.path={corpus}",
        "input.id_column=id",
        f"output.path={corpus.parent / 'out'}",
        f"model.target={model}",
    ]
    return load_config([], [*base, *overrides], task="summarize")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_every_odd_row_is_accounted_for(corpus, tiny_model_dir):
    assert pq.read_metadata(corpus / "groups.parquet").num_row_groups >= 2
    strict = config(corpus, tiny_model_dir, "faults.max_error_rate=0.01")
    assert run(strict, make_factory=fake_factory(Behaviour())) == 3
    lenient = config(corpus, tiny_model_dir, "faults.max_error_rate=0.2")
    assert run(lenient, make_factory=fake_factory(Behaviour())) == 0
    table = pyarrow.dataset.dataset(corpus.parent / "out").to_table()
    odd = table.filter(pc.equal(table["source_file"], "deep/er/odd.parquet"))
    assert odd["id"].to_pylist() == [name for name, _, _ in TEXTS]
    assert odd["status"].to_pylist() == [status for _, _, status in TEXTS]
    assert odd["source_row"].to_pylist() == list(range(len(TEXTS)))
    bad = odd.slice(7, 1).to_pylist()[0]
    assert (bad["error_type"], bad["summary"]) == ("invalid_utf8", None)
    assert bad["error"]
    assert odd["truncated_prompt_tokens"][4].as_py() > 10_000
    assert table.num_rows == len(TEXTS) + 3
    assert odd["error"].null_count == len(TEXTS) - 1  # skipped is no error


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_too_long_is_an_error_when_asked(corpus, tiny_model_dir):
    asked = config(corpus, tiny_model_dir, "decoding.on_too_long=error", "faults.max_error_rate=1")
    assert run(asked, make_factory=fake_factory(Behaviour())) == 0
    rows = pyarrow.dataset.dataset(corpus.parent / "out").to_table().to_pylist()
    assert [r["error_type"] for r in rows if r["id"] == "long"] == ["prompt_too_long"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_text_that_is_no_text_fails_row_by_row(tmp_path, tiny_model_dir):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": ["a", "b"], "text": [1, 2]}), tmp_path / "in" / "x.parquet")
    asked = config(tmp_path / "in", tiny_model_dir, "faults.max_error_rate=1")
    assert run(asked, make_factory=fake_factory(Behaviour())) == 0
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert table["error_type"].to_pylist() == ["not_text", "not_text"]


def test_storage_variants_of_one_type_agree_and_others_do_not(corpus, tiny_model_dir):
    odd = pa.table({"id": ["a"], "text": pa.array(["x"], pa.large_string())})
    pq.write_table(odd, corpus / "large.parquet")
    pq.write_table(odd.set_column(1, "text", pa.nulls(1)), corpus / "nulls.parquet")
    encoded = odd.set_column(1, "text", pa.array(["x"]).dictionary_encode())
    pq.write_table(encoded, corpus / "encoded.parquet")
    assert prepare(config(corpus, tiny_model_dir)).schema.field("text").type == pa.string()
    pq.write_table(odd.set_column(0, "id", pa.array([1])), corpus / "other.parquet")
    with pytest.raises(InputError, match=r"'id' is string in .* but int64 in other.parquet"):
        prepare(config(corpus, tiny_model_dir))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "cut.parquet").write_bytes(b"PAR1half"), "cut.parquet is not"),
        (lambda folder: (folder / "none.parquet").write_bytes(b""), "none.parquet is not"),
        (
            lambda folder: pq.write_table(pa.table({"id": ["a"]}), folder / "a.parquet"),
            "a.parquet has no column 'text'",
        ),
        (
            lambda folder: [p.unlink() for p in folder.rglob("*.parquet")],
            "no Parquet or JSONL file under",
        ),
    ],
)
def test_files_at_fault_are_named(corpus, tiny_model_dir, damage, message):
    damage(corpus)
    with pytest.raises(InputError, match=message):
        prepare(config(corpus, tiny_model_dir))


def test_truncated_file_is_named(corpus, tiny_model_dir):
    file = corpus / "groups.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"groups.parquet is not a complete Parquet file"):
        prepare(config(corpus, tiny_model_dir))


def test_output_must_not_feed_the_input(corpus, tiny_model_dir):
    with pytest.raises(ConfigError, match=r"^output.path: .*inside input.path"):
        prepare(config(corpus, tiny_model_dir, f"output.path={corpus}/out"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["decoding.methd=plain"], "decoding.methd: unknown key; did you mean decoding.method?"),
        (["input.path=/no/such/folder"], "input.path: nothing at /no/such/folder"),
        (["model.target=/no/such/model"], "model.target: "),
        (["model.target=nobody/no-such-model"], "model.target: "),
        (["model.target=demo:nothing"], "model.target: "),
        (["prompt.template='{headline}: {text}'"], "prompt.template: "),
        (["input.text_column=body"], "input.text_column: "),
        (["output.text_column=id"], "output.text_column: "),
        (["decoding.method=mtp"], "decoding.method: mtp needs MTP layers, and "),
        (
            ["decoding.method=early_exit", "decoding.exit_layer=30"],
            "decoding.exit_layer: 30 is not ",
        ),
        (["decoding.max_new_tokens=9000"], "decoding.max_new_tokens: "),
    ],
)
def test_wrong_config_exits_2_at_once_with_one_line(tmp_path, overrides, key):
    sets = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "jobs/summarize.py", "--config", "conf/demo.yaml"]
    command += ["--set", f"output.path={tmp_path / 'out'}", *sets]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {key}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    print(f"{key} after {seconds:.1f} s")


@pytest.mark.skipif(os.geteuid() != 0, reason="changes user to lose its permissions")
def test_unreadable_folder_is_named(corpus):
    (corpus / "locked").mkdir(mode=0o700)
    code = (
        "import os, sys; from pipeline.store.listing import list_input; os.seteuid(65534)\n"
        f"try: list_input({str(corpus)!r})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    for folder in [corpus, *corpus.parents]:
        if "pytest-of" in str(folder):
            folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("InputError input.path: no permission to list "), done
    assert "locked" in done.stdout
