"""The demo model, in float32: what the engine makes of it is what `generate()` makes of it."""

from typing import Any

import pytest
import torch

from pipeline.config import DecodingConfig
from pipeline.decoding.reference import ReferenceEngine
from pipeline.records import GenerationRequest
from tests.tiny import TEXT

pytestmark = pytest.mark.model
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def prompt(demo_model: tuple[Any, Any]) -> list[int]:
    _, tokenizer = demo_model
    turn = {"role": "user", "content": f"Summarize this text.\n\n{TEXT}"}
    ids = tokenizer.apply_chat_template([turn], add_generation_prompt=True)["input_ids"]
    return list(ids)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_summary_is_the_same_with_and_without_drafts(
    demo_model: tuple[Any, Any], prompt: list[int], settings: dict[str, Any]
) -> None:
    model, tokenizer = demo_model
    texts = set()
    for method in ("plain", "prompt_lookup"):
        decoding = DecodingConfig.model_validate(
            {"method": method, "max_new_tokens": 24, "num_draft_tokens": 5} | settings
        )
        engine = ReferenceEngine(model, tokenizer, decoding, max_model_len=8192)
        engine.add_request(GenerationRequest("f:0", prompt))
        (completion,) = engine.step()
        assert completion.status == "ok"
        texts.add(completion.text)
    if not settings:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        texts.add(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
    assert len(texts) == 1
    if not settings:
        assert completion.stats.num_accepted_draft_tokens > 0, "a summary quotes its text"
