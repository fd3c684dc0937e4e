"""What serving people asks of the batched engine: see `engine.ServingEngine`."""

from pipeline.decoding.memory import SlotBudget
from pipeline.decoding.rows import Row
from pipeline.decoding.scheduler import Scheduler
from pipeline.records import Completion


class Serving:
    """The part of `BatchedEngine` that looks at rows in flight and lets go of them."""

    _scheduler: Scheduler
    _budget: SlotBudget
    _failed: list[Completion]

    @property
    def num_slots(self) -> int:
        """Rows that may be decoded at a time; before the first one, at most."""
        return self._scheduler.num_slots or self._budget.max_slots

    @property
    def num_running(self) -> int:
        """Rows that hold a slot."""
        return len(self._scheduler.running)

    def partial_text(self, row_key: str) -> str:
        """Text so far of a row that holds a slot; a later token may change its end."""
        row = next((r for r in self._scheduler.decoding() if r.request.row_key == row_key), None)
        return row.end.text() if row else ""

    def cancel(self, row_key: str) -> None:
        """Forget a row, wherever it is; no completion of it will come."""
        for row in self._scheduler.decoding():
            if row.request.row_key == row_key:
                self._release(row)
        self._scheduler.withdraw(row_key)
        self._failed = [one for one in self._failed if one.row_key != row_key]

    def _release(self, row: Row) -> None:
        raise NotImplementedError
