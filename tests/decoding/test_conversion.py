import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.decoding.conversion import convert_gguf, make_once
from pipeline.errors import ConfigError

WORKER = """
import os, sys, time
from pathlib import Path
from pipeline.decoding.conversion import make_once
folder, log, die = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "die"

def convert(to):
    with log.open("a") as lines:
        lines.write("converting\\n")
    (to / "first").write_text("1")
    time.sleep(0.5)
    if die:
        os._exit(9)
    (to / "second").write_text("2")

assert make_once(folder, convert) == folder
assert sorted(p.name for p in folder.iterdir()) == ["first", "second"]
"""


def _start(folder: Path, log: Path, how: str = "live") -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(log), how])


def test_processes_that_start_at_once_convert_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "models" / "m", tmp_path / "log"
    workers = [_start(folder, log) for _ in range(3)]
    assert [worker.wait(30) for worker in workers] == [0, 0, 0]
    assert log.read_text().count("converting") == 1


def test_a_killed_conversion_leaves_nothing_that_counts(tmp_path: Path) -> None:
    folder, log = tmp_path / "models" / "m", tmp_path / "log"
    assert _start(folder, log, "die").wait(30) == 9
    assert not folder.exists()
    assert list(folder.parent.glob(".m.tmp-*")), "the half-made folder lies under another name"
    assert _start(folder, log).wait(30) == 0
    assert not list(folder.parent.glob(".m.tmp-*")), "and is removed by the next"


def test_a_failing_conversion_is_not_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_once(tmp_path / "m", fail)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]


def test_an_unreadable_gguf_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(40))
    with pytest.raises(ConfigError, match=r"^model.target: cannot convert bad.gguf"):
        convert_gguf(file, tmp_path / "out", "model.target")
