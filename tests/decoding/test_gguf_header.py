from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeline.decoding.conversion import read_gguf_config
from pipeline.decoding.gguf_header import read_header

FIELDS: dict[str, tuple[str, Any]] = {
    "llama.block_count": ("add_uint32", 3),
    "llama.embedding_length": ("add_uint64", 64),
    "llama.context_length": ("add_uint32", 2048),
    "llama.attention.head_count": ("add_uint32", 4),
    "llama.some.float": ("add_float32", 0.5),
    "llama.some.flag": ("add_bool", True),
    "llama.some.negative": ("add_int8", -3),
    "tokenizer.ggml.tokens": ("add_array", ["a", "Ü", ""]),
    "tokenizer.ggml.scores": ("add_array", [0.5, -1.0, 2.0]),
    "tokenizer.ggml.nested": ("add_array", [[1, 2], [3, 4]]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (method, value) in FIELDS.items():
        getattr(writer, method)(name, value)
    writer.add_tensor("a.weight", np.ones((3, 64), np.float32))
    writer.add_tensor("b.weight", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_package_wrote(file: Path) -> None:
    header = read_header(file)
    assert header.fields == {"general.architecture": "llama"} | {
        name: value for name, (_, value) in FIELDS.items()
    }
    assert header.parameters == 3 * 64 + 5


def test_shape(file: Path) -> None:
    config, parameters = read_gguf_config(file)
    assert config == {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "vocab_size": 3,
    }
    assert parameters == 3 * 64 + 5


def test_damaged_files(file: Path, tmp_path: Path) -> None:
    """Cut anywhere in the header: always the same error, and at once."""
    whole = file.read_bytes()
    end = whole.index(b"b.weight") + 8
    damaged = tmp_path / "damaged.gguf"
    for length in range(1, end, 7):
        damaged.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"GGUF|ends within"):
            read_header(damaged)
    huge = whole.replace((3).to_bytes(8, "little"), b"\xff" * 8)
    damaged.write_bytes(huge)
    with pytest.raises(ValueError):
        read_header(damaged)
    damaged.write_bytes(b"GGUF" + bytes([1]) + whole[5:])
    with pytest.raises(ValueError, match="version 2 or 3"):
        read_header(damaged)
