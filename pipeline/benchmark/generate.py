"""The benchmark: all contenders over the same rows, taking turns."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pipeline.benchmark.breakdown import break_down
from pipeline.benchmark.engines import EngineContender, EngineSetup
from pipeline.benchmark.machine import OthersCpu, describe_machine
from pipeline.benchmark.models import Models
from pipeline.benchmark.peer import Peer, PeerContender, PeerError
from pipeline.benchmark.results import REFERENCE, Results
from pipeline.benchmark.runs import Contender
from pipeline.benchmark.stock import StockContender, stock_drafts
from pipeline.benchmark.workload import FEW_SHOT_HEAD, Workload, load_workload
from pipeline.decoding.loading import set_threads
from pipeline.errors import ConfigError
from pipeline.sections import Method

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What to measure; the options of the command. Sequences are in the order of the table."""

    model: str
    prompts: Path
    task: str | None = None
    limit: int | None = 16
    max_new_tokens: int = 96
    dtype: str = "auto"
    slots: tuple[int, ...] = (1, 16)
    methods: tuple[str, ...] = ("plain", "prompt_lookup")
    drafts: tuple[int, ...] = (2, 3, 10)
    drafter: str | None = None
    exit_layer: int | None = None
    draft_confidence: float = 0.4
    lookup_min: int = 2
    chat: bool = True
    few_shot_prefix: str | None = None
    share_prefix: bool = True
    ignore_eos: bool = False
    repeats: int = 3
    threads: int = 1
    peer_python: Path | None = None
    peer_script: Path | None = None
    only: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    breakdown: bool = True


def measure(settings: Settings, save: Callable[[Results], None]) -> Results:
    """Run everything.

    Args:
        save: called after every run with what there is by then.

    Raises:
        ConfigError: for options that make no sense.
    """
    _check(settings)
    set_threads(settings.threads)
    machine = describe_machine(settings.threads, settings.peer_python)
    models = Models(settings.model, settings.drafter, settings.dtype)
    workload = load_workload(
        settings.prompts,
        models.tokenizer,
        task=settings.task,
        limit=settings.limit,
        max_new_tokens=settings.max_new_tokens,
        head=head_text(settings.few_shot_prefix),
        ignore_end=settings.ignore_eos,
        chat=settings.chat,
    )
    contenders = [make() for make in selected(settings, models)]
    names = [contender.name for contender in contenders]
    options = {**asdict(settings), "dtype": models.dtype}
    results = Results(machine, options, workload, names, _baselines(settings, names))
    for one in contenders if settings.breakdown else ():
        if isinstance(one, EngineContender):
            results.breakdowns.append(break_down(models, one.setup, workload.prompts))
    take_turns(contenders, workload, settings.repeats, results, save)
    return results


def _check(settings: Settings) -> None:
    unknown = set(settings.methods) - set(get_args(Method))
    if unknown:
        known = ", ".join(get_args(Method))
        raise ConfigError("--methods", f"unknown: {', '.join(sorted(unknown))}; choose of {known}")
    if (settings.peer_python is None) != (settings.peer_script is None):
        raise ConfigError("--peer-script", "goes with --peer-python; give both or neither")
    if min((*settings.slots, *settings.drafts, settings.repeats), default=0) < 1:
        raise ConfigError("--slots, --drafts, --repeats", "must be at least 1; raise them")


