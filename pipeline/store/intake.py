"""Incremental runs: which input files are new, by a ledger of those that are done.

An entry's name carries the file, its version (size and etag, or time of modification on disks) and
the run's fingerprint, so that a listing of `_run/intake` answers what is done. The ledger is the
truth; times only say what to look at.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import InputError
from pipeline.store.files import Store
from pipeline.store.listing import file_id
from pipeline.store.plan import RUN_FOLDER

INTAKE = f"{RUN_FOLDER}/intake"
BATCH = f"{INTAKE}/batch.json"  # versions of the files that the plan holds
STATUS = f"{INTAKE}/status.json"  # for monitoring
_ENTRY = re.compile(
    rf"{INTAKE}/(?P<file_id>[0-9a-f]{{12}})\.(?P<version>[0-9a-f]{{12}})\."
    r"(?P<fingerprint>[0-9a-f]{16})\.(?P<state>done|bad)\.json"
)

OnChange = Literal["reprocess", "ignore", "error"]


@dataclass(frozen=True)
class Selection:
    """What the command line says about the files to take. Times in Unix seconds."""

    since: float | None = None
    until: float | None = None
    partitions: tuple[str, ...] = ()
    lookback_s: float | None = None
    max_files: int | None = None
    settle_s: float = 60.0
    on_change: OnChange = "error"
    full_refresh: bool = False


@dataclass(frozen=True)
class Candidate:
    """An input file as the listing shows it, unopened."""

    name: str
    size: int
    modified: float  # Unix seconds by the store's clock
    version: str  # 12 hex digits; another whenever the file is

    @property
    def file_id(self) -> str:
        return file_id(self.name)


@dataclass(frozen=True)
class Entry:
    """A file version that is dealt with."""

    file_id: str
    version: str
    fingerprint: str
    state: Literal["done", "bad"]

    @property
    def name(self) -> str:
        return f"{INTAKE}/{self.file_id}.{self.version}.{self.fingerprint}.{self.state}.json"


@dataclass(frozen=True)
class Decision:
    """Whether a file is taken, and why. `waits`: it will be, by a later run."""

    name: str
    take: bool
    reason: str
    waits: bool = False


def candidate(name: str, entry: Mapping[str, Any]) -> Candidate:
    """From an fsspec entry."""
    when = entry.get("mtime", entry.get("LastModified"))
    modified = when.timestamp() if hasattr(when, "timestamp") else float(when or 0.0)
    etag = entry.get("ETag") or f"{modified:.6f}"
    key = f"{entry['size']} {etag}".encode()
    version = hashlib.blake2b(key, digest_size=6).hexdigest()
    return Candidate(name, int(entry["size"]), modified, version)


class Intake:
    """The ledger of an output folder."""

    def __init__(self, store: Store) -> None:
        self._store = store
        found = [_ENTRY.fullmatch(name) for name in store.names(INTAKE)]
        self._entries: dict[str, list[Entry]] = {}
        for match in filter(None, found):
            entry = Entry(**match.groupdict())  # type: ignore[arg-type]
            self._entries.setdefault(entry.file_id, []).append(entry)
        self.batch: dict[str, str] = _read(store, BATCH)  # name -> version
        self.status: dict[str, Any] = _read(store, STATUS)

    @property
    def watermark(self) -> float | None:
        """The newest time of modification that was processed."""
        return self.status.get("newest_done")

    def entries(self, name: str) -> list[Entry]:
        return self._entries.get(file_id(name), [])

    def count(self, state: str) -> int:
        """Files in a state."""
        return sum(any(e.state == state for e in known) for known in self._entries.values())

    def reason(self, entry: Entry) -> str:
        """Why a file was set aside."""
        return str(_read(self._store, entry.name).get("reason", "unknown"))

    def begin(self, batch: Mapping[str, str]) -> None:
        """Note the versions of the files that the plan is about to hold."""
        self.batch = dict(batch)
        self._store.put(BATCH, json.dumps(self.batch, indent=1).encode())

    def record(self, entry: Entry, body: Mapping[str, Any]) -> None:
        """Put an entry; those of other versions go."""
        self._store.put(entry.name, json.dumps(body, sort_keys=True).encode())
        old = self._entries.get(entry.file_id, [])
        self._store.delete(e.name for e in old if e != entry)
        self._entries[entry.file_id] = [entry]

    def finish(self, status: Mapping[str, Any]) -> None:
        """The batch is done."""
        self.note(status)
        self._store.delete([BATCH])

    def note(self, status: Mapping[str, Any]) -> None:
        """Write the file for monitoring."""
        self.status = {**self.status, **status}
        self._store.put(STATUS, json.dumps(self.status, indent=1).encode())


def decide(
    candidates: Iterable[Candidate],
    intake: Intake,
    selection: Selection,
    fingerprint: str,
    now: float | None = None,
) -> list[Decision]:
    """What to do with each file, in the order of the candidates.

    Raises:
        InputError: a file changed and `on_change` is `error`.
    """
    now = time.time() if now is None else now
    listed = list(candidates)
    decisions = [_decide(c, intake, selection, fingerprint, now) for c in listed]
    return _limit(listed, decisions, intake, selection.max_files)


def _decide(c: Candidate, intake: Intake, s: Selection, fingerprint: str, now: float) -> Decision:
    begun = intake.batch.get(c.name)
    if begun == c.version:
        return Decision(c.name, True, "unfinished: goes on")
    outside = _outside(c, s)
    if outside:
        return Decision(c.name, False, outside)
    if now - c.modified < s.settle_s:
        reason = f"modified in the last {s.settle_s:g} s: may still be written (--settle)"
        return Decision(c.name, False, reason, waits=True)
    if begun is not None:
        return Decision(c.name, True, "changed before it was done: starts over")
    known = intake.entries(c.name)
    same = [e for e in known if e.version == c.version]
    if same and s.full_refresh:
        return Decision(c.name, True, "done before: --full-refresh")
    if same:
        return Decision(c.name, False, _known(same[0], intake, fingerprint))
    if any(e.state == "done" for e in known):
        return _changed(c, s)
    mark = intake.watermark
    if s.lookback_s is not None and mark is not None and c.modified < mark - s.lookback_s:
        return Decision(c.name, False, "older than what is done, by more than --lookback")
    return Decision(c.name, True, "mended since it was set aside" if known else "new")


def _outside(c: Candidate, s: Selection) -> str | None:
    folders = c.name.split("/")[:-1]
    for partition in s.partitions:
        if partition not in folders:
            return f"not in partition {partition}"
    if s.since is not None and c.modified < s.since:
        return "modified before --since"
    if s.until is not None and c.modified >= s.until:
        return "modified at or after --until"
    return None if c.size else "empty: no bytes"


def _known(entry: Entry, intake: Intake, fingerprint: str) -> str:
    if entry.state == "bad":
        return f"set aside: {intake.reason(entry)}"
    return "done" if entry.fingerprint == fingerprint else "done with other settings"


def _changed(c: Candidate, s: Selection) -> Decision:
    if s.on_change == "error" and not s.full_refresh:
        raise InputError(
            "input.path",
            f"{c.name} changed since it was done; give it another name, or say --on-change "
            "reprocess or ignore",
        )
    if s.on_change == "ignore" and not s.full_refresh:
        return Decision(c.name, False, "changed since it was done: --on-change ignore")
    return Decision(c.name, True, "changed since it was done: done anew")


def _limit(
    listed: Sequence[Candidate],
    decisions: list[Decision],
    intake: Intake,
    max_files: int | None,
) -> list[Decision]:
    """Take the oldest first; files that were begun are always finished."""
    if max_files is None:
        return decisions
    modified = {c.name: c.modified for c in listed}
    taken = [d for d in decisions if d.take and d.name not in intake.batch]
    taken.sort(key=lambda d: (modified[d.name], d.name))
    over = {d.name for d in taken[max_files:]}
    reason = f"beyond --max-files {max_files}"
    return [Decision(d.name, False, reason, waits=True) if d.name in over else d for d in decisions]


def _read(store: Store, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(store.read(name))
        return found
    except FileNotFoundError:
        return {}
