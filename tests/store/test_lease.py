"""One run at a time; a dead run's lease is taken over at once, a living one's never."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from pipeline.errors import ConfigError, LockedError, RunFailed
from pipeline.store import lease as lease_module
from pipeline.store.files import Store
from pipeline.store.lease import LEASE_NAME, Lease, describe_holder


def foreign(store, counter=0, host="elsewhere/boot", pid=4242):
    holder = {
        "token": "theirs",
        "run_id": "r1",
        "host": host,
        "pid": pid,
        "process_start": "1.0",
        "counter": counter,
    }
    store.put(LEASE_NAME, json.dumps(holder).encode())


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def test_lease_is_exclusive_and_released(store):
    with Lease(store, "r1"):
        assert "r1" in describe_holder(store)
        with pytest.raises(LockedError, match=f"r1, process {os.getpid()}"), Lease(store, "r2"):
            pass
    assert describe_holder(store) is None
    with Lease(store, "r3"):
        pass


def test_lease_of_killed_process_is_taken_over_at_once(store, tmp_path):
    code = (
        "import sys, time; from pipeline.store.files import Store;"
        "from pipeline.store.lease import Lease;"
        f"lease = Lease(Store({str(tmp_path)!r}), 'victim'); lease.__enter__();"
        "print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match="victim"), Lease(store, "r2"):
        pass
    process.kill()
    process.wait()
    started = time.monotonic()
    with Lease(store, "r2", period_s=60):
        assert time.monotonic() - started < 5
        assert "r2" in describe_holder(store)


def test_reused_pid_does_not_keep_a_dead_lease(store):
    foreign(store, host=lease_module._host(), pid=psutil.Process().ppid())
    with Lease(store, "r2"):
        assert "r2" in describe_holder(store)


def test_silent_foreign_lease_is_taken_over_after_a_period(store):
    foreign(store)
    with Lease(store, "r2", period_s=0.5):
        assert "r2" in describe_holder(store)


def test_beating_foreign_lease_is_respected(store):
    foreign(store)
    beat = threading.Timer(0.3, lambda: foreign(store, counter=1))
    beat.start()
    with pytest.raises(LockedError, match="r1, process 4242 on elsewhere"):
        Lease(store, "r2", period_s=2).__enter__()
    beat.join()


def eventually(condition, seconds=30.0):
    """Wait until it holds: how soon a thread runs is not ours to say."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_lost(lease):
    try:
        lease.check()
    except RunFailed:
        return True
    return False


def test_heartbeat_counts_and_loss_is_noticed(store):
    with Lease(store, "r1", period_s=0.2) as lease:
        assert eventually(lambda: json.loads(store.read(LEASE_NAME))["counter"] > 0)
        lease.check()
        foreign(store)
        assert eventually(lambda: is_lost(lease))
        with pytest.raises(RunFailed, match="took over"):
            lease.check()
    assert json.loads(store.read(LEASE_NAME))["token"] == "theirs"  # not ours to remove


def test_output_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^output.path: cannot write .*file"):
        Lease(Store(str(tmp_path / "file" / "out")), "r1").__enter__()
