"""With a draft model of whatever tokenizer the engine gives every row the tokens that it gets
alone; and how many drafts are accepted is held to floors, since output cannot tell."""

import functools
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.config import DecodingConfig
from pipeline.decoding.drafters import translation_trial, universal
from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.drafters.make import DrafterCheckpoint, make_drafter
from pipeline.decoding.drafters.universal import UniversalDrafter
from pipeline.records import Completion, GenerationRequest, SamplingParams
from tests.decoding.oracle import decode, generate, make_engine
from tests.tiny import TEXT, make_model, make_tokenizer
from tests.vocabularies import (
    DraftedRow,
    metaspace_tokenizer,
    permutation,
    permuted_model,
    permuted_tokenizer,
    trained_model,
)

TOKENIZER = make_tokenizer()
METASPACE = metaspace_tokenizer()
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3),
}
BUDGETS = [16, 1, 2, 9, 20, 5]  # rows finish at different times
PLACES = permutation(512)
MADE = {"byte-level": (make_model, TOKENIZER)}  # targets: how to make them, and their tokenizers
MADE["metaspace"] = (lambda: make_model(2, vocab_size=len(METASPACE)), METASPACE)
MADE["trained"] = (trained_model, TOKENIZER)


def other(vocab_size: int) -> Any:
    return make_model(1, num_hidden_layers=1, vocab_size=vocab_size)


# target, then the draft model and its tokenizer
PAIRS: dict[str, tuple[str, Any]] = {
    "permuted": (
        "byte-level",
        lambda: (permuted_model(make_model(), PLACES), permuted_tokenizer(TOKENIZER, PLACES)),
    ),
    "trained": (
        "trained",
        lambda: (permuted_model(trained_model(), PLACES), permuted_tokenizer(TOKENIZER, PLACES)),
    ),
    "metaspace": ("byte-level", lambda: (other(len(METASPACE)), METASPACE)),
    "smaller": ("byte-level", lambda: (other(400), make_tokenizer(400))),
    "for metaspace": ("metaspace", lambda: (other(512), TOKENIZER)),
    "few positions": (
        "byte-level",
        lambda: (make_model(1, vocab_size=400, max_position_embeddings=60), make_tokenizer(400)),
    ),
}


def requests(target: str, params: SamplingParams) -> list[GenerationRequest]:
    """Rows with prompts and budgets of several lengths."""
    ids = MADE[target][1](TEXT)["input_ids"]
    return [
        GenerationRequest(
            f"f:{i}", ids[:10] + ids[9 * i : 9 * i + 4 + 7 * i], replace(params, max_new_tokens=n)
        )
        for i, n in enumerate(BUDGETS)
    ]


@functools.cache
def expected(target: str, name: str) -> dict[str, list[int]]:
    model = MADE[target][0]()
    return {
        r.row_key: generate(model, r.prompt_token_ids, r.row_key, r.sampling or PARAMS[name])
        for r in requests(target, PARAMS[name])
    }


def make(pair: str, translation: str | None = None, **settings: Any) -> UniversalDrafter:
    target, made = PAIRS[pair]
    model, own = made()
    tokenizer = MADE[target][1]
    cls = settings.pop("cls", UniversalDrafter)
    chooser = DraftChooser(
        max(512, len(tokenizer)),
        end_tokens=[tokenizer.eos_token_id],
        confidence=settings.pop("confidence", 0.0),
    )
    drafter: UniversalDrafter = cls(
        model,
        chooser,
        tokenizer,
        own,
        translation=translation,
        **({"step_tokens": 64} | settings),
    )
    return drafter


