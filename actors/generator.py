"""The generation actor: an async Ray Data callable in front of one engine thread.

Several batches are in flight at once, so that the engine stays full across their edges. Each is
committed here as soon as it is generated, while the engine goes on with the others. Plain class:
Ray Data makes it an actor; tests use it without a cluster.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa

from actors.assembly import assemble
from actors.attempts import TOGETHER, AttemptsClient
from actors.engine_thread import EngineThread
from actors.metrics import RowMetrics
from pipeline import logs
from pipeline.decoding.engine import Engine
from pipeline.decoding.loading import settle_heap
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
from pipeline.store.retry import take_retries

logger = logging.getLogger(__name__)

EngineFactory = Callable[[], Engine]
T = TypeVar("T")
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
        attempts: AttemptsClient,
        row_attempts: int,
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
        self._attempts, self._row_attempts = attempts, row_attempts
        self._gate = _Gate()
        attempts.call_now("actor_started")
        self._thread = EngineThread(engine_factory())
        settle_heap()

    async def __call__(self, rows: pa.Table) -> pa.Table:
        """Generate and commit one batch: a table of `MARKERS`.

        One block per call, so that replays agree. A replay commits anew: the ledger takes one of
        the attempts.

        Raises:
            EngineError: the engine failed; nothing of the batch is committed. On a cluster the
                actor ends itself instead, since devices seldom recover, and Ray starts another.
            RunFailed, StoreError or OSError: it could not be committed.
        """
        work = rows.select(
            ["status", "prompt_token_ids", "sampling", "pieces", "values"]
        ).to_pylist()
        files = rows.column("source_file").to_pylist()
        indices = rows.column("source_row").to_pylist()
        keys = [f"{file}:{index}" for file, index in zip(files, indices, strict=True)]
        batch = f"{keys[0]}+{len(keys)}"
        if await self._attempts.call("begin", batch) <= TOGETHER:
            async with self._gate.together():
                results = await self._or_die(self._together(keys, work))
        else:
            results = await self._one_by_one(keys, work)
        completed = self._table(rows, results)
        names = await asyncio.to_thread(self._committer.commit, completed)
        self._metrics.add_table(completed)
        self._metrics.queue(self._thread.num_unfinished)
        for name in names:
            logger.info("committed", extra={"unit": unit_of(name), "rows": rows.num_rows})
        await self._attempts.call("finish", batch)
        retries = take_retries()
        if retries:
            await self._attempts.call("add_retries", retries)
        return pa.table([names], schema=MARKERS)

    async def _together(self, keys: list[str], work: list[dict[str, Any]]) -> list["Result | None"]:
        tasks = [asyncio.ensure_future(self._row(*row)) for row in zip(keys, work, strict=True)]
        await asyncio.sleep(0)  # all of them are with the engine now
        self._metrics.queue(self._thread.num_unfinished)
        return await asyncio.gather(*tasks)

    async def _one_by_one(
        self, keys: list[str], work: list[dict[str, Any]]
    ) -> list["Result | None"]:
        """As `_together`, with each row alone in the engine, and not too often."""
        results: list[Result | None] = []
        for key, row in zip(keys, work, strict=True):
            async with self._gate.alone():
                deaths = await self._attempts.call("begin", key) - 1
                if row["status"] is not None or deaths < self._row_attempts:
                    results.append(await self._or_die(self._row(key, row)))
                    await self._attempts.call("finish", key)
                    continue
            reason = await self._attempts.call("reason")
            tries = f"each of {self._row_attempts} tries with this row alone"
            problem = f"its actor died at {tries}: {reason}"
            completion = Completion(key, "error", error_type="actor_died", error=problem)
            results.append(Result(completion, [None] * len(self._text_columns), 0))
        return results

    async def _or_die(self, work: Awaitable[T]) -> T:
        """What the engine gives. Where it fails this process ends, and Ray starts another."""
        try:
            return await work
        except Exception as error:
            if self._attempts.is_remote:
                await self._attempts.call("died", f"{type(error).__name__}: {error}")
                os._exit(1)
            raise

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


class _Gate:
    """Lets in many batches together, or one row alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = self._waiting = 0

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside >= 0 and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            self._waiting += 1
            await self._changed.wait_for(lambda: self._inside == 0)
            self._inside, self._waiting = -1, self._waiting - 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside = 0
                self._changed.notify_all()


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
