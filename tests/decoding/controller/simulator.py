"""A machine and a text whose costs and chances are known, so that choices can be judged."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.config import Method
from pipeline.decoding.control import ControlClock, bucket_of
from pipeline.decoding.controller.controller import DraftLengthController
from pipeline.decoding.controller.views import Outcome, Plan, RowsView

PLACES = 10


@dataclass(frozen=True)
class Machine:
    """Seconds, as on two cores with a model of 135M: `base + row * rows` for a plain step, `token`
    for each draft token, `prefill` for each token of a prompt. `noise`: of a step, relative."""

    base: float = 0.035
    row: float = 0.0047
    token: float = 0.0018
    prefill: float = 0.0009
    noise: float = 0.04

    def plain(self, rows: int) -> float:
        return self.base + self.row * rows


@dataclass(frozen=True)
class Drafts:
    """Of a method: `chance` of each token after `time` tokens of the run, `per_pass` in plain
    steps, `entry` seconds per token to catch up by."""

    chance: Callable[[int], float]
    per_pass: float = 0.0
    entry: float = 0.0


@dataclass
class Result:
    """`plain_seconds`: of the same tokens without drafts. `lowest`: balance of the ledger."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    tokens: int = 0
    lowest: float = float("inf")
    lengths: list[float] = field(default_factory=list)  # draft tokens of a row, by step

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def simulate(
    machine: Machine,
    methods: dict[Method, Drafts],
    *,
    rows: int | Callable[[int], int],
    tokens: int,
    prompt: int = 300,
    row_tokens: int = 120,
    seed: int = 0,
) -> Result:
    """Decode `tokens` tokens; `rows` at a time, or as many as it says after so many tokens."""
    dice = random.Random(seed)
    controller = DraftLengthController(list(methods), PLACES)
    clock, result = ControlClock(), Result()
    lags: dict[tuple[Method, int], int] = {}
    left: dict[int, int] = {}
    while result.tokens < tokens:
        count = rows if isinstance(rows, int) else rows(result.tokens)
        for slot in range(count):
            if left.get(slot, 0) <= 0:
                controller.release(slot)
                left[slot] = row_tokens
                lags |= {(method, slot): prompt for method in methods}
                controller.record_prefill(machine.prefill * prompt, prompt)
        bucket = bucket_of(count, prompt)
        view = RowsView(
            bucket,
            list(range(count)),
            [max(0, min(PLACES, left[s] - 1)) for s in range(count)],
            [left[s] for s in range(count)],
            {},
            {m: [lags[m, s] for s in range(count)] for m, one in methods.items() if one.per_pass},
        )
        if clock.wants_control(bucket):
            plan = Plan({})
        else:
            plan = controller.plan(view)
        outcome, seconds, extra = _step(machine, methods, plan, view, lags, result.tokens, dice)
        controller.record(bucket, outcome, seconds, extra)
        gained = count + sum(outcome.accepted)
        if any(outcome.drafted):
            clock.record_drafted(bucket, gained, seconds + extra)
        else:
            clock.record_control(bucket, seconds, count)
        for slot in range(count):
            left[slot] -= 1 + outcome.accepted[slot]
            method = outcome.methods[slot]
            asked, accepted = outcome.asked[slot], outcome.accepted[slot]
            if method is not None and methods[method].per_pass:
                controller.observe(method, slot, 1, asked, asked, accepted)
            for free, one in methods.items():  # what would have become of a lookup
                if not one.per_pass:
                    right = _right(PLACES, one.chance(result.tokens), dice)
                    controller.observe(free, slot, 1, PLACES, PLACES, right)
        result.tokens += gained
        result.seconds += seconds + extra
        result.plain_seconds += machine.plain(count) * gained / count
        ledger = controller.ledger
        result.lowest = min(result.lowest, ledger.balance, ledger.free_balance)
        result.lengths.append(sum(outcome.drafted) / count)
    return result


def _right(length: int, chance: float, dice: random.Random) -> int:
    right = 0
    while right < length and dice.random() < chance:
        right += 1
    return right


def _step(
    machine: Machine,
    methods: dict[Method, Drafts],
    plan: Plan,
    view: RowsView,
    lags: dict[tuple[Method, int], int],
    time: int,
    dice: random.Random,
) -> tuple[Outcome, float, float]:
    """What becomes of the plan: the outcome, and the seconds of the pass and of drafting."""
    count = len(view)
    of: list[Method | None] = [None] * count
    asked, accepted = [0] * count, [0] * count
    draft_seconds: dict[Method, float] = {}
    passes: dict[Method, int] = {}
    entries: dict[Method, tuple[int, float]] = {}
    for method, lengths in plan.lengths.items():
        one = methods[method]
        behind = sum(lags[method, s] for s in range(count) if lengths[s])
        for slot, length in enumerate(lengths):
            if length:
                of[slot], asked[slot] = method, length
                accepted[slot] = _right(length, one.chance(time), dice)
                lags[method, slot] = 0
        drafted_rows = sum(n > 0 for n in lengths)
        if one.per_pass and drafted_rows:
            passes[method] = max(lengths)
            entries[method] = behind, behind * one.entry
            pass_seconds = one.per_pass * machine.plain(drafted_rows)
            draft_seconds[method] = passes[method] * pass_seconds + behind * one.entry
    outcome = Outcome(of, asked, asked, accepted, draft_seconds, passes, entries)
    noise = max(0.5, 1 + dice.gauss(0, machine.noise))
    seconds = (machine.plain(count) + machine.token * sum(asked)) * noise
    return outcome, seconds, sum(draft_seconds.values())


def best_static(
    machine: Machine, methods: dict[Method, Drafts], rows: int, prompt: int = 300, tokens: int = 120
) -> tuple[float, tuple[Method, int] | None]:
    """The expected speedup of the best fixed method and length, 1 for plain; and which. Without the
    control steps that a run has besides."""
    best: tuple[float, tuple[Method, int] | None] = (1.0, None)
    plain = machine.plain(rows)
    for method, one in methods.items():
        chance = one.chance(0)
        for length in (1, 3, 5, 10):
            gained = sum(chance**j for j in range(length + 1))
            step = plain + rows * length * machine.token + length * one.per_pass * plain
            row_seconds = tokens * step / rows / gained + prompt * one.entry
            speedup = tokens * plain / rows / row_seconds
            best = max(best, (speedup, (method, length)), key=lambda pair: pair[0])
    return best
