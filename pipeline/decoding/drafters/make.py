"""From a run's settings to the drafter of its method; a new method is wired here."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import DecodingConfig
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.drafters.draft_model import DraftModelDrafter
from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.drafters.early_exit import EarlyExitDrafter
from pipeline.decoding.drafters.mtp import MtpDrafter, load_layers
from pipeline.decoding.drafters.mtp_drafter import SharedKvDrafter
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.drafters.universal import UniversalDrafter
from pipeline.decoding.loading import end_tokens, load_model, load_tokenizer
from pipeline.decoding.packing import pack_linears
from pipeline.decoding.selftest import misfit
from pipeline.errors import ConfigError

_KEY = "model.drafter"


class DrafterFiles(Protocol):
    """What `model.drafter` names, loaded as far as the method wants it."""

    def model(self) -> Any:
        """With packed linear layers."""
        ...

    def tokenizer(self) -> Any: ...


class DrafterCheckpoint(DrafterFiles):
    """The checkpoint of a reference."""

    def __init__(self, reference: str, dtype: str, device: str) -> None:
        """`dtype`, `device`: as of `load_model`. Raises ConfigError, as all methods, naming
        `model.drafter`."""
        self._reference, self._dtype, self._device = reference, dtype, device

    @cached_property
    def _folder(self) -> Path:
        return materialize(resolve(self._reference, key=_KEY))

    def model(self) -> Any:
        model = load_model(self._folder, self._dtype, self._device, key=_KEY)
        pack_linears(model)
        return model

    def tokenizer(self) -> Any:
        return load_tokenizer(self._folder, key=_KEY)


def make_drafter(
    decoding: DecodingConfig,
    target: Any,
    files: DrafterFiles | None,
    *,
    tokenizer: Any,
    step_tokens: int,
    prefix_token_ids: list[int],
) -> Drafter | None:
    """What drafts for the target by the method; None for plain decoding.

    Args:
        files: of `model.drafter`, for methods that need one.
        tokenizer: the target's.
        step_tokens: prompt tokens per prefill pass at most.
        prefix_token_ids: what all prompts begin with.

    Raises:
        ConfigError: if the method's model cannot be had, loaded or batched.
    """
    method = decoding.method
    if method == "plain":
        return None
    if method == "prompt_lookup":
        return PromptLookupDrafter(decoding.prompt_lookup_max, decoding.prompt_lookup_min)
    chooser = DraftChooser(
        target.config.get_text_config().vocab_size,
        # under an ensemble the text depends on where drafts end
        confidence=decoding.draft_confidence if decoding.ensemble_weight is None else 0.0,
        end_tokens=end_tokens(target.generation_config.eos_token_id),
    )
    if method == "early_exit":
        assert decoding.exit_layer is not None
        return EarlyExitDrafter(decoding.exit_layer, chooser)
    if method == "mtp":
        return MtpDrafter(load_layers(target), chooser, step_tokens=step_tokens)
    if files is None:
        raise ConfigError(_KEY, f"{method} needs it; name a model")
    model = files.model()
    if method == "mtp_drafter":
        return SharedKvDrafter(model, chooser, num_draft_tokens=decoding.num_draft_tokens)
    reason = misfit(model)
    if reason:
        raise ConfigError(_KEY, f"cannot draft for many rows: {reason}; choose another model")
    if method == "universal":
        return UniversalDrafter(
            model,
            chooser,
            tokenizer,
            files.tokenizer(),
            step_tokens=step_tokens,
            prefix_token_ids=prefix_token_ids,
        )
    return DraftModelDrafter(
        model, chooser, step_tokens=step_tokens, prefix_token_ids=prefix_token_ids
    )
