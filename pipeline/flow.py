"""The Ray side of a run: cluster, CPU shares and the data flow from source to commits."""

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.attempts import Attempts, AttemptsClient
from actors.generator import EngineFactory, GenerationActor
from actors.prompter import PromptActor, load_renderer
from pipeline import logs
from pipeline.config import RunConfig
from pipeline.decoding.memory import MAX_SLOTS
from pipeline.errors import ConfigError
from pipeline.prepare import Job
from pipeline.store.commit import Committer
from pipeline.store.lease import LeaseGuard
from pipeline.store.plan import Plan, Unit
from pipeline.store.source import UnitSource

TASK_CPUS = 0.1  # what reading, rendering and publishing reserve, each
_CPUS_LEFT_FREE = 0.5
_READ_TASKS = 2  # each decodes a row group forwards; more would decode it again
MIN_BATCHES_IN_FLIGHT = 4  # per actor
_RAY_SETTINGS = {
    # A thread that outlives the run must not start a cluster of its own.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Ray's own processes would push a nicer engine aside: a tenth of its speed on two cores.
    "RAY_worker_niceness": "0",
    # Reading and publishing are short tasks far apart; by default each finds its worker stopped
    # and imports all anew, two seconds of a core.
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
}
_WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # see `cli.quiet_libraries`
    "TOKENIZERS_PARALLELISM": "false",  # the prompt stage reserves a tenth of a core
    "TQDM_DISABLE": "1",  # bars of libraries, from several processes at once
}


@dataclass(frozen=True)
class Shares:
    """What each generation actor reserves."""

    num_cpus: float
    num_gpus: float


def start_ray() -> bool:
    """Connect to the cluster of RAY_ADDRESS or start one here; whether it was started."""
    for talkative in ("ray._private.authentication", "ray.data._internal.progress"):
        logging.getLogger(talkative).setLevel(logging.ERROR)
    if ray.is_initialized():
        return False
    # Only the address that we are told: Ray would also try, for minutes, the last cluster that ran
    # on this host, dead or alive.
    address = os.environ.get("RAY_ADDRESS", "local")
    runtime_env = {"env_vars": _WORKER_ENVIRONMENT}
    if address == "local":
        # Workers inherit it. With a runtime environment they would be started beside those that
        # Ray keeps ready, and each of these costs a hundredth of a core for nothing.
        for name, value in (_RAY_SETTINGS | _WORKER_ENVIRONMENT).items():
            os.environ.setdefault(name, value)
        runtime_env = {}
    ray.init(
        address=address,
        include_dashboard=False,
        logging_level=logging.WARNING,
        runtime_env=runtime_env,
    )
    return True


def stop_ray() -> None:
    """Stop the cluster that `start_ray` started."""
    ray.shutdown()


def model_engine(job: Job, shares: Shares) -> EngineFactory:
    """Factory of the configured model's engine, to be called on the actor."""
    from pipeline.decoding.build import build_engine  # imports transformers: seconds of a core

    return functools.partial(
        build_engine,
        job.config,
        dtype=job.resolved.dtype,
        device=job.resolved.device,
        max_model_len=job.resolved.max_model_len,
        num_cpus=shares.num_cpus,
        num_gpus=shares.num_gpus,
    )


def plan_shares(config: RunConfig, num_gpus: float) -> Shares:
    """Reservations per actor, such that all actors run and tasks still find room.

    Raises:
        ConfigError: the actors do not fit the cluster; the message has the arithmetic.
    """
    cluster = ray.cluster_resources()
    cores, gpus = cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    actors, asked = config.resources.num_actors, config.resources.num_cpus
    if num_gpus * actors > gpus:
        raise ConfigError(
            "resources.num_gpus",
            f"{actors} actors x {num_gpus:g} is more than the cluster's {gpus:g} GPUs; lower it "
            "or resources.num_actors",
        )
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    if asked != "auto":
        num_cpus = float(asked)
        if _places(nodes, num_cpus) < actors:
            raise ConfigError(
                "resources.num_cpus",
                f"{actors} actors x {num_cpus:g} do not fit nodes of "
                f"{', '.join(f'{cpus:g}' for cpus in nodes)} cores; use auto, or fewer",
            )
    elif num_gpus:
        num_cpus = min(1.0, _share(cores, actors))
    else:
        num_cpus = _share(cores, actors)
        while num_cpus > 2 * TASK_CPUS and _places(nodes, num_cpus) < actors:
            num_cpus = round(num_cpus - TASK_CPUS, 2)  # no actor spans nodes
    room = cores - 4 * TASK_CPUS
    if num_cpus * actors > room + 1e-6:
        raise ConfigError(
            "resources.num_cpus",
            f"{actors} actors x {num_cpus:g} leave less than {4 * TASK_CPUS:g} of {cores:g} cores "
            f"for reading and writing; use auto, or at most {room / actors:.2f}",
        )
    return Shares(round(num_cpus, 2), num_gpus)


def _places(nodes: Sequence[float], num_cpus: float) -> int:
    """Actors that nodes of as many cores have room for, one by one."""
    return sum(int(cpus / num_cpus + 1e-9) for cpus in nodes) if num_cpus else 1 << 30


