"""The command line that the generation jobs share. Heavy imports wait until they are needed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipeline import logs
from pipeline.config import Task, dump_yaml, load_config
from pipeline.errors import ConfigError, DraftmillError
from pipeline.progress import is_working


def make_app(task: Task, about: str) -> typer.Typer:
    """The Typer app of a job."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=about)
    def main(
        config: Annotated[
            list[Path] | None,
            typer.Option(help="YAML file; repeat it to lay one over another, later wins."),
        ] = None,
        set_: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override, as in decoding.seed=7."),
        ] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what would be done; load no model.")
        ] = False,
        print_config: Annotated[
            bool, typer.Option("--print-config", help="Print the resolved config and stop.")
        ] = False,
        new_run: Annotated[
            bool, typer.Option("--new-run", help="Discard the results in output.path first.")
        ] = False,
        retry_failed: Annotated[
            bool, typer.Option("--retry-failed", help="Generate failed rows anew.")
        ] = False,
    ) -> None:
        with errors_to_exit_codes():
            if new_run and retry_failed:
                raise ConfigError("--retry-failed", "goes with the old run; leave out --new-run")
            loaded = load_config(config or [], set_ or [], task=task)
            if print_config:
                print(dump_yaml(loaded), end="")
                return
            quiet_libraries()
            if dry_run:
                from pipeline.dryrun import dry_run as show_plan

                show_plan(loaded, new_run=new_run, retry_failed=retry_failed)
                return
            from pipeline.run import Options, run

            code = run(loaded, Options(new_run=new_run, retry_failed=retry_failed))
            raise typer.Exit(code)

    return app


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """An expected error becomes one line on stderr and its exit code."""
    try:
        yield
    except DraftmillError as error:
        if os.environ.get("DRAFTMILL_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        if is_working():  # given up early: what is committed is safe, the rest may just end
            sys.stdout.flush()
            os._exit(error.exit_code)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def quiet_libraries() -> None:
    """Our own messages at INFO; of the libraries only warnings, and no bars of theirs.

    Also makes idle OpenMP threads sleep, for which the variable must be set before torch is loaded:
    spinning, they halve the speed of any other process on the same cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logs.configure(logs.wants_json())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
