"""Tiny random models of many architectures: each small, and real where it matters to attention."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 128
WINDOW = 12  # shorter than most prompts
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # a random model with tied ones only repeats its last token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2}
_HEAD = _GROUPED | {"head_dim": 8}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK_EXPERTS = _EXPERTS | {
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,  # K and V differ
}

# What the batched engine runs.
FITTING: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED | _SLIDING,
    "qwen2": _GROUPED,
    "qwen3": _HEAD,
    "qwen3_moe": _HEAD | _EXPERTS | {"num_experts": 4},
    "gemma2": _HEAD | _SLIDING | {"attn_logit_softcapping": 2.0},
    "gemma3_text": _HEAD | _SLIDING | {"layer_types": _MIXED},
    "gemma4_text": _HEAD
    | _SLIDING
    | {
        "num_hidden_layers": 4,
        "layer_types": _MIXED * 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "phi3": _GROUPED | _SLIDING,
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "olmo2": _GROUPED,
    "granite": _GROUPED,
    "cohere2": _GROUPED | _SLIDING | {"num_hidden_layers": 4},
    "smollm3": _GROUPED | {"no_rope_layers": [1, 0]},
    "deepseek_v2": _DEEPSEEK_EXPERTS | LATENT,
    "deepseek_v3": _DEEPSEEK_EXPERTS | LATENT,
    "glm4_moe": _HEAD | _DEEPSEEK_EXPERTS,
    "afmoe": _HEAD
    | _SLIDING
    | _EXPERTS
    | {"num_experts": 4},  # takes views of what attention gives
    "gpt_oss": _HEAD | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(model_type: str, **settings: Any) -> Any:
    """A random causal language model in float32.

    Its head is scaled until logits spread as a trained model's do: rounding then has no near-ties
    to decide.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(_SHAPE | FITTING.get(model_type, {}) | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.copy_(torch.randn(parameter.shape))  # zero would be no sink worth the name
    head = model.get_output_embeddings()
    if head is not None and not model.config.is_encoder_decoder:
        ids = torch.arange(3, 40)[None] % model.config.get_text_config().vocab_size
        head.weight *= 4 / model(ids).logits.std()
    return model
