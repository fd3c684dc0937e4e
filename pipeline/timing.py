"""Times and durations as the command line gives them."""

import re
from datetime import UTC, datetime

from pipeline.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_time(option: str, text: str) -> float:
    """Unix seconds of an ISO 8601 date or time; without an offset it is UTC.

    Raises:
        ConfigError: naming the option.
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        problem = f"{text!r} is no ISO 8601 time; write 2026-11-30 or 2026-11-30T06:00:00Z"
        raise ConfigError(option, problem) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90s`, `15m`, `2h` or `3d`.

    Raises:
        ConfigError: naming the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise ConfigError(option, f"{text!r} is no duration; write one such as 90s, 15m, 2h or 3d")
    return float(match[1]) * _UNITS[match[2]]
