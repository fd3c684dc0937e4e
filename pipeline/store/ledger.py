"""What is done: commit markers and publication markers, read from their names alone.

A marker's name carries rows, range and counts, so that one listing answers "how far is it"; its
body carries the sums for the run summary. A marker is written after its data file and is the only
commit point; a data file without a marker does not exist for anybody.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.records import STATUSES
from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.plan import RUN_FOLDER, Part, Plan, Unit

COMMITS = f"{RUN_FOLDER}/commits"
PUBLISHED = f"{RUN_FOLDER}/published"
DATA = f"{RUN_FOLDER}/data"

# Counts in a name: short tag -> field of RunTotals.
_TAGS = {
    "ok": "rows_ok",
    "er": "rows_error",
    "to": "rows_timeout",
    "sk": "rows_skipped",
    "tk": "completion_tokens",
    "dr": "num_draft_tokens",
    "ac": "num_accepted_draft_tokens",
    "sp": "num_spec_steps",
}
_COUNTS = "-".join(rf"{tag}(?P<{name}>\d+)" for tag, name in _TAGS.items())
_COMMIT = re.compile(
    r"(?P<file_id>[0-9a-f]{12})\.(?P<start>\d{12})-(?P<stop>\d{12})\.g(?P<generation>\d+)\."
    rf"{_COUNTS}\.(?P<attempt>[\w-]+)\.json"
)
_PUBLICATION = re.compile(
    rf"(?P<file_id>[0-9a-f]{{12}})\.(?P<index>\d{{5,}})\.g(?P<generation>\d+)\.{_COUNTS}\.json"
)


@dataclass(frozen=True)
class Commit:
    """Rows [start, stop) of a file are generated; `generation` counts `--retry-failed` runs."""

    file_id: str
    start: int
    stop: int
    generation: int
    attempt: str  # `<run id>-<random>`
    counts: RunTotals = field(compare=False)

    @property
    def _where(self) -> str:
        return f"{self.file_id}.{self.start:012d}-{self.stop:012d}.g{self.generation}"

    @property
    def marker(self) -> str:
        return f"{COMMITS}/{self._where}.{_format_counts(self.counts)}.{self.attempt}.json"

    @property
    def data(self) -> str:
        return f"{DATA}/{self._where}.{self.attempt}.parquet"

    @property
    def run_id(self) -> str:
        return self.attempt.rpartition("-")[0]

    @classmethod
    def parse(cls, marker: str) -> "Commit | None":
        """From a marker's name; None for a name that is none."""
        match = _COMMIT.fullmatch(marker.removeprefix(f"{COMMITS}/"))
        if not match:
            return None
        return cls(
            match["file_id"],
            int(match["start"]),
            int(match["stop"]),
            int(match["generation"]),
            match["attempt"],
            _parse_counts(match),
        )


@dataclass(frozen=True)
class Publication:
    """A part is published, with all commits up to `generation` in it."""

    file_id: str
    index: int
    generation: int
    counts: RunTotals = field(compare=False)

    @property
    def marker(self) -> str:
        where = self.prefix(self.file_id, self.index, self.generation)
        return f"{where}{_format_counts(self.counts)}.json"

    @staticmethod
    def prefix(file_id: str, index: int, generation: int) -> str:
        """What the marker's name begins with, whatever the counts."""
        return f"{PUBLISHED}/{file_id}.{index:05d}.g{generation}."

    @classmethod
    def parse(cls, marker: str) -> "Publication | None":
        match = _PUBLICATION.fullmatch(marker.removeprefix(f"{PUBLISHED}/"))
        if not match:
            return None
        generation = int(match["generation"])
        return cls(match["file_id"], int(match["index"]), generation, _parse_counts(match))


