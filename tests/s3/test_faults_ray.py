"""Faults through Ray and a real store: killed drivers and actors, refusals, two at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from pipeline.errors import RunFailed
from pipeline.flow import start_ray
from pipeline.status import clean_output, read_status, verify_output
from pipeline.store import lease
from pipeline.store.files import Store
from pipeline.store.lease import LEASE_NAME, describe_holder
from tests.s3.proxy import Fault
from tests.s3.test_run import ALL, S3Job

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(s3_server, tiny_model_dir, tmp_path):
    return S3Job(s3_server, tiny_model_dir, tmp_path)


@pytest.fixture(scope="module")
def texts(s3_server, tiny_model_dir, tmp_path_factory):
    """The text columns of an undisturbed run."""
    job = S3Job(s3_server, tiny_model_dir, tmp_path_factory.mktemp("undisturbed"))
    assert job.run() == 0
    return job.texts()


class Driver:
    """A run of the fake engine in a process of its own, on the Ray of these tests."""

    def __init__(self, job, endpoint=None, seconds_per_row=0.0, options=()):
        job.config(endpoint)
        command = [sys.executable, "tests/fakes.py", job.folder / "journal", str(seconds_per_row)]
        address = ray.get_runtime_context().gcs_address
        self.process = subprocess.Popen(
            [*command, job.folder / "config.yaml", *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def end(self):
        """Its exit code and what it printed."""
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output


def committed(job):
    """Rows that count as done now."""
    if not Store(job.output, job.server.options()).exists("_run/plan.json"):
        return 0
    return read_status(job.output, job.server.options()).snapshot.counts.rows


def check(job, texts):
    """All is there once; what dead attempts left can be removed, and then nothing is left."""
    whole = f"{len(ALL)} rows in 4 files are as they should be"
    options = job.server.options()
    good, found = verify_output(job.output, options)
    assert (good, found.splitlines()[0]) == (True, whole)
    clean_output(job.output, options)
    assert verify_output(job.output, options) == (True, whole)
    assert job.texts() == texts


KILLS = [
    Fault("after", r"_run/plan", "PUT"),
    Fault("before", r"_run/data/", "PUT", first=2),
    Fault("after", r"_run/commits/", "PUT", first=2),
    Fault("after", r"/part-", "PUT"),
    Fault("before", r"/_SUCCESS", "PUT"),
]


def test_driver_killed_at_point_after_point(job, proxy, texts):
    done = 0
    for fault in KILLS:
        driver = Driver(job, proxy.endpoint)
        fault.action = driver.kill
        proxy.faults = [fault]
        code, output = driver.end()
        assert (code, fault.struck) == (-signal.SIGKILL, 1), output
        now = committed(job)
        assert now >= done
        done = now
    code, output = Driver(job).end()
    assert code == 0, output
    assert f"{len(ALL)} of {len(ALL)} rows already done" in output
    check(job, texts)


def test_actor_killed_at_its_data_and_at_its_marker(job, proxy, texts):
    def kill_actor():
        os.kill(int((job.folder / "journal").read_text().split()[-1]), signal.SIGKILL)

    proxy.faults = [
        Fault("after", r"_run/data/", "PUT", first=3, action=kill_actor),
        Fault("after", r"_run/commits/", "PUT", first=5, action=kill_actor),
    ]
    assert job.run(proxy.endpoint) == 0
    assert [fault.struck for fault in proxy.faults] == [1, 1]
    check(job, texts)


def test_bad_network_is_counted_and_changes_nothing(job, proxy, texts, capsys):
    unavailable, lost = Fault("503", every=7), Fault("lost", method="PUT", every=6)
    until_summary = []

    def count():
        until_summary.append(unavailable.struck)

    proxy.faults = [Fault("after", r"/summary.json", "PUT", action=count), unavailable, lost]
    assert job.run(proxy.endpoint) == 0
    summary = job.summary()
    assert 10 < until_summary[0] - 1 <= summary["store_retries"]
    assert f"{summary['store_retries']} requests had to be repeated" in capsys.readouterr().out
    check(job, texts)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("denied", r"_run/commits/", "PUT", first=3, times=99), r"grant s3:PutObject"),
        (Fault("denied", r"/part-", "PUT", times=99), r"/part-.*: access denied \(PutObject\)"),
    ],
)
def test_store_that_denies_ends_the_run_at_once_and_the_same_command_goes_on(
    job, proxy, texts, fault, message
):
    proxy.faults = [fault]
    with pytest.raises(RunFailed, match=message + r".*of 50 rows are committed"):
        job.run(proxy.endpoint)
    ray.shutdown()  # as the end of the driver does
    start_ray()
    done, before = committed(job), job.generated()
    proxy.faults = []
    assert job.run(proxy.endpoint) == 0
    assert len(job.generated() - before) <= len(ALL) - done
    check(job, texts)


def test_two_drivers_at_once(job, texts, monkeypatch):
    drivers = [Driver(job, seconds_per_row=0.3) for _ in range(2)]
    deadline = time.monotonic() + 100
    while all(driver.process.poll() is None for driver in drivers):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    loser, winner = sorted(drivers, key=lambda driver: driver.process.poll() is None)
    code, output = loser.end()
    assert (code, f"process {winner.process.pid} on" in output) == (75, True), output
    while committed(job) < 8:
        assert winner.process.poll() is None, winner.end()
        time.sleep(0.2)
    winner.kill()
    winner.end()
    monkeypatch.setattr(lease, "_host", lambda: "elsewhere/boot")  # it cannot see that it is dead
    monkeypatch.setattr(lease, "PERIOD_S", 2.0)
    store = Store(job.output, job.server.options())
    assert str(winner.process.pid) in describe_holder(store)
    assert job.run() == 0
    assert not store.exists(LEASE_NAME)
    check(job, texts)
    assert clean_output(job.output, job.server.options()).startswith("removed 0 ")
