"""The batched engine gives every row the tokens that `model.generate()` gives it alone."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.memory import SlotBudget
from pipeline.errors import EngineError
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.oracle import decode, generate, make_draft_model, make_engine
from tests.tiny import TEXT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
HEAD = list(TOKENIZER(TEXT)["input_ids"])[:10]  # the constant head of all prompts
TAILS = [TEXT[i * 31 : i * 31 + 9 * i] for i in range(1, 6)]
PROMPTS = [HEAD + list(TOKENIZER(tail)["input_ids"]) for tail in TAILS]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=16),
    "sampled": SamplingParams(max_new_tokens=16, temperature=0.8, top_k=50, top_p=0.95, seed=3),
}
REQUESTS = [GenerationRequest(f"f:{i}", prompt) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return make_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, dict[str, list[int]]]:
    return {
        name: {r.row_key: generate(model, r.prompt_token_ids, r.row_key, p) for r in REQUESTS}
        for name, p in PARAMS.items()
    }


class Scripted(Drafter):
    """Drafts from known completions, some tokens spoilt; counts what it is told."""

    def __init__(self, truth: dict[str, list[int]], spoil: float = 0.0, seed: int = 0) -> None:
        self.truth, self.spoil, self.random = truth, spoil, random.Random(seed)
        self.accepted = 0
        self.held: set[int] = set()

    def propose(self, rows: Any, limits: Any) -> list[list[int]]:
        drafts = []
        for row, limit in zip(rows, limits, strict=True):
            self.held.add(row.slot)
            done = len(row.tokens) - row.num_prompt_tokens
            true = self.truth[row.request.row_key][done : done + limit]
            draft = [t if self.random.random() >= self.spoil else (t + 1) % 512 for t in true]
            drafts.append(draft)
        return drafts

    def observe(self, row: Any, num_drafted: int, num_accepted: int) -> None:
        self.accepted += num_accepted

    def release(self, row: Any) -> None:
        self.held.discard(row.slot)

    def resize(self, num_slots: int, max_len: int) -> None:
        assert not self.held


def lookup() -> PromptLookupDrafter:
    return PromptLookupDrafter(3, 1)


def make_drafter(method: str, chunk: int, prefix: Sequence[int]) -> Drafter | None:
    if method == "draft_model":  # another random model: now and then it is right
        return make_draft_model(make_model(seed=1), step_tokens=chunk, prefix_token_ids=prefix)
    return lookup() if method == "prompt_lookup" else None


METHODS = ["plain", "prompt_lookup", "draft_model"]
GRID = list(itertools.product(METHODS, PARAMS, (1, 4, 16), (1, 3, 10), (1, 64, 512), (True, False)))
GRID = [g for g in GRID if g[0] != "plain" or g[3] == 1]  # plain has no draft length


@pytest.mark.parametrize(("method", "params", "slots", "drafts", "chunk", "prefix"), GRID)
def test_same_tokens(
    model: Any,
    expected: Any,
    method: Any,
    params: str,
    slots: int,
    drafts: int,
    chunk: int,
    prefix: bool,
) -> None:
    requests = random.Random(slots * drafts * chunk).sample(REQUESTS, len(REQUESTS))
    engine = make_engine(
        model,
        TOKENIZER,
        slots,
        params=PARAMS[params],
        step_tokens=chunk,
        method=method,
        drafter=make_drafter(method, chunk, HEAD if prefix else ()),
        num_draft_tokens=drafts,
        prefix_token_ids=HEAD if prefix else (),
    )
    tokens, completions = decode(engine, requests)
    assert tokens == expected[params]
    for completion in completions.values():
        stats = completion.stats
        assert stats.cached_prompt_tokens == (len(HEAD) if prefix else 0)
        assert stats.method in ("plain", method)
        last_is_draft = stats.completion_tokens - stats.num_target_forwards
        assert stats.num_accepted_draft_tokens - last_is_draft in (0, 1)
    if method == "prompt_lookup" and drafts > 1:
        assert sum(c.stats.num_accepted_draft_tokens for c in completions.values()) > 8


@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("params", PARAMS)
def test_drafts_of_any_quality(model: Any, expected: Any, params: str, spoil: float) -> None:
    drafter = Scripted(expected[params], spoil)
    engine = make_engine(
        model,
        TOKENIZER,
        3,
        params=PARAMS[params],
        method="draft_model",
        drafter=drafter,
        num_draft_tokens=6,
    )
    tokens, completions = decode(engine, REQUESTS)
    assert tokens == expected[params]
    drafted = sum(c.stats.num_draft_tokens for c in completions.values())
    accepted = sum(c.stats.num_accepted_draft_tokens for c in completions.values())
    assert drafted and accepted == drafter.accepted
    if spoil in (0.0, 1.0):  # a broken verification cannot hide
        assert accepted == (0 if spoil else drafted)
    assert not drafter.held


def test_rows_bring_their_own_settings(model: Any) -> None:
    variants = [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=9, temperature=1.0, seed=5),
        SamplingParams(max_new_tokens=15, temperature=0.7, min_p=0.05, seed=9),
        SamplingParams(max_new_tokens=15, repetition_penalty=1.3, banned_tokens=(7, 300)),
        SamplingParams(max_new_tokens=1, temperature=0.7, top_p=0.8),
        SamplingParams(max_new_tokens=2),
        SamplingParams(max_new_tokens=15, end_tokens=()),
    ]
    rows = [*REQUESTS, *(replace(r, row_key=f"g:{i}") for i, r in enumerate(REQUESTS[:2]))]
    requests = [replace(r, sampling=p) for r, p in zip(rows, variants, strict=True)]
    engine = make_engine(
        model, TOKENIZER, 4, method="prompt_lookup", drafter=lookup(), num_draft_tokens=4
    )
    tokens, _ = decode(engine, requests)
    for request, params in zip(requests, variants, strict=True):
        key = request.row_key
        assert tokens[key] == generate(model, request.prompt_token_ids, key, params), params


def test_end_tokens_anywhere(model: Any, expected: Any) -> None:
    """End tokens first, inside a draft, after it, several of them: cut at the first."""
    truth = expected["greedy"]
    for at in (0, 1, 3, 5, 6):
        requests, wanted = [], {}
        for request in REQUESTS:
            ends = (truth[request.row_key][at], 511)
            params = SamplingParams(max_new_tokens=16, end_tokens=ends)
            requests.append(replace(request, sampling=params))
            wanted[request.row_key] = generate(
                model, request.prompt_token_ids, request.row_key, params
            )
        drafter = Scripted(truth)
        engine = make_engine(
            model, TOKENIZER, 4, method="draft_model", drafter=drafter, num_draft_tokens=5
        )
        tokens, completions = decode(engine, requests)
        assert tokens == wanted
        for key, completion in completions.items():
            assert completion.finish_reason == "stop"
            assert completion.stats.completion_tokens == len(wanted[key])
            assert completion.stats.num_draft_tokens < 16 + 6


def test_stop_strings_inside_drafts(model: Any, expected: Any) -> None:
    for request in REQUESTS[:4]:
        truth = expected["greedy"][request.row_key]
        text = TOKENIZER.decode(truth, skip_special_tokens=True)
        stop = text[7:10]
        for drafter in (None, Scripted(expected["greedy"]), lookup()):
            engine = make_engine(
                model, TOKENIZER, method="draft_model", drafter=drafter, num_draft_tokens=8
            )
            params = SamplingParams(max_new_tokens=16, stop=(stop, "\x00never"))
            tokens, completions = decode(engine, [replace(request, sampling=params)])
            (completion,) = completions.values()
            assert completion.text == text[: text.index(stop)]
            assert completion.finish_reason == "stop"
            cut = len(tokens[request.row_key])
            assert stop in TOKENIZER.decode(truth[:cut], skip_special_tokens=True)
            assert stop not in TOKENIZER.decode(truth[: cut - 1], skip_special_tokens=True)


def test_edges_of_length(model: Any) -> None:
    """Prompts of one token, prompts that leave room for one token, a prompt that is the prefix."""
    limit = 64
    long = (PROMPTS[0] * 20)[: limit - 1]
    prompts = {"one": [5], "full": long, "prefix": HEAD, "nearly": long[:-1]}
    params = SamplingParams(max_new_tokens=16)
    for slots in (1, 4):
        engine = make_engine(
            model,
            TOKENIZER,
            slots,
            params=params,
            max_model_len=limit,
            method="prompt_lookup",
            drafter=lookup(),
            num_draft_tokens=10,
            prefix_token_ids=HEAD,
        )
        tokens, completions = decode(
            engine, [GenerationRequest(key, prompt) for key, prompt in prompts.items()]
        )
        for key, prompt in prompts.items():
            room = replace(params, max_new_tokens=min(16, limit - len(prompt)))
            assert tokens[key] == generate(model, prompt, key, room), key
        assert completions["full"].stats.completion_tokens == 1
        assert completions["full"].finish_reason == "length"
        assert completions["prefix"].stats.cached_prompt_tokens == len(HEAD) - 1


def test_rows_at_fault_leave_others_alone(model: Any, expected: Any) -> None:
    bad = {
        "empty_prompt": GenerationRequest("empty", []),
        "prompt_too_long": GenerationRequest("long", [1] * 512),
        "bad_token": GenerationRequest("token", [1, 512]),
        "bad_params": GenerationRequest("params", [1], SamplingParams(top_p=2.0)),
        "bad_params ": GenerationRequest(
            "forbidden", [1, 2], SamplingParams(banned_tokens=tuple(range(512)))
        ),
    }
    engine = make_engine(model, TOKENIZER, params=PARAMS["greedy"])
    tokens, completions = decode(engine, [*bad.values(), *REQUESTS])
    for error_type, request in bad.items():
        completion = completions[request.row_key]
        assert (completion.status, completion.error_type) == (
            "error",
            error_type.strip(),
        )
        assert completion.error and completion.text is None
    assert {key: tokens[key] for key in expected["greedy"]} == expected["greedy"]


def test_bad_logits_are_the_rows_own_fault(model: Any, expected: Any) -> None:
    engine = make_engine(model, TOKENIZER, params=PARAMS["greedy"])
    forward = engine._runner.forward

    def spoil(step: Any, keep: Any) -> torch.Tensor:
        logits = forward(step, keep).clone()
        if step.decoding:
            logits[step.offsets[1] - 1] = torch.nan  # the row in the lowest slot
        return logits

    engine._runner.forward = spoil  # type: ignore[method-assign]
    _, completions = decode(engine, REQUESTS[:3])
    engine._runner.forward = forward  # type: ignore[method-assign]
    assert [c.status for c in completions.values()].count("error") == 3  # one after another
    assert {c.error_type for c in completions.values()} == {"bad_logits"}
    tokens, _ = decode(engine, REQUESTS)
    assert tokens == expected["greedy"]


def test_deadline(model: Any, expected: Any) -> None:
    params = replace(PARAMS["greedy"], timeout_s=1e-6)
    engine = make_engine(model, TOKENIZER, params=PARAMS["greedy"])
    requests = [replace(REQUESTS[0], sampling=params), *REQUESTS[1:]]
    tokens, completions = decode(engine, requests)
    late = completions["f:0"]
    assert late.status == "timeout" and late.finish_reason is None and late.text is not None
    assert 0 < len(tokens["f:0"]) < 16
    assert all(c.status == "ok" for key, c in completions.items() if key != "f:0")


def test_out_of_memory_halves_the_slots(model: Any, expected: Any) -> None:
    engine = make_engine(
        model,
        TOKENIZER,
        16,
        params=PARAMS["sampled"],
        method="prompt_lookup",
        drafter=lookup(),
        num_draft_tokens=4,
        prefix_token_ids=HEAD,
    )
    forward, steps = engine._runner.forward, []

    def short_of_memory(step: Any, keep: Any) -> torch.Tensor:
        steps.append(len(step.spans))
        if len(step.spans) > 2 and len(steps) > 4:
            raise torch.OutOfMemoryError("tried to allocate")
        return forward(step, keep)

    engine._runner.forward = short_of_memory  # type: ignore[method-assign]
    tokens, completions = decode(engine, REQUESTS)
    assert tokens == expected["sampled"]
    assert all(c.status == "ok" for c in completions.values())
    assert engine._scheduler.num_slots in (1, 2) and max(steps) > 2


def test_out_of_memory_with_one_slot_fails_the_row(model: Any, expected: Any) -> None:
    engine = make_engine(model, TOKENIZER, 2, params=PARAMS["greedy"])
    forward = engine._runner.forward

    def too_much(step: Any, keep: Any) -> torch.Tensor:
        if step.kv_len > len(PROMPTS[-1]) + 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(step, keep)

    engine._runner.forward = too_much  # type: ignore[method-assign]
    tokens, completions = decode(engine, REQUESTS)
    failed = [key for key, c in completions.items() if c.status == "error"]
    assert "f:4" in failed
    assert completions["f:4"].error_type == "out_of_memory"
    for key in set(completions) - set(failed):
        assert tokens[key] == expected["greedy"][key]


def test_a_lost_device_is_not_a_rows_fault(model: Any) -> None:
    engine = make_engine(model, TOKENIZER)

    def lost(step: Any, keep: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine._runner.forward = lost  # type: ignore[method-assign]
    engine.add_request(REQUESTS[0])
    with pytest.raises(EngineError, match="device failed"):
        engine.step()


def test_slots_grow_with_the_rows(model: Any) -> None:
    """Where memory is short, slots are as long as rows need, and fewer for longer rows."""
    params = SamplingParams(max_new_tokens=8)
    budget = SlotBudget(max_slots=4, kv_bytes=4 * 64, bytes_per_token=1)
    engine = BatchedEngine(
        model, TOKENIZER, params, max_model_len=512, budget=budget, step_tokens=64
    )
    prompts = {"a": PROMPTS[0], "b": (PROMPTS[0] * 20)[:200], "c": PROMPTS[0]}
    requests = [GenerationRequest(key, prompt) for key, prompt in prompts.items()]
    tokens, _ = decode(engine, requests[:1])
    assert (engine._scheduler.num_slots, engine.cache.max_len) == (4, 64)
    more, _ = decode(engine, requests[1:])
    assert (engine._scheduler.num_slots, engine.cache.max_len) == (1, 256)
    for key, row in (tokens | more).items():
        assert row == generate(model, prompts[key], key, params)


def test_plain_rows_have_no_speedup(model: Any) -> None:
    engine = make_engine(model, TOKENIZER, 4, params=PARAMS["greedy"])
    _, completions = decode(engine, REQUESTS)
    for completion in completions.values():
        stats = completion.stats
        assert stats.num_target_forwards == stats.completion_tokens
        assert stats.speedup == pytest.approx(1.0, abs=0.35)  # few steps in a bucket
        assert stats.num_draft_tokens == 0 and stats.method == "plain"
    total = [
        sum(getattr(c.stats, n) for c in completions.values())
        for n in ("plain_decode_seconds", "decode_seconds", "prefill_seconds")
    ]
    assert total[0] / total[1] == pytest.approx(1.0, abs=0.03)
    assert total[1] == pytest.approx(engine.times.verify_seconds)
    assert total[2] == pytest.approx(engine.times.prefill_seconds)


def test_times_add_up(model: Any, expected: Any) -> None:
    engine = make_engine(
        model,
        TOKENIZER,
        4,
        params=PARAMS["greedy"],
        method="prompt_lookup",
        drafter=lookup(),
        num_draft_tokens=4,
        prefix_token_ids=HEAD,
    )
    _, completions = decode(engine, REQUESTS)
    stats = [c.stats for c in completions.values()]
    times = engine.times
    assert sum(s.decode_seconds for s in stats) == pytest.approx(
        times.verify_seconds + times.draft_seconds
    )
    assert sum(s.draft_seconds for s in stats) == pytest.approx(times.draft_seconds)
    assert sum(s.prefill_seconds for s in stats) == pytest.approx(times.prefill_seconds)
    assert times.decode_tokens >= sum(s.num_draft_tokens for s in stats)
    assert max(s.num_control_steps for s in stats) >= 1