def _share(cores: float, actors: int) -> float:
    """cores / actors - 0.5, but on small machines at least a fair part of what may be used."""
    fair = math.floor(100 * (cores - _CPUS_LEFT_FREE) / actors) / 100
    return max(cores / actors - _CPUS_LEFT_FREE, min(fair, 1.0))


def batches_in_flight(config: RunConfig, device: str, unit_rows: int) -> int:
    """Units that an actor works on at a time: twice its slots, so that none of them runs dry.

    With the rows of a unit, it is also what a kill costs at most.
    """
    return max(MIN_BATCHES_IN_FLIGHT, -(-_rows_in_flight(config, device) // unit_rows))


def _rows_in_flight(config: RunConfig, device: str) -> int:
    asked = config.resources.slots
    return 2 * (MAX_SLOTS[device] if asked == "auto" else asked)


def _set_context() -> None:
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = None  # one block per task: block = unit = commit
    context.execution_no_progress_timeout_s = -1  # one unit may well take half an hour
    # Progress and summary are ours; Ray's would say it all twice, in other numbers.
    context.enable_progress_bars = False
    context.issue_detectors_config.detectors = []
    logging.getLogger("ray.data").setLevel(logging.WARNING)


def generate(
    job: Job,
    plan: Plan,
    units: Sequence[Unit],
    run_id: str,
    factory: EngineFactory,
    shares: Shares,
    guard: LeaseGuard,
    prompter: type = PromptActor,
) -> int:
    """Generate and commit the units. Blocks until all are committed.

    Returns:
        How many store operations the tasks and actors had to try again.

    The actors commit what they generate: a write stage behind them would be starved by Ray, which
    runs it last, and a kill would cost all that waits for it.

    Raises:
        Exception: whatever Ray Data raises; committed units stay committed.
    """
    if not units:
        return 0
    config = job.config
    client = AttemptsClient(_start_attempts(config.resources.num_actors))
    report = functools.partial(client.call_now, "add_retries")
    reducer = functools.partial(load_renderer, config, job.max_prompt_tokens)
    generator = {
        "engine_factory": factory,
        "kept": job.kept,
        "text_columns": config.text_columns,
        "run_id": run_id,
        "committer": Committer(guard, plan, units[0].generation),
        "attempts": client,
        "row_attempts": config.faults.row_attempts,
        "json_logs": logs.wants_json(),
        "reducer": reducer if config.on_too_long == "map_reduce" else None,
    }
    in_flight = batches_in_flight(config, job.resolved.device, plan.unit_rows)
    # With GPUs `map_batches` insists on a batch size, which would cut units in pieces.
    markers = _prompts(job, units, prompter, report).map_batches_internal(
        GenerationActor,
        fn_constructor_kwargs=generator,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=config.resources.num_actors,
            max_tasks_in_flight_per_actor=in_flight,
            max_concurrent_calls_per_actor=in_flight,
        ),
        num_cpus=shares.num_cpus,
        num_gpus=shares.num_gpus or None,
    )
    for _ in markers.iter_internal_ref_bundles():
        pass  # committed; keeping the references would pile them up here
    return int(client.call_now("retries"))


def _start_attempts(num_actors: int) -> Any:
    """The actor that counts, on the driver's node: it lives as long as the run."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Attempts)
    return remote.options(scheduling_strategy=here).remote(num_actors)


def audit(
    job: Job, plan: Plan, units: Sequence[Unit], factory: EngineFactory, shares: Shares
) -> list[dict[str, Any]]:
    """Generate rows of a published run again: rows of `auditing.GROUP_SCHEMA`.

    They go in groups of as many rows as an actor of the run has in flight, so that its slots are
    as full.

    Raises:
        Exception: whatever Ray Data raises.
    """
    from actors.auditor import AuditActor  # as above

    config = job.config
    group_rows = _rows_in_flight(config, job.resolved.device)
    num_groups = math.ceil(sum(unit.num_rows for unit in units) / group_rows)
    auditor = {
        "engine_factory": factory,
        "store": job.store,
        "rows_per_file": plan.rows_per_file,
        "text_column": config.text_columns[0],
    }
    groups = _prompts(job, units).map_batches(
        AuditActor,
        fn_constructor_kwargs=auditor,
        batch_size=group_rows,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(config.resources.num_actors, num_groups)),
        num_cpus=shares.num_cpus,
        num_gpus=shares.num_gpus or None,
    )
    found: list[dict[str, Any]] = groups.take_all()
    return found


def _prompts(
    job: Job,
    units: Sequence[Unit],
    prompter: type = PromptActor,
    report: Callable[[int], None] | None = None,
) -> ray.data.Dataset:
    """Read and render the units: one block each. `report`: see `UnitSource`."""
    _set_context()
    prompts = {"config": job.config, "max_prompt_tokens": job.max_prompt_tokens}
    return ray.data.read_datasource(
        UnitSource(job.listing.source, units, job.schema, report),
        override_num_blocks=len(units),
        num_cpus=TASK_CPUS,
        concurrency=_READ_TASKS,
    ).map_batches(
        prompter,
        fn_constructor_kwargs=prompts,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=TASK_CPUS,
    )
