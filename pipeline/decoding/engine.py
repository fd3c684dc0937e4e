"""The engine seam: rows in, completions with statistics out. Everything above it sees only this."""

from typing import Protocol

from pipeline.records import Completion, GenerationRequest


class Engine(Protocol):
    """Generates rows. Used from one thread; knows nothing of Ray.

    A row at fault comes back as a `Completion` with `status="error"`. `EngineError` means that the
    engine itself cannot go on; rows that it held are lost to it and must be given anew.
    """

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a row."""
        ...

    def step(self) -> list[Completion]:
        """Do the next piece of work; return the rows that it finished, possibly none."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Rows queued or running."""
        ...


class ServingEngine(Engine, Protocol):
    """What serving people asks besides: to see rows while they grow, and to let go of them."""

    @property
    def num_slots(self) -> int:
        """Rows that may be decoded at a time."""
        ...

    @property
    def num_running(self) -> int:
        """Rows that hold a slot."""
        ...

    def partial_text(self, row_key: str) -> str:
        """Text so far of a running row."""
        ...

    def cancel(self, row_key: str) -> None:
        """Forget a row; no completion of it will come."""
        ...
