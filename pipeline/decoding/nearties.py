"""Near-ties: two tokens so close that rounding decides, and with it the shape of the pass.

No two passes of different shapes add up a row's products in the same order, so their logits differ
in the last bits. A row that chose another token than before is explained when both choices lie
within that error of what one pass over the same tokens says; else something is wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.choosing import Chooser, Position
from pipeline.decoding.rows import Row
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step, packs
from pipeline.records import SamplingParams

FLOAT32_GAP = 1e-4  # of logits in float32
# In 16 bits a gap is in doubt by so many units of rounding of the largest logit. Two logits, each
# rounded by half a unit in both passes, make up two; the rest is for roundings before the head.
# Of 640 gaps below the best token of a model of 30 layers none differed by more than 1.9 units
# between a prefill pass and decode steps, in bfloat16 and float16; in float32 by 6e-5.
ROUNDING_UNITS = 4


def doubtful_gap(logits: Tensor, dtype: torch.dtype) -> float:
    """Up to which gap two logits of `[vocab]`, computed in `dtype`, may change places."""
    finite = logits[logits.isfinite()].abs()
    unit = torch.finfo(dtype).eps * float(finite.max()) if finite.numel() else 0.0
    return max(FLOAT32_GAP, ROUNDING_UNITS * unit)


class NearTies:
    """Tells whether rounding explains a choice. Its passes use slot 0: no row may be in flight."""

    def __init__(self, runner: ModelRunner, chooser: Chooser, step_tokens: int) -> None:
        """`step_tokens`: of a pass at most."""
        self._runner = runner
        self._chooser = chooser
        self._step_tokens = step_tokens

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in float32, where next to nothing is in doubt."""
        return self._dtype == torch.float32

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._runner.model.dtype
        return dtype

    def between(self, row: Row, common: Sequence[int], tokens: tuple[int, int]) -> bool:
        """Whether the row, after its prompt and `common`, may well choose either token."""
        logits, position = self._at(row, common)
        a, b = tokens
        gap = doubtful_gap(logits, self._dtype)
        return self._may_choose(a, b, logits, position, gap) and self._may_choose(
            b, a, logits, position, gap
        )

    def near(self, row: Row, common: Sequence[int], token: int) -> bool:
        """Whether the row may well choose `token`, and as well some other one."""
        logits, position = self._at(row, common)
        others = logits.index_fill(0, torch.tensor([token], device=logits.device), -torch.inf)
        second = self._chooser.choose(others[None], [position])[0]
        gap = doubtful_gap(logits, self._dtype)
        return (
            second >= 0
            and self._may_choose(second, token, logits, position, gap)
            and self._may_choose(token, second, logits, position, gap)
        )

    def _at(self, row: Row, common: Sequence[int]) -> tuple[Tensor, Position]:
        """Float32 logits `[vocab]` after the tokens, by one pass over them all, and the place."""
        tokens = [*row.request.prompt_token_ids, *common]
        logits: Any = None
        for spans in packs([Span(0, 0, tokens)], self._step_tokens):
            step = Step(spans, decoding=False, device=self._runner.device)
            logits = self._runner.forward(step, [step.num_tokens - 1])
        return logits[0].float(), Position(row.sampling, row.noise_key, len(common), tokens, ())

    def _may_choose(
        self, token: int, rival: int, logits: Tensor, position: Position, gap: float
    ) -> bool:
        """Whether the row's rule chooses `token` once errors of half the gap are in its favour:
        against all others, or against the rival alone, whose fall may let others survive."""
        against_all = logits - gap / 2
        against_rival = logits.clone()
        against_rival[rival] -= gap / 2
        for favoured in (against_all, against_rival):
            favoured[token] = logits[token] + gap / 2
        rules = _rules(position.params, gap)
        block = torch.stack([against_all, against_rival]).repeat(len(rules), 1)
        positions = [position._replace(params=rule) for rule in rules for _ in range(2)]
        return token in self._chooser.choose(block, positions)


def _rules(params: SamplingParams, gap: float) -> list[SamplingParams]:
    """The row's rule, and with the borders of its nucleus where errors may have moved them: logits
    that change by half a gap change the odds of a set of tokens by a gap at most."""
    p = params.top_p
    if p is None or p >= 1 or params.temperature == 0:
        return [params]
    odds, factor = p / (1 - p), math.exp(gap / params.temperature)
    moved = [1 - 1 / (1 + each) for each in (odds / factor, odds * factor)]
    return [params, *(replace(params, top_p=each) for each in moved)]