def head_text(option: str | None) -> str:
    """`--few-shot-prefix` as text: nothing, the built-in head (`auto`), or a file's.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if option in (None, "auto"):
        return FEW_SHOT_HEAD if option else ""
    try:
        return Path(str(option)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("--few-shot-prefix", f"cannot read {option}: {error}") from None


def selected(settings: Settings, models: Models) -> list[Callable[[], Contender]]:
    """The contenders that `--only` leaves, unmade: making one may load a model.

    Raises:
        ConfigError: if it leaves none.
    """
    known = {
        name: make
        for family in (_stock, _engines, _peers)
        for name, make in family(settings, models)
    }
    only = settings.only or ("*",)
    chosen = [name for name in known if any(fnmatchcase(name, pattern) for pattern in only)]
    if not chosen:
        raise ConfigError("--only", f"matches none; choose of {', '.join(known)}")
    return [partial(known[name], name) for name in chosen]


Makers = Iterator[tuple[str, Callable[[str], Contender]]]


def _stock(settings: Settings, models: Models) -> Makers:
    def make(name: str, **options: Any) -> Contender:
        return StockContender(name, models.stock, **options)

    def drafting(name: str, method: Method, length: int) -> Contender:
        bounds = {"exit_layer": settings.exit_layer, "confidence": settings.draft_confidence}
        return make(name, drafts=stock_drafts(models, method, length, **bounds))  # type: ignore[arg-type]

    yield REFERENCE, make
    for method, length in _methods(settings):
        if method not in ("plain", "auto"):
            name = f"hf/{method}:{length}/1"
            yield name, partial(drafting, method=method, length=length)
    for slots in settings.slots:
        if slots > 1:
            yield f"hf/plain/{slots}", partial(make, batch_size=slots)


def _methods(settings: Settings) -> Iterator[tuple[Method, int]]:
    """Methods with their draft lengths, 0 for plain."""
    for method in settings.methods:
        for length in (0,) if method in ("plain", "auto") else settings.drafts:
            yield method, length  # type: ignore[misc]


def _engines(settings: Settings, models: Models) -> Makers:
    def make(name: str, setup: EngineSetup) -> Contender:
        return EngineContender(name, models, setup, share_prefix=settings.share_prefix)

    for slots in settings.slots:
        for method, length in _methods(settings):
            setup = EngineSetup(
                method,
                slots,
                length,
                settings.exit_layer,
                settings.draft_confidence,
                settings.lookup_min,
            )
            yield f"draftmill/{setup.label}", partial(make, setup=setup)


def _peers(settings: Settings, models: Models) -> Makers:
    if settings.peer_python is None or settings.peer_script is None:
        return
    peer = Peer(settings.peer_python, settings.peer_script, models.folder, settings.threads)
    specs: dict[str, str | None] = {}
    for method in settings.methods:
        for length in settings.drafts:
            if method == "plain":
                specs["plain"] = None
            elif method == "prompt_lookup":
                specs[f"ngram:{length}"] = f"ngram:{length}"
            elif models.drafter_folder is not None:
                specs[f"draft_model:{length}"] = f"draft:{models.drafter_folder}:{length}"
    for slots in settings.slots:
        for label, spec in specs.items():
            yield (
                f"vllm/{label}/{slots}",
                partial(PeerContender, peer=peer, slots=slots, spec=spec),
            )


def take_turns(
    contenders: Sequence[Contender],
    workload: Workload,
    repeats: int,
    results: Results,
    save: Callable[[Results], None],
) -> None:
    """Run all contenders once, and then again. A peer that fails costs the others nothing."""
    for repeat in range(repeats):
        for contender in contenders:
            name, others = contender.name, OthersCpu()
            try:
                run = replace(contender.run(workload), others_cpu=others.share())
            except PeerError as error:
                logger.warning("%s", error)
                results.failures.append({"name": name, "error": str(error)})
            else:
                results.runs[name].append(run)
                rate = run.num_tokens / run.total_seconds
                message = "%s, %d of %d: %.2f s, %.1f tokens/s, others used %.0f %% of the CPUs"
                figures = (run.total_seconds, rate, 100 * run.others_cpu)
                logger.info(message, name, repeat + 1, repeats, *figures)
            save(results)


def _baselines(settings: Settings, names: Sequence[str]) -> list[str]:
    """Those of the options that take part."""
    most = max(settings.slots)
    usual = (REFERENCE, f"draftmill/plain/{most}", f"vllm/plain/{most}")
    return [name for name in settings.baselines or usual if name in names]
