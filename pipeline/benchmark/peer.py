"""A contender in an environment of its own: a script that the user names, run by its own python.

The script takes the checkpoint folder, a file of prompts and options, and prints one line of JSON
with `seconds` among whatever else it logs; loading and warm-up are not in them.
"""

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.benchmark.runs import Run
from pipeline.benchmark.workload import Workload
from pipeline.errors import DraftmillError

logger = logging.getLogger(__name__)

_SHOWN_LINES = 8  # of a failed script's output


class PeerError(DraftmillError):
    """A peer did not do its part."""


@dataclass(frozen=True)
class Peer:
    """How to run a peer. `threads`: CPUs that it is bound to, from the first on."""

    python: Path
    script: Path
    model: Path
    threads: int

    def command(self, options: Sequence[str]) -> list[str]:
        bound = f"0-{self.threads - 1}" if self.threads > 1 else "0"
        return [
            *(str(self.python), str(self.script), str(self.model)),
            *options,
            *("--threads", bound),
        ]


class PeerContender:
    """A peer's run, a process each time. It decodes greedily and honours the model's end tokens.

    Args:
        spec: how it shall draft, in the script's words, or None.
    """

    def __init__(self, name: str, peer: Peer, slots: int, spec: str | None = None) -> None:
        self.name = name
        self._peer = peer
        self._slots = slots
        self._spec = spec

    def run(self, workload: Workload) -> Run:
        """Generate all rows.

        Raises:
            PeerError: if the script fails or does not tell what is expected of it.
        """
        with tempfile.TemporaryDirectory() as folder:
            prompts, tokens = Path(folder) / "prompts.jsonl", Path(folder) / "tokens.jsonl"
            lines = (json.dumps({"prompt": text}) + "\n" for text in workload.texts)
            prompts.write_text("".join(lines), encoding="utf-8")
            options = [str(prompts), *self._options(workload), "--tokens-out", str(tokens)]
            result = self._execute(self._peer.command(options))
            try:
                rows = [json.loads(line) for line in tokens.read_text().splitlines()]
                seconds = float(result["seconds"])
            except (OSError, ValueError, KeyError) as error:
                raise PeerError(f"{self.name} gave no tokens or seconds: {error!r}") from None
        if len(rows) != len(workload.texts):
            raise PeerError(f"{self.name} gave {len(rows)} rows of {len(workload.texts)}")
        return Run(rows, seconds)

    def _options(self, workload: Workload) -> list[str]:
        options = {
            "--slots": self._slots,
            "--max-new-tokens": workload.max_new_tokens,
            "--max-model-len": workload.max_model_len,
        }
        words = [word for option, value in options.items() for word in (option, str(value))]
        return words + (["--spec", self._spec] if self._spec else [])

    def _execute(self, command: list[str]) -> dict[str, float]:
        """The line of JSON that the script prints. OMP_WAIT_POLICY is inherited, as ours is."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        lines = done.stdout.splitlines()
        found = [line for line in lines if line.startswith('{"peer"')]
        if done.returncode or not found:
            shown = "\n".join(lines[-_SHOWN_LINES:])
            raise PeerError(f"{self.name} ended with {done.returncode}:\n{shown}")
        result: dict[str, float] = json.loads(found[-1])
        return result
