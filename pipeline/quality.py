"""How good the results are, where the input has the right answers: chrF, BLEU, ROUGE-L.

Of translations chrF and BLEU over the corpus (sacrebleu, so that figures compare with papers); of
summaries the mean ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013): F1 of the longest common
subsequence of words.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipeline.prepare import Job
from pipeline.store.plan import Plan

MAX_ROWS = 10_000  # the first; more would not change the figures
_BATCH_ROWS = 1024
_WORD = re.compile(r"\w+")
_BLEU_TOKENS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char"}


def score(job: Job, plan: Plan) -> dict[str, Any]:
    """Figures for each text column, over its first `MAX_ROWS` rows that are ok and have a
    reference; empty without `input.reference_column`."""
    config = job.config
    figures = {}
    for i, (text, reference) in enumerate(
        zip(config.text_columns, config.reference_columns, strict=False)
    ):
        pairs = list(_pairs(job, plan, text, reference))
        if not pairs:
            continue
        hypotheses, references = zip(*pairs, strict=True)
        if config.task == "translate":
            codes = config.prompt.target_langs
            found = score_translations(hypotheses, references, codes[i] if codes else "")
        else:
            found = {"rouge_l": rouge_l(hypotheses, references)}
        figures[text] = {"rows": len(pairs), **found}
    return figures


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], language: str
) -> dict[str, Any]:
    """chrF and BLEU (0 to 100), with sacrebleu's signatures."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    tokenize = _BLEU_TOKENS.get(language.partition("-")[0], "13a")
    found: dict[str, Any] = {}
    for name, metric in (("chrf", CHRF()), ("bleu", BLEU(tokenize=tokenize))):
        found[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        found[f"{name}_signature"] = str(metric.get_signature())
    return found


def rouge_l(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Mean over the rows, 0 to 1. Words are compared in lower case, without stemming."""
    pairs = zip(hypotheses, references, strict=True)
    return float(np.mean([_rouge_l(_words(h), _words(r)) for h, r in pairs]))


def _rouge_l(hypothesis: list[str], reference: list[str]) -> float:
    total = len(hypothesis) + len(reference)
    return 2 * _common(hypothesis, reference) / total if total else 0.0


def _common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, a row of its table at a time."""
    table = np.zeros(len(b) + 1, np.int64)
    known = {word: i for i, word in enumerate(dict.fromkeys(b))}
    other = np.array([known[word] for word in b], np.int64)
    for word in a:
        diagonal = table[:-1] + (other == known.get(word, -1))
        table[1:] = np.maximum.accumulate(np.maximum(diagonal, table[1:]))
    return int(table[-1])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _pairs(job: Job, plan: Plan, text: str, reference: str) -> Iterator[tuple[str, str]]:
    """(result, right answer) of the first rows that have both."""
    left = MAX_ROWS
    for part in plan.parts():
        with job.store.open(part.name) as handle:
            columns = ["status", text, reference]
            for batch in pq.ParquetFile(handle).iter_batches(_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    if row["status"] == "ok" and isinstance(row[reference], str):
                        yield row[text], row[reference]
                        left -= 1
                        if not left:
                            return


def quality_lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """For the table at the end of a run."""
    lines = []
    for column, found in figures.items():
        values = [
            f"{label} {found[name]:.{digits}f}"
            for name, label, digits in (
                ("chrf", "chrF", 1),
                ("bleu", "BLEU", 1),
                ("rouge_l", "ROUGE-L", 3),
            )
            if name in found
        ]
        lines.append((column, f"{', '.join(values)} ({found['rows']:,} rows)"))
    return lines
