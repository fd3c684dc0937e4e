"""Failures as clients of OpenAI's API know them: a status and `{"error": {...}}`."""

from dataclasses import dataclass
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass
class ApiError(Exception):
    """An answer that is no success. `param`: the field at fault; `code`: machine-readable."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def __reduce__(self) -> Any:
        return ApiError, (self.status, self.message, self.code, self.param, self.retry_after)

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else None)
        return {
            "error": {
                "message": self.message,
                "type": kind or "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request makes no sense."""
    return ApiError(400, message, code, param)


def not_found(what: str, name: str) -> ApiError:
    """404; also for what belongs to another key, so that nobody learns of it."""
    return ApiError(404, f"No such {what}: {name[:80]}", "not_found")


def row_error(error_type: str | None, error: str | None) -> ApiError:
    """What a row of the engine failed with."""
    message = error or error_type or "the row failed"
    if error_type == "prompt_too_long":
        return invalid(message, code="context_length_exceeded")
    if error_type == "timeout":
        return ApiError(408, message, "request_timeout")
    if error_type in ("out_of_memory", "engine_error", "engine_lost", "bad_logits"):
        return ApiError(500, message, error_type)
    return invalid(message, code=error_type)
