"""What drafting saved or lost against plain steps, so that it never loses more than little."""


class Ledger:
    """Seconds saved. Trials are paid from savings, and from a small share of the time that passes.

    A trial is allowed only if its whole cost could be lost without the balance falling below zero,
    so that a run takes at most `(1 + share) * plain + credit` seconds, as far as
    plain steps and costs are known.
    """

    def __init__(self, share: float = 0.01) -> None:
        """`share`: of all time that may be lost."""
        self._share = share
        self.saved = 0.0
        self.elapsed = 0.0
        self.credit = 0.0

    def record(self, plain_seconds: float, seconds: float) -> None:
        """A step took `seconds`, and its tokens would have taken `plain_seconds` without drafts."""
        self.saved += plain_seconds - seconds
        self.elapsed += seconds

    @property
    def balance(self) -> float:
        """Seconds that may yet be lost."""
        return self.saved + self.credit + self._share * self.elapsed

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
