"""Structured logs: `DRAFTMILL_LOG=json` makes every line of ours one JSON object.

Fields besides `time`, `level`, `logger` and `message` come from `bind` (for a whole process, such
as `run_id`) and from a call's `extra` (such as `unit`). Prompts and texts are never logged.
"""

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_bound: dict[str, Any] = {}


def wants_json() -> bool:
    """Whether the environment asks for structured logs."""
    return os.environ.get("DRAFTMILL_LOG") == "json"


def bind(**fields: Any) -> None:
    """Put these fields into every line of this process."""
    _bound.update(fields)


def configure(as_json: bool, level: int = logging.WARNING) -> None:
    """Handle the logs of this process: our own from INFO on, of libraries from `level` on."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    logging.basicConfig(level=level, handlers=[handler], force=as_json)
    for ours in ("pipeline", "actors"):
        logging.getLogger(ours).setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        own = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_bound,
            **own,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
