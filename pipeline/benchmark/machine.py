"""What a figure was measured on: it means nothing without."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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
