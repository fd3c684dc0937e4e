"""The exception tree: who is at fault decides what happens and with which exit code a job ends.

* DraftmillError            any expected failure; its message is one line for a person
    * ConfigError           exit 2: a config key or a command-line option; names the key and remedy
        * InputError        exit 2: an input file or folder; names the file
    * ErrorRateExceeded     exit 3: too many rows failed; everything generated is committed
    * LockedError           exit 75 (EX_TEMPFAIL): another run holds the output
    * RunFailed             exit 1: the run broke; the message says how to resume
        * StoreError        an object store denies what we ask, or fails again and again
    * RowError              one row is at fault: becomes that row's `error`, the run goes on
    * EngineError           the engine is at fault (out of memory, device lost), not the row
"""


class DraftmillError(Exception):
    """Base of every failure that we foresee; `exit_code` is what a job ends with."""

    exit_code = 1


class ConfigError(DraftmillError):
    """A key of the config is wrong. The text reads `key: what is wrong; what to do`."""

    exit_code = 2

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


class InputError(ConfigError):
    """An input file or folder cannot be used; the key names where it was configured."""


class ErrorRateExceeded(DraftmillError):
    """More rows failed than `faults.max_error_rate` allows."""

    exit_code = 3


class LockedError(DraftmillError):
    """A living run holds the lease of the output."""

    exit_code = 75


class RunFailed(DraftmillError):
    """The run ended before every row was done; what was committed stays."""


class StoreError(RunFailed):
    """An object store denies for good, or did not answer well at any of many tries."""


class RowError(DraftmillError):
    """This row cannot be generated; `error_type` is a short machine-readable reason."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class EngineError(DraftmillError):
    """The engine cannot go on, whatever the row: the caller retries smaller or restarts it."""
