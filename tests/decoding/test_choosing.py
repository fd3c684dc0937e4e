"""Batched choices equal the reference's, row by row, and depend on nothing but the row."""

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import DecodingConfig
from pipeline.decoding import choosing, shortlist
from pipeline.decoding.choosing import (
    ALL_FORBIDDEN,
    BAD_LOGITS,
    Chooser,
    Position,
    choice_error,
    params_of,
    validate_params,
)
from pipeline.decoding.sampling import Sampler, noise_key
from pipeline.errors import RowError
from pipeline.records import SamplingParams

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"banned_tokens": [0, 3, 49]},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "banned_tokens": [5]},
    {"temperature": 1.0},
    {"temperature": 0.3, "banned_tokens": [1, 2]},
    {"temperature": 1.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 3.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.5, "top_p": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "banned_tokens": [7]},
]


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Noisy and full of ties, as logits in bf16 are."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((rows, vocab), generator=generator) * 3).mul(4).round().div(4).to(dtype)


def position_of(row: int, params: SamplingParams, vocab: int) -> Position:
    """Rows differ in length, index and draft."""
    chance = random.Random(row)
    tokens = [chance.randrange(vocab) for _ in range(5 + row)]
    drafted = [chance.randrange(vocab) for _ in range(row % 4)]
    t = row % 5 + len(drafted)
    return Position(params, noise_key(params.seed, f"f:{row}"), t, tokens, drafted)


def chain_of(params: SamplingParams, vocab: int, row_key: str, prompt: int) -> Any:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "banned_tokens")
    fields = {name: getattr(params, name) for name in names} | {"seed": params.seed}
    fields["banned_tokens"] = list(params.banned_tokens)
    return Sampler(DecodingConfig(**fields), vocab).for_row(row_key, prompt)


def expected(logits: torch.Tensor, position: Position, row: int) -> int:
    """What the reference engine chooses: logits of one row, `[vocab]`."""
    ids = torch.tensor([[*position.tokens, *position.drafted]])
    prompt = ids.shape[1] - position.t
    chain = chain_of(position.params, len(logits), f"f:{row}", prompt)
    return int(chain(ids, logits[None].float()).argmax())


def params(fields: dict[str, Any]) -> SamplingParams:
    return params_of(DecodingConfig.model_validate(fields))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_choices_equal_the_reference(fields: dict[str, Any], dtype: torch.dtype) -> None:
    for vocab in (50, 640):
        logits = logits_of(24, vocab, dtype)
        before = logits.clone()
        positions = [position_of(i, params(fields), vocab) for i in range(24)]
        found = Chooser(vocab).choose(logits, positions)
        assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]
        assert torch.equal(logits, before), "the caller's logits were changed"


def test_rows_with_their_own_settings_in_any_company() -> None:
    vocab, rows = 640, 2 * len(SETTINGS)
    logits = logits_of(rows, vocab, torch.bfloat16)
    mixed = [replace(params(SETTINGS[i % len(SETTINGS)]), seed=i % 3) for i in range(rows)]
    positions = [position_of(i, p, vocab) for i, p in enumerate(mixed)]
    reference = [expected(logits[i], p, i) for i, p in enumerate(positions)]
    chooser = Chooser(vocab)
    assert chooser.choose(logits, positions) == reference
    chance = random.Random(0)
    for size in (1, 2, 7, rows):
        for _ in range(5):
            company = chance.sample(range(rows), size)
            found = chooser.choose(logits[company], [positions[i] for i in company])
            assert found == [reference[i] for i in company]


