"""The generation actor: an async Ray Data callable in front of one engine thread.

Several batches are in flight at once, so that the engine stays full across their edges. Each is
committed here as soon as it is generated, while the engine goes on with the others. Plain class:
Ray Data makes it an actor; tests use it without a cluster.
"""

import asyncio
import json
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from actors.assembly import assemble
from actors.metrics import RowMetrics
from pipeline import logs
from pipeline.decoding.engine import Engine
from pipeline.documents import DocumentRenderer
from pipeline.errors import RowError
from pipeline.records import (
    EVIDENCE_FIELDS,
    RESULT_FIELDS,
    Completion,
    GenerationRequest,
    SamplingParams,
    completed_schema,
    sum_stats,
)
from pipeline.rendered import Piece
from pipeline.store.commit import Committer
from pipeline.store.ledger import unit_of

logger = logging.getLogger(__name__)

EngineFactory = Callable[[], Engine]
MARKERS = pa.schema([pa.field("marker", pa.string())])


@dataclass(frozen=True)
class Result:
    """A generated row: status and statistics, the text of each column, and prompts it took."""

    row: Completion
    texts: list[str | None]
    chunks: int


class GenerationActor:
    """Generates and commits tables of `records.rendered_schema`; returns the markers' names."""

    def __init__(
        self,
        engine_factory: EngineFactory,
        kept: list[pa.Field],
        text_columns: list[str],
        run_id: str,
        committer: Committer,
        json_logs: bool = False,
        reducer: Callable[[], DocumentRenderer] | None = None,
    ) -> None:
        """`reducer`: renders summaries of pieces anew, under `on_too_long: map_reduce`."""
        if json_logs:
            logs.configure(as_json=True)
            logs.bind(run_id=run_id)
        self._metrics = RowMetrics("job")
        self._schema = completed_schema(text_columns, kept)
        self._kept = [field.name for field in kept]
        self._text_columns = text_columns
        self._run_id = run_id
        self._reducer = reducer() if reducer else None
        self._committer = committer
        self._thread = EngineThread(engine_factory())

    async def __call__(self, rows: pa.Table) -> pa.Table:
        """Generate and commit one batch: a table of `MARKERS`.

        One block per call, so that replays agree. A replay commits anew: the ledger takes one of
        the attempts.

        Raises:
            EngineError: the engine failed; nothing of the batch is committed.
            RunFailed or OSError: it could not be committed.
        """
        work = rows.select(
            ["status", "prompt_token_ids", "sampling", "pieces", "values"]
        ).to_pylist()
        files = rows.column("source_file").to_pylist()
        indices = rows.column("source_row").to_pylist()
        keys = [f"{file}:{index}" for file, index in zip(files, indices, strict=True)]
        tasks = [asyncio.ensure_future(self._row(*row)) for row in zip(keys, work, strict=True)]
        await asyncio.sleep(0)  # all of them are with the engine now
        self._metrics.queue(self._thread.num_unfinished)
        results = await asyncio.gather(*tasks)
        completed = self._table(rows, results)
        names = await asyncio.to_thread(self._committer.commit, completed)
        self._metrics.add_table(completed)
        self._metrics.queue(self._thread.num_unfinished)
        for name in names:
            logger.info("committed", extra={"unit": unit_of(name), "rows": rows.num_rows})
        return pa.table([names], schema=MARKERS)

    async def _row(self, key: str, row: dict[str, Any]) -> Result | None:
        """Generate a row; None for one that the prompt stage did not let through."""
        if row["status"] is not None:
            return None
        if row["pieces"] is None:
            request = GenerationRequest(key, row["prompt_token_ids"], _sampling(row["sampling"]))
            completion = await asyncio.wrap_future(self._thread.submit(request))
            return Result(completion, [completion.text], 1)
        pieces = [Piece.from_struct(struct) for struct in row["pieces"]]
        completions = await self._generate(key, pieces, _sampling(row["sampling"]))
        if self._reducer is not None and len(pieces) > 1:
            return await self._reduce(key, row["values"], pieces, completions)
        merged, texts = assemble(pieces, completions, len(self._text_columns))
        return Result(merged, texts, len(pieces))

    async def _generate(
        self, key: str, pieces: Sequence[Piece], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        requests = [piece.to_request(key, sampling) for piece in pieces]
        futures = [self._thread.submit(request) for request in requests]
        return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))

    async def _reduce(
        self, key: str, values: list[str], pieces: list[Piece], completions: list[Completion]
    ) -> Result:
        """Summarise the summaries until there is one."""
        assert self._reducer is not None
        done, level = list(completions), 1
        while len(pieces) > 1 and all(c.status == "ok" for c in completions):
            text = "\n\n".join((c.text or "").strip() for c in completions)
            try:
                fewer = await asyncio.to_thread(self._reducer.reduce, values, text, level)
                if len(fewer) >= len(pieces):
                    problem = "the summaries of its pieces are as long as the document; lower "
                    raise RowError("not_reduced", problem + "decoding.max_new_tokens")
            except RowError as error:
                done.append(Completion(key, "error", None, None, error.error_type, str(error)))
                completions = done[-1:]
                break
            pieces, level = fewer, level + 1
            completions = await self._generate(key, pieces)
            done += completions
        merged, texts = assemble(pieces[: len(completions)], completions, 1)
        return Result(replace(merged, stats=sum_stats([c.stats for c in done])), texts, len(done))

    def _table(self, rows: pa.Table, done: Sequence[Result | None]) -> pa.Table:
        """One row of `records.completed_schema` per input row, in order."""
        count = rows.num_rows
        results = [
            _failed_in_prompt(row) if result is None else _result(result, row)
            for row, result in zip(_stage_results(rows), done, strict=True)
        ]
        idle, busy = self._thread.take_times()
        evidence = [_evidence(result.row) if result else {} for result in done]
        if evidence:  # the batch's share of the engine's time, in its first row
            evidence[0] |= {"_idle_seconds": idle, "_busy_seconds": busy}
        columns: dict[str, Any] = {
            "source_file": rows.column("source_file"),
            "source_row": rows.column("source_row"),
            "run_id": [self._run_id] * count,
            **{name: rows.column(name) for name in self._kept},
            **{
                name: [result.texts[i] if result else None for result in done]
                for i, name in enumerate(self._text_columns)
            },
            **{f.name: [result.get(f.name) for result in results] for f in RESULT_FIELDS},
            **{f.name: [row.get(f.name) for row in evidence] for f in EVIDENCE_FIELDS},
        }
        arrays = [
            columns[f.name]
            if isinstance(columns[f.name], pa.ChunkedArray)
            else pa.array(columns[f.name], f.type)
            for f in self._schema
        ]
        return pa.table(arrays, schema=self._schema)


