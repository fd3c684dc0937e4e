"""One thread that drives an engine, with futures for those who wait."""

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future

from pipeline.decoding.engine import Engine
from pipeline.records import Completion, GenerationRequest


class EngineThread:
    """Drives an engine from one thread of its own: submit rows, get futures.

    An `EngineError`, or any exception that is not a row's, fails every row in flight: the caller
    sees it, and the rows are given out again elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[GenerationRequest, Future[Completion]]] = (
            queue.SimpleQueue()
        )
        # A row may be in flight twice when Ray retries a task that it believed lost.
        self._waiting: defaultdict[str, list[Future[Completion]]] = defaultdict(list)
        self._idle = self._busy = 0.0
        self._times = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> "Future[Completion]":
        """Queue a row; the future ends with its completion or the engine's failure."""
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up must not break this thread
        self._inbox.put((request, future))
        if self._failure is not None:
            self._fail_inbox(self._failure)
        return future

    @property
    def num_unfinished(self) -> int:
        """Rows that wait for the engine or are with it."""
        return self._inbox.qsize() + self._engine.num_unfinished

    def take_times(self) -> tuple[float, float]:
        """(idle, busy) seconds since the last call. Waiting for the first row is not idleness."""
        with self._times:
            times = self._idle, self._busy
            self._idle = self._busy = 0.0
        return times

    def _run(self) -> None:
        try:
            self._accept(block=True)
            while True:
                started = time.perf_counter()
                completions = self._engine.step() if self._engine.num_unfinished else []
                stepped = time.perf_counter()
                with self._times:  # before a result is out: its batch takes the time with it
                    self._busy += stepped - started
                for completion in completions:
                    self._waiting[completion.row_key].pop(0).set_result(completion)
                    if not self._waiting[completion.row_key]:
                        del self._waiting[completion.row_key]
                self._accept(block=not self._engine.num_unfinished)
                with self._times:
                    self._idle += time.perf_counter() - stepped
        except BaseException as error:
            self._fail(error)

    def _accept(self, block: bool) -> None:
        """Move waiting rows into the engine; with `block`, wait for the first."""
        try:
            request, future = self._inbox.get(block=block)
            while True:
                self._waiting[request.row_key].append(future)
                self._engine.add_request(request)
                request, future = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for futures in self._waiting.values():
            for future in futures:
                future.set_exception(error)
        self._fail_inbox(error)

    def _fail_inbox(self, error: BaseException) -> None:
        while True:
            try:
                self._inbox.get_nowait()[1].set_exception(error)
            except queue.Empty:
                return
