"""What makes two runs the same: the settings that change the text or the layout of the output.

Not among them: method, drafts, actors and devices, since drafting is lossless, unless
`ensemble_weight` is set; and the input listing, since new files are new work for the same run.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pipeline.config import RunConfig


@dataclass(frozen=True)
class Resolved:
    """What `auto` came to: decided once, by the driver, and the same on every actor."""

    model_identity: str
    device: str
    dtype: str
    max_model_len: int
    num_gpus: float
    drafter_identity: str | None = None  # of `model.drafter`, where the method reads it


_DECODING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "banned_tokens",
    "max_new_tokens",
    "stop",
    "seed",
)


_ENSEMBLE = ("ensemble_weight", "method", "num_draft_tokens", "exit_layer")


def text_settings(config: RunConfig, resolved: Resolved) -> dict[str, Any]:
    """Dotted keys and values on which the generated text depends."""
    prompt = config.prompt.model_dump(mode="json")
    decoding = config.decoding.model_dump(mode="json")
    return {
        "task": config.task,
        "input.text_column": config.input.text_column,
        "model.target": resolved.model_identity,
        "model.dtype": resolved.dtype,
        "resources.max_model_len": resolved.max_model_len,
        **{f"prompt.{key}": value for key, value in prompt.items()},
        "decoding.on_too_long": config.on_too_long,
        **{f"decoding.{key}": decoding[key] for key in _DECODING},
        **_ensemble_settings(config, resolved),
    }


def _ensemble_settings(config: RunConfig, resolved: Resolved) -> dict[str, Any]:
    """What the text depends on besides, once drafts bear on it: the drafter, and their borders."""
    decoding = config.decoding.model_dump(mode="json")
    if config.decoding.ensemble_weight is None:
        return {}
    settings = {f"decoding.{key}": decoding[key] for key in _ENSEMBLE}
    settings["decoding.num_draft_tokens"] = config.decoding.max_draft_tokens
    return settings | {"model.drafter": resolved.drafter_identity}


def layout_settings(config: RunConfig) -> dict[str, Any]:
    """Dotted keys and values on which rows, columns and files of the output depend."""
    return {
        "input.keep_columns": config.kept,
        "input.max_rows": config.input.max_rows,
        "output.text_column": config.text_columns,
        "output.rows_per_file": config.output.rows_per_file,
    }


def fingerprint(settings: dict[str, Any]) -> str:
    """Digest of `text_settings`: 16 hex digits."""
    encoded = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()
