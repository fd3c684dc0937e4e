"""An engine without a model, to drive the flow: fast, deterministic, and able to misbehave."""

import functools
import hashlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.decoding.loading import load_tokenizer
from pipeline.errors import EngineError
from pipeline.records import Completion, GenerationRequest, GenerationStats
from pipeline.store.commit import Committer


@dataclass(frozen=True)
class Behaviour:
    """What the fake does. Patterns are matched against the row key."""

    journal: str | None = None  # file that gets a line per generated row, with the process id
    seconds_per_row: float = 0.0
    slow_until: str | None = None  # file that ends the slowness
    fail_rows: tuple[str, ...] = ()  # row keys that end in `error`
    fail_all: bool = False
    break_at: str | None = None  # row key at which the engine itself fails
    break_all: bool = False  # it fails at each row
    kill_at: tuple[str, ...] = ()  # row keys that kill their process, each time
    echo: str | None = None  # folder of a tokenizer: the text is the prompt's own
    echo_tokens: int | None = None  # as many of its tokens at most


class FakeEngine:
    """Completes one row per step; the text is a digest of the prompt, so identity is checkable."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._queue: list[GenerationRequest] = []
        self._journal = open(behaviour.journal, "a") if behaviour.journal else None
        self._tokenizer = load_tokenizer(Path(behaviour.echo)) if behaviour.echo else None

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def add_request(self, request: GenerationRequest) -> None:
        self._queue.append(request)

    def step(self) -> list[Completion]:
        if self._behaviour.seconds_per_row:
            return [self._complete(self._queue.pop(0))]
        queued, self._queue = self._queue, []
        return [self._complete(request) for request in queued]

    def _complete(self, request: GenerationRequest) -> Completion:
        behaviour = self._behaviour
        if behaviour.seconds_per_row and not Path(behaviour.slow_until or "").is_file():
            time.sleep(behaviour.seconds_per_row)
        if request.row_key in behaviour.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour.break_all or request.row_key == behaviour.break_at:
            raise EngineError("the fake device is lost")
        if self._journal:
            self._journal.write(f"{request.row_key} {os.getpid()}\n")
            self._journal.flush()
        if behaviour.fail_all or request.row_key in behaviour.fail_rows:
            return Completion(request.row_key, "error", error_type="fake", error="as asked")
        text = self._text(list(request.prompt_token_ids))
        return Completion(request.row_key, "ok", text, "stop", stats=_STATS)

    def _text(self, prompt: list[int]) -> str:
        if self._tokenizer is None:
            return fake_text(prompt)
        return self._tokenizer.decode(prompt[: self._behaviour.echo_tokens])


_STATS = GenerationStats(
    method="prompt_lookup",
    prompt_tokens=10,
    completion_tokens=5,
    num_target_forwards=3,
    num_spec_steps=1,
    num_draft_tokens=4,
    num_accepted_draft_tokens=2,
    drafted_at=[1, 1, 1, 1],
    accepted_at=[1, 1, 0, 0],
    latency_seconds=0.3,
    prefill_seconds=0.1,
    decode_seconds=0.2,
    plain_decode_seconds=0.4,
    num_control_steps=2,
    control_seconds=0.2,
)


class DyingCommitter(Committer):
    """Ends its actor once, after a commit and before the task returns."""

    def commit(self, rows):
        names = super().commit(rows)
        if self._store.create("_run/died", b""):
            os.kill(os.getpid(), signal.SIGKILL)
        return names


class FullCommitter(Committer):
    """Finds no room for some rows."""

    def commit(self, rows):
        if rows["source_row"][0].as_py() == 12:
            raise OSError("no space left for the commit")
        return super().commit(rows)


def fake_text(prompt_token_ids) -> str:
    """The text that the fake generates for a prompt."""
    return hashlib.blake2b(repr(list(prompt_token_ids)).encode(), digest_size=8).hexdigest()


def fake_factory(behaviour: Behaviour):
    """For `run(make_factory=...)`."""
    return lambda job, shares: functools.partial(FakeEngine, behaviour)


def peak_mib(pid: int | str = "self") -> float:
    """Peak memory of a process. Not `ru_maxrss`, which a child inherits from its parent."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def main() -> None:
    """A job with the fake engine, for tests that kill it: `python tests/fakes.py JOURNAL SECONDS
    CONFIG [--retry-failed] [--fail-all] [--incremental]`."""
    from pipeline.cli import errors_to_exit_codes
    from pipeline.config import load_config
    from pipeline.incremental import Selection, run_incremental
    from pipeline.run import Options, run

    journal, seconds, config = sys.argv[1:4]
    behaviour = Behaviour(
        journal=journal, seconds_per_row=float(seconds), fail_all="--fail-all" in sys.argv
    )
    with errors_to_exit_codes():
        loaded = load_config([Path(config)], task="summarize")
        factory = fake_factory(behaviour)
        if "--incremental" in sys.argv:
            sys.exit(run_incremental(loaded, Selection(settle_s=0.0), make_factory=factory))
        options = Options(retry_failed="--retry-failed" in sys.argv)
        code = run(loaded, options, factory)
        print(f"driver peak: {peak_mib():.0f} MiB", flush=True)
        sys.exit(code)


if __name__ == "__main__":
    from tests.fakes import main as importable_main  # workers must find the classes by name

    importable_main()
