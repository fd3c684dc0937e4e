"""Which translation of a universal drafter is better for this pair of models and this text.

Both are tried on the same rows, in stretches, since rows differ more than translations do. That
ends as soon as one is clearly better, and all rows go on with it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

from pipeline.decoding.drafters.translation import Translation

logger = logging.getLogger(__name__)

_STRETCH = 8  # verifications of a row before it changes: then its ids are computed anew
_MIN = 8  # verifications by each translation before they are compared
_MAX = 64  # and before one is chosen in any case
_CLEAR = 2.5  # standard errors between them


@dataclass
class Tally:
    """How a translation did. `seconds` are its own, passes of the draft model apart."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    squares: int = 0  # of the tokens accepted in each verification
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens accepted per verification."""
        return self.accepted / max(1, self.verifications)

    @property
    def variance(self) -> float:
        """Of the mean."""
        count = max(1, self.verifications)
        return (self.squares / count - self.mean**2) / count

    @property
    def score(self) -> tuple[float, float]:
        """Where as many tokens are accepted, about, less time is better."""
        return round(self.mean, 1), -self.seconds / max(1, self.verifications)

    def __str__(self) -> str:
        return (
            f"{self.mean:.2f} tokens accepted per verification, "
            f"{self.accepted / max(1, self.drafted):.0%} of those drafted, "
            f"{1000 * self.seconds / max(1, self.verifications):.2f} ms to translate"
        )


@dataclass
class _Turn:
    """Of a row: its translation, and for how many more verifications."""

    translation: Translation
    left: int = _STRETCH


class TranslationTrial:
    """Says which translation a row gets: each in turn, until one has proved better."""

    def __init__(self, translations: Sequence[Translation], overlap: float) -> None:
        """`overlap`: share of the draft model's vocabulary that the target has."""
        self._tallies = {translation.name: Tally() for translation in translations}
        self._translations = list(translations)
        self._shared = f"the target has {overlap:.0%} of the draft model's vocabulary"
        self._turns: dict[int, _Turn] = {}
        self._num_rows = 0
        self.winner = translations[0] if len(translations) == 1 else None
        if self.winner is not None:
            logger.info("universal drafts by %s: %s", self.winner.name, self._shared)

    def tally(self, translation: Translation) -> Tally:
        return self._tallies[translation.name]

    def translation_of(self, slot: int) -> Translation:
        """For the row's next draft."""
        if self.winner is not None:
            return self.winner
        turn = self._turns.get(slot)
        if turn is None:
            self._num_rows += 1
            turn = self._turns[slot] = _Turn(self._after(self._num_rows))
        elif turn.left == 0:
            at = self._translations.index(turn.translation)
            turn = self._turns[slot] = _Turn(self._after(at + 1))
        return turn.translation

    def begin(self, slot: int, translation: Translation) -> None:
        """A draft of the row's is on its way to be verified."""
        self.tally(translation).verifications += 1
        if slot in self._turns:
            self._turns[slot].left -= 1

    def observe(self, translation: Translation, num_drafted: int, num_accepted: int) -> None:
        """A draft that was not empty was verified."""
        tally = self.tally(translation)
        tally.drafted += num_drafted
        tally.accepted += num_accepted
        tally.squares += num_accepted**2

    def release(self, slot: int) -> None:
        self._turns.pop(slot, None)

    @contextmanager
    def timing(self, translation: Translation) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.tally(translation).seconds += time.perf_counter() - started

    def decide(self) -> bool:
        """Choose, once one is better; True if that is now."""
        if self.winner is not None or not self._is_clear():
            return False
        self.winner = max(self._translations, key=lambda one: self.tally(one).score)
        self._turns.clear()
        figures = "; ".join(f"by {name} {tally}" for name, tally in self._tallies.items())
        logger.info("universal drafts by %s: %s; %s", self.winner.name, self._shared, figures)
        return True

    def _is_clear(self) -> bool:
        count = min(tally.verifications for tally in self._tallies.values())
        if count < _MIN:
            return False
        a, b = self._tallies.values()
        return count >= _MAX or abs(a.mean - b.mean) > _CLEAR * sqrt(a.variance + b.variance)

    def _after(self, at: int) -> Translation:
        return self._translations[at % len(self._translations)]
