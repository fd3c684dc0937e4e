"""What each row's tokens must be: `model.generate()` with our processors, row by row."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from pipeline.config import DecodingConfig
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.drafters.draft_model import DraftModelDrafter
from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.memory import SlotBudget
from pipeline.decoding.rows import Row
from pipeline.decoding.sampling import Sampler
from pipeline.records import Completion, GenerationRequest, SamplingParams


def generate(model: Any, prompt: Sequence[int], key: str, params: SamplingParams) -> list[int]:
    """The row's new tokens by transformers, one pass per token. Stop strings are left out."""
    settings = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "banned_tokens": list(params.banned_tokens),
        "seed": params.seed,
    }
    decoding = DecodingConfig.model_validate(settings)
    processors = Sampler(decoding, model.config.vocab_size).for_row(key, len(prompt))
    ids = torch.tensor([list(prompt)])
    ends = params.end_tokens
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList(processors),
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            **({} if ends is None else {"eos_token_id": list(ends) or None}),
        )
    finally:
        model.set_attn_implementation(before)
    return list(output[0, len(prompt) :].tolist())


def make_draft_model(
    model: Any,
    vocab_size: int = 512,
    *,
    step_tokens: int = 64,
    prefix_token_ids: Sequence[int] = (),
    drafter: type[DraftModelDrafter] = DraftModelDrafter,
    **rule: Any,
) -> DraftModelDrafter:
    """A draft model for a target of `vocab_size` tokens; `rule` are its `DraftChooser`'s."""
    chooser = DraftChooser(vocab_size, **rule)
    return drafter(model, chooser, step_tokens=step_tokens, prefix_token_ids=prefix_token_ids)


def make_engine(model: Any, tokenizer: Any, slots: int = 4, **settings: Any) -> BatchedEngine:
    """A batched engine, by default with room enough; `params` are its rows' settings."""
    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "step_tokens": 64,
        "budget": SlotBudget(slots, 1 << 30, 1024),
    }
    params = settings.pop("params", SamplingParams())
    return BatchedEngine(model, tokenizer, params, **(defaults | settings))


def decode(
    engine: BatchedEngine, requests: Sequence[GenerationRequest]
) -> tuple[dict[str, list[int]], dict[str, Completion]]:
    """Tokens and completion of each row, by its key."""
    rows: dict[str, Row] = {}
    make_row = engine._row

    def spy(request: GenerationRequest) -> Row:
        rows[request.row_key] = row = make_row(request)
        return row

    engine._row = spy  # type: ignore[method-assign]
    for request in requests:
        engine.add_request(request)
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    engine._row = make_row  # type: ignore[method-assign]
    assert len(completions) == len(requests)
    return {k: row.end.tokens for k, row in rows.items()}, {c.row_key: c for c in completions}
