import gc
import json
from pathlib import Path

import pytest
import torch

from pipeline.decoding import loading
from pipeline.decoding.loading import (
    end_tokens,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    set_threads,
    settle_heap,
)
from pipeline.errors import ConfigError


def test_device() -> None:
    assert resolve_device("auto", 0) == "cpu"
    assert resolve_device("auto", 0.5) == "cuda"
    assert resolve_device("cpu", 1) == "cpu"
    with pytest.raises(ConfigError, match=r"^model.device: .*resources.num_gpus"):
        resolve_device("cuda", 0)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"bf16": True, "architecture": "aarch64"}, "bfloat16"),
        ({"avx512_f": True, "avx512_bf16": False}, "float32"),
    ],
)
def test_dtype_on_cpu_follows_its_instructions(
    capabilities: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", "cpu") == expected
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"


def test_threads_are_rounded_up() -> None:
    before = torch.get_num_threads()
    try:
        for num_cpus, threads in ((1.5, 2), (1.0, 1), (0.25, 1), (0, 1)):
            set_threads(num_cpus)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_loads_for_inference_in_the_asked_dtype(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, "bfloat16", "cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(load_tokenizer(tiny_model_dir)) <= model.config.vocab_size


def test_only_end_and_pad_tokens_survive_of_the_checkpoints_settings(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.1,
        "repetition_penalty": 1.9,
        "suppress_tokens": [5],
        "max_length": 3,
        "min_new_tokens": 4,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    kept = load_model(tmp_path, "float32", "cpu").generation_config.to_diff_dict()
    kept.pop("transformers_version", None)
    assert kept == {"eos_token_id": [2, 7], "pad_token_id": 0}


@pytest.mark.parametrize(("given", "ids"), [(None, []), (2, [2]), ([2, 7], [2, 7])])
def test_end_tokens(given: int | list[int] | None, ids: list[int]) -> None:
    assert end_tokens(given) == ids


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "clip"}, "clip cannot be loaded to generate"),
        ({"model_type": "nonesuch"}, "cannot read the model's config"),
    ],
)
def test_models_that_do_not_generate_text_are_refused(
    config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path, "float32", "cpu")
    assert str(caught.value).startswith(f"model.target: {problem}")
    assert "choose" in str(caught.value)


def test_missing_gpu_is_a_config_error(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^model.device: no CUDA device"):
        load_model(tiny_model_dir, "float32", "cuda")


def test_missing_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"^model.target: cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_dtypes_are_those_of_the_config() -> None:
    from pipeline.decoding.checkpoint import ITEMSIZE

    assert set(loading.DTYPES) == set(ITEMSIZE)


def test_the_collector_leaves_models_alone() -> None:
    before = gc.get_freeze_count()
    kept = [[i] for i in range(1000)]
    try:
        settle_heap()
        assert gc.get_freeze_count() >= before + len(kept)
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
