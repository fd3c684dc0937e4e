"""The endpoint for Ray Serve's own config files, as `infra/serve.yaml` and a RayService have them.

    import_path: actors.bulk.builder:build
    args: {config: /etc/draftmill/serve.yaml}

Serve calls `build` in a task on the cluster; `jobs/serve.py` needs none of this.
"""

import time

from pydantic import BaseModel, ConfigDict
from ray import serve

from actors.bulk import app
from pipeline.config import load_endpoint_config
from pipeline.errors import ConfigError

WORKERS_S = 900.0  # Serve deploys as soon as the head is up; images may still be pulled elsewhere
_POLL_S = 2.0


class Arguments(BaseModel):
    """`args` of the application. `config`: path of the YAML file; `set`: overrides `a.b=value`."""

    model_config = ConfigDict(extra="forbid")

    config: str
    set: list[str] = []


def build(arguments: Arguments) -> serve.Application:
    """The application, once the nodes for its replicas are there; it must be named `draftmill`.

    Raises:
        ConfigError: naming the key and the remedy.
        RunFailed: the controller of batches did not start.
    """
    config = load_endpoint_config([arguments.config], arguments.set)
    resolved = app.check(config)
    deadline = time.monotonic() + WORKERS_S
    while True:
        try:
            bound = app.bind(config, resolved)
            break
        except ConfigError as error:
            if not error.key.startswith("resources.") or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
    app.start_controller(config)
    return bound
