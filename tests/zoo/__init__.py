"""Tiny models that are trained for real, in seconds: their drafts are accepted as real ones are.

Each is a whole checkpoint folder, made on first use and kept in the user's cache under a hash of
all that it is made from: recipe, text and versions of libraries. `python -m tests.zoo` makes all,
with `--wide` those for benchmarks too.
"""

import hashlib
import importlib.metadata
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.zoo import assistant, corpus, deepseek, gemma, llama, training

_LIBRARIES = ("tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class Recipe:
    """`make(folder, *needs)` trains a member into `folder`, from the folders of those it needs."""

    make: Callable[..., None]
    needs: tuple[str, ...] = ()


RECIPES = {
    "target": Recipe(llama.make_target),
    "draft": Recipe(llama.make_draft, ("target",)),
    "other_tokenizer": Recipe(llama.make_other_tokenizer),
    "layerskip": Recipe(llama.make_layerskip),
    "deepseek": Recipe(deepseek.make_target),
    "mtp1": Recipe(deepseek.make_mtp1, ("deepseek",)),
    "mtp2": Recipe(deepseek.make_mtp2, ("deepseek",)),
    "gemma4": Recipe(gemma.make_target),
    "gemma4_assistant": Recipe(assistant.make_assistant, ("gemma4",)),
}
# The same, wide enough that a step is arithmetic rather than calls: for benchmarks, not for tests.
WIDE = {
    "wide_target": Recipe(llama.make_wide_target),
    "wide_draft": Recipe(llama.make_draft, ("wide_target",)),
    "wide_layerskip": Recipe(llama.make_wide_layerskip),
    "wide_deepseek": Recipe(deepseek.make_wide_target),
    "wide_mtp1": Recipe(deepseek.make_mtp1, ("wide_deepseek",)),
    "wide_mtp2": Recipe(deepseek.make_mtp2, ("wide_deepseek",)),
    "wide_gemma4": Recipe(gemma.make_wide_target),
    "wide_gemma4_assistant": Recipe(assistant.make_wide_assistant, ("wide_gemma4",)),
}
_ALL = RECIPES | WIDE


def path(name: str) -> Path:
    """The checkpoint folder of a member of `RECIPES` or `WIDE`; trained if it is not there yet."""
    root = Path(os.environ.get("DRAFTMILL_ZOO") or Path.home() / ".cache/draftmill/test-zoo")
    folder = root / f"{name}-{_key(name)}"
    if folder.exists():
        return folder
    needs = [path(need) for need in _ALL[name].needs]
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
        made = Path(scratch) / name
        with _alike():
            _ALL[name].make(made, *needs)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def _key(name: str) -> str:
    recipe = _ALL[name]
    sources: list[Any] = [tiny, corpus, training, inspect.getmodule(recipe.make)]
    digest = hashlib.sha256(corpus.text().encode())
    for source in sources:
        digest.update(inspect.getsource(source).encode())
    for library in _LIBRARIES:
        digest.update(importlib.metadata.version(library).encode())
    for need in recipe.needs:
        digest.update(_key(need).encode())
    return digest.hexdigest()[:12]


@contextmanager
def _alike() -> Iterator[None]:
    """One thread and the same random numbers, whoever asks; theirs stay untouched."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
