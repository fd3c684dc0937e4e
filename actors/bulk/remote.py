"""The replicas as an `Engine`: what the pipeline's generation actors drive in a batch.

Rows go to whichever replica has room. A row whose replica dies is given to another one; after a few
deaths it is at fault itself and becomes an error, so that it cannot end one replica after another.
"""

import asyncio
import queue
import threading
import time

from ray import serve
from ray.exceptions import RayError

from actors.bulk import ENGINE
from pipeline.errors import EngineError
from pipeline.records import Completion, GenerationRequest

_DEATHS = 5  # of replicas under one row
_PATIENCE_S = 900.0  # without any replica, as while a model is loaded anew
_WAIT_S = 0.05


class RemoteEngine:
    """Sends rows to the replicas of a Serve application and collects their completions."""

    def __init__(self, application: str) -> None:
        self._handle = serve.get_deployment_handle(ENGINE, app_name=application)
        self._done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self.num_unfinished = 0
        threading.Thread(target=self._loop.run_forever, name="rows", daemon=True).start()

    def add_request(self, request: GenerationRequest) -> None:
        """Send a row."""
        self.num_unfinished += 1
        asyncio.run_coroutine_threadsafe(self._follow(request), self._loop)

    def step(self) -> list[Completion]:
        """What came back; waits for a moment if nothing did.

        Raises:
            EngineError: there is no replica any more.
        """
        found: list[Completion] = []
        try:
            found.append(self._take(self._done.get(timeout=_WAIT_S)))
            while True:
                found.append(self._take(self._done.get_nowait()))
        except queue.Empty:
            return found

    def _take(self, item: Completion | BaseException) -> Completion:
        if isinstance(item, BaseException):
            raise EngineError(f"no replica answers: {item}") from item
        self.num_unfinished -= 1
        return item

    async def _follow(self, request: GenerationRequest) -> None:
        try:
            self._done.put(await self._generate(request))
        except BaseException as error:
            self._done.put(error)

    async def _generate(self, request: GenerationRequest) -> Completion:
        deadline = time.monotonic() + _PATIENCE_S
        for death in range(1, _DEATHS + 1):
            try:
                completion: Completion = await self._handle.row.remote(request)
                return completion
            except (RayError, EngineError) as error:
                if time.monotonic() > deadline:
                    raise
                cause = error
                await asyncio.sleep(min(2.0**death, 30.0) / 2)
        problem = f"{_DEATHS} replicas died with this row: {type(cause).__name__}"
        return Completion(request.row_key, "error", error_type="engine_lost", error=problem)
