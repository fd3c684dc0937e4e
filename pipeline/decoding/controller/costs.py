"""What steps cost, learnt from the steps of this run: nothing is assumed of the machine."""

import math
from collections import defaultdict
from dataclasses import dataclass

from pipeline.decoding.control import Bucket, class_of
from pipeline.decoding.controller.lengths import StepCost
from pipeline.steptable import STEP_BASE, distance

_LEAST_PLAIN = 2  # steps before drafts are held against them
_PLAIN_FADE = 1 - 1 / 16  # of old steps: the machine's load changes
_FADE = 1 - 1 / 64
_AGE = 1 - 1 / 512  # of what verifying cost, at every step: in the end it is tried again
_LEAST = 0.02  # of a row's share of a plain step: no draft token is free
# Before two occupancies were seen, a draft token is guessed to cost half of a row, whose K/V are
# being read anyway.
_PRIOR_STEPS = 2.0  # weight of that guess
_PRIOR_FIRST = 8.0  # weight of the guess that drafts as such cost nothing
_PRIOR_PASSES = 1.0  # weight of the guess of a drafter's passes
_LEAST_ENTRY = 0.5  # of the target's prefill, for each token to catch up by, before any was seen


@dataclass
class Ratio:
    """A ratio of sums in which old terms fade: steady where single terms are not."""

    fade: float
    above: float = 0.0
    below: float = 0.0
    count: int = 0

    def add(self, above: float, below: float) -> None:
        self.above = self.above * self.fade + above
        self.below = self.below * self.fade + below
        self.count += 1

    @property
    def value(self) -> float:
        """0 before any term."""
        return self.above / self.below if self.count else 0.0


class PlainCosts:
    """Seconds of plain steps, by bucket of occupancy and context."""

    def __init__(self) -> None:
        self._buckets: dict[Bucket, Ratio] = {}

    def record(self, bucket: Bucket, rows: int, seconds: float) -> None:
        self._buckets.setdefault(bucket, Ratio(_PLAIN_FADE)).add(seconds, rows + STEP_BASE)

    def knows(self, bucket: Bucket) -> bool:
        """Whether enough steps of this occupancy were seen; what others cost says too little to
        hold drafts against, and the very first step may have been slow."""
        seen = (one.count for b, one in self._buckets.items() if b.occupancy == bucket.occupancy)
        return sum(seen) >= _LEAST_PLAIN

    def seconds(self, bucket: Bucket, rows: int) -> float | None:
        """Of a step of `rows` rows; from the nearest bucket that was seen, None before any."""
        found = self._buckets.get(bucket)
        if found is None:
            if not self._buckets:
                return None
            found = self._buckets[min(self._buckets, key=lambda other: distance(bucket, other))]
        return found.value * (rows + STEP_BASE)


@dataclass
class _Line:
    """Sums behind a fit of seconds over draft tokens, or passes; `aged`: the step up to which they
    fade."""

    aged: int = 0
    steps: float = 0.0
    drafted: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    product: float = 0.0

    def scale(self, factor: float) -> None:
        self.steps *= factor
        self.drafted *= factor
        self.squares *= factor
        self.seconds *= factor
        self.product *= factor

    def add(self, drafted: int, seconds: float) -> None:
        self.steps += 1
        self.drafted += drafted
        self.squares += drafted * drafted
        self.seconds += seconds
        self.product += drafted * seconds

    def fit(self, prior: float, weight: float = _PRIOR_STEPS) -> tuple[float, float]:
        """(intercept, slope), the first not negative, with a slope that was guessed before; as if
        `weight` steps had shown it."""
        typical = self.squares / self.steps if self.steps else 1.0
        squares = self.squares + weight * typical
        product = self.product + weight * typical * prior
        steps = self.steps + _PRIOR_FIRST
        determinant = steps * squares - self.drafted * self.drafted
        first = (squares * self.seconds - self.drafted * product) / determinant
        if first <= 0:
            return 0.0, product / squares
        return first, (product - self.drafted * first) / squares


class VerifyCosts:
    """What drafts add to a step, by occupancy: an amount, and one per token."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, _Line] = defaultdict(_Line)
        self._step = 0

    def record(self, occupancy: int, drafted: int, extra_seconds: float) -> None:
        """A step with draft tokens took so much longer than a plain one."""
        line = self._line(occupancy)
        line.scale(_FADE)
        line.add(drafted, extra_seconds)

    def age(self) -> None:
        """A step went by."""
        self._step += 1

    def step_cost(self, occupancy: int, rows: int, plain: float) -> StepCost:
        """Of a step of `rows` rows, a plain one taking `plain` seconds."""
        first, token = self._line(occupancy).fit(plain / (rows + STEP_BASE) / 2)
        return StepCost(plain, first, max(token, _LEAST * plain / rows))

    def _line(self, occupancy: int) -> _Line:
        line = self._lines[occupancy]
        line.scale(_AGE ** (self._step - line.aged))
        line.aged = self._step
        return line


class DraftCosts:
    """What one drafter's passes cost, measured in plain steps of as many rows: a small model slows
    down with rows and context as a large one does, by and large. Hence by number of rows.

    A draft costs an amount, as the first pass also reads what came since the last draft, and one
    per pass.
    """

    def __init__(self, guess: float) -> None:
        """`guess`: plain steps per pass, before any was seen."""
        self._guess = guess
        self._lines: dict[int, _Line] = {}  # by rows, up to a factor of 2
        self._entry = Ratio(_FADE)

    def record(self, passes: int, seconds: float, plain: float, rows: int) -> None:
        """`passes` took `seconds`; a plain step of the `rows` drafted for would take `plain`."""
        if passes:
            line = self._lines.setdefault(class_of(rows), _Line())
            line.scale(_FADE)
            line.add(passes, seconds / plain)

    def knows(self, rows: int) -> bool:
        """Whether passes over about as many rows were seen."""
        return class_of(rows) in self._lines

    def record_entry(self, tokens: int, seconds: float) -> None:
        """Catching up by so many tokens of rows that were far behind."""
        if tokens:
            self._entry.add(seconds, tokens)

    def of_draft(self, plain: float, rows: int) -> tuple[float, float]:
        """Seconds of drafting at all, and of each pass, for rows whose plain step takes `plain`.

        From passes over about as many, if there were any. Of passes over fewer it is unknown how
        much were fixed costs; half of it (geometrically), so that more rows are tried for once.
        """
        if not self._lines:
            return 0.0, plain * self._guess
        wanted = class_of(rows)
        near = min(self._lines, key=lambda seen: abs(math.log2(seen / wanted)))
        first, one = self._lines[near].fit(self._guess, _PRIOR_PASSES)
        fixed = math.sqrt((near + STEP_BASE) / (wanted + STEP_BASE)) if near < wanted else 1.0
        return plain * first * fixed, plain * one * fixed

    def per_entry_token(self, prefill_token: float) -> float:
        """Seconds for each token to catch up by; `prefill_token`: of the target's prefill.

        Before any was seen at least half of that, however small the model: whole prompts are caught
        up with at once, and a guess too low is paid for with the first trial.
        """
        if self._entry.count:
            return self._entry.value
        return prefill_token * max(_LEAST_ENTRY, self.of_draft(1.0, 1)[1])
