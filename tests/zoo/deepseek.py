"""DeepSeek-V3 with one and with two MTP layers, in checkpoints of the published form."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from tests.zoo import corpus
from tests.zoo.training import (
    RATE,
    WIDE_RATE,
    imitation_loss,
    load,
    mixed_windows,
    save,
    train,
    train_on_text,
)

_SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "initializer_range": 0.05,
}
_WIDE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 6,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "initializer_range": 0.03,
}
_MTP_INITIAL = 0.05


def make_target(folder: Path) -> None:
    """Without MTP layers."""
    _train_target(folder, RATE, _SHAPE)


def make_wide_target(folder: Path) -> None:
    _train_target(folder, WIDE_RATE, _WIDE)


def _train_target(folder: Path, rate: float, shape: dict[str, Any]) -> None:
    config = DeepseekV3Config(
        **shape,
        vocab_size=512,
        # experts in MTP layers only, which never do without
        first_k_dense_replace=shape["num_hidden_layers"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        num_nextn_predict_layers=0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    tokenizer = corpus.make_text_tokenizer()
    model = DeepseekV3ForCausalLM(config)
    train_on_text(model, tokenizer, steps=180, rate=rate)
    save(model, tokenizer, folder)


def make_mtp1(folder: Path, target: Path) -> None:
    _make_mtp(folder, target, 1)


def make_mtp2(folder: Path, target: Path) -> None:
    _make_mtp(folder, target, 2)


def _make_mtp(folder: Path, source: Path, count: int) -> None:
    """The target with `count` MTP layers, which imitate it `count` tokens ahead."""
    tokenizer = corpus.make_text_tokenizer()
    target = load(source)
    target.config.num_nextn_predict_layers = count
    mtp = make_layers(target, count)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = target.model(ids, use_cache=False).last_hidden_state
            wanted = target.lm_head(hidden)
        length = ids.shape[1] - count  # places whose chains are known
        hidden, total = hidden[:, :length], torch.zeros(())
        for k in range(count):
            places = torch.arange(k + 1, k + 1 + length)
            hidden = mtp.forward_layer(k, hidden, places[None], None, input_ids=ids[:, places])
            total = total + imitation_loss(mtp._project_to_logits(hidden), wanted[:, places])
        return total

    windows = mixed_windows(target, corpus.token_ids(tokenizer))
    train(mtp.layers.parameters(), loss, windows, steps=140)
    save(target, tokenizer, folder)
    _add_layers(folder, mtp, target.config.num_hidden_layers)


def make_layers(target: Any, count: int) -> Any:
    """transformers' `MtpModel` around the target, its own layers fresh."""
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    mtp = MtpModel(target, count)  # initialises what it shares with the target too
    target.load_state_dict(before)
    for name, parameter in mtp.layers.named_parameters():
        parameter.requires_grad_(True)
        with torch.no_grad():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=_MTP_INITIAL)
    return mtp


def published_tensors(mtp: Any, num_hidden_layers: int) -> dict[str, Tensor]:
    """The MTP layers under the names that DeepSeek's checkpoints give them."""
    found = {}
    for k, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{num_hidden_layers + k}."
        for name, tensor in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            if name == "mlp.experts.gate_up_proj":
                for e, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    found[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = gate
                    found[f"{prefix}mlp.experts.{e}.up_proj.weight"] = up
            elif name == "mlp.experts.down_proj":
                for e, down in enumerate(tensor):
                    found[f"{prefix}mlp.experts.{e}.down_proj.weight"] = down
            else:
                found[prefix + name] = tensor
        found[f"{prefix}embed_tokens.weight"] = mtp.embed_tokens.weight
        found[f"{prefix}shared_head.head.weight"] = mtp.shared_head.weight
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _add_layers(folder: Path, mtp: Any, num_hidden_layers: int) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | published_tensors(mtp, num_hidden_layers)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["num_nextn_predict_layers"] == len(mtp.layers)
