"""How commands end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("code", [0, 1])
def test_what_happens_at_the_end_of_python_does_not_change_the_exit_code(code: int) -> None:
    """Arrow's threads abort the process now and then when Python ends."""
    script = f"""
import atexit, os, typer
from pipeline.cli import run_to_exit

atexit.register(os.abort)
app = typer.Typer()

@app.command()
def main():
    print("said")
    raise typer.Exit({code})

run_to_exit(app)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", "")
