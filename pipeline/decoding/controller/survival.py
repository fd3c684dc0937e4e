"""How often the draft tokens of a method stand, learnt from what became of earlier ones."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.decoding.controller.lengths import Chances, Floats

_PRIOR_DRAFTS = 4.0  # weight of what is known in general against what a class of drafts showed
_PRIOR_ROW = 4.0  # draft tokens: weight of the method's rate against the row's own
_MEMORY = 400.0  # drafts that are remembered: text changes
_HIGHEST = 0.995  # chance of a token, however often its like stood


@dataclass
class _Place:
    """Counts at one place of drafts of a class, old ones fading."""

    asked: float = 0.0
    proposed: float = 0.0
    reached: float = 0.0  # those of which all before stood: only they tell
    stood: float = 0.0

    def fade(self, factor: float) -> None:
        self.asked *= factor
        self.proposed *= factor
        self.reached *= factor
        self.stood *= factor


@dataclass
class _RowRate:
    """Draft tokens of one row that stood, against what its method would have led to expect."""

    stood: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.stood + _PRIOR_ROW) / (self.expected + _PRIOR_ROW)


class Survival:
    """Chances of one method's draft tokens, by class of draft, place in it and row.

    The classes are the method's own: prompt lookup knows how long the match was. Only the first
    rejection of a draft is seen; what comes after it says nothing, and counts for nothing.
    """

    def __init__(self, places: int, prior: float, by_class: Mapping[int, float] = {}) -> None:
        """`places`: tokens of a draft at most. `prior`: chance of a token before any was seen, and
        `by_class` of classes where it is another."""
        self.places = places
        self._prior, self._priors = prior, dict(by_class)
        self._classes: defaultdict[int, list[_Place]] = defaultdict(
            lambda: [_Place() for _ in range(places)]
        )
        self._rows: defaultdict[int, _RowRate] = defaultdict(_RowRate)
        self._cached: dict[int, tuple[list[float], list[float]]] = {}  # of `_of_class`
        self.evidence = 0  # drafts seen since the last trial began
        self.has_stood = False  # any token of these

    def record(self, slot: int, kind: int, asked: int, drafted: int, accepted: int) -> None:
        """A draft was verified: at most `asked` tokens, `drafted` of which came, and `accepted`
        stood."""
        if not asked:
            return
        self.evidence += 1
        self.has_stood |= accepted > 0
        conditional, _ = self._of_class(kind)
        row, places = self._rows[slot], self._classes[kind]
        for place in range(min(asked, drafted + 1)):
            counts = places[place]
            counts.fade(1 - 1 / _MEMORY)
            counts.asked += 1
            if place >= drafted:
                break
            counts.proposed += 1
            if place > accepted:
                continue
            counts.reached += 1
            row.expected += conditional[place]
            if place < accepted:
                counts.stood += 1
                row.stood += 1
        self._cached.pop(kind, None)

    def chances(
        self, slots: list[int], kinds: list[int], limits: list[int]
    ) -> tuple[Floats, Floats]:
        """`keep` and `share` of `lengths.Source` for these rows, each `[rows, places]`.

        Class 0 has no draft.
        """
        keep, share = np.zeros((2, len(slots), self.places))
        for i, (chances, reach) in enumerate(self.chances_above(0.0, slots, kinds, limits)):
            keep[i, : len(chances)] = chances
            share[i, : len(chances)] = reach[: len(chances)]
        return keep, share

    def chances_above(
        self, least: float, slots: list[int], kinds: list[int], limits: list[int]
    ) -> list[Chances]:
        """The same row by row, as far as chances exceed `least`."""
        rows: list[Chances] = []
        for slot, kind, limit in zip(slots, kinds, limits, strict=True):
            keep: list[float] = []
            reach: Sequence[float] = ()
            if kind and limit > 0:
                conditional, reach = self._of_class(kind)
                factor = self._rows[slot].factor if slot in self._rows else 1.0
                chance = 1.0
                for one in conditional[:limit]:
                    chance *= min(one * factor, _HIGHEST)
                    if chance <= least:
                        break
                    keep.append(chance)
            rows.append((keep, reach))
        return rows

    def release(self, slot: int) -> None:
        """The slot's row is over."""
        self._rows.pop(slot, None)

    def start_trial(self) -> None:
        """From now on new drafts count more than what was seen before."""
        self.evidence, self.has_stood = 0, False
        for places in self._classes.values():
            for place in places:
                place.fade(0.25)
        self._cached.clear()

    def _of_class(self, kind: int) -> tuple[list[float], list[float]]:
        """Per place: chance of a token if those before it stand, and that the draft gets there."""
        found = self._cached.get(kind)
        if found is None:
            conditional, reach = [], []
            expected, reached = self._priors.get(kind, self._prior), 1.0
            for place in self._classes[kind]:
                # a place of which nothing is known does as the one before it
                expected = (place.stood + _PRIOR_DRAFTS * expected) / (
                    place.reached + _PRIOR_DRAFTS
                )
                reached *= (place.proposed + _PRIOR_DRAFTS) / (place.asked + _PRIOR_DRAFTS)
                conditional.append(expected)
                reach.append(reached)
            found = self._cached[kind] = conditional, reach
        return found
