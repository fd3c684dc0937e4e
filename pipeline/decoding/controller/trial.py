"""When a method that costs time to try is tried."""

from pipeline.decoding.controller.ledger import Cooldown
from pipeline.decoding.controller.survival import Survival

# Drafts of a model before it is judged: at first, when it is used if they look good and given up if
# no token stood, and in all.
_TRIAL_DRAFTS = 4, 12
TRIAL_LENGTH = 4  # tokens of these
_RETRIAL_DRAFTS = 3, 6  # of one that was judged before: most such trials are in vain,
_RETRIAL_LENGTH = 3  # and must be cheap


class Trial:
    """When a method is to be tried. Once known it is judged at every step by what was seen, and
    tried again after pauses, since text and load change."""

    def __init__(self) -> None:
        self.is_known = False
        self._is_running = True
        self._cooldown = Cooldown()

    def is_due(self, step: int, survival: Survival) -> bool:
        if not self._is_running:
            if not self._cooldown.is_over(step):
                return False
            survival.start_trial()
            self._is_running = True
        if self.wanted(survival) > 0:
            return True
        self.is_known = True
        self.rest(step, succeeded=False)
        return False

    def tells(self, survival: Survival) -> bool:
        """Whether enough was seen to use the method if that looks good, though not to give it up:
        the rest of a trial may have to wait until it can be paid for."""
        return self.is_known or survival.evidence >= _TRIAL_DRAFTS[0]

    def wanted(self, survival: Survival) -> int:
        """Drafts that are yet to be seen in this trial: a few, and the rest if any token stood."""
        first, enough = _RETRIAL_DRAFTS if self.is_known else _TRIAL_DRAFTS
        seen = survival.evidence
        if seen < first:
            return first - seen
        return enough - seen if survival.has_stood else 0

    @property
    def length(self) -> int:
        """Draft tokens of a row at most."""
        return _RETRIAL_LENGTH if self.is_known else TRIAL_LENGTH

    def is_near(self, step: int) -> bool:
        """Whether it is due, or will be at once."""
        return self._is_running or self._cooldown.is_over(step)

    def rest(self, step: int, *, succeeded: bool) -> None:
        """The method was tried to the end, or is in use."""
        if succeeded:
            self.is_known = True
            self._cooldown.reset()
        self._is_running = False
        self._cooldown.start(step)
