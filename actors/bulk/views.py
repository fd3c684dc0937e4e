"""Batches in OpenAI's shape, from what the store knows of them."""

import time
from typing import Any

from actors.bulk.results import counts
from actors.bulk.state import ENDED, Batches, run_store
from pipeline.store.files import Store

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")


def batch_view(
    batches: Batches, options: dict[str, Any], owner: str, batch_id: str
) -> dict[str, Any]:
    """A batch as clients see it.

    Args:
        options: fsspec options of the store.

    Raises:
        ApiError: 404.
    """
    request = batches.request(owner, batch_id)
    state = batches.state(owner, batch_id)
    cancelling = batches.cancelled_at(owner, batch_id)
    status = state.get("status", "validating")
    if cancelling is not None and status not in ENDED:
        status = "cancelling"
    progress = state.get("request_counts") or _progress(batches, options, owner, request, state)
    shown = {name: request[name] for name in ("input_file_id", "input_uri", "output_uri")}
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": request["endpoint"],
        "model": request["model"],
        "errors": state.get("errors"),
        "completion_window": request["completion_window"],
        "status": status,
        "output_file_id": state.get("output_file_id"),
        "error_file_id": state.get("error_file_id"),
        "created_at": request["created_at"],
        "expires_at": request["expires_at"],
        "cancelling_at": cancelling,
        **{f"{name}_at": state.get(f"{name}_at") for name in _TIMES},
        "request_counts": progress,
        "metadata": request["metadata"],
        "usage": state.get("usage"),
        "speculative": state.get("speculative"),
        **shown,
        "input_file_id": request["input_file_id"] or "",
    }


def _progress(
    batches: Batches,
    options: dict[str, Any],
    owner: str,
    request: dict[str, Any],
    state: dict[str, Any],
) -> dict[str, int]:
    """Requests done so far, from the markers of the run."""
    if "in_progress_at" not in state:
        return {"total": state.get("total", 0), "completed": 0, "failed": 0}
    if request["task"] is None:
        store = run_store(batches.store, options, owner, request["id"])
    else:
        store = Store(request["output_uri"], options)
    done = counts(store)
    return {
        "total": max(state.get("total", 0), done.rows),
        "completed": done.rows_ok,
        "failed": done.rows - done.rows_ok,
    }


def model_view(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "draftmill",
    }


_STARTED = int(time.time())
