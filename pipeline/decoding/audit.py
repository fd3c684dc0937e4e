"""The audit: rows decoded again, plainly and as configured, to see what drafting does to them.

It should change nothing but the time. So the texts are compared token by token, also with what the
run wrote, and the clock tells what drafting saved, beside what control steps made of it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.control import ControlClock
from pipeline.decoding.nearties import NearTies
from pipeline.decoding.prefix import common_prefix
from pipeline.decoding.rows import Row
from pipeline.records import Completion, GenerationRequest
from pipeline.stats import RunTotals

# `mixed`: an ensemble's text is not the target's own.
Verdict = Literal["agree", "near_tie", "error", "mixed"]
_WARM_UP_TOKENS = 4
_TEXT_WINDOW = 3  # tokens before a difference of texts among which it may have begun


@dataclass(frozen=True)
class AuditGroup:
    """Rows that were decoded together. `seconds`: wall time, plainly and as configured."""

    verdicts: dict[str, Verdict]  # by row key
    plain_seconds: float
    assisted_seconds: float
    estimate: RunTotals  # of the assisted rows: what `job_speedup` needs

    def count(self, verdict: Verdict) -> int:
        return list(self.verdicts.values()).count(verdict)


def audit(
    engine: BatchedEngine,
    requests: Sequence[GenerationRequest],
    texts: Mapping[str, str],
    *,
    assisted_first: bool,
) -> AuditGroup:
    """Decode the rows both ways, one after the other.

    Args:
        engine: without rows.
        texts: by row key, what the run wrote for rows that ended well.

    Raises:
        EngineError: if the device is lost.
    """
    done: dict[bool, tuple[dict[str, Completion], float]] = {}
    for assisted in (assisted_first, not assisted_first):
        if assisted:
            done[assisted] = _generate(engine, requests)
        else:
            with without_drafts(engine):
                done[assisted] = _generate(engine, requests)
    (plain, plain_seconds), (drafted, assisted_seconds) = done[False], done[True]
    judge = _Judge(engine)
    verdicts: dict[str, Verdict] = {}
    for request in requests:
        key = request.row_key
        verdict = judge.verdict(request, plain[key], drafted[key], texts.get(key))
        if verdict is not None:
            verdicts[key] = verdict
    return AuditGroup(
        verdicts,
        plain_seconds,
        assisted_seconds,
        RunTotals.from_rows(done.stats for done in drafted.values()),
    )


def warm_up(engine: BatchedEngine, requests: Sequence[GenerationRequest]) -> None:
    """Decode a few tokens of the longest prompt both ways: first calls are slower than others."""
    request = max(requests, key=lambda request: len(request.prompt_token_ids))
    sampling = request.sampling or engine._admission.sampling
    short = replace(request, sampling=replace(sampling, max_new_tokens=_WARM_UP_TOKENS))
    _generate(engine, [short])
    with without_drafts(engine):
        _generate(engine, [short])


@contextmanager
def without_drafts(engine: BatchedEngine) -> Iterator[None]:
    """Within it the engine decodes plainly, by the very steps of `method: plain`.

    Only while it has no rows. Its clock is set aside too, for its own control steps shall be the
    only evidence behind its estimates.
    """
    assert not engine.num_unfinished
    drafter, clock, cache = engine._drafter, engine._clock, engine.cache
    shared = engine._prefix.is_cached
    engine._drafter, engine._clock, engine._runner.keeps_hidden = None, ControlClock(), False
    try:
        yield
    finally:
        engine._drafter, engine._clock = drafter, clock
        if drafter is not None:
            # It missed new slots, and the prefix if that was computed without it.
            same = engine.cache is cache
            engine._prefix.is_cached &= shared and same
            if not same:
                drafter.resize(engine._scheduler.num_slots, engine.cache.max_len)


def _generate(
    engine: BatchedEngine, requests: Sequence[GenerationRequest]
) -> tuple[dict[str, Completion], float]:
    """Completions by row key, and seconds."""
    started = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    completions: dict[str, Completion] = {}
    while engine.num_unfinished:
        completions |= {completion.row_key: completion for completion in engine.step()}
    return completions, time.perf_counter() - started


class _Judge:
    """Compares what became of a row."""

    def __init__(self, engine: BatchedEngine) -> None:
        self._admission = engine._admission
        self._mixes = engine._ensemble is not None
        self._ties = NearTies(engine._runner, engine._chooser, engine._scheduler.step_tokens)

    def verdict(
        self,
        request: GenerationRequest,
        plain: Completion,
        assisted: Completion,
        text: str | None,
    ) -> Verdict | None:
        """None where there is nothing to compare: the row fails both ways.

        Args:
            text: what the run wrote, if that is known.
        """
        if plain.status == "error" or assisted.status == "error":
            return None if plain.status == assisted.status else "error"
        row = self._admission.row(request)
        found = self._of_tokens(row, plain, assisted)
        if self._mixes:
            return "agree" if found == "agree" else "mixed"
        if found == "error" or text is None or text in (plain.text, assisted.text):
            return found
        if "timeout" in (plain.status, assisted.status):
            return found  # cut somewhere
        return "near_tie" if self._explains_text(row, plain, text) else "error"

    def _of_tokens(self, row: Row, plain: Completion, assisted: Completion) -> Verdict:
        ours, theirs = list(plain.token_ids or ()), list(assisted.token_ids or ())
        common = common_prefix(ours, theirs)
        if common == len(ours) == len(theirs):
            return "agree"
        if common in (len(ours), len(theirs)):  # one ended earlier: only deadlines do that
            return "agree" if "timeout" in (plain.status, assisted.status) else "error"
        tokens = ours[common], theirs[common]
        return "near_tie" if self._ties.between(row, ours[:common], tokens) else "error"

    def _explains_text(self, row: Row, plain: Completion, text: str) -> bool:
        """Whether a near-tie stands where another text, of unknown tokens, begins to differ."""
        tokens = list(plain.token_ids or ())
        decode = self._admission.decode
        if not decode(tokens).startswith(plain.text or ""):
            return not self._ties.is_exact  # only the answer of a model that thinks aloud
        shared = 0
        while shared < len(tokens) and text.startswith(
            decode(tokens[: shared + 1]).rstrip("\ufffd")
        ):
            shared += 1
        first = max(0, shared - _TEXT_WINDOW + 1)
        return any(
            self._ties.near(row, tokens[:at], tokens[at])
            for at in range(first, min(shared + 1, len(tokens)))
        )
