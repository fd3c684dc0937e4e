"""A file system that fails at a named point, and a run in this process that meets it there."""

import asyncio
import errno
import functools
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from actors.attempts import AttemptsClient
from actors.generator import GenerationActor
from actors.prompter import PromptActor
from pipeline import flow, monitor
from pipeline.store import lease, retry
from pipeline.store.commit import Committer
from pipeline.store.source import read_unit


class Killed(BaseException):
    """The process is dead: nothing of it runs any more, no `except`, no store operation."""


@dataclass
class Fault:
    """Strikes one operation: the n-th that matches.

    operation: `put`, `read` or `delete`. kind: `kill` the process, `pass` (a connection is lost),
    `full` (no space left). when: `before` it takes effect or `after`.
    """

    operation: str
    path: str
    kind: str
    when: str = "before"
    nth: int = 1
    seen: int = field(default=0, init=False)
    struck: bool = field(default=False, init=False)

    def strike(self) -> None:
        self.struck = True
        if self.kind == "kill":
            FaultyFileSystem.dead = True
            raise Killed
        if self.kind == "pass":
            raise ConnectionError("the connection was lost")
        raise OSError(errno.ENOSPC, "No space left on device")


class FaultyFileSystem(MemoryFileSystem):
    """An object store in memory."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    fault: Fault | None = None
    dead = False

    def _meet(self, operation, path, act):
        cls = FaultyFileSystem
        if cls.dead:
            raise Killed
        fault = cls.fault
        if not fault or fault.struck or fault.operation != operation:
            return act()
        if not re.search(fault.path, str(path)):
            return act()
        fault.seen += 1
        if fault.seen < fault.nth:
            return act()
        if fault.when == "before":
            fault.strike()
        try:
            return act()
        finally:
            fault.strike()  # its answer is lost, whatever it was

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        put = functools.partial(super().pipe_file, path, value, mode=mode, **kwargs)
        return self._meet("put", path, put)

    def cat_file(self, path, start=None, end=None, **kwargs):
        read = functools.partial(super().cat_file, path, start=start, end=end, **kwargs)
        return self._meet("read", path, read)

    def rm_file(self, path):
        return self._meet("delete", path, functools.partial(super().rm_file, path))

    def rm(self, path, recursive=False, maxdepth=None):
        def remove():
            for name in reversed(self.expand_path(path, recursive=recursive)):
                if self.isfile(name):
                    MemoryFileSystem.rm_file(self, name)

        return self._meet("delete", path, remove)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


class InlineRay:
    """What `monitor` asks of Ray, done at once."""

    @staticmethod
    def remote(**_):
        return lambda function: SimpleNamespace(remote=function)

    @staticmethod
    def wait(references, **_):
        return references, []

    @staticmethod
    def get(references):
        return references


@functools.cache
def _prompter(max_prompt_tokens, config_json):
    from pipeline.config import RunConfig

    return PromptActor(RunConfig.model_validate_json(config_json), max_prompt_tokens)


def generate(job, plan, units, run_id, factory, shares, guard, prompter=None):
    """`flow.generate`, unit after unit, in this process."""
    config = job.config
    prompter = _prompter(job.max_prompt_tokens, config.model_dump_json())
    committer = Committer(guard, plan, units[0].generation) if units else None
    actor = GenerationActor(
        factory, job.kept, config.text_columns, run_id, committer, AttemptsClient(), 1
    )
    for unit in units:
        rows = prompter(read_unit(job.listing.source, unit, job.schema))
        asyncio.run(actor(rows))
    return 0


def install(monkeypatch) -> None:
    """Runs of `pipeline.run` go through this process from here on."""
    monkeypatch.setattr(flow, "start_ray", lambda: False)
    monkeypatch.setattr(flow, "plan_shares", lambda *_: flow.Shares(1, 0))
    monkeypatch.setattr(flow, "generate", generate)
    monkeypatch.setattr(monitor, "ray", InlineRay)
    monkeypatch.setattr(retry, "BASE_S", 0)
    monkeypatch.setattr(lease, "SETTLE_S", 0)
    FaultyFileSystem.fault, FaultyFileSystem.dead = None, False


def next_process(monkeypatch, number: int) -> None:
    """What follows belongs to another process than what went before."""
    monkeypatch.setattr(lease, "_process_start", lambda pid: f"process {number}")
    FaultyFileSystem.dead = False
