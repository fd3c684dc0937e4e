"""What drafting saved or lost against plain steps, so that it never loses more than little."""


class Ledger:
    """Seconds saved, by drafts that take passes of a model and by those that take none.

    Neither kind pays for the other's losses. A trial is allowed only if its whole cost could be
    lost without the balance of its kind falling below zero, so that a run takes at most
    `(1 + 2 * share) * plain + 2 * credit` seconds, as far as plain steps and costs are known.
    """

    def __init__(self, share: float = 0.01) -> None:
        """`share`: of all time that either kind may lose. `credit`: seconds that it may lose at
        once; `lent`: to models, for what they save later."""
        self._share = share
        self._saved_free = self._saved_paid = 0.0
        self.elapsed = 0.0
        self.credit = self.lent = 0.0

    def record(self, plain_seconds: float, seconds: float, *, is_free: bool = True) -> None:
        """A step took `seconds`, and its tokens would have taken `plain_seconds` without drafts.
        `is_free`: none of these took passes of a model."""
        if is_free:
            self._saved_free += plain_seconds - seconds
        else:
            self._saved_paid += plain_seconds - seconds
        self.elapsed += seconds

    @property
    def saved(self) -> float:
        """By all drafts."""
        return self._saved_free + self._saved_paid

    @property
    def balance(self) -> float:
        """Seconds that drafts of models may yet lose."""
        return self._saved_paid + self.credit + self.lent + self._share * self.elapsed

    @property
    def free_balance(self) -> float:
        """The same of drafts that take no passes."""
        return self._saved_free + self.credit + self._share * self.elapsed

    def allows(self, cost: float) -> bool:
        """Whether so many seconds may be lost."""
        return self.balance >= cost


class Cooldown:
    """Pauses that double each time that a trial was in vain."""

    def __init__(self, first: int = 64, last: int = 2048) -> None:
        """`first`, `last`: steps."""
        self._first, self._last = first, last
        self._pause = first
        self._until = 0

    def is_over(self, step: int) -> bool:
        return step >= self._until

    def start(self, step: int) -> None:
        """A trial failed: pause, the next time for longer."""
        self._until = step + self._pause
        self._pause = min(2 * self._pause, self._last)

    def reset(self) -> None:
        """It paid: the next pause is short again."""
        self._pause = self._first
