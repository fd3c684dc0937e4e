"""Verified drafts never change what a row becomes: neither its tokens nor their distribution.

The target of these tests is a Markov chain over a small vocabulary: its logits are a table, read
by the token before. All rows start alike, so each row is one draw from known probabilities.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.config import DecodingConfig
from pipeline.decoding import verification
from pipeline.decoding.choosing import BAD_LOGITS, Chooser, Position, params_of
from pipeline.decoding.sampling import gumbel_noise_block, noise_key
from pipeline.decoding.verification import accept
from tests.goodness_of_fit import chi_square_p_value

VOCAB, ROWS, START = 10, 20_000, 0
LEVEL = 1e-3  # a sound implementation would fail one test in a thousand; the seeds are fixed
SURE = 1e-12  # a faulty one must be found beyond doubt

Table = Tensor  # [VOCAB, VOCAB]: by the token before, of each token
Draft = Tensor  # int64 [rows, k]
Index = Callable[[int, int], int]  # (index of the step's first token, place in the step) -> t

_generator = torch.Generator().manual_seed(3)
TARGET: Table = 1.5 * torch.randn((VOCAB, VOCAB), generator=_generator)
OTHER: Table = TARGET + torch.randn((VOCAB, VOCAB), generator=_generator)  # a draft model


# What comes out of `accept`


def test_accepts_up_to_the_first_difference() -> None:
    assert accept([], [4]) == (0, [4])
    assert accept([4, 5], [4, 5, 6]) == (2, [4, 5, 6]), "the bonus token is missing"
    assert accept([4, 5], [3, 5, 6]) == (0, [3])
    assert accept([4, 5, 6], [4, 9, 6, 7]) == (1, [4, 9]), "what follows a difference is void"


def test_a_fault_counts_only_where_the_row_gets_to_it() -> None:
    assert accept([4, 5], [3, BAD_LOGITS, BAD_LOGITS]) == (0, [3])
    assert accept([4, 5], [4, BAD_LOGITS, 6]) == (1, [4, BAD_LOGITS])
    assert accept([4], [4, BAD_LOGITS]) == (1, [4, BAD_LOGITS])


@pytest.mark.parametrize("choices", [[], [1], [1, 2, 3]])
def test_one_choice_more_than_draft_tokens(choices: list[int]) -> None:
    with pytest.raises(ValueError, match="1 draft tokens need one choice more, not"):
        accept([1], choices)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.integers(0, 3))
def test_new_tokens_are_choices_and_all_but_the_last_were_drafted(
    pairs: list[tuple[int, int]], last: int
) -> None:
    draft, choices = tuple(d for d, _ in pairs), [*(c for _, c in pairs), last]
    accepted, tokens = accept(draft, choices)
    assert tokens == choices[: accepted + 1]
    assert tokens[:-1] == list(draft[:accepted])
    assert accepted == len(draft) or draft[accepted] != choices[accepted]


# Drafts of every kind, for all rows at once


def noise(keys: Sequence[int], t: int) -> Tensor:
    return gumbel_noise_block([(key, t) for key in keys], torch.arange(VOCAB)[None])


def coupled(table: Table, fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    """Drawn from a table with the rows' own noise; from the target's it is always right."""
    scores = exact(table, fields).log()

    def draft(keys: Sequence[int]) -> Draft:
        first = (scores[START] + noise(keys, 0)).argmax(1)
        return torch.stack([first, (scores[first] + noise(keys, 1)).argmax(1)], 1)

    return draft


def right(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    return coupled(TARGET, fields)


def wrong(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    return lambda keys: (right(fields)(keys) + 1) % VOCAB


def coupled_model(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    return coupled(OTHER, fields)


def uncoupled_model(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    """As from a drafter with a random generator of its own."""
    return lambda keys: coupled(OTHER, fields)([key ^ 1 for key in keys])


def unrelated(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    generator = torch.Generator().manual_seed(0)
    return lambda keys: torch.randint(VOCAB, (len(keys), 2), generator=generator)


def greedy(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    best = TARGET.argmax(1)
    return lambda keys: torch.stack([best[START], best[best[START]]]).expand(len(keys), 2)


def loudest(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    """An adversary that reads the noise: the token that it favours most."""
    return lambda keys: torch.stack([noise(keys, t).argmax(1) for t in (0, 1)], 1)


def runner_up(fields: dict[str, Any]) -> Callable[[Sequence[int]], Draft]:
    """An adversary that knows the choice, and is right only when the best token is chosen."""
    best = TARGET.argmax(1)

    def draft(keys: Sequence[int]) -> Draft:
        sure = right(fields)(keys)
        return torch.where(sure == best[START], sure, (sure + 1) % VOCAB)

    return draft


DRAFTERS = [right, wrong, coupled_model, uncoupled_model, unrelated, greedy, loudest, runner_up]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.15, "banned_tokens": [3]},
]


def exact(table: Table, fields: dict[str, Any]) -> Table:
    """Probabilities after the processors, from their definitions; float64."""
    scores = table.double().clone()
    scores[:, fields.get("banned_tokens", [])] = -torch.inf
    probabilities = (scores / fields["temperature"]).softmax(1)
    for row in probabilities:
        order = row.argsort(descending=True)
        row[order[fields.get("top_k", VOCAB) :]] = 0
        row /= row.sum()
        before = row[order].cumsum(0) - row[order]
        row[order[before >= fields.get("top_p", 1.0)]] = 0
        row[row < fields.get("min_p", 0.0) * row.max()] = 0
        row /= row.sum()
    return probabilities


# Decoding by steps of choose and accept


def in_order(first: int, place: int) -> int:
    return first + place


def step(
    fields: dict[str, Any],
    keys: Sequence[int],
    before: Sequence[list[int]],
    drafts: Sequence[list[int]],
    index: Index = in_order,
) -> list[list[int]]:
    """Each row's tokens after one verification."""
    params = params_of(DecodingConfig.model_validate(fields))
    contexts, positions = [], []
    for key, tokens, draft in zip(keys, before, drafts, strict=True):
        contexts += [tokens[-1], *draft]
        for place in range(len(draft) + 1):
            t = index(len(tokens) - 1, place)
            positions.append(Position(params, key, t, tokens, draft[:place]))
    choices = Chooser(VOCAB).choose(TARGET[contexts], positions)
    after, start = [], 0
    for tokens, draft in zip(before, drafts, strict=True):
        stop = start + len(draft) + 1
        after.append(tokens + accept(draft, choices[start:stop])[1])
        start = stop
    return after


