"""The lease of an output folder: one run at a time, and a dead run's is taken over.

A heartbeat counter says that the holder lives. Clocks of hosts differ, so nobody compares
timestamps: a newcomer watches the counter for one period on its own monotonic clock. A holder on
this host whose process is gone is taken over at once, so that "kill -9, same command" just works.

It is taken and kept by conditional puts (`If-None-Match`, `If-Match`), on disks under a file lock.
Where a store has no such thing, whose put came last is who holds it, after a moment's wait.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from filelock import FileLock

from pipeline.errors import ConfigError, LockedError, RunFailed, StoreError
from pipeline.store.files import Store
from pipeline.store.plan import RUN_FOLDER

LEASE_NAME = f"{RUN_FOLDER}/lease.json"
PERIOD_S = 30.0
SETTLE_S = 2.0  # longer than a put is under way
_TAKEN = "another run took over this output; this one stops before its next commit"


@dataclass
class _Holder:
    token: str
    run_id: str
    host: str
    pid: int
    process_start: str  # a pid is reused, with another start time
    counter: int = 0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return f"run {self.run_id}, process {self.pid} on {self.host.partition('/')[0]}"


class Lease:
    """Context manager that holds the lease and keeps its heartbeat in a thread.

    Raises on entry:
        LockedError: a living run holds it.
        ConfigError: the output folder cannot be written.
    """

    def __init__(self, store: Store, run_id: str, period_s: float | None = None) -> None:
        self._store = store
        self._period_s = PERIOD_S if period_s is None else period_s
        pid = os.getpid()
        self._me = _Holder(uuid.uuid4().hex, run_id, _host(), pid, _process_start(pid) or "")
        self._stop = threading.Event()
        self._lost = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Lease":
        try:
            self._acquire()
        except StoreError as error:
            raise ConfigError("output.path", str(error)) from None
        except (PermissionError, NotADirectoryError) as error:
            where = error.filename or self._store.url
            raise ConfigError(
                "output.path", f"cannot write {where}: {error.strerror}; choose another folder"
            ) from None
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._lost:
            return
        try:
            if _same(_read(self._store), self._me):
                self._store.delete([LEASE_NAME])
        except (OSError, StoreError):
            if error is None:
                raise  # else what broke the run matters more

    @property
    def guard(self) -> "LeaseGuard":
        """What the tasks of this run ask before they commit."""
        return LeaseGuard(self._store, self._me.token)

    def check(self) -> None:
        """Raise RunFailed when another run has taken the lease."""
        if self._lost:
            raise RunFailed(_TAKEN)

    def _acquire(self) -> None:
        seen = self._take(_is_dead)
        if seen is None:
            return
        self._watch(seen)
        now = self._take(lambda holder: holder == seen)
        if now is not None:
            raise _locked(now)

    def _take(self, may_replace: Callable[[_Holder], bool]) -> _Holder | None:
        """Take the lease where it is free, or its holder may be replaced; else who holds it."""
        with _one_at_a_time(self._store):
            while True:
                found = self._store.tagged(LEASE_NAME)
                if found is None:
                    if self._store.create(LEASE_NAME, self._me.to_json()):
                        break
                    continue
                holder = _Holder(**json.loads(found[0]))
                if not may_replace(holder):
                    return holder
                if self._store.replace(LEASE_NAME, self._me.to_json(), found[1]):
                    break
        if not self._is_exclusive():
            time.sleep(SETTLE_S)
            holder_now = _read(self._store)
            if not _same(holder_now, self._me):
                raise _locked(holder_now or self._me)
        return None

    def _is_exclusive(self) -> bool:
        """Whether nobody else can believe to hold it too: the store minds conditions of puts.

        One that ignores them is found out by a second creation. There the last of several puts
        at a time wins, and each looks again a little later.
        """
        if self._store.is_local:
            return True
        self._me.counter += 1
        again = self._store.create(LEASE_NAME, self._me.to_json())
        return self._store.has_conditional_put and not again

    def _watch(self, seen: _Holder) -> None:
        """Return if the counter stands still for a period."""
        if seen.host == _host():  # alive: we would have seen it dead
            raise _locked(seen)
        deadline = time.monotonic() + self._period_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._period_s / 10))
            now = _read(self._store)
            if now is None:
                return
            if now != seen:
                raise _locked(now)

    def _beat(self) -> None:
        """Count up, five times per period; a lease that is not ours any more is lost.

        So is one that could not be kept for a period, for others take it then.
        """
        kept = time.monotonic()
        while not self._stop.wait(self._period_s / 5):
            try:
                self._lost = not self._count_up()
                kept = time.monotonic()
            except Exception:  # a bad minute of the store is not the end
                self._lost = time.monotonic() - kept > self._period_s
            if self._lost:
                return

    def _count_up(self) -> bool:
        with _one_at_a_time(self._store):
            found = self._store.tagged(LEASE_NAME)
            if found is None or json.loads(found[0])["token"] != self._me.token:
                return False
            self._me.counter += 1
            return self._store.replace(LEASE_NAME, self._me.to_json(), found[1])


@dataclass(frozen=True)
class LeaseGuard:
    """Asks the store whether the run that this belongs to still has the lease. Picklable."""

    store: Store
    token: str

    def check(self) -> None:
        """Look now.

        Raises:
            RunFailed: another run has taken over.
        """
        holder = _read(self.store)
        if holder is None or holder.token != self.token:
            raise RunFailed(_TAKEN)


def describe_holder(store: Store) -> str | None:
    """Who holds the lease, for a person; None if nobody, or only a process known to be dead."""
    holder = _read(store)
    return None if holder is None or _is_dead(holder) else str(holder)


def _read(store: Store) -> _Holder | None:
    try:
        return _Holder(**json.loads(store.read(LEASE_NAME)))
    except FileNotFoundError:
        return None


def _same(holder: _Holder | None, me: _Holder) -> bool:
    return holder is not None and holder.token == me.token


def _locked(holder: _Holder) -> LockedError:
    return LockedError(
        f"output.path: {holder} is at work here; wait for it, or stop it and run again"
    )


def _is_dead(holder: _Holder) -> bool:
    """Only a process of this host can be known to be dead."""
    return holder.host == _host() and _process_start(holder.pid) != holder.process_start


def _host() -> str:
    """Host name and boot: after a reboot every process of before is gone."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _process_start(pid: int) -> str | None:
    """When a process of this host started; None if there is none (or only its zombie)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return ""


def _one_at_a_time(store: Store) -> Any:
    """Serialise read-then-write of the lease among processes of this host."""
    if not store.is_local:
        return nullcontext()
    folder = Path(store.path(RUN_FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".lease.lock")
