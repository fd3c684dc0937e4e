"""Which checkpoint a run uses: found, identified and measured without torch, made loadable once.

Everything here but `materialize` answers in well under two seconds, so that a misspelt target fails
before anything is loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from pipeline.decoding import conversion, hub
from pipeline.decoding.demo import demo_model, packaged_gguf
from pipeline.errors import ConfigError

ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin")
# Files whose content changes text or where it ends are compared whole, for all are small ...
_DEFINING = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# ... and these, as the weights, by size.
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found.

    `reference` is what the config says. Exactly one of these tells where it lies: `folder` (of
    transformers), `gguf_file`, or `hub_id` with its `commit`. `identity` goes into the run's
    fingerprint: it is the same on every machine and wherever the files lie.
    """

    reference: str
    identity: str
    name: str
    folder: Path | None = None
    gguf_file: Path | None = None
    hub_id: str | None = None
    commit: str | None = None
    key: str = "model.target"


@dataclass(frozen=True)
class ModelSize:
    """Memory that a model needs, in bytes; weights are None where they cannot be counted yet."""

    weight_bytes: int | None
    kv_bytes_per_token: int


def resolve(target: str, revision: str | None = None, *, key: str = "model.target") -> Checkpoint:
    """Find the checkpoint `target`: `demo:<name>`, a GGUF file, a local folder or a hub id.

    Raises:
        ConfigError: naming `key` and the remedy; within two seconds, without importing torch.
    """
    if target.startswith("demo:"):
        return _resolve_demo(target, key)
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        return _resolve_gguf(target, path, key)
    if path.is_dir():
        return _resolve_folder(target, path, key)
    if path.is_file():
        raise ConfigError(key, f"{target} is a file; give its folder, or a .gguf file")
    if not _HUB_ID.fullmatch(target):
        problem = f"no folder {target}; check the path, or give a hub id such as org/name"
        raise ConfigError(key, problem)
    commit = hub.find_commit(target, revision, key)
    name = target.replace("/", "--")
    return Checkpoint(target, f"{target}@{commit}", name, hub_id=target, commit=commit, key=key)


def _resolve_demo(target: str, key: str) -> Checkpoint:
    name = target.removeprefix("demo:")
    demo = demo_model(name, key)
    file = packaged_gguf(target, demo, key)
    identity = f"{target}@{demo.version}"
    return Checkpoint(target, identity, f"{name}-{demo.version}", gguf_file=file, key=key)


def _resolve_gguf(target: str, path: Path, key: str) -> Checkpoint:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(key, f"cannot read {target}: {error.strerror}; check the path") from None
    if magic != b"GGUF":
        raise ConfigError(key, f"{target} is no GGUF file; download it again")
    identity = f"gguf:{path.stem}:{_gguf_digest(path)}"
    return Checkpoint(target, identity, path.stem, gguf_file=path, key=key)


def _resolve_folder(target: str, path: Path, key: str) -> Checkpoint:
    try:
        entries = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise ConfigError(key, f"cannot read {target}: {error.strerror}; grant access") from None
    if "config.json" not in entries:
        problem = f"{target} has no config.json; give a folder written by save_pretrained"
        raise ConfigError(key, problem)
    weights = _weight_files(path)
    if not weights:
        raise ConfigError(key, f"{target} has no weights (*.safetensors); copy them there")
    parts = [f"{n}:".encode() + (path / n).read_bytes() for n in _DEFINING if (path / n).exists()]
    sized = [*weights, *(path / n for n in _VOCABULARY if (path / n).exists())]
    parts += [f"{file.name}:{file.stat().st_size}".encode() for file in sized]
    name = path.resolve().name
    return Checkpoint(target, f"folder:{_digest(*parts)}", name, folder=path, key=key)


def materialize(checkpoint: Checkpoint) -> Path:
    """The checkpoint as a transformers folder; a GGUF is converted, a hub id downloaded, once.

    Raises:
        ConfigError: if the files cannot be had or cannot be converted.
    """
    if checkpoint.folder is not None:
        return checkpoint.folder
    if checkpoint.gguf_file is not None:
        file, key = checkpoint.gguf_file, checkpoint.key
        folder = converted_folder(checkpoint)
        return conversion.make_once(folder, lambda to: conversion.convert_gguf(file, to, key))
    assert checkpoint.hub_id is not None and checkpoint.commit is not None
    return hub.download(checkpoint.hub_id, checkpoint.commit, checkpoint.key)


