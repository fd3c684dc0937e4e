"""JSON lines and partition folders as input: every line accounted for, folders become columns."""

import json

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError, InputError
from pipeline.run import run
from pipeline.store import jsonl
from pipeline.store.filesystem import FileSystem
from pipeline.store.listing import list_input, partitions
from pipeline.store.plan import make_plan
from pipeline.store.source import read_unit
from tests import crash
from tests.fakes import Behaviour, fake_factory


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")


def line(n, **more):
    return json.dumps({"id": f"row-{n}", "text": f"Mill {n} stands by the river.", **more}).encode()


@pytest.fixture
def start(tmp_path, tiny_model_dir, monkeypatch):
    crash.install(monkeypatch)

    def start(*overrides):
        base = [
            f"input.path={tmp_path / 'in'}",
            f"output.path={tmp_path / 'out'}",
            f"model.target={tiny_model_dir}",
            "input.unit_rows=3",
            "faults.max_error_rate=1",
        ]
        config = load_config([], [*base, *overrides], task="summarize")
        code = run(config, make_factory=fake_factory(Behaviour()))
        return code, pyarrow.dataset.dataset(tmp_path / "out").to_table()

    return start


def test_every_line_is_a_row_and_bad_ones_are_errors(tmp_path, start):
    bad = [b"{not json", b'["a", "list"]', b'{"id": "x", "text": 7}', b'{"text": "\xff"}', b"  "]
    write_lines(tmp_path / "in" / "a.jsonl", [line(0), line(1), *bad, line(7, other=[1])])
    (tmp_path / "in" / "b.ndjson").write_bytes(line(8))  # its last line has no end
    (tmp_path / "in" / "empty.jsonl").write_bytes(b"")
    pq.write_table(pa.table({"id": ["p"], "text": ["In Parquet."]}), tmp_path / "in" / "c.parquet")
    (tmp_path / "in" / "notes.txt").write_text("no input")
    (tmp_path / "in" / "empty.jsonl").unlink()
    code, table = start("input.id_column=id")
    assert code == 0
    rows = table.to_pylist()
    assert [(r["source_file"], r["source_row"]) for r in rows] == [
        *(("a.jsonl", n) for n in range(8)),
        ("b.ndjson", 0),
        ("c.parquet", 0),
    ]
    assert [r["status"] for r in rows] == ["ok"] * 2 + ["error"] * 4 + ["skipped"] + ["ok"] * 3
    assert {r["error_type"] for r in rows[2:6]} == {"bad_line"}
    assert [r["error"] for r in rows[2:6]] == [
        "the line is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"
        " (char 1)",
        "the line is JSON, but no object",
        "column 'text' holds int, not string",
        "the line is not valid UTF-8 at byte 10",
    ]
    assert [r["id"] for r in rows] == ["row-0", "row-1", *[None] * 2, "x", *[None] * 2, "row-7",
                                       "row-8", "p"]  # fmt: skip


def test_folders_become_columns_of_prompt_and_output(tmp_path, start):
    write_lines(tmp_path / "in" / "ds=2026-11-28" / "lang=d%C3%A9" / "a.jsonl", [line(0), line(1)])
    path = tmp_path / "in" / "ds=2026-11-29" / "lang=__HIVE_DEFAULT_PARTITION__" / "b.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["One."]}), path)
    code, table = start("prompt.template='{ds}: {text}'")
    assert code == 0
    assert table["ds"].to_pylist() == ["2026-11-28"] * 2 + ["2026-11-29"]
    assert table["lang"].to_pylist() == ["dé", "dé", None]
    assert len(set(table["summary"].to_pylist())) == 3
    write_lines(tmp_path / "in" / "ds=2026-11-30" / "a.jsonl", [line(5)])
    with pytest.raises(
        InputError, match=r"^input.keep_columns: ds=2026-11-30/a.jsonl has no column 'lang'"
    ):
        start("prompt.template='{ds}: {text}'")


def test_folder_and_output_column_must_not_collide(tmp_path, start):
    write_lines(tmp_path / "in" / "status=new" / "a.jsonl", [line(0)])
    with pytest.raises(ConfigError, match="'status' is a column of the output"):
        start()


def test_formats_and_globs(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        write_lines(tmp_path / name, [line(0)])
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "d.parquet")

    def names(url, *wanted):
        return [file.name for file in list_input(str(url), {}, *wanted).files]

    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "d.parquet", "sub/c.jsonl"]
    assert names(tmp_path, "jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names(tmp_path, "parquet") == ["d.parquet"]
    assert names(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    (tmp_path / "lines").write_bytes(line(0))
    assert names(tmp_path / "lines", "jsonl") == ["lines"]
    with pytest.raises(InputError, match=r"lines is not a complete Parquet file"):
        names(tmp_path / "lines")
    write_lines(tmp_path / "e.jsonl", [b"nothing", b"here"])
    with pytest.raises(InputError, match=r"e.jsonl is not JSON lines: no line at its head"):
        names(tmp_path)


def test_partition_values():
    assert partitions("ds=2026-11-29/x=a%2Fb/plain/f.jsonl") == {"ds": "2026-11-29", "x": "a/b"}
    assert partitions("a=b.jsonl") == {}


@pytest.mark.parametrize("block", [1, 70, 4000])
def test_any_rows_are_found_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    write_lines(tmp_path / "a.jsonl", [line(n, pad="x" * (n % 7 * 40)) for n in range(50)])
    listing = list_input(str(tmp_path / "a.jsonl"))
    (file,) = listing.files
    assert file.num_rows == 50
    assert len(file.offsets) == {4000: 3}.get(block, len(file.offsets))
    plan = make_plan([file], max_rows=47, unit_rows=7, rows_per_file=20, num_actors=1, settings={})
    again = type(plan).from_json(plan.to_json())
    schema = pa.schema([("id", pa.string())])
    found = []
    for part in again.parts():
        for unit in again.cells(part):
            found += read_unit(FileSystem(str(tmp_path)), unit, schema)["id"].to_pylist()
    assert found == [f"row-{n}" for n in range(47)]