def run(
    pair: str,
    name: str,
    translation: str | None = None,
    *,
    slots: int = 4,
    drafts: int = 3,
    prefix: Sequence[int] = (),
    repeat: int = 1,
    **settings: Any,
) -> tuple[dict[str, list[int]], dict[str, Completion], UniversalDrafter]:
    target = PAIRS[pair][0]
    drafter = make(pair, translation, prefix_token_ids=prefix, **settings)
    engine = make_engine(
        MADE[target][0](),
        MADE[target][1],
        slots,
        method="universal",
        drafter=drafter,
        num_draft_tokens=drafts,
        prefix_token_ids=prefix,
    )
    rows = requests(target, PARAMS[name])
    for i in range(repeat):
        tokens, completions = decode(engine, random.Random(slots + i).sample(rows, len(rows)))
    return tokens, completions, drafter


def acceptance(completions: dict[str, Completion]) -> float:
    stats = [completion.stats for completion in completions.values()]
    drafted = sum(s.num_draft_tokens for s in stats)
    return sum(s.num_accepted_draft_tokens for s in stats) / drafted


GRID = list(itertools.product(PARAMS, (1, 4, 16), ("tokens", "text", None)))


@pytest.mark.parametrize(("name", "slots", "translation"), GRID)
def test_no_draft_model_changes_a_row(name: str, slots: int, translation: str | None) -> None:
    for i, (pair, (target, _)) in enumerate(PAIRS.items()):
        if i % 3 != (slots + len(translation or "")) % 3:
            continue  # each setting with some pairs, each pair with some settings
        prefix = requests(target, PARAMS[name])[0].prompt_token_ids[:10] if i % 2 else ()
        drafts = (1, 3, 10)[i % 3]
        tokens, completions, drafter = run(
            pair,
            name,
            translation,
            slots=slots,
            drafts=drafts,
            prefix=prefix,
            step_tokens=7 + slots,
        )
        assert tokens == expected(target, name), pair
        for completion in completions.values():
            stats = completion.stats
            last_is_draft = stats.completion_tokens - stats.num_target_forwards
            assert stats.num_accepted_draft_tokens - last_is_draft in (0, 1)
        assert sum(c.stats.num_draft_tokens for c in completions.values()) > 0
        assert not drafter._of and not drafter._feeder._slots, "rows are released"


# --- How good drafts are


@pytest.mark.parametrize("drafts", [1, 3, 10])
@pytest.mark.parametrize("name", PARAMS)
def test_the_target_with_another_vocabulary(name: str, drafts: int) -> None:
    """Sampled too: the noise is that of the target's token, wherever the draft model has it."""
    for pair in ("permuted", "trained"):
        tokens, completions, _ = run(pair, name, "tokens", drafts=drafts)
        assert tokens == expected(PAIRS[pair][0], name)
        assert acceptance(completions) == 1.0


def test_the_target_with_another_vocabulary_by_text() -> None:
    tokens, completions, _ = run("trained", "greedy", "text")
    assert tokens == expected("trained", "greedy")
    assert acceptance(completions) > 0.5


def test_an_unsure_token_is_the_last() -> None:
    for translation in ("tokens", "text"):
        _, sure, _ = run("metaspace", "greedy", translation, drafts=10)
        tokens, unsure, _ = run("metaspace", "greedy", translation, drafts=10, confidence=0.9)
        assert tokens == expected("byte-level", "greedy")
        drafted = [sum(c.stats.num_draft_tokens for c in d.values()) for d in (sure, unsure)]
        assert 0 < drafted[1] < drafted[0]


# --- Which translation


def test_tries_both_and_keeps_the_better(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation_trial, "_MAX", 24)
    with caplog.at_level(logging.INFO, logger=translation_trial.__name__):
        tokens, _, drafter = run("trained", "sampled", repeat=6)
    assert tokens == expected("trained", "sampled")
    assert drafter.trial.winner is not None and drafter.trial.winner.name == "tokens"
    (message,) = [r.message for r in caplog.records if r.name == translation_trial.__name__]
    assert "by tokens" in message and "by text" in message and "100%" in message
    for translation in drafter.trial._translations:
        tally = drafter.trial.tally(translation)
        assert 0 < tally.accepted <= tally.drafted and tally.seconds > 0