_levels = st.sampled_from([-INF, -8.0, -1.5, -1.0, 0.0, 0.25, 0.5, 1.0, 1.0078125, 3.0])
_settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.9]),
        "top_k": st.none() | st.integers(1, 20),
        "top_p": st.none() | st.floats(0.01, 1.0) | st.sampled_from([0.25, 0.5, 0.75]),
        "min_p": st.none() | st.floats(0.0, 1.0) | st.sampled_from([0.5, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5, 0.5]),
        "banned_tokens": st.lists(st.integers(0, 15), max_size=3),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(
        st.tuples(_settings, st.lists(_levels, min_size=16, max_size=16)), min_size=1, max_size=6
    ),
    dtype=st.sampled_from(DTYPES),
    common=st.integers(1, 6),
)
def test_any_settings_ties_and_lists_too_short(data: Any, dtype: torch.dtype, common: int) -> None:
    """Lists so short that they miss survivors, are lengthened, or give up."""
    logits = torch.tensor([row for _, row in data]).to(dtype)
    positions = [position_of(i, params(fields), 16) for i, (fields, _) in enumerate(data)]
    with (
        patch.object(shortlist, "_COMMON", common),
        patch.object(shortlist, "_SPARE", 1),
        patch.object(choosing, "_LONGER", 2),
    ):
        found = Chooser(16).choose(logits, positions)
    for i, position in enumerate(positions):
        left = set(range(16)) - set(position.params.banned_tokens)
        if all(logits[i, token] == -INF for token in left):
            assert found[i] == ALL_FORBIDDEN
        else:
            assert found[i] == expected(logits[i], position, i)


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_nuclei_larger_than_the_list(spread: float, top_p: float) -> None:
    vocab = 8192
    logits = logits_of(6, vocab, torch.bfloat16).mul(spread).bfloat16()
    fields = {"temperature": 1.0, "top_p": top_p}
    positions = [position_of(i, params(fields), vocab) for i in range(6)]
    found = Chooser(vocab).choose(logits, positions)
    assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.875])
def test_probabilities_on_the_border_of_the_nucleus(top_p: float) -> None:
    """1/2, 1/4, 1/8, ...: whether the sums exceed 1 - top_p is up to rounding."""
    halves = torch.arange(16.0).neg().mul(torch.tensor(2.0).log())
    halves[15] = halves[14]
    positions = [
        position_of(i, params({"temperature": 1.0, "top_p": top_p}), 16) for i in range(99)
    ]
    order = [torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(99)]
    logits = torch.stack([halves[at] for at in order])
    found = Chooser(16).choose(logits, positions)
    assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]


@pytest.mark.parametrize("top", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_the_first_of_scores_that_drown_the_noise(top: dict[str, Any]) -> None:
    positions = [position_of(i, params({"temperature": 1.0} | top), 16) for i in range(20)]
    logits = logits_of(20, 16, torch.float32)
    for i, row in enumerate(logits):
        row[[i % 16, (i + 5) % 16, (i + 7) % 16]] = 2.0**70
    first = (logits == 2.0**70).int().argmax(1).tolist()
    found = Chooser(16).choose(logits, positions)
    assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]
    assert found == first or "top_p" in top  # there the warper drops some of the equals


def test_more_tokens_tie_with_the_last_of_top_k_than_are_listed() -> None:
    vocab, rows = 300, 50
    logits = torch.full((rows, vocab), -1.0)
    logits[:, ::4] = 0.0
    logits[:, 40] = 1.0
    for more in ({}, {"top_p": 0.05}, {"top_p": 0.3}, {"min_p": 0.1}):
        tied = params({"temperature": 1.0, "top_k": 2} | more)
        positions = [position_of(i, tied, vocab) for i in range(rows)]
        found = Chooser(vocab).choose(logits, positions)
        assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]
        assert len(set(found)) > 1


def test_probabilities_on_the_border_of_min_p() -> None:
    rows, vocab = 400, 3
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(0))
    ratios = (logits.double() - logits.amax(1, keepdim=True)).exp().median(1).values
    ratios *= 1 + 2.0**-26 * (
        torch.arange(rows).double() % 5 - 2
    )  # float32 cannot tell these apart
    on_border = [params({"temperature": 1.0, "min_p": ratio}) for ratio in ratios.tolist()]
    positions = [position_of(i, p, vocab) for i, p in enumerate(on_border)]
    found = Chooser(vocab).choose(logits, positions)
    assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]


