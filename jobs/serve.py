"""Serve a model to clients of OpenAI's API: `python jobs/serve.py --config conf/serve.yaml`."""

import signal
import threading
from typing import Annotated

import typer

from pipeline.cli import ConfigFiles, PrintConfig, errors_to_exit_codes, quiet_libraries
from pipeline.config import dump_yaml, load_endpoint_config
from pipeline.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Serve a model to clients of OpenAI's API: completions, chats, files, batches.")
def main(
    config: ConfigFiles = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override, as in serve.port=9000."),
    ] = None,
    print_config: PrintConfig = False,
    new_key: Annotated[
        str | None,
        typer.Option("--new-key", metavar="NAME", help="Make an API key, show it once, and stop."),
    ] = None,
) -> None:
    with errors_to_exit_codes():
        loaded = load_endpoint_config(config or [], set_ or [])
        if print_config:
            print(dump_yaml(loaded), end="")
            return
        if new_key is not None:
            from actors.bulk.guard import new_key as make_key

            if loaded.serve.keys_file is None:
                raise ConfigError("serve.keys_file", "is not set; name the file that keys go to")
            print(make_key(loaded.serve.keys_file, new_key))
            return
        quiet_libraries()
        from actors.bulk import app as application
        from pipeline import flow

        resolved = application.check(loaded)
        flow.start_ray()
        application.start(loaded, resolved)
        where = f"http://{loaded.serve.host}:{loaded.serve.port}/v1"
        print(f"ready: {where}, model {loaded.serve.model_name or loaded.model.target}", flush=True)
        ended = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: ended.set())
        ended.wait()
        print("stopping; unfinished batches go on with the same command", flush=True)
        application.stop(loaded.serve.shutdown_s)
        flow.stop_ray()


if __name__ == "__main__":
    app()
