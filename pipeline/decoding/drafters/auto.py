"""Drafts by whichever method pays, for each row and step, or none: what the controller says."""

import time
from collections.abc import Mapping, Sequence

from pipeline.config import Method
from pipeline.decoding.control import bucket_of
from pipeline.decoding.controller.controller import DraftLengthController
from pipeline.decoding.controller.views import Outcome, Plan, RowsView
from pipeline.decoding.drafters.base import Drafter, DraftRow, StepReport
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.drafters.shadows import Shadows
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Step

_LOOKUP: Method = "prompt_lookup"
_SEARCH_SHARE = 0.004  # of the time, for looking whether drafts would pay while there are none
_SAVED_SHARE = 0.1  # of what drafts saved, for the same: they come and go


class AutoDrafter(Drafter):
    """All methods that the configured models allow behind one face.

    While there are no drafts, it looks for better only as often as costs next to no time: most
    steps are then plain steps in every respect.
    """

    def __init__(
        self,
        lookup: PromptLookupDrafter,
        others: Mapping[Method, Drafter],
        controller: DraftLengthController,
    ) -> None:
        """`others`: by method; the controller chooses among these and the lookup."""
        self._lookup = lookup
        self._others = dict(others)
        self.controller = controller
        self._shadows = Shadows()
        self._methods: dict[int, Method] = {}  # by slot: of the last proposal
        self._proposal = _Proposal()
        self._is_drafting = False
        self._search_seconds = 0.0

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return sum(drafter.bytes_per_token for drafter in self._others.values())

    @property
    def wants_hidden(self) -> bool:  # type: ignore[override]
        return any(
            drafter.wants_hidden and self.controller.may_use(method)
            for method, drafter in self._others.items()
        )

    def attach(self, target: ModelRunner) -> None:
        for drafter in self._others.values():
            drafter.attach(target)

    def resize(self, num_slots: int, max_len: int) -> None:
        for drafter in self._others.values():
            drafter.resize(num_slots, max_len)

    def after_pass(self, step: Step) -> None:
        for drafter in self._others.values():
            drafter.after_pass(step)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for drafter in self._others.values():
            drafter.copy_prefix(source, target, length)

    def method_of(self, row: DraftRow, configured: Method) -> Method:
        return self._methods.get(row.slot, "plain")

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens by the methods and in the lengths that are expected to pay."""
        self._methods.clear()
        self._proposal = _Proposal()
        if not self._is_due():
            return [[] for _ in rows]
        started = time.perf_counter()
        found = self._look(rows, limits)
        if self._is_futile(found):
            self._search_seconds += time.perf_counter() - started
            return found
        plan = self.controller.plan(self._view(rows, limits))
        looked = time.perf_counter()
        drafts, self._proposal = self._draft(rows, plan, found)
        self._is_drafting = any(drafts)
        if not self._is_drafting:
            self._search_seconds += looked - started
        return drafts

    def after_prefill(self, seconds: float, num_tokens: int) -> None:
        self.controller.record_prefill(seconds, num_tokens)

    def after_step(self, report: StepReport) -> None:
        rows, proposal = report.rows, self._proposal
        self._proposal = _Proposal()
        if not proposal.asked:
            self.controller.record_plain(
                report.bucket, len(rows), report.verify_seconds, report.draft_seconds
            )
            return
        outcome = Outcome(
            [self._methods.get(row.slot) for row in rows],
            proposal.asked,
            [len(draft) for draft in report.drafts],
            report.accepted,
            proposal.seconds,
            proposal.passes,
            proposal.entries,
        )
        self.controller.record(report.bucket, outcome, report.verify_seconds, report.draft_seconds)
        if not any(report.drafts):
            return
        for row, asked, draft, accepted in zip(
            rows, outcome.asked, report.drafts, report.accepted, strict=True
        ):
            method = self._methods.get(row.slot)
            if method is not None and method != _LOOKUP:  # the shadows tell of lookups
                self.controller.observe(method, row.slot, 1, asked, len(draft), accepted)

    def observe(self, row: DraftRow, num_drafted: int, num_accepted: int) -> None:
        method = self._methods.get(row.slot)
        if method in self._others:
            self._others[method].observe(row, num_drafted, num_accepted)

    def release(self, row: DraftRow) -> None:
        self._lookup.release(row)
        self._shadows.release(row.slot)
        self.controller.release(row.slot)
        for drafter in self._others.values():
            drafter.release(row)

    def _is_due(self) -> bool:
        """Whether to look for drafts: while there are some, and else as time allows."""
        ledger = self.controller.ledger
        allowed = _SEARCH_SHARE * ledger.elapsed + _SAVED_SHARE * max(0.0, ledger.saved)
        return self._is_drafting or self._search_seconds <= allowed

    def _is_futile(self, found: Sequence[list[int]]) -> bool:
        """Whether there is nothing to decide: no lookup, and no reason to look at models now."""
        return not (self._is_drafting or any(found) or self.controller.wants_model())

    def _look(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """What a lookup finds."""
        for shadow, right in self._shadows.settled(rows):
            count = len(shadow.draft)
            self.controller.observe(_LOOKUP, shadow.slot, shadow.kind, count, count, right)
        found = self._lookup.propose(rows, limits)
        for row, kind, draft in zip(rows, self._lookup_kinds, found, strict=True):
            self._shadows.watch(row, kind, draft)
        return found

    @property
    def _lookup_kinds(self) -> list[int]:
        """Classes of what it found last, by row."""
        return [_class_of(length) for length in self._lookup.match_lengths]

    def _view(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> RowsView:
        """The rows as the controller sees them."""
        lags = {
            method: [drafter.lag(row) for row in rows]
            for method, drafter in self._others.items()
            if self.controller.needs_lags(method)
        }
        return RowsView(
            bucket_of(len(rows), sum(len(row.tokens) for row in rows) / len(rows)),
            [row.slot for row in rows],
            list(limits),
            [row.max_draft_tokens for row in rows],
            {_LOOKUP: self._lookup_kinds}
            | {m: [int(n is not None) for n in each] for m, each in lags.items()},
            {m: [n or 0 for n in each] for m, each in lags.items()},
        )

    def _draft(
        self, rows: Sequence[DraftRow], plan: Plan, found: Sequence[list[int]]
    ) -> tuple[list[list[int]], "_Proposal"]:
        drafts: list[list[int]] = [[] for _ in rows]
        proposal = _Proposal([0] * len(rows))
        for method, lengths in plan.lengths.items():
            started = time.perf_counter()
            drafter = self._others.get(method)
            if drafter is None:
                own = [draft[:n] for draft, n in zip(found, lengths, strict=True)]
            else:
                own = drafter.propose(rows, lengths)
                proposal.seconds[method] = time.perf_counter() - started
                proposal.passes[method] = max(map(len, own))
                proposal.entries[method] = drafter.caught_up
            for i, (row, draft) in enumerate(zip(rows, own, strict=True)):
                if lengths[i]:
                    drafts[i], proposal.asked[i] = draft, lengths[i]
                    self._methods[row.slot] = method
        return drafts, proposal


def _class_of(match_length: int) -> int:
    """Class of a lookup's draft: 1, 2, 3, then 4 for up to 7 tokens, 5 up to 15, 6 up to 31, 7."""
    if match_length < 4:
        return match_length
    return match_length.bit_length() + 1


class _Proposal:
    """How the last proposal came about: what was asked of each row, and by method seconds, passes
    and what rows far behind took of them."""

    def __init__(self, asked: list[int] | None = None) -> None:
        self.asked = asked or []
        self.seconds: dict[Method, float] = {}
        self.passes: dict[Method, int] = {}
        self.entries: dict[Method, tuple[int, float]] = {}