def two_tokens(
    fields: dict[str, Any], keys: Sequence[int], drafts: Draft, index: Index = in_order
) -> Tensor:
    """How often the rows begin with which two tokens, `[VOCAB, VOCAB]`. Rows that get only one
    token of the first step take a second step, with a draft that is no better."""
    rows = step(fields, keys, [[START]] * len(keys), drafts.tolist(), index)
    late = [i for i, tokens in enumerate(rows) if len(tokens) == 2]
    if late:
        second = [[int(drafts[i, 1])] for i in late]
        later = step(fields, [keys[i] for i in late], [rows[i] for i in late], second, index)
        for i, tokens in zip(late, later, strict=True):
            rows[i] = tokens
    pairs = torch.tensor([tokens[1] * VOCAB + tokens[2] for tokens in rows])
    return pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB)


def p_value(fields: dict[str, Any], counts: Tensor) -> float:
    """Of the joint distribution of two tokens."""
    probabilities = exact(TARGET, fields)
    return chi_square_p_value(counts, probabilities[START][:, None] * probabilities)


def keys_of(seed: int, rows: int = ROWS) -> list[int]:
    return [noise_key(seed, f"corpus.parquet:{i}") for i in range(rows)]


CASES = [(drafter, SAMPLED[i % len(SAMPLED)]) for i, drafter in enumerate(DRAFTERS)]
CASES += [(coupled_model, fields) for fields in SAMPLED if (coupled_model, fields) not in CASES]


@pytest.mark.parametrize(("drafter", "fields"), CASES)
def test_two_tokens_follow_the_targets_distribution(drafter: Any, fields: dict[str, Any]) -> None:
    keys = keys_of(CASES.index((drafter, fields)))
    counts = two_tokens(fields, keys, drafter(fields)(keys))
    assert p_value(fields, counts) > LEVEL


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_no_draft_changes_a_token(fields: dict[str, Any]) -> None:
    keys = keys_of(0, 200)
    plain: list[list[int]] = [[START]] * len(keys)
    for _ in range(3):
        plain = step(fields, keys, plain, [[]] * len(keys))
    for drafter in DRAFTERS:
        drafts = drafter(fields)(keys).tolist()
        first = step(fields, keys, [[START]] * len(keys), drafts)
        assert all(row == whole[: len(row)] for row, whole in zip(first, plain, strict=True))
        if drafter is right:
            assert first == plain, "a right draft was not accepted whole"
        if drafter is wrong:
            assert [len(row) for row in first] == [2] * len(keys)


