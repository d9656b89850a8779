"""The command line: read words, call a function, print."""

from __future__ import annotations

import sys

import typer

from adaptive_platform.cli import benches, plans, runs
from adaptive_platform.cli.words import split_words
from adaptive_platform.errors import UserError

__all__ = ["app", "main", "split_words"]

app = typer.Typer(
    name="adaptive-platform",
    help="Elastic, adaptive-batch training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(runs.commands)
app.add_typer(benches.commands, name="bench")
app.add_typer(plans.commands, name="plan")


def main() -> None:
    """Entry point: the user's mistakes are one message on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
