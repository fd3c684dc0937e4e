"""Fixtures shared by all tests: models, one Ray."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub reads it
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch does; see pipeline.flow

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and chat template, as a checkpoint folder."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def demo_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer; converted on first use."""
    from pipeline.decoding.checkpoint import materialize, resolve
    from pipeline.decoding.loading import load_model, load_tokenizer

    folder = materialize(resolve("demo:smollm2"))
    return load_model(folder, "float32", "cpu"), load_tokenizer(folder)


@pytest.fixture(scope="session")
def ray_cluster() -> Any:
    """One Ray for all tests that run in this process."""
    import ray

    from pipeline.flow import start_ray

    start_ray()
    yield
    ray.shutdown()
