"""A Serve instance for this folder: the tiny model at `/`, an engine without a model at `/fake`."""

import functools
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bulk.engine import SlotEngine

SLOTS = 8
STEP_S = 0.01
MAX_IN_FLIGHT = 150


@dataclass
class Endpoint:
    """An application and how to reach it."""

    config: Any
    url: str
    keys: dict[str, str]
    model: str
    folder: Path

    def client(self, key: str = "alice", **options: Any) -> Any:
        import openai

        options = {"max_retries": 0, "timeout": 90, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys.get(key, key), **options)


@pytest.fixture(scope="package")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="package")
def bulk_cluster(ray_cluster: Any, port: int) -> Any:
    """Ray with Serve, which gives its CPUs back at the end."""
    yield port
    from ray import serve

    serve.shutdown()


@pytest.fixture(scope="package")
def endpoint(bulk_cluster: int, tmp_path_factory: Any, tiny_model_dir: Path) -> Any:
    """The tiny model, for real."""
    yield from start(bulk_cluster, tmp_path_factory.mktemp("serve"), tiny_model_dir, "draftmill")


@pytest.fixture(scope="package")
def fake(bulk_cluster: int, tmp_path_factory: Any, tiny_model_dir: Path) -> Any:
    """8 slots, 10 ms a step, a word a step: `max_tokens` says how long a row takes."""
    folder = tmp_path_factory.mktemp("fake")
    engine = functools.partial(
        SlotEngine, SLOTS, STEP_S, words=400, journal=str(folder / "journal")
    )
    yield from start(bulk_cluster, folder, tiny_model_dir, "fake", engine)


def start(port: int, folder: Path, model: Path, name: str, make_engine: Any = None) -> Any:
    from actors.bulk import app
    from actors.bulk.guard import new_key
    from pipeline.config import load_config

    keys_file = folder / "keys.txt"
    keys = {who: new_key(str(keys_file), who) for who in ("alice", "bob", "carol", "dave")}
    (folder / "corpus").mkdir()
    config = load_config(
        [],
        [
            "input.path=requests",
            f"output.path={folder / 'state'}",
            f"model.target={model}",
            "model.dtype=float32",
            "decoding.max_new_tokens=24",
            "resources.slots=8",
            "resources.max_model_len=512",
            "resources.num_cpus=0.3",
            f"serve.port={port}",
            "serve.model_name=tiny",
            f"serve.keys_file={keys_file}",
            "serve.max_body_mb=2",
            f"serve.max_queued_requests={MAX_IN_FLIGHT}",
            f"serve.allowed_uris=[{folder / 'corpus'}]",
            "serve.shutdown_s=2",
        ],
        task="summarize",
    )
    app.start(config, app.check(config), make_engine, name)
    prefix = "" if name == app.APPLICATION else f"/{name}"
    yield Endpoint(config, f"http://127.0.0.1:{port}{prefix}", keys, "tiny", folder)
    app.stop_controller(name)
