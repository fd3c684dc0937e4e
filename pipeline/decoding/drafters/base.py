"""What drafts: the base of all methods, and what a drafter sees of a row.

Drafts are never trusted, so a drafter need not be exact; it must only be cheap, and remember
nothing about a row after its release.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config import Method
from pipeline.decoding.control import Bucket
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Step
from pipeline.records import SamplingParams


class DraftRow(Protocol):
    """A row as drafters see it. Rows of one engine have distinct slots while they run."""

    slot: int
    tokens: list[int]  # prompt and completion so far
    num_prompt_tokens: int
    sampling: SamplingParams
    noise_key: int

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that can still matter."""
        ...


@dataclass(frozen=True)
class StepReport:
    """A decode step, right after its verification. Sequences are by row.

    `drafts`: what was verified, none for plain steps; `accepted`: tokens of them. `verify_seconds`:
    of the target's pass and the choice of tokens, `draft_seconds`: of all before it.
    """

    rows: Sequence["DraftRow"]
    bucket: Bucket
    drafts: Sequence[Sequence[int]]
    accepted: Sequence[int]
    verify_seconds: float
    draft_seconds: float


class Drafter:
    """Proposes draft tokens for many rows at once.

    Most methods need `propose` alone; what they do not define does nothing.
    """

    bytes_per_token: int = 0  # of memory that each place of a slot takes beside the target's K/V
    wants_hidden: bool = False  # the target's final hidden states, kept as its runner's `hidden`
    caught_up: tuple[int, float] = (0, 0.0)  # tokens of rows far behind, seconds: last `propose`

    def attach(self, target: ModelRunner) -> None:
        """The target that verifies; called once, before all others. Its cache may be replaced."""

    def resize(self, num_slots: int, max_len: int) -> None:
        """The engine's slots change in number or length; all rows were released before.

        A shared prefix has the slot behind those of rows, `num_slots`.
        """

    def after_pass(self, step: Step) -> None:
        """The target has computed the step, of which draft tokens may yet be rejected."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The target's cache took over the first places of a slot from another."""

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens after each row's `tokens`: at most `limits[i]` (may be 0), maybe none."""
        raise NotImplementedError

    def observe(self, row: DraftRow, num_drafted: int, num_accepted: int) -> None:
        """The row's last draft was verified; its `tokens` hold what came of it already."""

    def lag(self, row: DraftRow) -> int | None:
        """Tokens to catch up by before the row can be drafted for; None: it cannot be."""
        return 0

    def method_of(self, row: DraftRow, configured: Method) -> Method:
        """Which method the row's last draft is by; `configured`: `decoding.method`."""
        return configured

    def after_prefill(self, seconds: float, num_tokens: int) -> None:
        """The target computed prompts."""

    def after_step(self, report: StepReport) -> None:
        """A decode step was verified; `observe` of its rows comes after."""

    def release(self, row: DraftRow) -> None:
        """The row leaves its slot; forget it. It may never have been proposed for."""
