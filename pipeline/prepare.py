"""Everything that can be wrong is found here, before a model is loaded or a row is read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.config import DRAFTER_OF, RunConfig
from pipeline.decoding.checkpoint import (
    Checkpoint,
    is_encoder_decoder,
    read_config,
    resolve,
    resolve_max_model_len,
)
from pipeline.errors import ConfigError, InputError, StoreError
from pipeline.identity import Resolved, fingerprint, layout_settings, text_settings
from pipeline.prompts import check_template, template_columns
from pipeline.records import check_column_names
from pipeline.store.files import Store
from pipeline.store.listing import InputFile, Listing, check_columns, list_input, partitions
from pipeline.store.plan import Plan, check_same_settings, extend_plan, make_plan, read_plan


@dataclass(frozen=True)
class Job:
    """A checked run: what to read, with what, where to."""

    config: RunConfig
    store: Store
    listing: Listing
    schema: pa.Schema  # columns to read
    checkpoint: Checkpoint
    drafter: Checkpoint | None  # where the method needs one
    resolved: Resolved
    settings: dict[str, Any]
    encoder_decoder: bool = False

    @property
    def kept(self) -> list[pa.Field]:
        """Fields of the input columns that the output carries."""
        return [self.schema.field(name) for name in self.config.kept]

    @property
    def max_prompt_tokens(self) -> int:
        """What a prompt may take: an encoder's all, else what the completion leaves."""
        limit = self.resolved.max_model_len
        return limit if self.encoder_decoder else limit - self.config.decoding.max_new_tokens

    @property
    def fingerprint(self) -> str:
        return fingerprint(text_settings(self.config, self.resolved))


def prepare(config: RunConfig, listing: Listing | None = None) -> Job:
    """Check inputs, columns, template, output and model reference; resolve every `auto`.

    `listing`: of the input files, where it is known.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    store = open_output(config)
    source = config.input
    listing = listing or list_input(source.path, source.storage_options, source.format)
    config = keep_folders(config, [file.name for file in listing.files])
    _check_output_apart(listing, store)
    check_column_names(config.text_columns, config.kept)
    schema = check_input(config, listing.files)
    return _resolve_job(config, store, listing, schema)


def keep_folders(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """The config with the columns that the files' folders give (`ds=...`) among the kept ones."""
    folders = dict.fromkeys(key for name in names for key in partitions(name))
    columns = list(dict.fromkeys([*folders, *config.input.kept]))
    if columns == config.input.kept:
        return config
    kept = config.input.model_copy(update={"keep_columns": columns})
    return config.model_copy(update={"input": kept})


def check_input(config: RunConfig, files: Sequence[InputFile]) -> pa.Schema:
    """The columns that the run reads, if the files have them.

    Raises:
        ConfigError: naming the key that asks for what is missing.
    """
    carried = _carried_columns(config)
    check_columns(files, carried.items())
    check_template(config, files[0].schema.names)
    wanted = dict.fromkeys(template_columns(config), "prompt.template") | carried
    return check_columns(files, wanted.items())


def _resolve_job(config: RunConfig, store: Store, listing: Listing, schema: pa.Schema) -> Job:
    checkpoint = resolve(config.model.target, config.model.revision)
    model = read_config(checkpoint)
    resolved = _resolve(config, checkpoint, model)
    drafter = _resolve_drafter(config, checkpoint)
    resolved = replace(resolved, drafter_identity=drafter.identity if drafter else None)
    settings = {**text_settings(config, resolved), **layout_settings(config)}
    encodes = is_encoder_decoder(model)
    return Job(config, store, listing, schema, checkpoint, drafter, resolved, settings, encodes)


def prepare_without_input(config: RunConfig, listing: Listing) -> Job:
    """As `prepare`, of a run that may find no file to read: columns are not checked."""
    store = open_output(config)
    _check_output_apart(listing, store)
    check_column_names(config.text_columns, config.kept)
    return _resolve_job(config, store, listing, pa.schema([]))