def converted_folder(checkpoint: Checkpoint) -> Path:
    """Where the conversion of a GGUF lies, whether or not it exists yet."""
    assert checkpoint.gguf_file is not None
    name = f"{checkpoint.name}-{_gguf_digest(checkpoint.gguf_file)}"
    return conversion.cache_root() / "models" / name


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json; of a GGUF that is not converted yet, what its header tells of the shape.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        folder = present_folder(checkpoint)
        if folder is None:
            assert checkpoint.gguf_file is not None
            return conversion.read_gguf_config(checkpoint.gguf_file)[0]
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return config
    except (OSError, ValueError, KeyError, IndexError) as error:
        problem = f"cannot read the config of {checkpoint.reference}: {error}; copy it again"
        raise ConfigError(checkpoint.key, problem) from None


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the model reads its prompt in an encoder of its own."""
    return bool(config.get("is_encoder_decoder"))


def count_parameters(checkpoint: Checkpoint) -> int | None:
    """Parameters, from the headers of the weight files; None before a hub id is downloaded."""
    folder = present_folder(checkpoint)
    if folder is None:
        assert checkpoint.gguf_file is not None
        return conversion.read_gguf_config(checkpoint.gguf_file)[1]
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.exists() and files < set(json.loads(index.read_bytes())["weight_map"].values()):
        return None
    return sum(_safetensors_parameters(folder / file) for file in files) or None


def estimate_memory(config: Mapping[str, Any], dtype: str, parameters: int | None) -> ModelSize:
    """Bytes of `parameters` in `dtype` and of one token's keys and values over all layers."""
    itemsize = ITEMSIZE[dtype]
    text = _text_config(config)
    layers = int(_first(text, "num_hidden_layers", "n_layer", "num_layers"))
    own = layers - int(text.get("num_kv_shared_layers") or 0)  # the others share those of these
    width = sum(_kv_width({**text, **_layer_config(text, layer)}) for layer in range(own))
    weight_bytes = None if parameters is None else parameters * itemsize
    return ModelSize(weight_bytes, width * itemsize)


def _kv_width(layer: Mapping[str, Any]) -> int:
    """Numbers that a layer keeps of one token."""
    if layer.get("kv_lora_rank"):  # latent attention caches one compressed vector per token
        return int(layer["kv_lora_rank"]) + int(layer.get("qk_rope_head_dim") or 0)
    heads = int(_first(layer, "num_attention_heads", "n_head"))
    head_dim = layer.get("head_dim") or int(_first(layer, "hidden_size", "n_embd")) // heads
    return 2 * int(layer.get("num_key_value_heads") or heads) * int(head_dim)


def _layer_config(text: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """What differs in one layer; Gemma 4 has wider heads, and maybe fewer, where it sees all."""
    if text.get("per_layer_config"):
        found: Mapping[str, Any] = text["per_layer_config"].get(str(layer), {})
        return found
    if not text.get("global_head_dim") or text["layer_types"][layer] != "full_attention":
        return {}
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return {
        "head_dim": text["global_head_dim"],
        "num_key_value_heads": heads or text.get("num_key_value_heads"),
    }


def max_model_len(config: Mapping[str, Any]) -> int:
    """The longest prompt plus completion that the model allows, in tokens.

    Raises:
        ConfigError: if the config does not tell.
    """
    try:
        return int(_first(_text_config(config), "max_position_embeddings", "n_positions"))
    except KeyError:
        problem = "auto finds no limit in the model's config; set a number"
        raise ConfigError("resources.max_model_len", problem) from None


def resolve_max_model_len(setting: Literal["auto"] | int, config: Mapping[str, Any]) -> int:
    """`resources.max_model_len` as a number.

    Raises:
        ConfigError: if it is above what the model allows.
    """
    if setting == "auto":
        return max_model_len(config)
    text = _text_config(config)
    limit = text.get("max_position_embeddings") or text.get("n_positions")
    if limit and setting > limit:
        problem = f"{setting} is above the model's limit of {limit}; lower it or use auto"
        raise ConfigError("resources.max_model_len", problem)
    return setting


def present_folder(checkpoint: Checkpoint) -> Path | None:
    """A folder with config.json, without downloading weights or converting anything."""
    if checkpoint.folder is not None:
        return checkpoint.folder
    if checkpoint.hub_id is not None and checkpoint.commit is not None:
        return hub.cached_snapshot(checkpoint.hub_id, checkpoint.commit)
    folder = converted_folder(checkpoint)
    return folder if folder.is_dir() else None


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))


def _safetensors_parameters(file: Path) -> int:
    """Sum of the tensors' sizes, from the header (8 bytes of length, then JSON)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal checkpoints nest the language model's config."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _first(config: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(names[0])


def _gguf_digest(file: Path) -> str:
    return _digest(f"{file.name}:{file.stat().st_size}".encode())


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()
