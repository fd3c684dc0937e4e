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
