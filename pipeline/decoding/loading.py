"""From a checkpoint folder to a model ready to generate: device, dtype, threads, weights."""

import gc
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.decoding.checkpoint import Checkpoint, present_folder
from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
# Names in torch.cpu.get_capabilities() of instructions that multiply bfloat16 (x86 and ARM).
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def resolve_device(device: Literal["auto", "cpu", "cuda"], num_gpus: float) -> str:
    """`cpu` or `cuda`. Decided from the config alone: the driver need not have the actors' GPU.

    Raises:
        ConfigError: if `cuda` is asked for and actors get no GPU.
    """
    if device == "auto":
        return "cuda" if num_gpus > 0 else "cpu"
    if device == "cuda" and num_gpus <= 0:
        raise ConfigError("model.device", "cuda needs resources.num_gpus above 0; set it")
    return device


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16", "float16"], device: str) -> str:
    """A name of `DTYPES`. `auto` is bfloat16 where the device computes in it, else float32.

    On CPUs without such instructions torch emulates bfloat16, slower than float32.
    """
    if dtype != "auto":
        return dtype
    if device == "cuda" or _cpu_has_bfloat16():
        return "bfloat16"
    return "float32"


def _cpu_has_bfloat16() -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_INSTRUCTIONS)


def set_threads(num_cpus: float) -> None:
    """Let torch use the CPUs that are reserved for it; more threads would wait for each other."""
    import torch

    torch.set_num_threads(max(1, math.ceil(num_cpus)))


def load_tokenizer(folder: Path, *, key: str = "model.target") -> Any:
    """The tokenizer of a checkpoint folder, as transformers' `PreTrainedTokenizerBase`.

    Raises:
        ConfigError: naming `key`, if the folder has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the files provoke
        problem = f"cannot load the tokenizer: {_line(error)}; add its files to the folder"
        raise ConfigError(key, problem) from error


def load_checkpoint_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a checkpoint of which no more is converted or downloaded than it needs.

    Raises:
        ConfigError: naming the checkpoint's key, if it has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    folder = present_folder(checkpoint)
    if folder is not None and checkpoint.hub_id is None:
        return load_tokenizer(folder, key=checkpoint.key)
    try:
        if checkpoint.gguf_file is not None:
            where, name = checkpoint.gguf_file.parent, checkpoint.gguf_file.name
            return AutoTokenizer.from_pretrained(str(where), gguf_file=name)
        return AutoTokenizer.from_pretrained(checkpoint.hub_id, revision=checkpoint.commit)
    except Exception as error:
        problem = f"cannot load the tokenizer: {_line(error)}; choose another model"
        raise ConfigError(checkpoint.key, problem) from error


def load_model(folder: Path, dtype: str, device: str, *, key: str = "model.target") -> Any:
    """The language model of a checkpoint folder, for inference only, with neutral settings: causal,
    or an encoder-decoder.

    Args:
        dtype: one of `DTYPES`.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: naming `key` or `model.device`, if it is no model that can generate by itself.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # many actors' bars would garble the job's own output
    if device == "cuda" and not torch.cuda.is_available():
        problem = "no CUDA device here; give actors a GPU (resources.num_gpus) or use cpu"
        raise ConfigError("model.device", problem)
    started = time.monotonic()
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        problem = f"cannot read the model's config: {_line(error)}; choose another model"
        raise ConfigError(key, problem) from error
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(
            str(folder), config=config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise  # a matter of the machine, not of the checkpoint
    except Exception as error:
        problem = f"{config.model_type} cannot be loaded to generate: {_line(error)}"
        raise ConfigError(key, f"{problem}; choose another model") from error
    if not model.can_generate():
        problem = f"{config.model_type} cannot generate text; choose a language model"
        raise ConfigError(key, problem)
    model.to(device).eval().requires_grad_(False)
    neutralize(model)
    seconds = time.monotonic() - started
    logger.info("loaded %s in %s on %s in %.1f s", folder.name, dtype, device, seconds)
    return model


def neutralize(model: Any) -> None:
    """Drop the checkpoint's own sampling settings: the run's config alone decides.

    `generate()` fills every setting that is unset from `model.generation_config`, so a checkpoint's
    repetition_penalty or forced tokens would leak into greedy runs. Its end and pad tokens stay,
    and what an encoder-decoder's answer begins with and never holds: its own padding, in Marian.
    """
    from transformers import GenerationConfig

    theirs = model.generation_config
    neutral = GenerationConfig()
    neutral.bos_token_id = theirs.bos_token_id
    neutral.eos_token_id = end_tokens(theirs.eos_token_id) or None
    neutral.pad_token_id = theirs.pad_token_id
    if model.config.is_encoder_decoder:
        neutral.decoder_start_token_id = theirs.decoder_start_token_id
        neutral.bad_words_ids = theirs.bad_words_ids
    model.generation_config = neutral


def settle_heap() -> None:
    """Have the garbage collector leave alone all objects so far: a full collection takes 0.2 s once
    transformers is loaded, twenty decode steps of a small model, and finds nothing among them.

    Only for processes that keep their models to the end: what is garbage later is not found either.
    """
    gc.collect()
    gc.freeze()


def end_tokens(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a text; a checkpoint may name none, one or several."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _line(error: Exception) -> str:
    """First sentence of a message that may span a page."""
    return " ".join(str(error).split())[:200]
