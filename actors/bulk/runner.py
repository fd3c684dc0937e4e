"""Runs one batch through the pipeline of the jobs; an actor of its own, so that it can be killed.

What it does is safe to do again: validation writes the same file, the pipeline goes on from its
markers, and the result files have names that depend on the batch alone.
"""

import io
import logging
import os
import time
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.bulk.lines import Checked, check_lines
from actors.bulk.results import TEXT_COLUMN, Results, collect, counts
from actors.bulk.state import Batches, Files, run_store
from pipeline import logs
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.stats import RunTotals
from pipeline.store.files import Store

logger = logging.getLogger(__name__)

ROWS_PER_FILE = 10_000
_MAX_UNIT_ROWS = 32  # what a kill or a cancel costs at most, per unit in flight
_CPUS = 0.05  # of the generation actors, which only wait for replicas


class BatchRunner:
    """See the module."""

    def __init__(self, config: RunConfig, application: str) -> None:
        os.environ["DRAFTMILL_LOG"] = "json"  # for the pipeline, here and in its actors
        logs.configure(as_json=True)
        self._config = config
        self._application = application
        store = Store(config.output.path, config.output.storage_options)
        self._batches, self._files = Batches(store), Files(store)

    def pid(self) -> int:
        """The process that runs the batch."""
        return os.getpid()

    def run(self, owner: str, batch_id: str) -> None:
        """Validate, generate, deliver.

        Raises:
            DraftmillError: the pipeline broke; another call goes on.
        """
        logs.bind(batch=batch_id)
        request = self._batches.request(owner, batch_id)
        if "in_progress_at" not in self._batches.state(owner, batch_id):
            if not self._validate(owner, request):
                return
            self._update(owner, batch_id, "in_progress")
        self._generate(owner, request)
        self.finish(owner, batch_id, "completed")

    def _generate(self, owner: str, request: dict[str, Any]) -> None:
        """Run the pipeline. Its imports take seconds, which no failing batch should cost."""
        from actors.bulk.prompter import RequestPrompter
        from actors.bulk.remote import RemoteEngine
        from pipeline.flow import Shares
        from pipeline.run import Options, run

        logger.info("batch runs")
        prompter = None if _is_corpus(request) else RequestPrompter
        options = Options(prompter=prompter, shares=Shares(_CPUS, 0.0), show_rows=False)
        engine = partial(RemoteEngine, self._application)
        run(self._run_config(owner, request), options, lambda job, shares: engine)

    def finish(self, owner: str, batch_id: str, status: str) -> None:
        """Deliver what is committed; the batch ends as `status`."""
        request = self._batches.request(owner, batch_id)
        self._update(owner, batch_id, "finalizing")
        if _is_corpus(request):
            totals = counts(self._run_store(owner, request))
            delivered: dict[str, Any] = {"total": totals.rows}
        else:
            results = self._collect(owner, request, status)
            totals = results.totals
            delivered = self._deliver(owner, request, results)
            delivered["total"] = len(results.output) + len(results.errors)
        failed = delivered["total"] - totals.rows_ok
        self._update(
            owner,
            batch_id,
            status,
            request_counts={
                "total": delivered.pop("total"),
                "completed": totals.rows_ok,
                "failed": failed,
            },
            usage=_usage(totals),
            speculative=_speculative(totals),
            **delivered,
        )
        self._batches.close(owner, batch_id)
        logger.info("batch ended", extra={"status": status})

    def fail(self, owner: str, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """The batch cannot be run."""
        self._update(owner, batch_id, "failed", errors={"object": "list", "data": errors})
        self._batches.close(owner, batch_id)
        logger.info("batch failed", extra={"errors": len(errors)})

    def _update(self, owner: str, batch_id: str, status: str, **changes: Any) -> None:
        known = self._batches.state(owner, batch_id)
        at = known.get(f"{status}_at") or int(time.time())  # done again, it keeps its time
        self._batches.update(owner, batch_id, status=status, **{f"{status}_at": at}, **changes)

    def _validate(self, owner: str, request: dict[str, Any]) -> bool:
        """Check the input and store it as Parquet; False if the batch is failed instead."""
        if _is_corpus(request):
            return True
        data = self._input(owner, request)
        if data is None:
            problem = {"code": "input_gone", "message": "the input is gone", "line": None}
            self.fail(owner, request["id"], [{**problem, "param": "input_file_id"}])
            return False
        checked = self._check(request, data)
        if checked.errors:
            self.fail(owner, request["id"], checked.errors)
            return False
        self._batches.store.put(self._input_name(owner, request), checked.to_parquet())
        self._batches.update(owner, request["id"], total=len(checked.rows))
        return True

    def _check(self, request: dict[str, Any], data: bytes) -> Checked:
        limit = self._config.serve.max_batch_rows
        return check_lines(data, request["endpoint"], request["model"], limit)

    def _input(self, owner: str, request: dict[str, Any]) -> bytes | None:
        if request["input_uri"]:
            options = self._config.input.storage_options
            folder, _, name = request["input_uri"].rpartition("/")
            try:
                return Store(folder or "/", options).read(name)
            except OSError:
                return None
        try:
            return self._files.content(owner, request["input_file_id"])
        except Exception:
            logger.warning("the input file is gone")
            return None

    def _run_config(self, owner: str, request: dict[str, Any]) -> RunConfig:
        from actors.bulk.rendering import task_config
        from pipeline.decoding.memory import MAX_SLOTS

        config = self._config
        slots = config.resources.slots
        per_replica = slots if isinstance(slots, int) else MAX_SLOTS["cpu"]
        values = config.model_dump()
        values["faults"]["max_error_rate"] = 1.0  # a batch tells of its failures, whatever many
        values["resources"] |= {
            "num_actors": 1,
            "slots": per_replica * config.resources.num_actors,
        }
        if _is_corpus(request):
            values["input"] |= {"path": request["input_uri"]}
            values["output"] |= {"path": request["output_uri"]}
            loaded = RunConfig.model_validate(values)
            return task_config(
                loaded, request["task"], request["source_lang"], request["target_lang"]
            )
        store = self._batches.store
        total = self._batches.state(owner, request["id"])["total"]
        values["task"] = "summarize"
        values["input"] |= {
            "path": f"{store.url}/{self._input_name(owner, request)}",
            "text_column": "body",
            "id_column": None,
            "keep_columns": ["custom_id", "url"],
            "unit_rows": max(1, min(_MAX_UNIT_ROWS, total // 32)),
            "max_rows": None,
            "storage_options": config.output.storage_options,
        }
        values["output"] |= {
            "path": self._run_store(owner, request).url,
            "text_column": TEXT_COLUMN,
            "rows_per_file": ROWS_PER_FILE,
        }
        return RunConfig.model_validate(values)

    def _input_name(self, owner: str, request: dict[str, Any]) -> str:
        return f"{Batches.folder(owner, request['id'])}/in/{request['id']}.parquet"

    def _run_store(self, owner: str, request: dict[str, Any]) -> Store:
        options = self._config.output.storage_options
        if _is_corpus(request):
            return Store(request["output_uri"], options)
        return run_store(self._batches.store, options, owner, request["id"])

    def _collect(self, owner: str, request: dict[str, Any], status: str) -> Results:
        try:
            data = self._batches.store.read(self._input_name(owner, request))
        except FileNotFoundError:  # it ends before it was looked at
            lines = self._input(owner, request) or b""
            data = self._check(request, lines).to_parquet()
        requests: pa.Table = pq.read_table(io.BytesIO(data))
        run_folder = self._run_store(owner, request)
        return collect(run_folder, requests, request["id"], request["model"], status)

    def _deliver(self, owner: str, request: dict[str, Any], results: Results) -> dict[str, Any]:
        """Store the result files; their ids. None of a kind, no file."""
        delivered: dict[str, Any] = {}
        life = request["output_life_s"]
        for kind, lines in (("output", results.output), ("error", results.errors)):
            data = "".join(f"{line}\n" for line in lines).encode()
            name = f"{request['id']}_{kind}.jsonl"
            delivered[f"{kind}_file_id"] = None
            if lines and request["output_uri"]:
                Store(request["output_uri"], self._config.output.storage_options).put(name, data)
            elif lines:
                file_id = f"file-{request['id'].removeprefix('batch_')}{kind}"
                self._files.put(owner, data, name, "batch_output", file_id=file_id, life_s=life)
                delivered[f"{kind}_file_id"] = file_id
        return delivered


def _is_corpus(request: dict[str, Any]) -> bool:
    """Whether the input is a Parquet corpus of documents, and not a file of requests."""
    return request["task"] is not None


def _usage(totals: RunTotals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_prompt_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
    }


def _speculative(totals: RunTotals) -> dict[str, Any]:
    """What drafting did for the batch: ratios of sums."""
    return {
        "draft_tokens": totals.num_draft_tokens,
        "accepted_tokens": totals.num_accepted_draft_tokens,
        "acceptance_rate": totals.draft_acceptance_rate,
        "mean_acceptance_length": totals.mean_acceptance_length,
        "decode_speedup": totals.decode_speedup,
        "job_speedup": totals.job_speedup,
    }


def why(error: BaseException) -> dict[str, Any]:
    """A batch error for a run that broke again and again."""
    code = "invalid_config" if isinstance(error, ConfigError) else "run_failed"
    return {"code": code, "message": str(error).splitlines()[0][:500], "line": None, "param": None}
