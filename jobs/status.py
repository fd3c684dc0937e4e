"""How far is a run? `python jobs/status.py OUTPUT`: from its markers alone, running or dead."""

import json
from typing import Annotated

import typer

from pipeline.cli import errors_to_exit_codes
from pipeline.status import describe, read_status

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Say how far the run of an output folder is. Needs neither Ray nor the model.")
def main(
    output: Annotated[str, typer.Argument(help="The run's output.path.")],
    storage_options: Annotated[
        str, typer.Option(help="fsspec options of the store, as JSON.")
    ] = "{}",
) -> None:
    with errors_to_exit_codes():
        print(describe(read_status(output, json.loads(storage_options))))


if __name__ == "__main__":
    app()
