"""A trained model with sliding layers: Gemma 3 270M, on prompts longer than its window."""

import pytest

from pipeline.decoding.checkpoint import estimate_memory, materialize, read_config, resolve
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.loading import load_model, load_tokenizer
from pipeline.decoding.selftest import misfit
from pipeline.errors import ConfigError
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.oracle import decode, make_engine
from tests.decoding.test_architectures import NEW_TOKENS, assert_same, generate
from tests.tiny import TEXT

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(1200)]


def test_gemma3_on_prompts_beyond_its_window() -> None:
    try:
        checkpoint = resolve("demo:gemma3")
    except ConfigError as error:
        pytest.skip(str(error))
    folder = materialize(checkpoint)
    model, tokenizer = load_model(folder, "float32", "cpu"), load_tokenizer(folder)
    window = model.config.sliding_window
    assert misfit(model) is None
    text = list(tokenizer(TEXT * 4)["input_ids"])
    assert len(text) > window
    prompts = [text[:length] for length in (200, 30, window - 9, len(text))]
    attention = model.config._attn_implementation
    truth = {f"f:{i}": generate(model, prompt) for i, prompt in enumerate(prompts)}
    engine = make_engine(
        model,
        tokenizer,
        slots=3,
        params=SamplingParams(max_new_tokens=NEW_TOKENS),
        max_model_len=1024,
        step_tokens=256,
        method="prompt_lookup",
        drafter=PromptLookupDrafter(3, 1),
        num_draft_tokens=5,
    )
    requests = [GenerationRequest(f"f:{i}", prompt) for i, prompt in enumerate(prompts)]
    found, completions = decode(engine, requests)
    size = estimate_memory(read_config(checkpoint), "float32", None)
    assert engine.cache.bytes_per_token == size.kv_bytes_per_token
    model.set_attn_implementation(attention)
    for request in requests:
        key, prompt = request.row_key, list(request.prompt_token_ids)
        assert_same(model, prompt, found[key], truth[key])
    stats = [completion.stats for completion in completions.values()]
    assert sum(s.num_accepted_draft_tokens for s in stats) > 0