class Ledger:
    """The markers of an output folder, in memory: O(units), never O(rows)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[str] = set()
        # (file, start, stop, generation) -> the winner among attempts: lowest marker name
        self._commits: dict[tuple[str, int, int, int], Commit] = {}
        self._by_file: dict[str, dict[tuple[int, int, int], Commit]] = {}
        self._published: dict[tuple[str, int], Publication] = {}

    def refresh(self) -> list[Commit]:
        """Read the names that are new; return the commits that are."""
        fresh = []
        for name in self._new_names(COMMITS):
            commit = Commit.parse(name)
            if commit and self._add(commit):
                fresh.append(commit)
        for name in self._new_names(PUBLISHED):
            self.add_publication(Publication.parse(name))
        return fresh

    def add_publication(self, publication: Publication | None) -> None:
        """Note a publication; the newest generation of a part counts."""
        if publication is None:
            return
        key = publication.file_id, publication.index
        old = self._published.get(key)
        if old is None or old.generation < publication.generation:
            self._published[key] = publication

    @property
    def newest_generation(self) -> int:
        return max((key[3] for key in self._commits), default=0)

    def commits(self) -> Iterable[Commit]:
        """The winning commits, of all generations."""
        return self._commits.values()

    def is_committed(self, unit: Unit) -> bool:
        """Whether a commit of the unit's own generation covers it."""
        return (unit.file.file_id, unit.start, unit.stop, unit.generation) in self._commits

    def publication(self, part: Part) -> Publication | None:
        return self._published.get(part.key)

    def published_as(self, file_id: str, index: int) -> Publication | None:
        """The publication of a part, by its key."""
        return self._published.get((file_id, index))

    def commits_in(self, part: Part) -> list[Commit]:
        """Winning commits within a part, older generations first."""
        found = [
            commit
            for commit in self._by_file.get(part.file.file_id, {}).values()
            if part.start <= commit.start < part.stop
        ]
        return sorted(found, key=lambda c: (c.generation, c.start))

    def pending_cells(self, plan: Plan) -> Iterator[Unit]:
        """Cells without a commit, in input order; published parts have none."""
        for part in plan.parts():
            if self.publication(part) is None:
                yield from (cell for cell in plan.cells(part) if not self.is_committed(cell))

    def counts(self, plan: Plan) -> RunTotals:
        """Rows by status and token counts so far.

        A published part is counted by its own marker; another by its first-generation commits.
        """
        total = RunTotals()
        unpublished: dict[str, list[Part]] = {}
        for part in plan.parts():
            publication = self.publication(part)
            if publication:
                total = total + publication.counts
            else:
                unpublished.setdefault(part.file.file_id, []).append(part)
        for file_id, parts in unpublished.items():
            open_parts = {part.index for part in parts}
            for commit in self._by_file.get(file_id, {}).values():
                if not commit.generation and commit.start // plan.rows_per_file in open_parts:
                    total = total + commit.counts
        return total

    def _add(self, commit: Commit) -> bool:
        key = (commit.file_id, commit.start, commit.stop, commit.generation)
        old = self._commits.get(key)
        if old is None or commit.marker < old.marker:
            self._commits[key] = commit
            self._by_file.setdefault(commit.file_id, {})[key[1:]] = commit
        return old is None

    def _new_names(self, folder: str) -> list[str]:
        names = [name for name in self._store.names(folder) if name not in self._seen]
        self._seen.update(names)
        return names


def unit_of(marker: str) -> str:
    """`<file id>:<start>-<stop>`: how logs name the unit of a commit marker."""
    commit = Commit.parse(marker)
    return f"{commit.file_id}:{commit.start}-{commit.stop}" if commit else marker


def write_marker(store: Store, marker: str, body: dict[str, Any], totals: RunTotals) -> None:
    """Put a marker: the commit point."""
    content = {**body, "totals": vars(totals)}
    store.put(marker, json.dumps(content, sort_keys=True).encode())


def read_totals(store: Store, marker: str) -> RunTotals:
    """The sums in a marker's body."""
    return RunTotals.from_mapping(json.loads(store.read(marker))["totals"])


def _format_counts(counts: RunTotals) -> str:
    return "-".join(f"{tag}{getattr(counts, name)}" for tag, name in _TAGS.items())


def _parse_counts(match: re.Match[str]) -> RunTotals:
    return RunTotals.from_mapping({name: int(match[name]) for name in _TAGS.values()})


assert {f"rows_{status}" for status in STATUSES} <= set(_TAGS.values())