RARE = [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}]
RARE += [{"temperature": 1.4, "top_p": 0.9}]  # nuclei of a thousand: the longer list
RARE += [{"top_p": 1e-6}, {"min_p": 1.0}, {"top_p": 1.0}, {"top_k": 10_000}]


@pytest.mark.parametrize("vocab", [200, 8192])
@pytest.mark.parametrize("fields", RARE, ids=str)
def test_the_warpers_are_rarely_needed(fields: dict[str, Any], vocab: int) -> None:
    rows = 64
    falling = -1.6 * torch.arange(1.0, vocab + 1).log()  # Zipf, as language is
    logits = (falling + logits_of(rows, vocab, torch.float32) / 10).bfloat16()
    positions = [position_of(i, params({"temperature": 0.8} | fields), vocab) for i in range(rows)]
    with patch.object(choosing, "_warped", wraps=choosing._warped) as warped:
        found = Chooser(vocab).choose(logits, positions)
    assert warped.call_count <= 3
    assert found == [expected(logits[i], p, i) for i, p in enumerate(positions)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [50, 640, 64 * 1024])
def test_the_first_of_equals(vocab: int, dtype: torch.dtype) -> None:
    """As `torch.argmax` on float32, whatever the dtype, the tiles and the threads."""
    chooser, chance = Chooser(vocab), random.Random(0)
    logits = torch.full((40, vocab), -1.0).to(dtype)
    first = []
    for row in logits:
        at = sorted(chance.sample(range(vocab), 9))
        row[at] = 2.0
        first.append(at[0])
    logits[0] = 0.0
    logits[0, : vocab // 2] = -0.0
    first[0] = 0
    positions = [position_of(i, SamplingParams(), vocab) for i in range(40)]
    assert chooser.choose(logits, positions) == first == logits.float().argmax(1).tolist()


def test_equal_rules_are_one_block_and_no_copy() -> None:
    mixed = [SamplingParams(max_new_tokens=i + 1, seed=i, top_k=i + 1) for i in range(8)]
    positions = [position_of(i, greedy, 640) for i, greedy in enumerate(mixed)]
    logits = logits_of(8, 640, torch.bfloat16)
    with patch.object(choosing, "_argmax", wraps=choosing._argmax) as argmax:
        Chooser(640).choose(logits, positions)
    ((block,), _) = argmax.call_args
    assert argmax.call_count == 1 and block is logits


def test_tokens_of_the_draft_count_as_seen() -> None:
    punished = SamplingParams(repetition_penalty=2.0)
    logits = torch.tensor([[3.0, 2.0, -1.0]]).repeat(4, 1)
    tokens = [2, 2]
    drafts: list[list[int]] = [[], [0], [0, 1], [1]]
    positions = [Position(punished, 0, len(d), tokens, d) for d in drafts]
    assert Chooser(3).choose(logits, positions) == [0, 1, 0, 0]
    seen = Chooser(3).process(logits, positions)
    assert seen.tolist() == [[3, 2, -2], [1.5, 2, -2], [1.5, 1, -2], [3, 1, -2]]
    beyond = Position(punished, 0, 0, [7, 0], [9])  # ids without logits
    assert Chooser(3).process(logits[:1], [beyond]).tolist() == [[1.5, 2, -1]]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_processed_scores_equal_the_reference(fields: dict[str, Any]) -> None:
    logits = logits_of(6, 640, torch.bfloat16)
    positions = [position_of(i, params(fields), 640) for i in range(6)]
    found = Chooser(640).process(logits, positions)
    for i, position in enumerate(positions):
        ids = torch.tensor([[*position.tokens, *position.drafted]])
        scores = logits[i : i + 1].float()
        chain = chain_of(position.params, 640, f"f:{i}", 0)
        for processor in chain[: len(chain) - (position.params.temperature > 0)]:
            scores = processor(ids, scores)
        assert torch.equal(found[i : i + 1], scores)


FAULTY = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}]
FAULTY += [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8, "min_p": 0.1}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", FAULTY, ids=str)
@pytest.mark.parametrize("vocab", [50, 640])
def test_a_row_at_fault_fails_alone(vocab: int, fields: dict[str, Any], dtype: torch.dtype) -> None:
    logits = logits_of(7, vocab, dtype)
    positions = [position_of(i, params(fields), vocab) for i in range(7)]
    sound = Chooser(vocab).choose(logits, positions)
    logits[1] = -INF
    logits[2, 0] = logits[3, vocab - 1] = NAN
    logits[4, 17] = INF
    logits[5] = NAN
    codes = [ALL_FORBIDDEN, *[BAD_LOGITS] * 4]
    assert Chooser(vocab).choose(logits, positions) == [sound[0], *codes, sound[6]]


