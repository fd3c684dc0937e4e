"""What the controller is told of a step, what it says, and what it is told afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config import Method
from pipeline.decoding.control import Bucket


@dataclass(frozen=True)
class RowsView:
    """The rows of a step, in parallel.

    `limits`: draft tokens at most. `remaining`: tokens that the row may yet have. `kinds`: by
    method the class of each row's draft, 0 for none, as of `Survival`; a method that is missing has
    class 1 everywhere. `lags`: by method, tokens that its drafter would have to catch up by.
    """

    bucket: Bucket
    slots: list[int]
    limits: list[int]
    remaining: list[int]
    kinds: Mapping[Method, list[int]] = field(default_factory=dict)
    lags: Mapping[Method, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def kinds_of(self, method: Method) -> list[int]:
        """By row, for a method that may be missing."""
        return self.kinds.get(method) or [1] * len(self)


@dataclass(frozen=True)
class Plan:
    """Draft tokens to ask for, by method and row; methods that are not asked are missing."""

    lengths: dict[Method, list[int]]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    `asked`, `drafted`, `accepted`: draft tokens by row. `methods`: by row, None without a draft.
    `draft_seconds`: by method, its passes; `passes`: of each; `entries`: tokens that it caught up
    by, and in how many seconds.
    """

    methods: Sequence[Method | None]
    asked: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    draft_seconds: Mapping[Method, float] = field(default_factory=dict)
    passes: Mapping[Method, int] = field(default_factory=dict)
    entries: Mapping[Method, tuple[int, float]] = field(default_factory=dict)
