"""The command line that the generation jobs share. Heavy imports wait until they are needed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, cast, get_args

import typer

from pipeline import logs
from pipeline.config import Task, dump_yaml, load_config
from pipeline.errors import ConfigError, DraftmillError
from pipeline.progress import is_working
from pipeline.store.intake import OnChange, Selection
from pipeline.timing import parse_duration, parse_time

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(help="YAML file; repeat it to lay one over another, later wins."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved config and stop.")
]


def make_app(task: Task, about: str) -> typer.Typer:
    """The Typer app of a job."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=about)
    def main(
        config: ConfigFiles = None,
        set_: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override, as in decoding.seed=7."),
        ] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what would be done; load no model.")
        ] = False,
        print_config: PrintConfig = False,
        new_run: Annotated[
            bool, typer.Option("--new-run", help="Discard the results in output.path first.")
        ] = False,
        retry_failed: Annotated[
            bool, typer.Option("--retry-failed", help="Generate failed rows anew.")
        ] = False,
        incremental: Annotated[
            bool, typer.Option("--incremental", help="Only files that are new since the last run.")
        ] = False,
        since: Annotated[
            str, typer.Option(help="Files modified at or after this ISO 8601 time.")
        ] = "",
        until: Annotated[str, typer.Option(help="Files modified before this time.")] = "",
        partition: Annotated[
            list[str] | None, typer.Option(metavar="KEY=VALUE", help="Files in such a folder.")
        ] = None,
        lookback: Annotated[
            str, typer.Option(help="Pass over files older by more than what is done: 2h, 3d.")
        ] = "",
        max_files: Annotated[
            int | None, typer.Option(min=1, help="New files at most, the oldest first.")
        ] = None,
        settle: Annotated[str, typer.Option(help="Leave files alone that are younger.")] = "60s",
        on_change: Annotated[
            str, typer.Option(help="A file that was done and changed: error, ignore, reprocess.")
        ] = "error",
        full_refresh: Annotated[
            bool, typer.Option("--full-refresh", help="Do files anew that are done.")
        ] = False,
    ) -> None:
        with errors_to_exit_codes():
            selection = make_selection(
                incremental,
                since=since,
                until=until,
                partitions=partition or [],
                lookback=lookback,
                max_files=max_files,
                settle=settle,
                on_change=on_change,
                full_refresh=full_refresh,
            )
            if selection and new_run:
                raise ConfigError("--new-run", "does not go with --incremental; use --full-refresh")
            if new_run and retry_failed:
                raise ConfigError("--retry-failed", "goes with the old run; leave out --new-run")
            loaded = load_config(config or [], set_ or [], task=task)
            if print_config:
                print(dump_yaml(loaded), end="")
                return
            quiet_libraries()
            if selection is not None:
                from pipeline import incremental as runs

                if dry_run:
                    runs.dry_run(loaded, selection)
                    return
                raise typer.Exit(runs.run_incremental(loaded, selection, retry_failed=retry_failed))
            if dry_run:
                from pipeline.dryrun import dry_run as show_plan

                show_plan(loaded, new_run=new_run, retry_failed=retry_failed)
                return
            from pipeline.run import Options, run

            code = run(loaded, Options(new_run=new_run, retry_failed=retry_failed))
            raise typer.Exit(code)

    return app


def make_selection(
    incremental: bool,
    *,
    since: str,
    until: str,
    partitions: list[str],
    lookback: str,
    max_files: int | None,
    settle: str,
    on_change: str,
    full_refresh: bool,
) -> Selection | None:
    """The options of incremental runs; None for an ordinary run.

    Raises:
        ConfigError: an option is malformed, or given without --incremental.
    """
    given = {
        "--since": since,
        "--until": until,
        "--partition": partitions,
        "--lookback": lookback,
        "--max-files": max_files,
        "--full-refresh": full_refresh,
    }
    if not incremental:
        for option, value in given.items():
            if value:
                raise ConfigError(option, "goes with --incremental; add it, or leave this out")
        return None
    if on_change not in get_args(OnChange):
        raise ConfigError("--on-change", f"{on_change!r} is none of error, ignore, reprocess")
    return Selection(
        parse_time("--since", since) if since else None,
        parse_time("--until", until) if until else None,
        tuple(partitions),
        parse_duration("--lookback", lookback) if lookback else None,
        max_files,
        parse_duration("--settle", settle),
        cast(OnChange, on_change),
        full_refresh,
    )


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


def run_to_exit(app: typer.Typer) -> NoReturn:
    """Run a command that leaves nothing behind, and end the process with its exit code.

    Without the interpreter's own clean-up: a thread of Arrow that lets go of a Python file handle
    meanwhile aborts the process, and the exit code would be lost.
    """
    try:
        app()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(bool(end.code)))
    raise AssertionError("typer ends every command by SystemExit")


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
