import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.build import build_engine
from pipeline.decoding.loading import load_tokenizer
from pipeline.decoding.memory import SlotBudget, slot_budget
from pipeline.decoding.prefix import SharedPrefix, template_prefix
from pipeline.decoding.reference import ReferenceEngine
from pipeline.errors import ConfigError
from pipeline.prompts import PromptRenderer
from pipeline.records import GenerationRequest
from tests.tiny import make_tokenizer


def config(model: Path, **decoding: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "input": {"path": "in"},
            "output": {"path": "out"},
            "model": {"target": str(model), "drafter": str(model)},
            "prompt": {"system": "You count sacks for the miller, all of them."},
            "decoding": {"max_new_tokens": 8} | decoding,
        }
    )


def test_the_batched_engine_is_the_default(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pipeline.decoding")
    run = config(tiny_model_dir)
    engine = build_engine(run, "float32", "cpu", 128, 1.0)
    assert isinstance(engine, BatchedEngine)
    assert "engine: batched (auto: the model passed the self-test)" in caplog.text
    prompts = PromptRenderer(run, load_tokenizer(tiny_model_dir), 120)
    ids = prompts.render({"text": "12 sacks on Monday"}).token_ids
    engine.add_request(GenerationRequest("f:0", ids))
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    assert completions[0].status == "ok"
    assert completions[0].stats.cached_prompt_tokens > 8  # the template's head
    assert "32 slots of 128 tokens" in caplog.text


def test_what_does_not_fit_goes_to_the_reference_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    settings = {"vocab_size": 512, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(**settings)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    caplog.set_level(logging.INFO, logger="pipeline.decoding")
    engine = build_engine(config(tmp_path, method="plain"), "float32", "cpu", 64, 1.0)
    assert isinstance(engine, ReferenceEngine)
    assert "engine: transformers (auto: " in caplog.text
    with pytest.raises(ConfigError, match=r"^decoding.engine: batched cannot run this model"):
        build_engine(config(tmp_path, engine="batched"), "float32", "cpu", 64, 1.0)
    drafting = config(tmp_path, method="draft_model", draft_confidence=0.0)
    with pytest.raises(ConfigError, match=r"^decoding.method: draft_model needs the batched"):
        build_engine(drafting, "float32", "cpu", 64, 1.0)


def test_shared_prefix_of_a_template(tiny_model_dir: Path) -> None:
    tokenizer = make_tokenizer()
    run = config(tiny_model_dir)
    head = template_prefix(run, tokenizer)
    for text in ("A mill.", "12 sacks", "\u00dcber dem Bach"):
        ids = PromptRenderer(run, tokenizer, 1000).render({"text": text}).token_ids
        assert ids[: len(head)] == head
    assert tokenizer.decode(head).endswith("\n") or len(head) > 8
    prefix = SharedPrefix(range(20))
    assert prefix.usable(range(30)) == 20
    assert prefix.usable(range(20)) == 19
    assert prefix.usable([*range(9), 99, 99]) == 9
    assert prefix.usable([*range(7), 99, 99]) == 0
    assert SharedPrefix(range(7)).token_ids == []


def test_slots_fit_the_memory() -> None:
    budget = SlotBudget(max_slots=16, kv_bytes=16 * 1000 * 10, bytes_per_token=10)
    assert budget.fit(100, 512) == (16, 512)  # all that the model allows
    assert budget.fit(100, 8192) == (16, 1000)  # what there is room for
    assert budget.fit(1001, 8192) == (15, 1024)
    assert budget.fit(5000, 8192) == (3, 5056)
    assert budget.fit(5000, 5000) == (3, 5000)
    assert budget.fit(100, 8192, extra_slots=4) == (16, 800)
    assert budget.fit(8000, 8192, extra_slots=1) == (1, 8000)
    assert SlotBudget(4, 0, 10).fit(50, 512) == (1, 64)  # at least one, come what may
    auto = slot_budget("auto", bytes_per_token=10, device="cpu")
    assert auto.max_slots == 32 and auto.kv_bytes > 1 << 20
    shared = slot_budget(5, bytes_per_token=10, device="cpu", actors_on_host=4)
    assert shared.max_slots == 5 and shared.kv_bytes < auto.kv_bytes / 3


@pytest.mark.parametrize("method", ["draft_model", "universal"])
def test_a_draft_model_from_the_config(tiny_model_dir: Path, method: str) -> None:
    engine = build_engine(
        config(tiny_model_dir, method=method, num_draft_tokens=3, draft_confidence=0.0),
        "float32",
        "cpu",
        128,
        1.0,
    )
    for i in range(4):
        engine.add_request(GenerationRequest(f"f:{i}", range(3, 20 + i)))
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    drafted = sum(c.stats.num_draft_tokens for c in completions)
    accepted = sum(c.stats.num_accepted_draft_tokens for c in completions)
    assert drafted and accepted
    if method == "draft_model":  # the target drafts for itself; the other tries text as well
        assert drafted == accepted
