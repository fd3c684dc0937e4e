"""GGUF files become transformers folders, once per machine and user."""

import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.decoding.gguf_header import read_header
from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """This program's folder in the user's cache (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "draftmill"


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill `folder` once, however many processes ask at the same time.

    It fills a temporary folder that is renamed when complete: a folder that exists is whole.
    """
    from filelock import FileLock

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.tmp-"
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(f"{prefix}*"):  # a killed process's: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            make(temporary)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert_gguf(file: Path, folder: Path, key: str) -> None:
    """Write the dequantized weights, tokenizer and configs of `file` into `folder`.

    Weights stay float32: block scales times integers fit neither bfloat16 nor float16 (3 % and
    21 % of SmolLM2's Q4_1 embeddings do).

    Raises:
        ConfigError: naming `key`, if transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logger.info("converting %s to a float32 model, once", file.name)
    started = time.monotonic()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
    except Exception as error:  # whatever a foreign file provokes in the reader
        reason = " ".join(str(error).split())
        problem = f"cannot convert {file.name}: {reason}; use a checkpoint that transformers reads"
        raise ConfigError(key, problem) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("converted %s in %.0f s", file.name, time.monotonic() - started)


@functools.lru_cache(maxsize=2)  # of a large vocabulary, half a second each
def read_gguf_config(file: Path) -> tuple[dict[str, Any], int]:
    """The shape of the model in a GGUF file, under transformers' names, and its parameter count.

    Raises:
        ValueError: if the file is damaged.
    """
    header = read_header(file)
    architecture = header.fields["general.architecture"]
    names = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
    }
    config: dict[str, Any] = {"model_type": architecture}
    for ours, theirs in names.items():
        found = header.fields.get(f"{architecture}.{theirs}")
        if found is not None:
            config[ours] = found
    if "vocab_size" not in config:
        config["vocab_size"] = len(header.fields["tokenizer.ggml.tokens"])
    return config, header.parameters