# The test itself: it must find what is wrong


def test_p_values_are_those_of_the_books() -> None:
    fair = torch.tensor([0.5, 0.5])
    assert chi_square_p_value(torch.tensor([50, 50]), fair) == 1.0
    assert chi_square_p_value(torch.tensor([60, 40]), fair) == pytest.approx(0.0455, abs=1e-4)
    die = torch.full((6,), 1 / 6)  # statistic 11.4 with 5 degrees of freedom
    found = chi_square_p_value(torch.tensor([5, 8, 9, 8, 10, 20]), die)
    assert found == pytest.approx(0.0199, abs=2e-4)
    assert chi_square_p_value(torch.tensor([99, 1]), torch.tensor([1.0, 0.0])) == 0.0
    pooled = chi_square_p_value(torch.tensor([96, 2, 2]), torch.tensor([0.96, 0.02, 0.02]))
    assert pooled == pytest.approx(1.0)


# A right draft puts both tokens into one step, a wrong one ends each step after a token.
FAULTS: list[tuple[str, Index, Any]] = [
    ("one noise for all", lambda first, place: 0, right),
    ("one noise for all", lambda first, place: 0, wrong),
    ("each step begins anew", lambda first, place: place, wrong),
    ("one noise for a step", lambda first, place: first, right),
]


@pytest.mark.parametrize(("fault", "index", "drafter"), FAULTS)
@pytest.mark.parametrize("fields", [SAMPLED[0], SAMPLED[3]], ids=str)
def test_finds_noise_used_twice(
    fault: str, index: Index, drafter: Any, fields: dict[str, Any]
) -> None:
    keys = keys_of(50, ROWS // 2)
    assert p_value(fields, two_tokens(fields, keys, drafter(fields)(keys), index)) < SURE


@pytest.mark.parametrize("shared", [2, ROWS])
def test_finds_rows_that_share_noise(shared: int) -> None:
    keys = keys_of(51, ROWS // shared) * shared
    counts = two_tokens(SAMPLED[0], keys, unrelated(SAMPLED[0])(keys))
    assert p_value(SAMPLED[0], counts) < LEVEL


def test_finds_a_draft_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(draft: Sequence[int], choices: Sequence[int]) -> tuple[int, list[int]]:
        accepted = min(verification.accept(draft, choices)[0] + 1, len(draft))
        return accepted, [*draft[:accepted], choices[accepted]]

    monkeypatch.setitem(step.__globals__, "accept", late)
    keys = keys_of(52)
    counts = two_tokens(SAMPLED[0], keys, coupled_model(SAMPLED[0])(keys))
    assert p_value(SAMPLED[0], counts) < SURE


@pytest.mark.parametrize("fault", ["none", "greedy draft", "no residual", "coupled draft"])
def test_finds_wrong_rejection_sampling(fault: str) -> None:
    """The textbook's rule (accept with min(1, target / draft), else draw from the residual) as it
    is often got wrong: for drafts that were not drawn from the probabilities it divides by, with
    rejected tokens drawn again from the target, with noise shared between drafting and drawing."""
    fields, generator = SAMPLED[0], torch.Generator().manual_seed(5)
    target, model = exact(TARGET, fields)[START], exact(OTHER, fields)[START]
    drawn = torch.multinomial(model, ROWS, replacement=True, generator=generator)
    draft = model.argmax().expand(ROWS) if fault == "greedy draft" else drawn
    kept = torch.rand(ROWS, generator=generator) < target[draft] / model[draft]
    residual = target if fault == "no residual" else (target - model).clamp(min=0)
    if fault == "coupled draft":  # both from one noise, yet verified as if they were independent
        keys = keys_of(53)
        draft = (model.log() + noise(keys, 0)).argmax(1)
        kept = torch.rand(ROWS, generator=generator) < target[draft] / model[draft]
        other = (target.log() + noise(keys, 0)).argmax(1)
    else:
        other = torch.multinomial(residual, ROWS, replacement=True, generator=generator)
    counts = torch.where(kept, draft, other).bincount(minlength=VOCAB)
    found = chi_square_p_value(counts, target)
    assert found > LEVEL if fault == "none" else found < SURE
