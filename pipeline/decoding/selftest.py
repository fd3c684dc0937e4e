"""Whether the batched engine can run a model, found out at load.

What the model says of itself comes first. Then packed steps over short random rows must give the
logits of each row alone under the model's own attention; beyond such rows see `visibility`.
"""

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.decoding.attention import NAME
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.faults import check_device, is_out_of_memory
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.steps import Span, Step
from pipeline.decoding.visibility import mask_misfit

_STATEFUL = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_KNOWN = {"full_attention", "sliding_attention", "chunked_attention"}
_NEEDED = ("position_ids", "cache", "logits_to_keep")  # arguments of a model's forward

_LENGTHS = (5, 12, 19)  # of the random rows
_SLOTS = (0, 1, 3)  # theirs: neighbours, and one beyond a gap
_Part = tuple[int, int, int, int]  # row, first token, end, wrong draft tokens behind that
_PASSES: tuple[tuple[bool, list[_Part]], ...] = (  # (decoding, parts of rows)
    (False, [(0, 0, 3, 0), (2, 0, 10, 0)]),
    (False, [(1, 0, 7, 0), (2, 10, 13, 0)]),
    (True, [(0, 3, 4, 0), (1, 7, 8, 0), (2, 13, 14, 0)]),
    (True, [(0, 4, 5, 0), (1, 8, 9, 3), (2, 14, 16, 2)]),
    (True, [(1, 9, 12, 0), (2, 16, 19, 0)]),
)
# Of the largest logit. SmolLM2-135M and Gemma-3-270M deviate by 5e-6, 0.012 and 0.002; attention
# that is wrong in one layer of them, by 0.03 to 0.1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.01}


def misfit(model: Any, max_model_len: int | None = None) -> str | None:
    """Why the batched engine cannot run this model; None if it can.

    To be asked before weights are packed. Leaves the model as it was.

    Args:
        model: a causal language model of transformers.
        max_model_len: prompt and completion of a row at most, in tokens; None: all that the model
            allows. Some models fit as long as rows stay short.
    """
    config = model.config.get_text_config()
    max_len = max_model_len or getattr(config, "max_position_embeddings", None) or 1 << 13
    reason = _declared_misfit(model, config) or _varying_rope(config, max_len)
    if reason:
        return reason
    try:
        with torch.inference_mode(), _keeping_attention(model):
            return _computed_misfit(model, config, max_len)
    except Exception as error:  # whatever a model makes of what it does not expect
        check_device(error)
        if is_out_of_memory(error):
            raise
        line = " ".join(str(error).split())[:200]
        return f"{config.model_type} fails in packed steps: {type(error).__name__}: {line}"


def _declared_misfit(model: Any, config: Any) -> str | None:
    name = config.model_type
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & _STATEFUL or (not kinds and model._is_stateful):
        return f"{name} has recurrent layers, from whose state drafts cannot be taken back"
    if kinds - _KNOWN:
        return f"{name} has layers of an unknown kind: {', '.join(sorted(kinds - _KNOWN))}"
    arguments = inspect.signature(model.forward).parameters
    missing = [argument for argument in _NEEDED if argument not in arguments]
    return f"{name} takes no {', '.join(missing)}" if missing else None


def _varying_rope(config: Any, max_len: int) -> str | None:
    """RoPE whose frequencies change for all rows of a pass once one of them is long."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(p for p in parameters.values() if isinstance(p, dict))):
        kind = rope.get("rope_type") or ""
        unchanged = max_len
        if kind == "longrope":
            unchanged = rope.get("original_max_position_embeddings") or max_len
        elif "dynamic" in kind:
            unchanged = config.max_position_embeddings
        if max_len > unchanged:
            return (
                f"{kind} RoPE changes for all rows of a pass once one is over {unchanged} tokens; "
                f"resources.max_model_len of {unchanged} would fit"
            )
    return None


def _computed_misfit(model: Any, config: Any, max_len: int) -> str | None:
    runner = ModelRunner(model, SlotCache(max(_SLOTS) + 1, max(_LENGTHS) + 1))
    if config._attn_implementation != NAME:
        return f"{config.model_type} takes no custom attention"
    rows = _random_rows(config.vocab_size)
    reason = mask_misfit(runner, config, rows[0], max_len)
    return reason or _logits_misfit(runner, config.model_type, rows)


def _random_rows(vocab_size: int) -> list[list[int]]:
    """From the middle of the vocabulary, far from special tokens. No shared generator is used."""
    generator = torch.Generator().manual_seed(0)
    low, high = vocab_size // 4, vocab_size // 2
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in _LENGTHS]


def _eager_logits(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """`[rows, longest, vocab]` in float32. No row sees what pads it, for that lies behind it."""
    padded = [row + [row[0]] * (max(_LENGTHS) - len(row)) for row in rows]
    ids = torch.tensor(padded, device=model.device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: torch.Tensor = output.logits.float()
    return logits


def _logits_misfit(runner: ModelRunner, name: str, rows: list[list[int]]) -> str | None:
    """Compare packed logits with those of the model's own attention, token by token."""
    model = runner.model
    model.set_attn_implementation("eager")
    expected = _eager_logits(model, rows)
    model.set_attn_implementation(NAME)
    scale = expected.abs().max()
    for decoding, parts in _PASSES:
        wanted = torch.cat([expected[row, start:stop] for row, start, stop, _ in parts])
        deviations = (_packed_logits(runner, rows, decoding, parts) - wanted).abs().amax(-1) / scale
        # In low precision a token may well be routed to another expert: most must agree, not all.
        exact = model.dtype == torch.float32
        deviation = float(deviations.max() if exact else deviations.median())
        if not deviation <= _TOLERANCE[model.dtype]:  # nan is a misfit too
            kind = "decode" if decoding else "prefill"
            return (
                f"logits of {name} in a packed {kind} pass differ from its own by {deviation:.2g} "
                f"of the largest"
            )
    return None


def _packed_logits(
    runner: ModelRunner, rows: list[list[int]], decoding: bool, parts: list[_Part]
) -> torch.Tensor:
    """`[right tokens of all parts, vocab]` in float32."""
    spans = [
        Span(_SLOTS[row], start, rows[row][start:stop] + rows[row][:1] * num_wrong)
        for row, start, stop, num_wrong in parts
    ]
    step = Step(spans, decoding=decoding, device=runner.device)
    firsts = zip(step.offsets, parts, strict=False)
    right = [first + i for first, (_, a, b, _) in firsts for i in range(b - a)]
    return runner.forward(step, right).float()


@contextmanager
def _keeping_attention(model: Any) -> Iterator[None]:
    """Put the attention implementation back, of the model and of every model within."""
    kept: dict[int, tuple[Any, str | None]] = {}
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    queue = deque(module.config for module in models)
    while queue:
        config = queue.popleft()
        if config is not None and id(config) not in kept:
            kept[id(config)] = config, config._attn_implementation
            queue.extend(getattr(config, key, None) for key in config.sub_configs)
    try:
        yield
    finally:
        for config, implementation in kept.values():
            config._attn_implementation_internal = implementation  # the setter recurses
