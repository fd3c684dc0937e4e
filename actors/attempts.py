"""Counts the starts of batches and rows, so that a row that ends its actor each time is found.

Ray tells no task how often it was tried, and a death hits every batch in flight. A batch that was
started `TOGETHER` times without an end is generated row by row, each alone in its engine: then a
death has one cause. Kept by one actor without CPUs, since it must outlive those it counts for.
"""

from collections import Counter
from typing import Any

from pipeline.errors import RunFailed

TOGETHER = 2  # times that a batch is tried as a whole
IN_VAIN = 8  # deaths in a row, with no row finished in between, that end the run


class Attempts:
    """The counts of one invocation."""

    def __init__(self, num_actors: int = 1) -> None:
        self._starts: Counter[str] = Counter()
        self._actors, self._num_actors = 0, num_actors  # started since a row was finished
        self._reason = "killed, or out of memory"
        self._retries = 0

    def actor_started(self) -> None:
        """Note that an engine is about to be loaded.

        Raises:
            RunFailed: actors only die.
        """
        self._actors += 1
        deaths = self._actors - self._num_actors
        if deaths > IN_VAIN:
            raise RunFailed(f"actors died {deaths} times without one row done: {self._reason}")

    def begin(self, key: str) -> int:
        """Note a start; how many there were, with this one, since the last end."""
        self._starts[key] += 1
        return self._starts[key]

    def finish(self, key: str) -> None:
        """Note an end."""
        self._starts.pop(key, None)
        self._actors = 0

    def died(self, reason: str) -> None:
        """Note why an actor ends itself."""
        self._reason = reason

    def reason(self) -> str:
        """Why the last one died, as far as it could say."""
        return self._reason

    def add_retries(self, count: int) -> None:
        """Store operations that were tried again, of tasks and actors."""
        self._retries += count

    def retries(self) -> int:
        return self._retries


class AttemptsClient:
    """Calls `Attempts` where it lives: on an actor, or, without a cluster, here. Picklable."""

    def __init__(self, handle: Any = None) -> None:
        self.handle = handle
        self._here = None if handle else Attempts()

    @property
    def is_remote(self) -> bool:
        return self.handle is not None

    async def call(self, method: str, *args: Any) -> Any:
        """The method's result."""
        if self.handle:
            return await getattr(self.handle, method).remote(*args)
        return getattr(self._here, method)(*args)

    def call_now(self, method: str, *args: Any) -> Any:
        """As `call`, for code that cannot await."""
        if self.handle:
            import ray

            return ray.get(getattr(self.handle, method).remote(*args))
        return getattr(self._here, method)(*args)
