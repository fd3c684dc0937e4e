"""One row of several prompts: the completions of its pieces, put together again."""

from collections.abc import Sequence

from pipeline.records import Completion, FinishReason, Status, sum_stats
from pipeline.rendered import Piece

_WORST: tuple[Status, ...] = ("error", "timeout", "ok")


def assemble(
    pieces: Sequence[Piece], completions: Sequence[Completion], num_columns: int
) -> tuple[Completion, list[str | None]]:
    """The row as one completion, with sums for statistics, and its text for each column.

    Pieces are joined in order. A column with a failed piece has no text: the row tells why.
    """
    texts: list[str | None] = []
    for column in range(num_columns):
        mine = [i for i, piece in enumerate(pieces) if piece.column == column]
        texts.append(_join([pieces[i] for i in mine], [completions[i] for i in mine]))
    worst = min(completions, key=lambda c: _WORST.index(c.status) if c.status in _WORST else 0)
    reason: FinishReason | None = None
    if worst.status == "ok":
        reason = "length" if any(c.finish_reason == "length" for c in completions) else "stop"
    error = worst.error
    if error is not None and len(completions) > 1:
        error = f"piece {completions.index(worst) + 1} of {len(completions)}: {error}"
    row = Completion(
        completions[0].row_key,
        worst.status,
        texts[0],
        reason,
        worst.error_type,
        error,
        sum_stats([c.stats for c in completions]),
    )
    return row, texts


def _join(pieces: Sequence[Piece], completions: Sequence[Completion]) -> str | None:
    if any(c.text is None for c in completions):
        return None
    joined = (p.joint + (c.text or "").strip() for p, c in zip(pieces, completions, strict=True))
    return "".join(joined)
