"""`jobs/serve.py` as its operator runs it: killed with its whole cluster, and stopped kindly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest
import yaml

from tests.bulk.helpers import by_id, lines_of, start_batch, wait_end, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
ROWS = 400


@pytest.fixture
def served(tmp_path, tiny_model_dir):
    """Starts the endpoint; any process that is left is ended with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "output": {"path": str(tmp_path / "state")},
        "model": {"target": str(tiny_model_dir)},
        "serve": {"port": port, "model_name": "tiny"},
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "jobs/serve.py", "--config", str(tmp_path / "serve.yaml")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("ab"),
            text=True,
        )
        started.append(process)
        for line in process.stdout:
            if line.startswith("ready:"):
                break
        else:
            pytest.fail((tmp_path / "stderr").read_text()[-3000:])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=2)
        return process, client

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


def test_batch_survives_its_cluster_and_a_request_the_end(served):
    process, client = served()
    batch = start_batch(client, lines_of(ROWS, max_tokens=200))
    wait_for(client, batch, lambda b: b.request_counts.completed >= 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(5)  # its Ray follows it

    process, client = served()
    before = client.batches.retrieve(batch.id).request_counts.completed
    assert 20 <= before < ROWS
    batch = wait_end(client, batch, 300)
    assert batch.status == "completed" and batch.request_counts.completed == ROWS
    assert set(by_id(client, batch.output_file_id)) == {f"row-{n}" for n in range(ROWS)}

    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "On and on"}],
        max_tokens=1500,
        stream=True,
        extra_body={"method": "plain"},
    )
    next(stream)
    process.send_signal(signal.SIGTERM)
    refused = refuse(client)
    assert (refused.status_code, refused.code) == (503, "stopping")
    with urllib.request.urlopen(str(client.base_url.join("/readyz"))) as answer:
        assert json.load(answer)["in_flight"] == 1
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] in ("length", "stop")
    assert process.wait(90) == 0


def refuse(client) -> openai.InternalServerError:
    """Ask until the endpoint takes no more requests."""
    messages = [{"role": "user", "content": "One more"}]
    while True:
        try:
            client.with_options(max_retries=0).chat.completions.create(
                model="tiny", messages=messages, max_tokens=1
            )
        except openai.InternalServerError as error:
            return error
