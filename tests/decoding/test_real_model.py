"""SmolLM2 in float32, many rows at once: the tokens of `generate()`, however they are batched."""

import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.prefix import common_prefix
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.oracle import decode, generate, make_draft_model, make_engine
from tests.tiny import make_model, make_tokenizer

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(7200)]
PROMPTS = Path(__file__).parents[3] / "shared/data/spec_bench/prompts.jsonl"
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=32),
    "sampled": SamplingParams(max_new_tokens=32, temperature=0.8, top_k=50, top_p=0.95, seed=1),
}
# Pairwise over method, sampling, slots, draft length, chunk and prefix.
COMBINATIONS = [
    ("plain", "greedy", 16, 1, 512, True),
    ("plain", "sampled", 4, 1, 64, False),
    ("plain", "greedy", 1, 1, 64, False),
    ("prompt_lookup", "greedy", 16, 3, 64, False),
    ("prompt_lookup", "sampled", 4, 10, 512, True),
    ("prompt_lookup", "sampled", 1, 3, 512, True),
    ("prompt_lookup", "greedy", 4, 1, 64, True),
    ("draft_model", "greedy", 16, 10, 512, True),
    ("draft_model", "sampled", 16, 3, 64, False),
    ("draft_model", "greedy", 4, 3, 512, False),
]
NEAR_TIE = 1e-4


def requests(tokenizer: Any) -> list[GenerationRequest]:
    """16 summarization and 16 translation prompts, in the chat template."""
    if not PROMPTS.exists():
        pytest.skip(f"{PROMPTS.name} is not there")
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chosen = [
        row
        for task in ("summarization", "translation")
        for row in [r for r in rows if r["task"] == task][:16]
    ]
    assert len(chosen) == 32
    found = []
    for row in chosen:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        found.append(GenerationRequest(row["id"], list(ids["input_ids"])))
    return found


@pytest.fixture(scope="module")
def expected(demo_model: Any) -> dict[str, dict[str, list[int]]]:
    model, tokenizer = demo_model
    return {
        name: {
            r.row_key: generate(model, r.prompt_token_ids, r.row_key, params)
            for r in requests(tokenizer)
        }
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize(("method", "params", "slots", "drafts", "chunk", "prefix"), COMBINATIONS)
def test_same_tokens(
    demo_model: Any,
    expected: Any,
    method: Any,
    params: str,
    slots: int,
    drafts: int,
    chunk: int,
    prefix: bool,
) -> None:
    model, tokenizer = demo_model
    rows = requests(tokenizer)
    head = rows[0].prompt_token_ids
    head = head[: min(common_prefix(head, row.prompt_token_ids) for row in rows)]
    drafter: Any = None
    if method == "prompt_lookup":
        drafter = PromptLookupDrafter()
    elif method == "draft_model":  # the same weights, halved precision: often right
        drafter = make_draft_model(half(model), model.config.vocab_size, step_tokens=chunk)
    engine = make_engine(
        model,
        tokenizer,
        slots,
        params=PARAMS[params],
        step_tokens=chunk,
        max_model_len=4096,
        method=method,
        drafter=drafter,
        num_draft_tokens=drafts,
        prefix_token_ids=head if prefix else (),
    )
    tokens, completions = decode(engine, random.Random(1).sample(rows, len(rows)))
    for row in rows:
        wanted, found = expected[params][row.row_key], tokens[row.row_key]
        if found != wanted:
            at = common_prefix(found, wanted)
            gap = logit_gap(model, [*row.prompt_token_ids, *wanted[:at]], found[at], wanted[at])
            print(f"{row.row_key}: token {at} differs at a logit gap of {gap:.1e}")
            assert params == "greedy" and gap < NEAR_TIE
    if drafter is not None:
        assert sum(c.stats.num_accepted_draft_tokens for c in completions.values()) > 50


def half(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).to(torch.bfloat16)


def logit_gap(model: Any, context: list[int], a: int, b: int) -> float:
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(torch.tensor([context])).logits[0, -1]
    model.set_attn_implementation(before)
    return float((logits[a] - logits[b]).abs())


def test_memory_does_not_grow() -> None:
    """10,000 rows through 16 slots take no more memory than 200."""
    torch.set_num_threads(1)
    engine = make_engine(
        make_model(),
        make_tokenizer(),
        16,
        params=SamplingParams(max_new_tokens=8),
        method="prompt_lookup",
        drafter=PromptLookupDrafter(),
        num_draft_tokens=3,
        prefix_token_ids=range(3, 15),
    )
    process, chooser = psutil.Process(os.getpid()), random.Random(0)

    def run(start: int, stop: int) -> int:
        for i in range(start, stop):
            tail = [chooser.randrange(3, 500) for _ in range(chooser.randrange(1, 60))]
            engine.add_request(GenerationRequest(f"f:{i}", [*range(3, 15), *tail]))
            while engine.num_unfinished > 64:
                engine.step()
        while engine.num_unfinished:
            engine.step()
        gc.collect()
        return process.memory_info().rss

    early = run(0, 200)
    late = run(200, 10_000)
    print(f"RSS {early / 1e6:.0f} MB after 200 rows, {late / 1e6:.0f} MB after 10,000")
    assert late <= 1.05 * early
