"""The models of a benchmark: each contender's own copy of the same files."""

from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.decoding.checkpoint import materialize, read_config, resolve
from pipeline.decoding.drafters.make import DrafterFiles
from pipeline.decoding.layers import replace_layers
from pipeline.decoding.loading import load_model, load_tokenizer, resolve_dtype
from pipeline.errors import ConfigError


class Models:
    """Target and drafter on CPU, loaded when they are first wanted.

    `stock` and `stock_drafter` are as transformers loads them, with its own attention; `target` and
    `drafter` have faster layers (see `replace_layers`), and an engine around them replaces their
    attention.

    Raises:
        ConfigError: if a model cannot be found or loaded.
    """

    def __init__(self, target: str, drafter: str | None, dtype: Any) -> None:
        """`dtype`: a name or `auto`. The models are references as in `model.target`."""
        self.dtype = resolve_dtype(dtype, "cpu")
        self.folder = materialize(resolve(target, key="--model"))
        self.drafter_folder: Path | None = None
        if drafter is not None:
            self.drafter_folder = materialize(resolve(drafter, key="--drafter"))

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder, key="--model")

    @cached_property
    def stock(self) -> Any:
        return load_model(self.folder, self.dtype, "cpu", key="--model")

    @cached_property
    def target(self) -> Any:
        return _packed(load_model(self.folder, self.dtype, "cpu", key="--model"))

    @cached_property
    def stock_drafter(self) -> Any:
        return self._load_drafter()

    @cached_property
    def drafter(self) -> Any:
        return _packed(self._load_drafter())

    @property
    def drafter_files(self) -> "_Files":
        return _Files(self)

    @property
    def config(self) -> dict[str, Any]:
        """The target's config.json."""
        return read_config(resolve(str(self.folder)))

    @property
    def checked_drafter_folder(self) -> Path:
        """Raises ConfigError if no drafter was named."""
        if self.drafter_folder is None:
            raise ConfigError("--drafter", "the method needs one; name a model")
        return self.drafter_folder

    def _load_drafter(self) -> Any:
        return load_model(self.checked_drafter_folder, self.dtype, "cpu", key="--drafter")


class _Files(DrafterFiles):
    """The drafter of the benchmark, for `make_drafter`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def model(self) -> Any:
        return self._models.drafter

    def tokenizer(self) -> Any:
        return load_tokenizer(self._models.checked_drafter_folder, key="--drafter")


def _packed(model: Any) -> Any:
    replace_layers(model)
    return model
