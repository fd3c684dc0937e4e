"""`ray job submit` and `infra/submit.py` against a standing cluster: as in production."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pyarrow.dataset
import pytest
import yaml

from infra import submit as submit_script
from tests.ports import NODE_PORTS, free_ports
from tests.s3.proxy import Fault, fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
RAY = Path(sys.executable).parent / "ray"

HEAD_PORTS = ["port", "dashboard-port", *NODE_PORTS]


@contextlib.contextmanager
def head_node(folder: Path, *options: str, **variables: str) -> Iterator[dict[str, str]]:
    """A head node of its own, on free ports; ended by its process group, never by `ray stop`."""
    ports = dict(zip(HEAD_PORTS, free_ports(len(HEAD_PORTS)), strict=True))
    token = folder / "token"
    token.write_text("0" * 32 + "test")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment |= variables
    environment.pop("RAY_ADDRESS", None)
    environment["PATH"] = f"{RAY.parent}:{environment['PATH']}"  # as with an activated venv
    process = subprocess.Popen(
        [
            *[RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"],
            *[
                *options,
                "--disable-usage-stats",
                *(f"--{name}={port}" for name, port in ports.items()),
            ],
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ports['dashboard-port']}"
    environment["CLUSTER"] = f"127.0.0.1:{ports['port']}"
    try:
        yield environment
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with head_node(tmp_path_factory.mktemp("ray")) as environment:
        yield environment


def submit(environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess:
    """Submit the demo's config; the cluster's agent may be late, so that error is retried."""
    sets = [word for override in overrides for word in ("--set", override)]
    job = [*["python", "jobs/summarize.py", "--config", "conf/demo.yaml"], *sets]
    command = [RAY, "job", "submit", "--working-dir", ".", "--", *job]
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
        )
        started = "submitted successfully" in done.stdout
        if started or time.monotonic() > deadline:
            return done
        time.sleep(2)


def test_submitted_job_and_its_exit_status(cluster, tiny_model_dir, tmp_path):
    settings = [
        f"model.target={tiny_model_dir}",
        f"output.path={tmp_path / 'out'}",
        "decoding.max_new_tokens=8",
        "input.path=tests/data/sotu.parquet",
    ]
    done = submit(cluster, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert table["source_row"].to_pylist() == list(range(24))
    assert "24 ok" in done.stdout

    failed = submit(cluster, *settings, "decoding.seed=7")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "decoding.seed (0 -> 7)" in failed.stdout


def wrapper(environment, job_id, code, *options):
    """`infra/submit.py` with a job of a line of Python."""
    job = ["python", "-c", code]
    return subprocess.Popen(
        [sys.executable, ROOT / "infra/submit.py", "--id", job_id, *options, "--", *job],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_wrapper_ends_with_the_jobs_exit_code_and_is_idempotent(cluster):
    process = wrapper(cluster, "good", "print('hel' + 'lo')")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.endswith("hello\n"), err
    again = wrapper(cluster, "good", "print('other')")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0 and "good is SUCCEEDED already" in err and "other" not in out
    failing = wrapper(cluster, "bad", "import sys; print('oh'); sys.exit(3)")
    out, err = failing.communicate(timeout=120)
    assert failing.returncode == 3 and "oh" in out and "bad: FAILED" in err
    retried = wrapper(cluster, "bad", "print('better')")
    out, err = retried.communicate(timeout=120)
    assert retried.returncode == 0 and "better" in out and "bad-a2: SUCCEEDED" in err


def test_wrapper_stops_its_job_if_asked(cluster, tmp_path):
    code = f"import time; open({str(tmp_path / 'on')!r}, 'w'); time.sleep(100)"
    process = wrapper(cluster, "long", code, "--stop-with-me")
    deadline = time.monotonic() + 90
    while not (tmp_path / "on").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "long: STOPPED" in err


def test_wrapper_outlives_lost_connections(cluster):
    """Log and status are cut while the job runs: the exit code is the job's all the same."""
    code = "import time; print('first', flush=True); time.sleep(6); print('last'); exit(5)"
    log = Fault("reset", r"/api/jobs/cut/logs", first=3, times=4)
    status = Fault("lost", r"/api/jobs/cut$", "GET", first=4, times=2)
    with fault_proxy(int(cluster["RAY_API_SERVER_ADDRESS"].rpartition(":")[2]), log, status) as way:
        process = wrapper({**cluster, "RAY_API_SERVER_ADDRESS": way.endpoint}, "cut", code)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 5 and out.endswith("\nfirst\nlast\n"), err
    assert log.struck >= 2 and status.struck == 2


def test_wrapper_gives_up_on_a_silent_connection(monkeypatch):
    monkeypatch.setattr(submit_script, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(OSError, match="timed out"):
            submit_script.connect(None)


def test_endpoint_deployed_by_serves_own_config(cluster, tiny_model_dir, tmp_path):
    """`serve deploy` of infra/serve.yaml, as KubeRay does it: a request, then a whole batch."""
    (port,) = free_ports(1)
    settings = {
        "output": {"path": str(tmp_path / "store")},
        "model": {"target": str(tiny_model_dir)},
        "decoding": {"max_new_tokens": 4},
        "serve": {"port": port, "model_name": "tiny", "parallel_batches": 1},
    }
    (tmp_path / "endpoint.yaml").write_text(yaml.safe_dump(settings))
    deployed = yaml.safe_load((ROOT / "infra/serve.yaml").read_text())
    deployed["http_options"] = {"host": "127.0.0.1", "port": port}
    deployed["applications"][0]["args"]["config"] = str(tmp_path / "endpoint.yaml")
    deployed["applications"][0]["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(deployed))
    command = [RAY.parent / "serve", "deploy", tmp_path / "serve.yaml"]
    command += ["--address", cluster["RAY_API_SERVER_ADDRESS"]]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    until(lambda: [model.id for model in client.models.list()] == ["tiny"], openai.OpenAIError)
    alone = client.completions.create(model="tiny", prompt="The mill", max_tokens=4)
    assert alone.usage.completion_tokens
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": "tiny", "prompt": "The mill", "max_tokens": 4}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id).text
    answer = json.loads(output)
    assert answer["custom_id"] == "a"
    assert answer["response"]["body"]["choices"][0]["text"] == alone.choices[0].text


def until(condition, *passing, seconds=120.0):
    """Wait for a condition; exceptions of the kinds in `passing` are a not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(*passing):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.5)
