"""The controller of batches: one named actor that outlives replicas, runners and itself.

It holds nothing that is not in the store. When it starts, it finds what is open and goes on with
it; a runner that died is started again. Ray restarts it when its process dies.
"""

import logging
import threading
import time
from typing import Any

import ray
from ray.util.metrics import Gauge

from actors.bulk.errors import ApiError
from actors.bulk.runner import BatchRunner, why
from actors.bulk.state import ENDED, Batches
from pipeline import logs
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, LockedError
from pipeline.store.files import Store

logger = logging.getLogger(__name__)

NAMESPACE = "draftmill"
_PERIOD_S = 1.0
_CREATION_S = 60.0
_ATTEMPTS = 5  # of a run that breaks without getting any further
Key = tuple[str, str]


def controller_name(application: str) -> str:
    """Name of the actor, in `NAMESPACE`."""
    return f"{application}-batches"


class BatchController:
    """See the module. Methods answer at once; the work is in a thread."""

    def __init__(self, config: RunConfig, application: str) -> None:
        logs.configure(as_json=True)
        self._config, self._application = config, application
        self._batches = Batches(Store(config.output.path, config.output.storage_options))
        self._runners: dict[Key, tuple[Any, Any]] = {}  # runner and its result to come
        self._absent: dict[Key, float] = {}  # since when
        self._gauge = Gauge("batch_jobs", "Unfinished batches.", ("status",))
        self._broken: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something new: a batch, or the wish to cancel one."""
        self._wake.set()

    def running(self) -> dict[str, int]:
        """Batch id -> pid of its runner; for operators."""
        return {key[1]: ray.get(r.pid.remote()) for key, (r, _) in list(self._runners.items())}

    def stop(self) -> None:
        """Give up what runs; the store has it all, and the next controller goes on."""
        self._stopped = True
        self._wake.set()
        self._thread.join(10)
        for key in list(self._runners):
            self._kill(key)

    def _loop(self) -> None:
        while not self._stopped:
            try:
                self._step()
            except Exception:
                logger.exception("looking after batches failed; trying again")
            self._wake.wait(_PERIOD_S)
            self._wake.clear()

    def _step(self) -> None:
        self._collect()
        open_batches = self._batches.open()
        running = len(self._runners)
        self._gauge.set(running, {"status": "running"})
        self._gauge.set(max(len(open_batches) - running, 0), {"status": "waiting"})
        for key in open_batches:
            if not self._exists(key) or self._has_ended(key):
                continue
            end = self._end_of(*key)
            if end is not None:
                self._end(key, end)
            elif key not in self._runners and len(self._runners) < self._limit():
                if time.monotonic() >= self._not_before.get(key, 0.0):
                    self._start(key, "run", *key)

    def _exists(self, key: Key) -> bool:
        """Whether its creation was finished; one that never will be is forgotten after a while."""
        try:
            self._batches.request(*key)
            self._absent.pop(key, None)
            return True
        except ApiError:
            since = self._absent.setdefault(key, time.monotonic())
            if time.monotonic() - since > _CREATION_S:
                self._batches.close(*key)
            return False

    def _has_ended(self, key: Key) -> bool:
        """Its creation was sent again after its end, or its end was not noted as such."""
        if key in self._runners or self._batches.state(*key).get("status") not in ENDED:
            return False
        self._batches.close(*key)
        return True

    def _limit(self) -> int:
        return self._config.serve.parallel_batches

    def _end_of(self, owner: str, batch_id: str) -> str | None:
        """`cancelled` or `expired` for a batch that must not go on."""
        if self._batches.cancelled_at(owner, batch_id):
            return "cancelled"
        expires_at = self._batches.request(owner, batch_id)["expires_at"]
        return "expired" if time.time() > expires_at else None

    def _end(self, key: Key, status: str) -> None:
        """Stop the run, then deliver what it committed."""
        runner = self._runners.get(key)
        if runner is not None and runner[0].ending:
            return
        state = self._batches.state(*key)
        if state.get("status") in ("finalizing", "completed", "failed"):
            if runner is not None:
                return  # all rows are done: it ends by itself
        if runner is not None:
            self._kill(key)
        self._start(key, "finish", *key, status)

    def _start(self, key: Key, method: str, *arguments: Any) -> None:
        runner = _Runner(self._config, self._application, ending=method == "finish")
        self._runners[key] = (runner, runner.call(method, *arguments))
        logger.info("runner starts", extra={"batch": key[1], "what": method})

    def _kill(self, key: Key) -> None:
        runner, _ = self._runners.pop(key)
        runner.kill()

    def _collect(self) -> None:
        """Look after runners that ended."""
        for key, (runner, result) in list(self._runners.items()):
            if not ray.wait([result], timeout=0)[0]:
                continue
            del self._runners[key]
            try:
                ray.get(result)
                self._broken.pop(key, None)
            except Exception as error:
                self._after_failure(key, error)
            runner.kill()

    def _after_failure(self, key: Key, error: Exception) -> None:
        """Try again later; a run that breaks again and again is failed."""
        cause = getattr(error, "cause", error)
        died = isinstance(error, ray.exceptions.RayActorError)
        if not died and not isinstance(cause, LockedError):
            self._broken[key] = self._broken.get(key, 0) + 1
        count = self._broken.get(key, 0)
        self._not_before[key] = time.monotonic() + (min(2.0**count, 60.0) if count else 0.0)
        logger.warning("runner ended: %s", type(cause).__name__, extra={"batch": key[1]})
        if count >= _ATTEMPTS or isinstance(cause, ConfigError):
            self._broken.pop(key, None)
            self._start(key, "fail", *key, [why(cause)])


class _Runner:
    """A `BatchRunner` as an actor of this controller: it dies with it."""

    def __init__(self, config: RunConfig, application: str, ending: bool) -> None:
        remote = ray.remote(num_cpus=0, max_concurrency=2)(BatchRunner)
        self._actor = remote.remote(config, application)
        self.ending = ending
        self.pid = self._actor.pid

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        ray.kill(self._actor)
