"""From a run's config to the engine that decodes it."""

import logging
from pathlib import Path
from typing import Any

from pipeline.config import Method, RunConfig
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.checkpoint import estimate_memory, materialize, read_config, resolve
from pipeline.decoding.choosing import params_of
from pipeline.decoding.drafters.make import DrafterCheckpoint, make_drafter
from pipeline.decoding.engine import Engine
from pipeline.decoding.layers import replace_layers
from pipeline.decoding.loading import load_model, load_tokenizer, set_threads
from pipeline.decoding.memory import slot_budget
from pipeline.decoding.packing import prepare_linears
from pipeline.decoding.prefix import template_prefix
from pipeline.decoding.reference import ReferenceEngine
from pipeline.decoding.selftest import misfit
from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

STEP_TOKENS = {"cpu": 1024, "cuda": 8192}


def build_engine(
    config: RunConfig,
    dtype: str,
    device: str,
    max_model_len: int,
    num_cpus: float,
    num_gpus: float = 0.0,
) -> Engine:
    """Load the run's models and put the engine around them that the config asks for.

    Args:
        dtype: resolved, as are the others: the driver decides once for all actors.
        max_model_len: prompt and completion of a row at most, in tokens.
        num_cpus, num_gpus: reserved for this engine.

    Raises:
        ConfigError: if a model cannot be had, loaded or decoded as configured.
    """
    set_threads(num_cpus)
    folder = materialize(resolve(config.model.target, config.model.revision))
    model, tokenizer = load_model(folder, dtype, device), load_tokenizer(folder)
    asked = config.decoding.engine
    reason = None if asked == "transformers" else misfit(model, max_model_len)
    if asked == "batched" and reason:
        problem = f"batched cannot run this model: {reason}; use auto or transformers"
        raise ConfigError("decoding.engine", problem)
    if reason and config.decoding.method == "auto":
        logger.info("method auto: plain, since the batched engine cannot run this model")
        config = with_method(config, "plain")
    if reason and config.decoding.method not in ("plain", "prompt_lookup"):
        problem = f"{config.decoding.method} needs the batched engine, which cannot run this model"
        raise ConfigError("decoding.method", f"{problem}: {reason}; use plain or prompt_lookup")
    if asked == "transformers" or reason:
        why = "as configured" if asked == "transformers" else f"auto: {reason}"
        logger.info("engine: transformers (%s), method %s", why, config.decoding.method)
        return _reference(config, model, tokenizer, max_model_len)
    logger.info("engine: batched (%s), method %s", _why(asked), config.decoding.method)
    return _batched(config, folder, model, tokenizer, max_model_len, num_gpus)


def with_method(config: RunConfig, method: Method) -> RunConfig:
    """The run, decoded by another method."""
    decoding = config.decoding.model_copy(update={"method": method})
    return config.model_copy(update={"decoding": decoding})


def _why(asked: str) -> str:
    return "as configured" if asked == "batched" else "auto: the model passed the self-test"


def _reference(config: RunConfig, model: Any, tokenizer: Any, max_model_len: int) -> Engine:
    engine = ReferenceEngine(
        model,
        tokenizer,
        config.decoding,
        max_model_len=max_model_len,
        row_timeout_s=config.faults.row_timeout_s,
    )
    engine.warm_up()
    return engine


def _batched(
    config: RunConfig,
    folder: Path,
    model: Any,
    tokenizer: Any,
    max_model_len: int,
    num_gpus: float,
) -> Engine:
    device = model.device.type
    replace_layers(model)
    dtype = str(model.dtype).removeprefix("torch.")
    size = estimate_memory(read_config(resolve(str(folder))), dtype, None)
    asked = config.resources.step_tokens
    step_tokens = STEP_TOKENS[device] if asked == "auto" else asked
    prefix = template_prefix(config, tokenizer)
    named = config.model.drafter
    drafter = make_drafter(
        config.decoding,
        model,
        DrafterCheckpoint(named, dtype, device) if named else None,
        tokenizer=tokenizer,
        step_tokens=step_tokens,
        prefix_token_ids=prefix,
    )
    budget = slot_budget(
        config.resources.slots,
        bytes_per_token=size.kv_bytes_per_token + (drafter.bytes_per_token if drafter else 0),
        device=device,
        actors_on_host=config.resources.num_actors,
        gpu_share=num_gpus or 1.0,
    )
    if drafter is not None:
        prepare_linears(model, budget.max_slots)
    return BatchedEngine(
        model,
        tokenizer,
        params_of(config.decoding, config.faults.row_timeout_s),
        max_model_len=max_model_len,
        budget=budget,
        step_tokens=step_tokens,
        method=config.decoding.method,
        drafter=drafter,
        num_draft_tokens=config.decoding.max_draft_tokens,
        ensemble_weight=config.decoding.ensemble_weight,
        prefix_token_ids=prefix,
    )