def test_rows_under_way_go_on_with_the_better() -> None:
    """And draft as rows do that had it from the beginning."""
    ids = TOKENIZER(TEXT)["input_ids"]
    drafter, fresh = make("smaller"), make("smaller", "text")
    for one in (drafter, fresh):
        one.resize(2, 128)
    rows = [DraftedRow(0, ids[:60]), DraftedRow(1, ids[20:70])]
    drafter.propose(rows, [4, 4])
    assert {one.name for one in drafter._of.values()} == {"tokens", "text"}
    (by_text,) = [one for one in drafter._of.values() if one.name == "text"]
    drafter.trial.winner = by_text
    for end in (71, 74):
        for row in rows:
            row.tokens = row.tokens + ids[end - 1 : end + 2]
        assert drafter.propose(rows, [4, 4]) == fresh.propose(rows, [4, 4])
    assert set(drafter._of.values()) == {by_text}


def test_vocabularies_with_little_in_common_meet_in_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "MIN_OVERLAP", 0.9)
    with caplog.at_level(logging.INFO, logger=translation_trial.__name__):
        drafter = make("metaspace")
    assert drafter.trial.winner is not None and drafter.trial.winner.name == "text"
    assert "vocabulary" in caplog.text
    row = DraftedRow(0, TOKENIZER(TEXT)["input_ids"][:9])
    drafter.resize(2, 64)
    assert drafter.propose([row], [3]) != [[]]


# --- Limits, slots, faults


@pytest.mark.parametrize("translation", ["tokens", "text"])
def test_limits_and_order(translation: str) -> None:
    ids = TOKENIZER(TEXT)["input_ids"]

    def rows() -> list[DraftedRow]:
        return [DraftedRow(slot, ids[slot : slot + 12]) for slot in range(4)]

    def drafts(order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        drafter = make("trained", translation)
        drafter.resize(4, 64)
        by_slot = rows()
        return drafter.propose([by_slot[i] for i in order], limits)

    whole = drafts([0, 1, 2, 3], [4] * 4)
    assert all(0 < len(draft) <= 4 for draft in whole)
    found = drafts([2, 0, 3, 1], [4, 0, 1, 4])
    assert [found[0], found[1], found[3]] == [whole[2], [], whole[1]]
    assert len(found[2]) <= 1
    assert drafts([], []) == []


@pytest.mark.parametrize("translation", ["tokens", "text"])
def test_only_what_is_missing_is_computed(translation: str) -> None:
    drafter = make("trained", translation)
    drafter.resize(2, 256)
    fed: list[int] = []
    forward = drafter._feeder._runner.forward

    def count(step: Any, keep: Any) -> torch.Tensor:
        fed.append(step.num_tokens)
        return forward(step, keep)

    drafter._feeder._runner.forward = count  # type: ignore[method-assign]
    ids = TOKENIZER(TEXT)["input_ids"]
    row = DraftedRow(1, ids[:80])
    for at in range(80, 110, 2):
        row.tokens = ids[:at]
        fed.clear()
        drafter.propose([row], [2])
        assert sum(fed) >= 79 if at == 80 else sum(fed) <= 8
    drafter.release(row)
    drafter.release(row)  # one that has left already
    again = DraftedRow(1, ids[40:70])
    other = make("trained", translation)
    other.resize(2, 256)
    assert drafter.propose([again], [4]) == other.propose([again], [4])


@pytest.mark.parametrize("translation", ["tokens", "text"])
def test_a_shared_prefix_is_computed_once(translation: str) -> None:
    ids = TOKENIZER(TEXT)["input_ids"]
    drafter = make("smaller", translation, prefix_token_ids=ids[:50])
    fresh = make("smaller", translation)
    for one in (drafter, fresh):
        one.resize(2, 128)
    rows = [DraftedRow(0, ids[:60]), DraftedRow(1, ids[:48] + ids[70:80])]
    spent = []
    forward = drafter._feeder._runner.forward

    def count(step: Any, keep: Any) -> torch.Tensor:
        spent.append(step.num_tokens)
        return forward(step, keep)

    drafter._feeder._runner.forward = count  # type: ignore[method-assign]
    for row in rows:
        spent.clear()
        assert drafter.propose([row], [4]) == fresh.propose([row], [4])
    assert sum(spent) < 35, "the second row takes over what the first has computed"


def test_stays_within_its_positions() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_positions=24, n_embd=32, n_layer=1, n_head=2)
    model, own = GPT2LMHeadModel(config).eval(), make_tokenizer(400)
    ids = TOKENIZER(TEXT)["input_ids"]
    for translation in ("tokens", "text"):
        drafter = UniversalDrafter(
            model, DraftChooser(512), TOKENIZER, own, step_tokens=64, translation=translation
        )
        drafter.resize(2, 64)
        assert drafter.cache.max_len == 24
        rows = [DraftedRow(0, ids[:40]), DraftedRow(1, ids[:9])]
        short = drafter.propose(rows, [3, 3])
        assert short[0] == [] and short[1]


