"""URIs that clients name: only below configured prefixes, whatever tricks they try."""

import os
import re
from urllib.parse import unquote

from actors.bulk.errors import ApiError, invalid


def check_uri(uri: str, prefixes: list[str], param: str) -> str:
    """The URI, if it may be used.

    Raises:
        ApiError: 400 for what is no URI, 403 for a foreign one.
    """
    if len(uri) > 2048 or not uri.isprintable() or re.search(r"[?#*\[\]\\]", uri):
        raise invalid(f"{param}: not a plain path or URL", param, "invalid_uri")
    if ".." in unquote(unquote(uri)).split("/") or "%" in uri or "@" in uri:
        raise _foreign(param)
    if "://" not in uri:
        if not uri.startswith("/"):
            raise invalid(f"{param}: not an absolute path or URL", param, "invalid_uri")
        real = os.path.realpath(uri)
        if not any(_below(real, os.path.realpath(p)) for p in prefixes if p.startswith("/")):
            raise _foreign(param)
        return real
    if not any(_below(uri, prefix) for prefix in prefixes if "://" in prefix):
        raise _foreign(param)
    return uri.rstrip("/")


def _below(uri: str, prefix: str) -> bool:
    return f"{uri.rstrip('/')}/".startswith(f"{prefix.rstrip('/')}/")


def _foreign(param: str) -> ApiError:
    return ApiError(
        403, f"{param}: outside of what this endpoint may use", "uri_not_allowed", param
    )