def test_logits_at_fault_matter_only_where_a_token_may_be_chosen() -> None:
    banned = params({"temperature": 1.0, "banned_tokens": [1]})
    positions = [position_of(i, banned, 3) for i in range(2)]
    logits = torch.tensor([[-INF, NAN, 0.0], [-INF, 5.0, -INF]])
    assert Chooser(3).choose(logits, positions) == [2, ALL_FORBIDDEN]
    assert choice_error(ALL_FORBIDDEN).error_type == "no_token"
    assert choice_error(BAD_LOGITS).error_type == "bad_logits"


def test_no_positions_and_wrong_shapes() -> None:
    chooser = Chooser(8)
    assert chooser.choose(torch.empty(0, 8), []) == []
    assert chooser.process(torch.empty(0, 8), []).shape == (0, 8)
    position = position_of(0, SamplingParams(), 8)
    for shape in [(1, 9), (2, 8), (8,)]:
        with pytest.raises(ValueError, match=r"logits must be \[1, 8\]"):
            chooser.choose(torch.zeros(shape), [position])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_choices_on_a_gpu_equal_those_on_the_cpu() -> None:
    logits = logits_of(24, 640, torch.bfloat16)
    for fields in SETTINGS:
        positions = [position_of(i, params(fields), 640) for i in range(24)]
        chooser = Chooser(640)
        assert chooser.choose(logits.cuda(), positions) == chooser.choose(logits, positions), fields


WRONG = [
    ("max_new_tokens", 0),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_k", 0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", INF),
    ("repetition_penalty", NAN),
    ("banned_tokens", (1, -1)),
    ("banned_tokens", (8,)),
    ("banned_tokens", tuple(range(8))),
    ("end_tokens", (8,)),
    ("stop", ("x", "")),
    ("timeout_s", 0.0),
    ("timeout_s", NAN),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_settings_out_of_range_are_the_rows_error(field: str, value: Any) -> None:
    with pytest.raises(RowError, match=f"^{field} is .*; it must be ") as caught:
        validate_params(replace(SamplingParams(), **{field: value}), 8)
    assert caught.value.error_type == "bad_params"


def test_settings_at_the_ends_of_their_ranges_are_fine() -> None:
    validate_params(SamplingParams(), 8)
    ends = SamplingParams(1, 0.0, 1, 1.0, 1.0, 1e-3, (0, 7), ("x",), (0, 7), -1, 0.1)
    validate_params(ends, 8)
    validate_params(replace(ends, temperature=1e-3, min_p=0.0, end_tokens=()), 8)


def test_settings_of_the_run() -> None:
    assert params_of(DecodingConfig()) == SamplingParams()
    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "banned_tokens": [1]}
    fields |= {"repetition_penalty": 1.1, "max_new_tokens": 5, "stop": ["x"], "seed": 3}
    decoding = DecodingConfig.model_validate(fields)
    made = params_of(decoding, 2.5)
    assert made == SamplingParams(5, 0.5, 3, 0.5, 0.1, 1.1, (1,), ("x",), None, 3, 2.5)
