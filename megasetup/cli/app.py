"""The commands and their options, and nothing else: each command imports its own code when it is called.

So `megasetup --help` does not wait for a benchmark's imports, and this file reads as the table of what can be asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps every FP32 copy of every Megatron weight true, at the speed of the wire between GPU and host.",
)


def _version(asked: bool) -> None:
    if asked:
        import megasetup

        print(megasetup.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that stand before the command."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False,
) -> None:
    """Say what this machine offers, what is missing and what to do about it."""
    from megasetup.cli import doctor as this
    from megasetup.cli.console import stdout

    found = this.examine()
    advice = this.advise(found)
    if as_json:
        print(json.dumps({**found, "what_to_do": advice}, indent=2))
    else:
        this.show(found, advice, stdout())
    if not this.healthy(found):
        raise typer.Exit(1)
