"""Store operations tried again: exponential back-off with full jitter, bounded and counted.

What may pass (throttling, time-outs, resets, cut bodies) is tried again; a denial is not. Full
jitter after M. Brooker, "Exponential backoff and jitter" (AWS Architecture Blog, 2015).
"""

import errno
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.errors import StoreError

MAX_RETRIES = 8
BASE_S, CAP_S = 0.2, 8.0  # 21 s between the first try and the last on average, 42 s at most

# Codes of S3 and of HTTP that may pass; any other answer of the store stands.
_PASSING = {
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
    *("408", "409", "429", "500", "502", "503", "504"),
}
_PASSING_ERRNOS = {errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE}
# Failures below HTTP, by class names: the packages of a store are loaded only where it is used.
_PASSING_CLASSES = {
    "HTTPClientError",  # botocore: time-out, reset
    "EndpointConnectionError",
    "IncompleteRead",
    "IncompleteReadError",
    "FlexibleChecksumError",
    "ResponseStreamingError",
    "ResponseParserError",
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "FSTimeoutError",
}
_PERMISSIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
_CREDENTIALS = {
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidAccessKeyId": "the access key is unknown",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is invalid",
    "TokenRefreshRequired": "the session token has expired",
}

T = TypeVar("T")


class _Counter:
    """Retries of this process since they were last taken."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def take(self) -> int:
        with self._lock:
            count, self._count = self._count, 0
        return count


_counter = _Counter()


def take_retries() -> int:
    """How many operations this process did again since it was last asked."""
    return _counter.take()


def call(operation: Callable[[], T], where: str) -> T:
    """Do it, again where the failure may pass. `where` names the object in messages.

    Raises:
        StoreError: denied, or still failing at the last try.
        OSError: any other answer of the store, such as FileNotFoundError.
    """
    for attempt in itertools.count():
        try:
            return operation()
        except Exception as error:
            if passes(error):
                if attempt < MAX_RETRIES:
                    _counter.add()
                    time.sleep(random.uniform(0, min(CAP_S, BASE_S * 2**attempt)))
                    continue
                reason = f"{_name(error)} at each of {attempt + 1} tries"
                raise StoreError(f"{where}: {reason}; the store may be down, try later") from None
            problem = denial(error)
            if problem:
                raise StoreError(f"{where}: {problem}") from None
            raise
    raise AssertionError("unreachable")


def passes(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    code = code_of(error)
    if code:
        return code in _PASSING or _http_status(error) in (429, 500, 502, 503, 504)
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    return any(cls.__name__ in _PASSING_CLASSES for cls in type(error).__mro__)


def denial(error: BaseException) -> str | None:
    """Why the store will never do this, and the remedy; None for another kind of error."""
    code, operation = code_of(error), getattr(_client_error(error), "operation_name", "")
    if code in _CREDENTIALS:
        return f"{_CREDENTIALS[code]} ({code}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code == "RequestTimeTooSkewed":
        return "the clocks of this host and of the store differ too much; set this host's clock"
    if code == "NoSuchBucket" or (code == "404" and operation == "HeadBucket"):
        return "there is no such bucket; create it, or correct the path"
    if code and (isinstance(error, PermissionError) or code in ("403", "AccessDenied")):
        permission = _PERMISSIONS.get(operation, "s3:PutObject")
        return f"access denied ({operation}); grant {permission}, or use other credentials"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    return None


def code_of(error: BaseException) -> str | None:
    """The store's own code, as `PreconditionFailed`; None where it gave none."""
    found = _client_error(error)
    return None if found is None else str(found.response["Error"].get("Code", "unknown"))


def _client_error(error: BaseException) -> Any:
    """The botocore error that s3fs put behind a Python one."""
    seen: Any = error
    while seen is not None:
        if isinstance(getattr(seen, "response", None), dict) and "Error" in seen.response:
            return seen
        seen = seen.__cause__
    return None


def _http_status(error: BaseException) -> int:
    metadata = _client_error(error).response.get("ResponseMetadata", {})
    return int(metadata.get("HTTPStatusCode", 0))


def _name(error: BaseException) -> str:
    return code_of(error) or f"{type(error).__name__} ({' '.join(str(error).split())[:120]})"
