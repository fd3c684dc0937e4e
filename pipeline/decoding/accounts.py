"""Who pays for a decode step: its time goes to the rows by what they had computed, and its figures
to the engine's clock and sums."""

import math
from collections.abc import Iterable, Sequence

from pipeline.config import Method
from pipeline.decoding.control import Bucket, ControlClock
from pipeline.decoding.drafters.base import StepReport
from pipeline.decoding.rows import Row
from pipeline.decoding.timing import StepTimes
from pipeline.steptable import BESIDES, PLAIN, StepKind


def charge(
    report: StepReport,
    rows: Sequence[Row],
    methods: Iterable[Method],
    times: StepTimes,
    clock: ControlClock,
) -> None:
    """Account for a decode step of these rows.

    Args:
        methods: that drafted, as far as any did.
    """
    counts = [len(draft) for draft in report.drafts]
    drafted, num_tokens = sum(counts), len(rows) + sum(counts)
    seconds, draft_seconds, bucket = report.verify_seconds, report.draft_seconds, report.bucket
    times.decode(seconds, draft_seconds, num_tokens, len(rows))
    if drafted:
        gained = len(rows) + sum(report.accepted)
        clock.record_drafted(bucket, gained, seconds + draft_seconds)
    else:  # a futile search for drafts is no part of a plain step
        clock.record_control(bucket, seconds, len(rows))
    kind = step_kind(bucket, methods, counts)
    for row, count, accepted in zip(rows, counts, report.accepted, strict=True):
        share = seconds * (1 + count) / num_tokens
        own_draft = draft_seconds * (count / drafted if drafted else 1 / len(rows))
        row.record_decode(bucket, accepted + 1, share + own_draft, own_draft)
        if drafted:
            row.stats.steps.add(kind, len(rows), accepted + 1, share + own_draft, 0.0)
        else:
            _record_control(row, bucket, seconds, len(rows), PLAIN)


def charge_control(
    rows: Sequence[Row], bucket: Bucket, seconds: float, times: StepTimes, clock: ControlClock
) -> None:
    """Account for a pass without drafts that yields no tokens."""
    times.decode(seconds, 0.0, len(rows), len(rows))
    clock.record_control(bucket, seconds, len(rows))
    for row in rows:
        row.record_decode(bucket, 0, seconds / len(rows), 0.0)
        _record_control(row, bucket, seconds, len(rows), BESIDES)


def step_kind(bucket: Bucket, methods: Iterable[Method], counts: Sequence[int]) -> StepKind:
    """How the step is counted in a run's table; `counts`: draft tokens by row."""
    drafting = [count for count in counts if count]
    if not drafting:
        return StepKind(*bucket, PLAIN, 0)
    mean = math.ceil(sum(drafting) / len(drafting) - 0.5)
    return StepKind(*bucket, "+".join(sorted(set(methods))), max(1, mean))


def _record_control(row: Row, bucket: Bucket, seconds: float, num_rows: int, method: str) -> None:
    share = seconds / num_rows
    row.record_control(bucket, share)
    row.stats.steps.add(StepKind(*bucket, method, 0), num_rows, 1, share, seconds)
