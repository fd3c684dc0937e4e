"""How far is a run? `python jobs/status.py OUTPUT`: from its markers alone, running or dead.

`--verify` reads all output files against them; `--clean` removes what dead attempts left.
"""

import json
from typing import Annotated, Any

import typer

from pipeline.cli import errors_to_exit_codes, run_to_exit
from pipeline.errors import ConfigError
from pipeline.status import clean_output, describe, read_status, verify_output

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Say how far the run of an output folder is. Needs neither Ray nor the model.")
def main(
    output: Annotated[str, typer.Argument(help="The run's output.path.")],
    storage_options: Annotated[
        str, typer.Option(help="fsspec options of the store, as JSON.")
    ] = "{}",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every output file; exit code 1 on problems.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what dead attempts left behind.")
    ] = False,
) -> None:
    with errors_to_exit_codes():
        options = _parse_options(storage_options)
        if clean:
            print(clean_output(output, options))
        if verify:
            good, findings = verify_output(output, options)
            print(findings)
            raise typer.Exit(0 if good else 1)
        if not clean:
            print(describe(read_status(output, options)))


def _parse_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError("--storage-options", 'is no JSON object; write {"key": value}')
    return options


if __name__ == "__main__":
    run_to_exit(app)
