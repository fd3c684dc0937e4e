"""The generation actor without a cluster: one commit per batch, beside the engine."""

import asyncio
import functools
import threading

import pyarrow as pa
import pytest

from actors.attempts import IN_VAIN, Attempts, AttemptsClient
from actors.generator import MARKERS, GenerationActor
from pipeline.errors import EngineError, RunFailed
from pipeline.records import Completion, completed_schema, rendered_schema
from tests.fakes import Behaviour, FakeEngine

KEPT = [pa.field("id", pa.string())]


class Recorder:
    """A committer that keeps what it is given; `hold` delays it, per first row."""

    def __init__(self):
        self.tables = []
        self.hold = {}

    def commit(self, rows):
        held = self.hold.get(rows["source_row"][0].as_py())
        if held:
            assert held.wait(10), "the other batch was never committed"
        self.tables.append(rows)
        return [f"marker-{rows['source_row'][0].as_py()}"]


def batch(start, stop, status=None):
    """Rendered rows [start, stop) of one file."""
    count = stop - start
    columns = {
        "source_file": ["a.parquet"] * count,
        "source_row": range(start, stop),
        "id": [f"row-{n}" for n in range(start, stop)],
        "status": [status] * count,
        "error_type": [None] * count,
        "error": [None] * count,
        "prompt_token_ids": [[n] for n in range(start, stop)],
        "truncated_prompt_tokens": [0] * count,
        "sampling": [None] * count,
        "pieces": [None] * count,
        "values": [None] * count,
    }
    return pa.table(columns, schema=rendered_schema(KEPT))


def make_actor(committer, **behaviour):
    factory = functools.partial(FakeEngine, Behaviour(**behaviour))
    return GenerationActor(factory, KEPT, ["summary"], "run", committer, AttemptsClient(), 2)


def call(actor, *batches):
    async def together():
        return await asyncio.gather(*(actor(rows) for rows in batches))

    return asyncio.run(together())


def test_batch_is_committed_in_order_and_only_markers_go_on():
    committer = Recorder()
    (returned,) = call(make_actor(committer), batch(4, 8))
    assert returned.schema == MARKERS
    assert returned["marker"].to_pylist() == ["marker-4"]
    (table,) = committer.tables
    assert table.schema == completed_schema(["summary"], KEPT)
    assert table["source_row"].to_pylist() == [4, 5, 6, 7]
    assert table["id"].to_pylist() == ["row-4", "row-5", "row-6", "row-7"]
    assert table["status"].to_pylist() == ["ok"] * 4
    assert len(set(table["summary"].to_pylist())) == 4
    assert set(table["run_id"].to_pylist()) == {"run"}


def test_engine_goes_on_while_a_batch_is_committed():
    committer = Recorder()
    committer.hold[0] = threading.Event()
    second = committer.hold[4] = threading.Event()
    second.set()

    class Releasing(Recorder):
        def commit(self, rows):
            names = committer.commit(rows)
            committer.hold[0].set()  # only another batch's commit lets the first one end
            return names

    returned = call(make_actor(Releasing()), batch(0, 4), batch(4, 8))
    assert [table["marker"].to_pylist() for table in returned] == [["marker-0"], ["marker-4"]]
    assert [table["source_row"][0].as_py() for table in committer.tables] == [4, 0]


def test_rows_that_failed_in_the_prompt_stage_are_committed_without_the_engine(tmp_path):
    committer = Recorder()
    call(make_actor(committer, journal=str(tmp_path / "journal")), batch(0, 2, "skipped"))
    (table,) = committer.tables
    assert table["status"].to_pylist() == ["skipped"] * 2
    assert table["completion_tokens"].to_pylist() == [0, 0]
    assert (tmp_path / "journal").read_text() == ""


def test_batch_of_a_failing_engine_is_not_committed():
    committer = Recorder()
    with pytest.raises(EngineError, match="fake device is lost"):
        call(make_actor(committer, break_at="a.parquet:2"), batch(0, 4))
    assert committer.tables == []


def test_failing_commit_fails_the_batch():
    class Full:
        def commit(self, rows):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        call(make_actor(Full()), batch(0, 4))


class Killer:
    """An engine of which some rows kill the actor: here they end the call, and nothing is done."""

    def __init__(self, deadly):
        self.deadly, self.rows = deadly, []
        self.together = []

    @property
    def num_unfinished(self):
        return len(self.rows)

    def add_request(self, request):
        self.rows.append(request)

    def step(self):
        rows, self.rows = self.rows, []
        self.together.append([row.row_key for row in rows])
        if any(row.row_key in self.deadly for row in rows):
            raise EngineError("killed")
        return [Completion(row.row_key, "ok", "text", "stop") for row in rows]


def test_row_that_kills_its_actor_is_found_and_its_neighbours_are_done():
    attempts, committer, engines = AttemptsClient(), Recorder(), []

    def factory():
        engines.append(Killer({"a.parquet:2", "a.parquet:5"}))
        return engines[-1]

    deaths = 0
    while not committer.tables:
        actor = GenerationActor(factory, KEPT, ["summary"], "run", committer, attempts, 2)
        try:
            call(actor, batch(0, 8))
        except EngineError:
            deaths += 1
    assert deaths == 2 + 2 + 2  # together, and each of the two alone
    (table,) = committer.tables
    assert table["status"].to_pylist() == ["error" if n in (2, 5) else "ok" for n in range(8)]
    bad = table.to_pylist()[2]
    assert bad["error_type"] == "actor_died"
    assert bad["error"].startswith("its actor died at each of 2 tries with this row alone")
    assert [len(rows) for rows in engines[0].together] == [8]
    assert {len(rows) for engine in engines[2:] for rows in engine.together} == {1}


def test_row_alone_is_alone():
    """While a suspect is generated, no other batch is in the engine."""
    attempts, committer = AttemptsClient(), Recorder()
    engine = Killer(set())
    actor = GenerationActor(lambda: engine, KEPT, ["summary"], "run", committer, attempts, 2)
    for _ in range(2):
        attempts.call_now("begin", "a.parquet:0+4")
    call(actor, batch(0, 4), batch(4, 8), batch(8, 12))
    singles = [rows for rows in engine.together if any(k in rows for k in ["a.parquet:1"])]
    assert singles == [["a.parquet:1"]]
    assert sorted(row for rows in engine.together for row in rows) == sorted(
        f"a.parquet:{n}" for n in range(12)
    )


def test_actors_that_only_die_end_the_run():
    attempts = Attempts(num_actors=2)
    for _ in range(2 + IN_VAIN):
        attempts.actor_started()
    attempts.died("no device")
    with pytest.raises(RunFailed, match=f"actors died {IN_VAIN + 1} times .*: no device"):
        attempts.actor_started()
    attempts.finish("row")
    attempts.actor_started()