def _sampling(text: str | None) -> SamplingParams | None:
    """A row's own parameters from the prompt stage."""
    return None if text is None else SamplingParams.from_json(text)


def _stage_results(rows: pa.Table) -> list[dict[str, Any]]:
    names = ["status", "error_type", "error", "truncated_prompt_tokens"]
    result: list[dict[str, Any]] = rows.select(names).to_pylist()
    return result


def _failed_in_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row that never reached the engine: nothing was generated or measured."""
    counts = {f.name: 0 for f in RESULT_FIELDS if pa.types.is_integer(f.type)}
    return {**counts, **row, "speedup_basis": "none"}


def _result(result: Result, row: dict[str, Any]) -> dict[str, Any]:
    completion = result.row
    stats = completion.stats
    return {
        **vars(stats),
        "chunks": result.chunks,
        "status": completion.status,
        "error_type": completion.error_type,
        "error": completion.error,
        "finish_reason": completion.finish_reason,
        "truncated_prompt_tokens": row["truncated_prompt_tokens"] or 0,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "speedup": stats.speedup,
        "speedup_basis": stats.speedup_basis,
    }


def _evidence(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    return {
        "_draft_seconds": stats.draft_seconds,
        "_num_control_steps": stats.num_control_steps,
        "_control_seconds": stats.control_seconds,
        "_drafted_at": stats.drafted_at,
        "_accepted_at": stats.accepted_at,
        "_steps": json.dumps(stats.steps) if stats.steps else None,
    }


class EngineThread:
    """Drives an engine from one thread of its own: submit rows, get futures.

    An `EngineError`, or any exception that is not a row's, fails every row in flight: the caller
    sees it, and the rows are given out again elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[GenerationRequest, Future[Completion]]] = (
            queue.SimpleQueue()
        )
        # A row may be in flight twice when Ray retries a task that it believed lost.
        self._waiting: defaultdict[str, list[Future[Completion]]] = defaultdict(list)
        self._idle = self._busy = 0.0
        self._times = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> "Future[Completion]":
        """Queue a row; the future ends with its completion or the engine's failure."""
        future: Future[Completion] = Future()
        self._inbox.put((request, future))
        if self._failure is not None:
            self._fail_inbox(self._failure)
        return future

    @property
    def num_unfinished(self) -> int:
        """Rows that wait for the engine or are with it."""
        return self._inbox.qsize() + self._engine.num_unfinished

    def take_times(self) -> tuple[float, float]:
        """(idle, busy) seconds since the last call. Waiting for the first row is not idleness."""
        with self._times:
            times = self._idle, self._busy
            self._idle = self._busy = 0.0
        return times

    def _run(self) -> None:
        try:
            self._accept(block=True)
            while True:
                started = time.perf_counter()
                completions = self._engine.step() if self._engine.num_unfinished else []
                stepped = time.perf_counter()
                with self._times:  # before a result is out: its batch takes the time with it
                    self._busy += stepped - started
                for completion in completions:
                    self._waiting[completion.row_key].pop(0).set_result(completion)
                    if not self._waiting[completion.row_key]:
                        del self._waiting[completion.row_key]
                self._accept(block=not self._engine.num_unfinished)
                with self._times:
                    self._idle += time.perf_counter() - stepped
        except BaseException as error:
            self._fail(error)

    def _accept(self, block: bool) -> None:
        """Move waiting rows into the engine; with `block`, wait for the first."""
        try:
            request, future = self._inbox.get(block=block)
            while True:
                self._waiting[request.row_key].append(future)
                self._engine.add_request(request)
                request, future = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for futures in self._waiting.values():
            for future in futures:
                future.set_exception(error)
        self._fail_inbox(error)

    def _fail_inbox(self, error: BaseException) -> None:
        while True:
            try:
                self._inbox.get_nowait()[1].set_exception(error)
            except queue.Empty:
                return
