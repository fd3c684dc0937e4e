"""Where an engine's time went."""

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Sums over the steps of an engine. Seconds are wall time."""

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0  # target tokens computed: last tokens and drafts
    decode_rows: int = 0  # sum of occupancies
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def prefill(self, seconds: float, num_tokens: int) -> None:
        """Count a prefill pass."""
        self.prefill_steps += 1
        self.prefill_tokens += num_tokens
        self.prefill_seconds += seconds

    def decode(
        self, verify_seconds: float, draft_seconds: float, num_tokens: int, num_rows: int
    ) -> None:
        """Count a decode pass and the drafting before it."""
        self.decode_steps += 1
        self.decode_tokens += num_tokens
        self.decode_rows += num_rows
        self.verify_seconds += verify_seconds
        self.draft_seconds += draft_seconds
