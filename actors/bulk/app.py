"""The Serve application: model replicas, the HTTP deployment, the controller of batches."""

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from actors.bulk import ENGINE
from actors.bulk.api import Api
from actors.bulk.controller import NAMESPACE, BatchController, controller_name
from actors.bulk.guard import Keys
from actors.bulk.replica import Replica
from pipeline import flow
from pipeline.config import RunConfig
from pipeline.decoding.build import build_engine
from pipeline.errors import ConfigError, RunFailed
from pipeline.identity import Resolved
from pipeline.prepare import resolve_model
from pipeline.report import root_cause

logger = logging.getLogger(__name__)

APPLICATION = "draftmill"
_NO_LIMIT = 100_000  # of requests at a replica: the API and the batches keep to limits of their own
_BATCH_CPUS = 0.4  # what reading, rendering, committing and publishing of a batch reserve
_POLL_S = 0.1
# Access is logged by our own lines (see `generation`); Serve's would say it twice.
_QUIET = LoggingConfig(encoding="JSON", log_level="WARNING", enable_access_log=False)
MakeEngine = Callable[[], Any]


def check(config: RunConfig) -> Resolved:
    """Everything that can be wrong, before anything starts.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    if config.decoding.engine == "transformers":
        problem = "transformers decodes row by row and cannot serve; use batched"
        raise ConfigError("decoding.engine", problem)
    Keys(config.serve.keys_file)
    if config.serve.keys_file is None and config.serve.host not in ("127.0.0.1", "localhost"):
        problem = f"without keys anybody could use {config.serve.host}; set serve.keys_file"
        raise ConfigError("serve.host", problem)
    if "RAY_ADDRESS" not in os.environ and not ray.is_initialized():
        _check_port(config)
    return resolve_model(config)


def _check_port(config: RunConfig) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.serve.host, config.serve.port))
        except OSError as error:
            where = f"{config.serve.host}:{config.serve.port}"
            problem = f"cannot listen on {where}: {error.strerror}; choose another port or host"
            raise ConfigError("serve.port", problem) from None


def start(
    config: RunConfig,
    resolved: Resolved,
    make_engine: MakeEngine | None = None,
    name: str = APPLICATION,
) -> None:
    """Start everything in the cluster that this process is connected to; returns when ready.

    Args:
        make_engine: in place of the configured model.
        name: of the application; any but the first's is also the prefix of its paths.
    """
    app = bind(config, resolved, make_engine, name)
    http = {"host": config.serve.host, "port": config.serve.port}
    prefix = "/" if name == APPLICATION else f"/{name}"
    try:
        serve.start(http_options=http, logging_config=_QUIET)
        serve.run(app, name=name, route_prefix=prefix)
    except RuntimeError as error:
        raise RunFailed(f"the endpoint did not start: {root_cause(error)}") from error
    start_controller(config, name)


def bind(
    config: RunConfig,
    resolved: Resolved,
    make_engine: MakeEngine | None = None,
    name: str = APPLICATION,
) -> serve.Application:
    """The deployments, for Serve to run. Arguments as for `start`."""
    reserved, threads = _cpus(config, resolved)
    engine = make_engine or partial(
        build_engine,
        config,
        dtype=resolved.dtype,
        device=resolved.device,
        max_model_len=resolved.max_model_len,
        num_cpus=threads,
        num_gpus=resolved.num_gpus,
    )
    replicas = serve.deployment(
        name=ENGINE,
        num_replicas=config.resources.num_actors,
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=config.serve.shutdown_s,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": reserved, "num_gpus": resolved.num_gpus},
        logging_config=_QUIET,
    )(Replica)
    api = serve.deployment(
        name="Api",
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=config.serve.shutdown_s,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
    )(Api)
    return api.bind(config, replicas.bind(config, resolved.max_model_len, engine), name)


def start_controller(config: RunConfig, name: str = APPLICATION) -> Any:
    """The controller of batches, in place of one with an older config."""
    stop_controller(name)
    remote = ray.remote(
        num_cpus=0,
        name=controller_name(name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=8,
    )(BatchController)
    controller = remote.remote(config, name)
    ray.get(controller.wake.remote())
    return controller


def stop_controller(name: str = APPLICATION) -> None:
    """End it and its runners; their batches stay where they are."""
    try:
        controller = ray.get_actor(controller_name(name), NAMESPACE)
    except ValueError:
        return  # there is none
    ray.get(controller.stop.remote(), timeout=30)
    ray.kill(controller)


def stop(seconds: float) -> None:
    """Running requests get their time; batches go on another time."""
    stop_controller()
    # Serve's own shutdown ends its proxies first, and with them all connections.
    deadline = time.monotonic() + seconds
    api = serve.get_app_handle(APPLICATION)
    while api.close.remote().result() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    serve.delete(APPLICATION)
    serve.shutdown()


def _cpus(config: RunConfig, resolved: Resolved) -> tuple[float, float]:
    """What each replica reserves, and what it sets its threads by.

    Raises:
        ConfigError: the replicas do not fit beside the batches.
    """
    cores = ray.cluster_resources().get("CPU", 0.0)
    replicas, asked = config.resources.num_actors, config.resources.num_cpus
    room = cores - _BATCH_CPUS * config.serve.parallel_batches
    fair = room / replicas
    if resolved.num_gpus:
        fair = min(fair, 1.0)
    reserved = fair if asked == "auto" else float(asked)
    if reserved <= 0 or reserved * replicas > room + 1e-6:
        raise ConfigError(
            "resources.num_cpus",
            f"{replicas} replicas x {reserved:.2g} leave less than {_BATCH_CPUS:g} of "
            f"{cores:g} cores for each of serve.parallel_batches="
            f"{config.serve.parallel_batches}; lower one of them",
        )
    threads = flow.plan_shares(config, resolved.num_gpus).num_cpus
    return round(reserved, 2), threads
