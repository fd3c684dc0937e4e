"""One engine for all clients: interactive requests and rows of batches share its slots.

The engine gets no more rows than its slots take and a few to follow, so that whoever comes next
waits for a slot and not behind a queue. Interactive requests go first; while both kinds wait,
every fourth slot goes to a batch, so that neither starves.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from actors.metrics import RowMetrics
from pipeline.decoding.engine import ServingEngine
from pipeline.records import Completion, GenerationRequest, SamplingParams

_BATCH_SHARE = 4  # one in so many, while interactive requests wait too
OnText = Callable[[str], None]


@dataclass
class Ticket:
    """A request on its way; `key` names it to the engine."""

    key: str
    request: GenerationRequest
    urgent: bool
    future: "Future[Completion]"
    on_text: OnText | None = None


class Feeder:
    """Drives the engine from one thread; callers get futures."""

    def __init__(self, engine: ServingEngine, sampling: SamplingParams) -> None:
        """`sampling`: of requests without their own."""
        self._engine = engine
        self._sampling = sampling
        self._metrics = RowMetrics("serve")
        self._inbox: queue.SimpleQueue[Ticket | str] = queue.SimpleQueue()  # str: cancel this key
        self._urgent: deque[Ticket] = deque()
        self._bulk: deque[Ticket] = deque()
        self._running: dict[str, Ticket] = {}
        self._numbers = itertools.count()
        self._urgent_in_a_row = 0
        self._full_steps = self._full_slots = 0.0
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(
        self, request: GenerationRequest, *, urgent: bool, on_text: OnText | None = None
    ) -> Ticket:
        """Queue a row. `on_text` is called from the engine's thread with the text so far."""
        sampling = request.sampling or self._sampling
        if sampling.noise_row is None:
            sampling = replace(sampling, noise_row=request.row_key)
        key = str(next(self._numbers))  # of several clients' rows two may have the same key
        request = replace(request, sampling=sampling)
        ticket = Ticket(key, request, urgent, Future(), on_text)
        ticket.future.set_running_or_notify_cancel()  # from here on only `cancel` below ends it
        self._inbox.put(ticket)
        if self.failure is not None:
            self._fail(self.failure)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give the row's slot to others; its future never ends."""
        self._inbox.put(ticket.key)

    @property
    def depth(self) -> int:
        """Rows that wait or run."""
        return self._inbox.qsize() + len(self._urgent) + len(self._bulk) + len(self._running)

    def stats(self) -> dict[str, float]:
        """`occupancy`: mean share of slots in use, over the steps during which rows waited."""
        steps = self._full_steps
        return {
            "slots": self._engine.num_slots,
            "running": self._engine.num_running,
            "waiting": self.depth - self._engine.num_running,
            "steps_while_waiting": steps,
            "occupancy": self._full_slots / steps if steps else 0.0,
        }

    def _run(self) -> None:
        try:
            while True:
                self._receive(block=not (self._urgent or self._bulk or self._running))
                self._feed()
                completions = self._engine.step()
                self._observe(len(completions))
                for completion in completions:
                    self._finish(completion)
        except BaseException as error:
            self.failure = error
            self._fail(error)

    def _receive(self, block: bool) -> None:
        try:
            while True:
                item = self._inbox.get(block=block)
                block = False
                if isinstance(item, str):
                    self._withdraw(item)
                else:
                    (self._urgent if item.urgent else self._bulk).append(item)
        except queue.Empty:
            return

    def _withdraw(self, key: str) -> None:
        if self._running.pop(key, None):
            self._engine.cancel(key)
        self._urgent = deque(ticket for ticket in self._urgent if ticket.key != key)
        self._bulk = deque(ticket for ticket in self._bulk if ticket.key != key)

    def _feed(self) -> None:
        """Give the engine as many rows as it has slots, and a quarter more to follow at once."""
        slots = self._engine.num_slots
        while (self._urgent or self._bulk) and len(self._running) < slots + max(1, slots // 4):
            ticket = self._next()
            self._running[ticket.key] = ticket
            self._engine.add_request(replace(ticket.request, row_key=ticket.key))

    def _next(self) -> Ticket:
        if self._urgent and (not self._bulk or self._urgent_in_a_row < _BATCH_SHARE - 1):
            self._urgent_in_a_row += 1
            return self._urgent.popleft()
        self._urgent_in_a_row = 0
        return self._bulk.popleft()

    def _observe(self, finished: int) -> None:
        """Occupancy of the step while rows wait, and text of those that are streamed."""
        if self._urgent or self._bulk:
            slots = self._engine.num_slots
            self._full_steps += 1
            self._full_slots += min(self._engine.num_running + finished, slots) / slots
        for ticket in self._running.values():
            if ticket.on_text is not None:
                text = self._engine.partial_text(ticket.key)
                if text:
                    ticket.on_text(text)
        self._metrics.queue(self.depth)

    def _finish(self, completion: Completion) -> None:
        ticket = self._running.pop(completion.row_key, None)
        if ticket is None:
            return  # cancelled
        if ticket.urgent:  # rows of batches are counted where they are committed
            stats = completion.stats
            row = {**vars(stats), "status": completion.status, "speedup": stats.speedup}
            self._metrics.add(row)
        ticket.future.set_result(replace(completion, row_key=ticket.request.row_key))

    def _fail(self, error: BaseException) -> None:
        """The engine is lost: so is every row."""
        try:
            while True:
                item = self._inbox.get_nowait()
                if not isinstance(item, str):
                    self._bulk.append(item)
        except queue.Empty:
            pass
        for ticket in [*self._running.values(), *self._urgent, *self._bulk]:
            if not ticket.future.done():
                ticket.future.set_exception(error)
        self._running.clear()
        self._urgent.clear()
        self._bulk.clear()


class TextStream:
    """What may be told of a growing text: never a character that the whole text will not have.

    Held back are characters of which bytes are missing, white space that the end may strip, and
    what may turn out to be the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._sent = ""

    def grow(self, text: str) -> str:
        """What is new and certain."""
        safe = text[: len(text) - self._hold] if self._hold else text
        return self._send(safe.rstrip("\ufffd").rstrip())

    def end(self, text: str) -> str:
        """The rest, once the whole text is known."""
        return self._send(text)

    def _send(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new
