"""The decision log."""

import logging
from collections import Counter
from collections.abc import Mapping

from pipeline.config import Method
from pipeline.decoding.controller.lengths import Choice, StepCost

logger = logging.getLogger(__name__)

_WINDOW = 32  # decisions after which it is told if the methods changed


class Mind:
    """Tells in one line when the methods change that draft most, and why."""

    def __init__(self) -> None:
        self._told = ""
        self._drafted: Counter[str] = Counter()
        self._steps = 0

    def note(
        self,
        num_rows: int,
        lengths: Mapping[Method, list[int]],
        choice: Choice,
        cost: StepCost,
        saved: float,
    ) -> None:
        """A decision was made; it counts once a window of them is full."""
        self._steps += 1
        self._drafted.update({method: sum(each) for method, each in lengths.items()})
        if self._steps < _WINDOW:
            return
        drafted = sum(self._drafted.values())
        methods = [m for m, count in self._drafted.items() if count >= drafted / 10]
        mind = "+".join(sorted(methods)) or "plain"
        if mind != self._told:
            logger.info(
                "controller: method=%s rows=%d draft_tokens_per_step=%.1f expected_gain=%.2f "
                "plain_ms=%.1f token_ms=%.2f saved_s=%.2f",
                mind,
                num_rows,
                drafted / self._steps,
                choice.gain,
                1000 * cost.plain,
                1000 * cost.token,
                saved,
            )
            self._told = mind
        self._drafted.clear()
        self._steps = 0
