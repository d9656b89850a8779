"""Commands about runs: train, sweep, report, replay, and what helps with them."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from adaptive_platform.cli.words import RecipeWords, split_words
from adaptive_platform.errors import UserError

__all__ = ["commands"]

_COMMAND_TIME = time.time()

commands = typer.Typer()


@commands.command()
def train(
    words: RecipeWords = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join, such as `auto`; a local Ray if absent.")
    ] = None,
) -> None:
    """Train a recipe (`quickstart` if none is named) to its end."""
    from rich.console import Console

    from adaptive_platform.cluster.launch import launch
    from adaptive_platform.cluster.trainer import resolve_recipe

    recipe, overrides = split_words(words or [])
    if address is not None:
        overrides.append(f"address={address}")
    result = launch(
        resolve_recipe(recipe, overrides), console=Console(), command_time=_COMMAND_TIME
    )
    if result.exit_code == 2:
        raise UserError(result.message)
    if result.exit_code == 1:
        typer.echo(f"failed: {result.message}", err=True)
    raise typer.Exit(result.exit_code)


@commands.command()
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP] [FIELD=VALUE]...",
            help="A shipped sweep or a YAML file, then fields of the sweep (budget.trials=4) or of "
            "all its trials' recipes (stop.epochs=2). `resume=DIR` goes on with a sweep.",
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join, such as `auto`; a local Ray if absent.")
    ] = None,
) -> None:
    """Run many trials of a recipe and find its best settings; list the shipped sweeps if none."""
    from rich.console import Console

    from adaptive_platform.sweeps.config import load_sweep, shipped_sweeps

    source, overrides = split_words(words or [])
    if address is not None:
        overrides.append(f"address={address}")
    resumed = [word.partition("=")[2] for word in overrides if word.startswith("resume=")]
    if source is None and not resumed:
        _list(shipped_sweeps())
        return
    # Ray reads it when it is imported. Trials are actors, which a small machine has many of for its
    # cores; Ray would warn of that between the lines of the sweep.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "PYTHON worker processes have been started")
    from adaptive_platform.sweeps.launch import resume_sweep, run_sweep

    if resumed:
        if source is not None or len(overrides) > 1 + (address is not None):
            raise UserError("resume: a sweep goes on as it began; leave the other words away.")
        found = resume_sweep(resumed[0])
        if address is not None:
            found = found.model_copy(update={"address": address})
    else:
        found = load_sweep(source or "", overrides)
    result = run_sweep(found, resume=resumed[0] if resumed else None, console=Console())
    if result.exit_code == 1:
        typer.echo("failed: every trial failed", err=True)
    raise typer.Exit(result.exit_code)


@commands.command()
def report(
    run_dirs: Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help="Run directories.")],
    out: Annotated[str, typer.Option(help="File to write.")] = "",
    form: Annotated[str, typer.Option("--format", help="html, png or md.")] = "html",
) -> None:
    """Write a report of one run, or compare several."""
    from adaptive_platform.report.run_data import read_run

    if form not in ("html", "png", "md"):
        raise UserError(f"--format = {form}: must be html, png or md.")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    if form == "md":
        from adaptive_platform.report.markdown import render_markdown

        typer.echo(render_markdown(runs))
        return
    target = out or (f"{run_dirs[0]}/report.{form}" if len(runs) == 1 else f"comparison.{form}")
    if form == "html":
        from adaptive_platform.report.html import write_html

        write_html(runs, target)
    else:
        from adaptive_platform.report.png import write_png

        write_png(runs, target)
    typer.echo(target)


@commands.command()
def replay(
    run_dir: Annotated[str, typer.Argument(help="Run directory of a recorded run.")],
    controller: Annotated[str, typer.Option(help="Kind of the batch controller to try.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Its other fields.")
    ] = None,
    out: Annotated[str, typer.Option(help="Also draw it: a file that ends in .html or .png.")] = "",
) -> None:
    """Say what another batch controller would have done with a run's recorded noise."""
    from rich.console import Console
    from rich.table import Table

    from adaptive_platform.report.plots import check_plot_path, write_plots
    from adaptive_platform.training.replaying import replay_run

    if out:
        check_plot_path(out, "--out")
    found = replay_run(run_dir, controller, settings or [])
    for line in found.lines():
        typer.echo(line)
    table = Table("course", "steps", "samples", "seconds", "changes", "last batch", box=None)
    for course in found.courses:
        seconds = "" if course.seconds is None else f"{course.seconds:.4g}"
        numbers = (course.steps, course.samples, seconds, course.changes, course.final_batch)
        table.add_row(course.name, *map(str, numbers))
    Console().print(table)
    if out:
        write_plots(found.plots, out, f"{controller}, replayed on {run_dir}")
        typer.echo(out)


@commands.command()
def doctor(
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to look at, such as `auto`.")
    ] = None,
    out: Annotated[str, typer.Option(help="Where runs are to be written.")] = "runs",
) -> None:
    """Check this machine, the cluster and the services around it; exit code 1 if runs will fail."""
    from rich.console import Console

    from adaptive_platform.cluster.doctor import examine

    console, bad = Console(), False
    for finding in examine(address, out):
        bad = bad or finding.state == "bad"
        fix = f"\n{'':16}→ {finding.fix}" if finding.fix else ""
        line = f"{finding.state:5}{finding.what:16}{finding.found}{fix}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(int(bad))


@commands.command()
def dashboards(
    out: Annotated[str, typer.Argument(help="Folder to write to.")] = "dashboards",
) -> None:
    """Write Grafana dashboards and Prometheus alert rules for the live metrics."""
    from pathlib import Path

    from adaptive_platform.report.dashboards import dashboard_files

    for name, text in dashboard_files().items():
        path = Path(out) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: can't be written ({error.strerror or error}).") from None
        typer.echo(str(path))


@commands.command()
def recipes() -> None:
    """List the shipped recipes."""
    from adaptive_platform.recipe import published_recipes, shipped_recipes

    shipped, small = shipped_recipes(), published_recipes()
    large = {name: text for name, text in shipped.items() if name.removesuffix("-imagenet") in small
             and name not in small}  # fmt: skip
    own = {name: text for name, text in shipped.items() if name not in small and name not in large}
    _list(own)
    typer.echo("\nPublished systems, small: digits and a small net, a minute on two cores")
    _list(small)
    typer.echo(
        "\nPublished systems, ResNet-50 on ImageNet: set data.train and data.eval to your folders"
    )
    _list(large)


def _list(found: dict[str, str]) -> None:
    width = max((len(name) for name in found), default=0)
    for name, description in found.items():
        typer.echo(f"{name:{width}}  {description}")
