"""What a figure was measured on: it means nothing without."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("draftmill", "torch", "transformers")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine(threads: int, peer_python: Path | None = None) -> dict[str, Any]:
    """CPU, threads, versions and the command line, for the results' file."""
    versions = {name: _version(name) for name in _PACKAGES}
    if peer_python is not None:
        versions["vllm"] = _peer_version(peer_python)
    model, flags = _cpu()
    return {
        "cpu": model,
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # when the benchmark began; others disturb it
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "command": shlex.join(sys.argv),
    }


class OthersCpu:
    """How much of the machine others use from here on: a figure measured meanwhile is worth as
    much less. Counts this process and its ended children as own, stolen time as others'."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy(), _own()

    def share(self) -> float:
        """Mean share of all cores, 0 to 1."""
        seconds = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        others = (_busy() - self._busy) - (_own() - self._own)
        return min(1.0, max(0.0, others / seconds))


def _busy() -> float:
    """CPU seconds that all cores have spent on anything."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    not_work = ("idle", "iowait", "guest", "guest_nice")  # guests' is in the users' time already
    return sum(seconds for name, seconds in times.items() if name not in not_work)


def _own() -> float:
    """CPU seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


def _cpu() -> tuple[str, set[str]]:
    """Model name and flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor(), set()
    parts = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in parts}
    return fields.get("model name", platform.processor()), set(fields.get("flags", "").split())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _peer_version(python: Path) -> str | None:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
