"""Decides at each step which rows to draft for, by which method and how far; or not at all.

It maximises expected tokens a second (`lengths`) from what plain steps, drafts and drafting cost in
this run (`costs`) and from how often drafts stand (`survival`), and keeps a ledger against plain
steps (`ledger`), so that a run with hopeless drafts is hardly slower than one without.

Methods without a model are judged for nothing: what they would have drafted is compared with what
came. One with a model is tried with short drafts, on as many rows as the ledger can pay for, and
again after pauses that double. Knows nothing of models: `drafters.auto` feeds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.config import Method
from pipeline.decoding.control import Bucket, class_of
from pipeline.decoding.controller.costs import DraftCosts, PlainCosts, Ratio, VerifyCosts
from pipeline.decoding.controller.ledger import Cooldown, Ledger
from pipeline.decoding.controller.lengths import (
    Choice,
    Floats,
    Source,
    StepCost,
    best_drafts,
    best_free,
)
from pipeline.decoding.controller.mind import Mind
from pipeline.decoding.controller.survival import Survival
from pipeline.decoding.controller.trial import TRIAL_LENGTH, Trial
from pipeline.decoding.controller.views import Outcome, Plan, RowsView
from pipeline.steptable import STEP_BASE

MARGIN = 0.03  # by which drafts must be expected to win before they start
_TRIAL_ROWS = (8, 4, 2, 1)  # the most that can be paid for: passes over more cost little more
_CREDIT_STEPS = 3.0  # plain steps that may be lost at the start
_PRIOR = 0.65  # of a draft token by a model
# Of one by lookup, by the class of its match: a long one is a copy that goes on.
_LOOKUP_PRIORS = {1: 0.3, 2: 0.4, 3: 0.5, 4: 0.65, 5: 0.8, 6: 0.9, 7: 0.95}
_GUESSED_PASS: Mapping[Method, float] = {"early_exit": 0.3, "mtp": 0.1, "mtp_drafter": 0.2}
_LEAST_GUESS = 0.15  # however small the model: calls cost time too
_LOOK_AGAIN = (4, 64)  # steps between looks at a model's drafts that would not pay: first, at most


class DraftLengthController:
    """One per engine. `plan` before a step, `record` after it."""

    def __init__(
        self, methods: Sequence[Method], max_length: int, sizes: Mapping[Method, float] = {}
    ) -> None:
        """`methods`: to choose from, besides plain. `max_length`: draft tokens of a row at most.
        `sizes`: of drafters' models, in that of the target, where they are known."""
        self.methods = list(methods)
        self.max_length = max_length
        self.ledger = Ledger()
        self.plain_costs = PlainCosts()
        self.verify_costs = VerifyCosts()
        self.survival: dict[Method, Survival] = {
            m: Survival(max_length, _PRIOR, _LOOKUP_PRIORS if m == "prompt_lookup" else {})
            for m in methods
        }
        self._draft_costs: dict[Method, DraftCosts] = {
            m: DraftCosts(max(_LEAST_GUESS, sizes.get(m) or _GUESSED_PASS.get(m, 0.5)))
            for m in methods
            if m != "prompt_lookup"
        }
        self._trials: dict[Method, Trial] = {m: Trial() for m in self._draft_costs}
        self._free_off, self._paid_off = Cooldown(first=32), Cooldown(first=32)
        self._invested: dict[tuple[Method, int], float] = {}
        self._prefill = Ratio(fade=1 - 1 / 16)
        self._deciding = Ratio(fade=1 - 1 / 16)  # seconds by rows, as for plain steps
        self._unwanted = {m: Cooldown(*_LOOK_AGAIN) for m in self._trials}
        self._step = 0
        self._in_use: set[Method] = set()
        self._mind = Mind()
        self._trial_price = 0.0  # seconds: of the cheapest that could not be paid for last
        self._on: dict[int, bool] = {}  # by occupancy: whether drafts were the better choice last

    # Deciding

    def plan(self, rows: RowsView) -> Plan:
        """What to draft for these rows in the coming step."""
        plain = self.plain_costs.seconds(rows.bucket, len(rows))
        if plain is None or not self.plain_costs.knows(rows.bucket):
            return Plan({})
        self.ledger.credit = max(self.ledger.credit, _CREDIT_STEPS * plain)
        free = self._is_on(self._free_off, self.ledger.free_balance)
        paid = self._is_on(self._paid_off, self.ledger.balance)
        allowed = [m for m in self.methods if (paid if m in self._trials else free)]
        if not allowed:
            return Plan({})
        cost = self._step_cost(rows, plain)
        if trial := self._trial(rows, cost, allowed):
            return trial
        methods = [m for m in allowed if self._is_in_question(m)]
        choice = self._choose(methods, rows, cost)
        was_on = self._on.get(rows.bucket.occupancy, False)
        on = self._on[rows.bucket.occupancy] = choice.drafts and choice.gain > 1 + (
            0.0 if was_on else MARGIN
        )
        lengths = self._lengths(choice, methods) if on else {}
        self._in_use = set(lengths)
        for method in self._trials.keys() & set(methods):
            if method not in lengths:
                self._unwanted[method].start(self._step)
                continue
            self._unwanted[method].reset()
            if choice.gain > 1 + 3 * MARGIN:  # less may be chance, and no reason to try it often
                self._trials[method].rest(self._step, succeeded=True)
        self._mind.note(len(rows), lengths, choice, cost, self.ledger.saved)
        self._invest(lengths, rows)
        return Plan(lengths)

    def _step_cost(self, rows: RowsView, plain: float) -> StepCost:
        """Of verifying drafts, and of looking for them and deciding."""
        cost = self.verify_costs.step_cost(rows.bucket.occupancy, len(rows), plain)
        deciding = self._deciding.value * (len(rows) + STEP_BASE)
        return replace(cost, first=cost.first + deciding)

    def _is_in_question(self, method: Method) -> bool:
        trial = self._trials.get(method)
        if trial is None:
            return True
        return trial.tells(self.survival[method]) and self._unwanted[method].is_over(self._step)

    def needs_lags(self, method: Method) -> bool:
        """Whether the coming decision may be about this method with a model."""
        return self._is_in_question(method) or self._trials[method].is_near(self._step)

    def _is_on(self, off: Cooldown, balance: float) -> bool:
        """Whether drafts of a kind may go on; they pause after losses."""
        if not off.is_over(self._step):
            return False
        if balance < 0:
            off.start(self._step)
        return balance >= 0

    def _choose(self, methods: Sequence[Method], rows: RowsView, cost: StepCost) -> Choice:
        if len(methods) == 1 and methods[0] not in self._trials:
            kinds = rows.kinds_of(methods[0])
            least = cost.token * len(rows) / cost.plain
            survival = self.survival[methods[0]]
            return best_free(survival.chances_above(least, rows.slots, kinds, rows.limits), cost)
        sources = [self._source(method, rows, cost) for method in methods]
        return best_drafts(len(rows), sources, cost)

    def _source(self, method: Method, rows: RowsView, cost: StepCost) -> Source:
        kinds = rows.kinds_of(method)
        draft = self._draft_costs.get(method)
        # what passes over so many rows cost is found out with short drafts
        longest = TRIAL_LENGTH if draft and not draft.knows(len(rows)) else self.max_length
        limits = [min(limit, longest) for limit in rows.limits]
        keep, share = self.survival[method].chances(rows.slots, kinds, limits)
        if draft is None:
            return Source(keep, share, np.zeros(len(rows)))
        first, per_pass = draft.of_draft(cost.plain, len(rows))
        return Source(keep, share, self._entry(method, rows), per_pass, first)

    def _entry(self, method: Method, rows: RowsView) -> Floats:
        """Seconds per row to catch up, spread over the steps that the row may have."""
        lags = rows.lags.get(method)
        if not lags or not any(lags):
            return np.zeros(len(rows))
        per_token = self._draft_costs[method].per_entry_token(self._prefill_token)
        # rows end early more often than not, and drafts save steps: a quarter of what may come
        steps = np.maximum(np.array(rows.remaining) / 4, 1.0)
        return np.array(lags) * per_token / steps

    def _lengths(self, choice: Choice, methods: Sequence[Method]) -> dict[Method, list[int]]:
        pair = choice.lengths, choice.source
        found = {
            method: [n if of == index else 0 for n, of in zip(*pair, strict=True)]
            for index, method in enumerate(methods)
        }
        return {method: lengths for method, lengths in found.items() if any(lengths)}

    # Trials

    def may_use(self, method: Method) -> bool:
        """Whether a method with a model is in use or due for a trial; else it need not be ready."""
        return method in self._in_use or self._is_wanted(self._trials[method])

    def wants_model(self) -> bool:
        """Whether a method with a model is due to be tried, and could be paid for as far as is
        known, or might pay by now."""
        return any(
            self._is_in_question(method) or self._is_wanted(trial)
            for method, trial in self._trials.items()
        )

    def _is_wanted(self, trial: Trial) -> bool:
        is_open = self._paid_off.is_over(self._step)
        return is_open and trial.is_near(self._step) and self.ledger.allows(self._trial_price)

    def _trial(self, rows: RowsView, cost: StepCost, allowed: Sequence[Method]) -> Plan | None:
        """A step that tries a method on as many rows as can be paid for, if one is due."""
        for method in self._draft_costs:
            if method not in allowed:
                continue
            trial, survival = self._trials[method], self.survival[method]
            if not trial.is_due(self._step, survival):
                continue
            lags, kinds = rows.lags.get(method) or [0] * len(rows), rows.kinds_of(method)
            order = sorted(range(len(rows)), key=lambda i: (lags[i], -rows.remaining[i]))
            able = [i for i in order if rows.limits[i] > 0 and kinds[i]]
            most = min(len(able), trial.wanted(survival))
            for count in sorted({min(n, most) for n in _TRIAL_ROWS if most}, reverse=True):
                lengths = [0] * len(rows)
                for i in able[:count]:
                    lengths[i] = min(trial.length, rows.limits[i])
                lag = sum(lags[i] for i in able[:count])
                price = self._trial_seconds(method, rows, cost, lengths, lag)
                if self.ledger.allows(price):
                    self._trial_price = 0.0
                    self._unwanted[method] = Cooldown(*_LOOK_AGAIN)
                    return Plan({method: lengths})
                self._trial_price = price
        return None

    def _trial_seconds(
        self, method: Method, rows: RowsView, cost: StepCost, lengths: list[int], lag: int
    ) -> float:
        """What the trial costs if no draft token stands."""
        draft = self._draft_costs[method]
        count = sum(length > 0 for length in lengths)
        plain = self._plain_seconds(rows.bucket, count) or cost.plain
        first, per_pass = draft.of_draft(plain, count)
        catching_up = lag * draft.per_entry_token(self._prefill_token)
        drafting = first + per_pass * max(lengths) + catching_up
        return cost.first + cost.token * sum(lengths) + drafting

    # Learning

    def record(
        self, bucket: Bucket, outcome: Outcome, verify_seconds: float, other_seconds: float = 0.0
    ) -> None:
        """A step is over.

        Args:
            verify_seconds: of the target's pass and the choice of tokens.
            other_seconds: all else that a plain step would not have taken.
        """
        count, drafted = len(outcome.drafted), sum(outcome.drafted)
        drafting = sum(outcome.draft_seconds.values())
        self._deciding.add(max(0.0, other_seconds - drafting), count + STEP_BASE)
        is_free = not outcome.draft_seconds
        if not drafted:
            self.record_plain(bucket, count, verify_seconds, other_seconds, is_free=is_free)
            self._record_drafting(bucket, outcome)
            return
        self._pass_step()
        plain = self.plain_costs.seconds(bucket, count)
        if plain is None:
            return
        self.verify_costs.record(bucket.occupancy, drafted, verify_seconds - plain)
        self._record_drafting(bucket, outcome)
        worth = plain * (count + sum(outcome.accepted)) / count
        self.ledger.record(worth, verify_seconds + other_seconds, is_free=is_free)

    def record_plain(
        self,
        bucket: Bucket,
        count: int,
        verify_seconds: float,
        other_seconds: float = 0.0,
        *,
        is_free: bool = True,
    ) -> None:
        """As `record`, of a step of so many rows without drafts. `is_free`: no model was asked."""
        self._pass_step()
        self.plain_costs.record(bucket, count, verify_seconds)
        # it is what steps are compared with: only what came on top of it is a loss
        self.ledger.record(verify_seconds, verify_seconds + other_seconds, is_free=is_free)

    def _pass_step(self) -> None:
        self._step += 1
        self.verify_costs.age()

    def record_prefill(self, seconds: float, tokens: int) -> None:
        """A prefill pass of the target. A share of its time may be lost too."""
        self.ledger.record(seconds, seconds)
        self._prefill.add(seconds, tokens)

    @property
    def _prefill_token(self) -> float:
        return self._prefill.value

    def observe(
        self, method: Method, slot: int, kind: int, asked: int, drafted: int, accepted: int
    ) -> None:
        """What became of a draft, or would have."""
        self.survival[method].record(slot, kind, asked, drafted, accepted)

    def release(self, slot: int) -> None:
        """The slot's row is over."""
        for method, survival in self.survival.items():
            survival.release(slot)
            self.ledger.lent -= self._invested.pop((method, slot), 0.0)

    def _record_drafting(self, bucket: Bucket, outcome: Outcome) -> None:
        for method, seconds in outcome.draft_seconds.items():
            draft = self._draft_costs[method]
            tokens, entry_seconds = outcome.entries.get(method, (0, 0.0))
            draft.record_entry(tokens, entry_seconds)
            count = sum(m == method for m in outcome.methods)
            plain = self._plain_seconds(bucket, count) if count else None
            if plain:
                draft.record(outcome.passes[method], seconds - entry_seconds, plain, count)

    def _plain_seconds(self, bucket: Bucket, count: int) -> float | None:
        """Of a plain step of some of a step's rows."""
        return self.plain_costs.seconds(Bucket(class_of(count), bucket.context), count)

    def _invest(self, lengths: Mapping[Method, list[int]], rows: RowsView) -> None:
        """Catching up is paid at once and saves later: lent until the row is over."""
        for method, counts in lengths.items():
            lags = rows.lags.get(method)
            if not lags:
                continue
            per_token = self._draft_costs[method].per_entry_token(self._prefill_token)
            for slot, lag, count in zip(rows.slots, lags, counts, strict=True):
                if lag and count and (method, slot) not in self._invested:
                    self._invested[method, slot] = lag * per_token
                    self.ledger.lent += lag * per_token
