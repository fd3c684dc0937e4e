"""From committed rows of a batch to its output and error file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.bulk.errors import ApiError, row_error
from actors.bulk.replies import answer
from pipeline.records import Completion, GenerationStats
from pipeline.stats import RunTotals
from pipeline.store.files import Store
from pipeline.store.ledger import Ledger
from pipeline.store.plan import Plan, read_plan

TEXT_COLUMN = "completion"
_STATS = {f.name for f in fields(GenerationStats)}
_NEVER_RAN = {
    "expired": ("batch_expired", "This request could not be done before the batch expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was done."),
}


@dataclass
class Results:
    """Lines of the two files, and sums over the requests."""

    output: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    totals: RunTotals = field(default_factory=RunTotals)


def collect(run: Store, requests: pa.Table, batch_id: str, model: str, status: str) -> Results:
    """The results of a batch that ends as `status`, from whatever is committed.

    Args:
        run: the output folder of its pipeline.
        requests: `lines.SCHEMA`, all of the batch.
    """
    results = Results()
    done: set[int] = set()
    urls = requests.column("url").to_pylist()
    for table in _tables(run):
        for row in table.to_pylist():
            number = row["source_row"]
            done.add(number)
            _add(results, row, urls[number], f"{batch_id}_{number}", model)
        results.totals += RunTotals.from_table(table)
    code, message = _NEVER_RAN.get(status, ("not_run", "The request was not run."))
    for number, custom_id in enumerate(requests.column("custom_id").to_pylist()):
        if number not in done:
            error = {"code": code, "message": message}
            results.errors.append(_line(f"{batch_id}_{number}", custom_id, None, error))
    return results


def counts(run: Store) -> RunTotals:
    """Rows by status so far."""
    plan = read_plan(run)
    if plan is None:
        return RunTotals()
    return _ledger(run).counts(plan)


def _tables(run: Store) -> Iterator[pa.Table]:
    """Committed rows, each once: published parts, and commits of parts that are not."""
    plan = read_plan(run)
    if plan is None:
        return
    for name in _names(plan, _ledger(run)):
        with run.open(name) as handle:
            yield pq.read_table(handle)


def _names(plan: Plan, ledger: Ledger) -> Iterator[str]:
    for part in plan.parts():
        if ledger.publication(part):
            yield part.name
        else:
            yield from (commit.data for commit in ledger.commits_in(part))


def _ledger(run: Store) -> Ledger:
    ledger = Ledger(run)
    ledger.refresh()
    return ledger


def _add(results: Results, row: dict[str, Any], url: str, request_id: str, model: str) -> None:
    try:
        body = _body(row, url, request_id, model)
        response = {"status_code": 200, "request_id": request_id, "body": body}
        results.output.append(_line(request_id, row["custom_id"], response, None))
    except ApiError as error:
        response = {"status_code": error.status, "request_id": request_id, "body": error.body()}
        results.errors.append(_line(request_id, row["custom_id"], response, None))


def _body(row: dict[str, Any], url: str, request_id: str, model: str) -> dict[str, Any]:
    if row["status"] == "skipped":
        raise row_error("blank", "the document is blank")
    if row["status"] == "error":
        raise _told(row["error"]) or row_error(row["error_type"], row["error"])
    stats = GenerationStats(**{k: v for k, v in row.items() if k in _STATS})
    completion = Completion("", row["status"], row[TEXT_COLUMN], row["finish_reason"], stats=stats)
    return answer(url, request_id, model, [completion], [row["truncated_prompt_tokens"]])


def _told(error: str | None) -> ApiError | None:
    """The answer that the prompt stage had for the request (see `prompter`)."""
    if not error or not error.startswith('{"status"'):
        return None
    told = json.loads(error)
    inner = told["body"]["error"]
    return ApiError(told["status"], inner["message"], inner["code"], inner["param"])


def _line(request_id: str, custom_id: str, response: Any, error: Any) -> str:
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id}
    return json.dumps(line | {"response": response, "error": error}, ensure_ascii=False)