def test_rows_with_tokens_that_the_model_lacks_get_no_drafts() -> None:
    drafter = UniversalDrafter(  # a model with fewer tokens than its tokenizer
        other(300), DraftChooser(512), TOKENIZER, make_tokenizer(400), step_tokens=64
    )
    drafter.resize(3, 64)
    rows = [DraftedRow(0, TOKENIZER("The mill stands")["input_ids"]), DraftedRow(1, [5, 6, 7])]
    found = drafter.propose(rows, [3, 3])
    assert found[0] == [] and len(found[1]) <= 3
    assert drafter.propose([DraftedRow(2, [5000, 5001])], [3]) == [[]], "nothing to go by"


@pytest.mark.parametrize("translation", ["tokens", None])
def test_rows_of_other_slots_after_running_out_of_memory(translation: str | None) -> None:
    """The engine halves its slots in the middle of rows; their drafts stay right."""

    class Short(UniversalDrafter):
        calls = 0

        def propose(self, rows: Any, limits: Any) -> list[list[int]]:
            Short.calls += 1
            drafts = super().propose(rows, limits)
            if Short.calls in (1, 4):
                raise torch.OutOfMemoryError("a test")
            return drafts

    tokens, completions, _ = run("trained", "greedy", translation, cls=Short, slots=8)
    assert Short.calls > 4 and tokens == expected("trained", "greedy")
    assert acceptance(completions) > 0.5
    if translation == "tokens":
        assert acceptance(completions) == 1.0


def test_reports_the_memory_that_it_takes() -> None:
    drafter = make("metaspace")
    drafter.resize(2, 100)
    drafter.propose([DraftedRow(0, TOKENIZER(TEXT)["input_ids"][:12])], [1])
    assert drafter.bytes_per_token * 2 * 100 == drafter.cache.num_bytes


# --- Loading


def test_loads_what_the_config_names(tmp_path: Path) -> None:
    other(len(METASPACE)).save_pretrained(tmp_path)
    METASPACE.save_pretrained(tmp_path)
    drafter = make_drafter(
        DecodingConfig(method="universal", draft_confidence=0),
        make_model(),
        DrafterCheckpoint(str(tmp_path), "float32", "cpu"),
        tokenizer=TOKENIZER,
        step_tokens=64,
        prefix_token_ids=[],
    )
    assert isinstance(drafter, UniversalDrafter)
    drafter.resize(1, 64)
    mine = make("metaspace")
    mine.resize(1, 64)
    row = DraftedRow(0, TOKENIZER(TEXT)["input_ids"][:9])
    assert drafter.propose([row], [4]) == mine.propose([row], [4])
