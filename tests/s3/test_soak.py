"""Long runs against the store, `make soak`: random faults, many files, a large one."""

import itertools
import json
import os
import random
import signal
import time

import pytest

from pipeline.status import verify_output
from tests.fakes import peak_mib
from tests.s3.proxy import Fault, fault_proxy
from tests.s3.test_faults_ray import Driver
from tests.s3.test_run import S3Job

pytestmark = [
    pytest.mark.soak,
    pytest.mark.ray,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("ray_cluster"),
]
SECONDS = 300
POINTS = ["_run/plan", "_run/lease", "_run/data/", "_run/commits/", "_run/published/", "/part-",
          "_run/summary", "_SUCCESS"]  # fmt: skip


def trouble(dice):
    """Faults of a bad network, none of which may change anything."""
    kinds = dice.sample(["503", "reset", "lost", "truncate", "delay"], dice.randint(0, 3))
    return [Fault(kind, every=dice.randint(6, 30)) for kind in kinds]


def test_random_faults(s3_server, tiny_model_dir, tmp_path):
    seed = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))
    print(f"\nSOAK_SEED={seed}", flush=True)
    dice, deadline = random.Random(seed), time.monotonic() + SECONDS
    calm = S3Job(s3_server, tiny_model_dir, tmp_path)
    assert calm.run() == 0
    texts, runs, kills = calm.texts(), 0, 0
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        job = S3Job(s3_server, tiny_model_dir, folder)
        with fault_proxy(s3_server.port) as proxy:
            code = None
            while code != 0:
                runs += 1
                proxy.faults = trouble(dice)
                driver = Driver(job, proxy.endpoint, dice.choice([0.0, 0.02]))
                point = dice.choice(POINTS)
                if dice.random() < 0.7:
                    when = dice.choice(["before", "after"])
                    fault = Fault(when, point, "PUT", first=dice.randint(1, 4), action=driver.kill)
                    proxy.faults.insert(0, fault)
                code, output = driver.end()
                assert code in (0, 1, -signal.SIGKILL), output
                kills += code == -signal.SIGKILL
        good, findings = verify_output(job.output, s3_server.options())
        assert good, f"seed {seed}: {findings}"
        assert job.texts() == texts, f"seed {seed}"
        if time.monotonic() > deadline:
            break
    print(f"{number + 1} outputs, {runs} runs, {kills} drivers killed: each row exactly once")


def test_five_thousand_files(s3_server, tiny_model_dir, tmp_path):
    job = S3Job(s3_server, tiny_model_dir, tmp_path, files={})
    client = s3_server.client()
    for n in range(5000):
        line = json.dumps({"text": f"The mill number {n} stands by the river."}).encode()
        client.pipe_file(f"prompts/{job.name}/ds={n % 7}/{n}.jsonl", line)
    started = time.monotonic()
    assert job.run() == 0
    print(f"\n5,000 files in {time.monotonic() - started:.0f} s")
    good, findings = verify_output(job.output, s3_server.options())
    assert (good, findings) == (True, "5,000 rows in 5,000 files are as they should be")


def test_two_gigabytes_in_one_file(s3_server, tiny_model_dir, tmp_path):
    job = S3Job(s3_server, tiny_model_dir, tmp_path, files={})
    client, rows = s3_server.client(), 2000
    with client.open(f"prompts/{job.name}/large.jsonl", "wb", block_size=64 << 20) as file:
        for n in range(rows):  # a column beside the text, which alone would take an hour to encode
            line = {"text": f"The mill number {n} stands by the river. ", "page": "mill " * 210_000}
            file.write(json.dumps(line).encode() + b"\n")
    assert client.info(f"prompts/{job.name}/large.jsonl")["size"] > 2_000_000_000
    started = time.monotonic()
    assert job.run() == 0
    print(f"\n2 GB in {time.monotonic() - started:.0f} s, driver {peak_mib():.0f} MiB")
    good, findings = verify_output(job.output, s3_server.options())
    assert good and findings.startswith("2,000 rows"), findings