def resolve_model(config: RunConfig) -> Resolved:
    """Check the model references alone; resolve every `auto` of the model.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    checkpoint = resolve(config.model.target, config.model.revision)
    _resolve_drafter(config, checkpoint)
    return _resolve(config, checkpoint, read_config(checkpoint))


def plan_run(job: Job, *, new_run: bool = False) -> tuple[Plan, Plan | None]:
    """The plan to follow, and the stored plan that it continues (None: a new run).

    Raises:
        ConfigError: the output holds a run with other settings, or over other input.
    """
    stored = None if new_run else read_plan(job.store)
    config = job.config
    if stored is None:
        unit_rows = config.input.unit_rows
        plan = make_plan(
            job.listing.files,
            max_rows=config.input.max_rows,
            unit_rows=unit_rows if isinstance(unit_rows, int) else None,
            rows_per_file=config.output.rows_per_file,
            num_actors=config.resources.num_actors,
            settings=job.settings,
        )
        return plan, None
    check_same_settings(stored, job.settings)
    _check_same_corpus(stored, job.listing)
    return extend_plan(stored, job.listing.files, config.input.max_rows), stored


def open_output(config: RunConfig) -> Store:
    try:
        store = Store(config.output.path, config.output.storage_options)
        if store.info(store.root)["type"] != "directory":
            raise ConfigError("output.path", f"{store.url} is a file; name a folder")
    except FileNotFoundError:
        return store  # made by the first put
    except StoreError as error:
        raise ConfigError("output.path", str(error)) from None
    except (ValueError, ImportError) as error:
        raise ConfigError("output.path", f"cannot open {config.output.path}: {error}") from None
    return store


def _check_output_apart(listing: Listing, store: Store) -> None:
    """Results below the input folder would be input the next time."""
    if listing.is_folder and f"{store.root}/".startswith(f"{listing.root}/"):
        raise ConfigError(
            "output.path", f"{store.url} lies inside input.path; choose a folder beside it"
        )


def _carried_columns(config: RunConfig) -> dict[str, str]:
    """Columns that the run names, and the config key that asks for each."""
    carried = dict.fromkeys(config.input.kept, "input.keep_columns")
    carried |= dict.fromkeys(config.reference_columns, "input.reference_column")
    for side in ("source", "target"):
        column = getattr(config.prompt, f"{side}_lang_column")
        if config.task == "translate" and column:
            carried[column] = f"prompt.{side}_lang_column"
    if config.input.id_column:
        carried[config.input.id_column] = "input.id_column"
    return carried | {config.input.text_column: "input.text_column"}


def _resolve(config: RunConfig, checkpoint: Checkpoint, model: dict[str, Any]) -> Resolved:
    if is_encoder_decoder(model):
        _check_encoder_decoder(config, model)
    limit = resolve_max_model_len(config.resources.max_model_len, model)
    if config.decoding.max_new_tokens >= limit:
        raise ConfigError(
            "decoding.max_new_tokens",
            f"{config.decoding.max_new_tokens} leaves no room for a prompt in the {limit} tokens "
            "of resources.max_model_len; lower it",
        )
    _check_method(config, model)
    from pipeline.decoding.loading import resolve_device, resolve_dtype  # imports torch

    num_gpus = _resolve_gpus(config)
    device = resolve_device(config.model.device, num_gpus)
    dtype = resolve_dtype(config.model.dtype, device)
    return Resolved(checkpoint.identity, device, dtype, limit, num_gpus)


def _check_encoder_decoder(config: RunConfig, model: dict[str, Any]) -> None:
    """Encoder-decoders decode row by row, without drafts, and have no turns of a chat."""
    kind, decoding = model.get("model_type"), config.decoding
    if decoding.method != "plain":
        problem = f"{kind} is an encoder-decoder, which decodes without drafts; use plain"
        raise ConfigError("decoding.method", problem)
    if decoding.engine == "batched":
        problem = f"{kind} is an encoder-decoder; use auto or transformers"
        raise ConfigError("decoding.engine", problem)
    for key in ("system", "few_shot"):
        if getattr(config.prompt, key):
            raise ConfigError(f"prompt.{key}", f"{kind} is an encoder-decoder; leave it out")


def _check_method(config: RunConfig, model: dict[str, Any]) -> None:
    """What `early_exit` and `mtp` need of the target, as far as its config.json tells."""
    text = model.get("text_config") or model
    name, decoding = config.model.target, config.decoding
    method, exit_layer = decoding.method, decoding.exit_layer
    counts = (text.get("num_nextn_predict_layers"), text.get("num_mtp_layers"))  # either name
    if method == "mtp" and not any(counts):
        raise ConfigError(
            "decoding.method",
            f"mtp needs MTP layers, and {name} has no num_nextn_predict_layers in its config; use "
            "another method",
        )
    layers = text.get("num_hidden_layers")
    if (
        method in ("early_exit", "auto")
        and exit_layer is not None
        and layers
        and exit_layer >= layers
    ):
        raise ConfigError(
            "decoding.exit_layer",
            f"{exit_layer} is not fewer than the {layers} layers of {name}; choose a lower one",
        )


def _resolve_drafter(config: RunConfig, target: Checkpoint) -> Checkpoint | None:
    """The checkpoint that the method drafts with; for `draft_model` only if its tokens are the
    target's."""
    method = config.decoding.method
    if config.model.drafter is None or method not in (*DRAFTER_OF, "auto"):
        return None
    drafter = resolve(config.model.drafter, key="model.drafter")
    model = read_config(drafter)
    if is_encoder_decoder(model):
        problem = f"{model.get('model_type')} is an encoder-decoder; choose a decoder-only model"
        raise ConfigError(drafter.key, problem)
    if method != "draft_model" or drafter.identity == target.identity:
        return drafter
    from pipeline.decoding.loading import load_checkpoint_tokenizer  # imports transformers
    from pipeline.decoding.vocabulary import mismatch

    difference = mismatch(load_checkpoint_tokenizer(target), load_checkpoint_tokenizer(drafter))
    if difference:
        raise ConfigError(
            drafter.key,
            f"{difference}; choose a model with the target's tokenizer (method universal is for "
            "others)",
        )
    return drafter


def _resolve_gpus(config: RunConfig) -> float:
    """GPUs per actor; `auto` asks this host, which on a cluster `resources.num_gpus` overrides."""
    asked = config.resources.num_gpus
    if asked != "auto":
        return float(asked)
    if config.model.device == "cpu":
        return 0.0
    import torch

    return 1.0 if config.model.device == "cuda" or torch.cuda.is_available() else 0.0


def _check_same_corpus(stored: Plan, listing: Listing) -> None:
    names = {file.name for file in listing.files}
    if stored.files and not any(file.name in names for file in stored.files):
        raise InputError(
            "input.path",
            f"this output was begun over other files ({stored.files[0].name}, ...); choose another "
            "output.path, or start over with --new-run",
        )
