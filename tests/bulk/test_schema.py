"""schemathesis makes up requests from the endpoint's own OpenAPI description: no 500."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "phases, most, least",
    [("fuzzing", 12, 100), pytest.param("coverage", 12, 400, marks=pytest.mark.soak)],
)
def test_made_up_requests_never_end_in_a_500(endpoint, tmp_path, phases, most, least):
    """`most`: requests of a kind; `least`: of all."""
    schemathesis = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [
            *(schemathesis, "run", f"{endpoint.url}/openapi.json", "--no-color"),
            *("--header", f"Authorization: Bearer {endpoint.keys['bob']}"),
            *("--checks", "not_a_server_error", "--max-examples", str(most)),
            *("--phases", phases, "--seed", "1"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated, passed = re.search(r"(\d+) generated, (\d+) passed", done.stdout).groups()
    assert generated == passed and int(generated) > least, done.stdout[-1500:]
