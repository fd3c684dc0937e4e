"""How drafts grow, token by token, from what a model says; shared by all drafters that have one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.decoding.choosing import Chooser, Position
from pipeline.decoding.drafters.base import Drafter, DraftRow


@dataclass
class Drafting:
    """A row while it is drafted for.

    `chain`: the tokens chosen so far, each given those before. A draft is its beginning, up to the
    limit or to where the drafter was no longer sure; drafters may need the rest themselves.
    """

    row: DraftRow
    limit: int
    chain: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of the draft's tokens, if they are kept
    is_over: bool = False
    _length: int = 0

    @property
    def draft(self) -> list[int]:
        return self.chain[: self._length]

    @property
    def tokens(self) -> list[int]:
        """The row's and the chain's."""
        return self.row.tokens + self.chain

    @property
    def last_token(self) -> int:
        return self.chain[-1] if self.chain else self.row.tokens[-1]

    @property
    def position(self) -> Position:
        """Where its next token is chosen: the index that the target's choice will have."""
        row = self.row
        t = len(row.tokens) - row.num_prompt_tokens + len(self.chain)
        return Position(row.sampling, row.noise_key, t, row.tokens, self.chain)

    def add(self, token: int, logits: Tensor | None, is_last: bool) -> None:
        """Take a token; a negative one means that none could be chosen."""
        self.chain.append(max(token, 0))
        if self.is_over or token < 0:
            self.is_over = True
            return
        self._length += 1
        if logits is not None:
            self.logits.append(logits)
        self.is_over = is_last or self._length == self.limit


def start_drafts(rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Drafting]:
    """The rows that may be drafted for, by slot: as steps sort their spans."""
    active = [Drafting(row, n) for row, n in zip(rows, limits, strict=True) if n > 0]
    return sorted(active, key=lambda drafting: drafting.row.slot)


class DraftChooser:
    """Chooses draft tokens as the target will choose its own: by the row's rule, with the noise
    that the target will use at the same index. Models that agree on the probabilities then agree
    on the token."""

    def __init__(
        self, vocab_size: int, *, confidence: float = 0.0, end_tokens: Collection[int] = ()
    ) -> None:
        """
        Args:
            vocab_size: of the target; the drafter's may be larger or smaller.
            confidence: a draft ends with the first token that is less probable than this; 0: never.
            end_tokens: of the target; a draft ends with the first of them, or of the row's own.
        """
        self.keeps_logits = False
        self._chooser = Chooser(vocab_size)
        self.vocab_size = vocab_size
        self._confidence = confidence
        self._end_tokens = frozenset(end_tokens)
        self.last_logits: list[Tensor] = []

    def extend(self, active: Sequence[Drafting], logits: Tensor) -> None:
        """One token more for each draft.

        Args:
            logits: `[len(active), any vocab]`.
        """
        logits = _fit(logits, self.vocab_size)
        tokens = self._chooser.choose(logits, [drafting.position for drafting in active])
        unsure = self.unsure(logits, tokens)
        for i, (drafting, token) in enumerate(zip(active, tokens, strict=True)):
            ends = drafting.row.sampling.end_tokens
            is_end = token in (self._end_tokens if ends is None else ends)
            kept = logits[i] if self.keeps_logits else None
            drafting.add(token, kept, is_end or unsure[i])

    def finish(self, rows: Sequence[DraftRow], done: Sequence[Drafting]) -> list[list[int]]:
        """The drafts, row by row."""
        by_slot = {drafting.row.slot: drafting for drafting in done}
        found = [by_slot.get(row.slot) for row in rows]
        if self.keeps_logits:
            self.last_logits = [
                torch.stack(d.logits) if d and d.logits else _NOTHING for d in found
            ]
        return [drafting.draft if drafting else [] for drafting in found]

    def unsure(self, logits: Tensor, tokens: Sequence[int]) -> list[bool]:
        """Whether each token is less probable than it must be for its draft to go on."""
        if not self._confidence:
            return [False] * len(tokens)
        scores = logits.float()
        at = torch.tensor(tokens, device=scores.device).clamp(min=0)[:, None]
        probable = (scores.gather(1, at)[:, 0] - scores.logsumexp(1)).exp()
        unsure: list[bool] = (probable < self._confidence).tolist()
        return unsure


class ModelDrafter(Drafter):
    """A drafter that has a distribution over the target's vocabulary for each of its tokens."""

    def __init__(self, chooser: DraftChooser) -> None:
        self._chooser = chooser

    def keep_logits(self) -> None:
        """From now on, keep the logits of each proposal."""
        self._chooser.keeps_logits = True

    def draft_logits(self) -> list[Tensor]:
        """Of the last proposal's drafts: `[tokens, vocab]` per row."""
        return self._chooser.last_logits


_NOTHING = torch.empty(0)


def _fit(logits: Tensor, vocab_size: int) -> Tensor:
    """`[n, any vocab]` -> `[n, vocab_size]`; what only one of the models has is impossible."""
    missing = vocab_size - logits.shape[1]
    return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]
