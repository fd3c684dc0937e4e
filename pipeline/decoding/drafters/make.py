"""From a run's settings to the drafter of its method; a new method is wired here."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import DecodingConfig, Method
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.controller.controller import DraftLengthController
from pipeline.decoding.drafters.auto import AutoDrafter
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.drafters.draft_model import DraftModelDrafter
from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.drafters.early_exit import EarlyExitDrafter
from pipeline.decoding.drafters.mtp import MtpDrafter, load_layers
from pipeline.decoding.drafters.mtp_drafter import SharedKvDrafter
from pipeline.decoding.drafters.prompt_lookup import PromptLookupDrafter
from pipeline.decoding.drafters.universal import UniversalDrafter
from pipeline.decoding.layers import replace_layers
from pipeline.decoding.loading import end_tokens, load_model, load_tokenizer
from pipeline.decoding.selftest import misfit
from pipeline.decoding.vocabulary import mismatch
from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

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
        return self._model

    @cached_property
    def _model(self) -> Any:
        model = load_model(self._folder, self._dtype, self._device, key=_KEY)
        replace_layers(model)
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
    maker = _Maker(decoding, target, files, tokenizer, step_tokens, prefix_token_ids)
    if decoding.method == "plain":
        return None
    return maker.auto() if decoding.method == "auto" else maker.make(decoding.method)


@dataclass(frozen=True)
class _Maker:
    """Makes the drafters of one engine; fields as of `make_drafter`."""

    decoding: DecodingConfig
    target: Any
    files: DrafterFiles | None
    tokenizer: Any
    step_tokens: int
    prefix_token_ids: list[int]

    def make(self, method: Method) -> Drafter:
        """The drafter of one method."""
        decoding = self.decoding
        if method == "prompt_lookup":
            return self._lookup()
        if method == "early_exit":
            assert decoding.exit_layer is not None
            return EarlyExitDrafter(decoding.exit_layer, self._chooser())
        if method == "mtp":
            layers = load_layers(self.target)
            return MtpDrafter(layers, self._chooser(), step_tokens=self.step_tokens)
        if self.files is None:
            raise ConfigError(_KEY, f"{method} needs it; name a model")
        model = self.files.model()
        if method == "mtp_drafter":
            length = decoding.max_draft_tokens
            return SharedKvDrafter(model, self._chooser(), num_draft_tokens=length)
        reason = misfit(model)
        if reason:
            raise ConfigError(_KEY, f"cannot draft for many rows: {reason}; choose another model")
        shared: Any = {"step_tokens": self.step_tokens, "prefix_token_ids": self.prefix_token_ids}
        if method == "universal":
            own = self.files.tokenizer()
            return UniversalDrafter(model, self._chooser(), self.tokenizer, own, **shared)
        return DraftModelDrafter(model, self._chooser(), **shared)

    def auto(self) -> AutoDrafter:
        """All that the models allow, to be chosen from at every step."""
        methods = self._possible()
        logger.info("method auto: among plain, %s", ", ".join(methods))
        others: dict[Method, Drafter] = {
            method: self.make(method) for method in methods if method != "prompt_lookup"
        }
        sizes = {method: size for method in others if (size := self._size(method))}
        controller = DraftLengthController(methods, self.decoding.max_draft_tokens, sizes)
        return AutoDrafter(self._lookup(), others, controller)

    def _size(self, method: Method) -> float | None:
        """Share of the target's weights that a pass of the drafter takes, if that is plain."""
        if method == "early_exit" and self.decoding.exit_layer is not None:
            layers: int = self.target.config.get_text_config().num_hidden_layers
            return self.decoding.exit_layer / layers
        if method in ("draft_model", "universal") and self.files is not None:
            return float(self.files.model().num_parameters() / self.target.num_parameters())
        return None

    def _possible(self) -> list[Method]:
        methods: list[Method] = ["prompt_lookup"]
        if self.decoding.exit_layer is not None:
            methods.append("early_exit")
        if getattr(self.target.config.get_text_config(), "num_mtp_layers", None):
            methods.append("mtp")
        if self.files is not None:
            methods.append(self._kind(self.files))
        return methods

    def _kind(self, files: DrafterFiles) -> Method:
        """What the named drafter can be used for."""
        if hasattr(files.model().config, "backbone_hidden_size"):
            return "mtp_drafter"
        return "universal" if mismatch(self.tokenizer, files.tokenizer()) else "draft_model"

    def _lookup(self) -> PromptLookupDrafter:
        decoding = self.decoding
        return PromptLookupDrafter(decoding.prompt_lookup_max, decoding.prompt_lookup_min)

    def _chooser(self) -> DraftChooser:
        decoding = self.decoding
        return DraftChooser(
            self.target.config.get_text_config().vocab_size,
            # under an ensemble the text depends on where drafts end
            confidence=decoding.draft_confidence if decoding.ensemble_weight is None else 0.0,
            end_tokens=end_tokens(self.target.generation_config.eos_token_id),
        )
