"""The command line: read words, call a function, print."""

from __future__ import annotations

import sys
import time
from enum import Enum
from typing import Annotated

import typer

from adaptive_platform.errors import UserError

__all__ = ["app", "main"]

_COMMAND_TIME = time.time()

app = typer.Typer(
    name="adaptive-platform",
    help="Elastic, adaptive-batch training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [FIELD=VALUE]...",
        help="A shipped recipe or a YAML file, then fields to change, such as workers=2.",
    ),
]


@app.command()
def train(
    words: _Words = None,
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


@app.command()
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
    from adaptive_platform.sweeps.launch import resume_sweep, run_sweep

    if resumed:
        if source is not None or len(overrides) > 1 + (address is not None):
            raise UserError("resume: a sweep goes on as it began; leave the other words away.")
        found = resume_sweep(resumed[0]).model_copy(update={"address": address})
    else:
        found = load_sweep(source or "", overrides)
    result = run_sweep(found, resume=resumed[0] if resumed else None, console=Console())
    if result.exit_code == 1:
        typer.echo("failed: every trial failed", err=True)
    raise typer.Exit(result.exit_code)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from adaptive_platform.recipe import shipped_recipes

    _list(shipped_recipes())


def _list(found: dict[str, str]) -> None:
    width = max((len(name) for name in found), default=0)
    for name, description in found.items():
        typer.echo(f"{name:{width}}  {description}")


class _Bench(str, Enum):
    overhead = "overhead"
    collectives = "collectives"
    optimizers = "optimizers"
    chaos = "chaos"


@app.command()
def bench(
    name: Annotated[_Bench, typer.Argument(help="What to measure.")],
    quick: Annotated[bool, typer.Option(help="End within a minute, with less certainty.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    out: Annotated[
        str, typer.Option(help="collectives: file for the links that `reducer.links` reads.")
    ] = "",
    case: Annotated[
        str,
        typer.Option(
            help="overhead: only this case, such as resnet18 or resnet18-memory; chaos: only "
            "scenarios with this in their name."
        ),
    ] = "",
) -> None:
    """Measure ours against a baseline, in turn within one run."""
    from rich.console import Console

    from adaptive_platform.bench.collectives import collectives
    from adaptive_platform.bench.optimizers import optimizers
    from adaptive_platform.bench.overhead import overhead
    from adaptive_platform.bench.rows import print_rows

    if out and name is not _Bench.collectives:
        raise UserError(f"--out = {out}: only `bench collectives` writes a file.")
    if case and name not in (_Bench.overhead, _Bench.chaos):
        raise UserError(f"--case = {case}: only `bench overhead` and `bench chaos` have cases.")
    notes: list[str] = []
    if name is _Bench.overhead:
        rows, notes = overhead(quick=quick, case=case)
    elif name is _Bench.chaos:
        from functools import partial

        from adaptive_platform.bench.chaos import chaos

        rows = chaos(quick=quick, case=case, say=partial(print, file=sys.stderr, flush=True))
    elif name is _Bench.optimizers:
        rows = optimizers(quick=quick)
    else:
        rows = collectives(quick=quick, out=out)
    print_rows(rows, as_json=as_json, console=Console())
    for note in notes:
        print(note, file=sys.stderr)


plan = typer.Typer(no_args_is_help=True, help="Say what will happen, before anything runs.")
app.add_typer(plan, name="plan")


@plan.command("schedule")
def plan_schedule(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [FIELD=VALUE]...", help="As for train.")
    ] = None,
    out: Annotated[str, typer.Option(help="Also draw it: a file that ends in .html or .png.")] = "",
    samples: Annotated[
        int, typer.Option(help="Training samples, which turn epochs into steps.")
    ] = 50_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show learning rate, batch, momentum and weight decay over a recipe's run."""
    from rich.console import Console

    from adaptive_platform.bench.rate_plans import print_rate_plan, write_rate_plan
    from adaptive_platform.recipe import load_recipe
    from adaptive_platform.training.rate_plan import plan_rates

    if samples < 1:
        raise UserError(f"--samples = {samples}: must be at least 1.")
    name, overrides = split_words(words or [])
    recipe = load_recipe(name or "quickstart", overrides)
    found = plan_rates(recipe, dataset_size=samples)
    print_rate_plan(found, as_json=as_json, console=Console())
    if out:
        write_rate_plan(found, recipe.name, out)
        typer.echo(out)


@plan.command("collectives")
def plan_collectives(
    workers: Annotated[int, typer.Option(help="Number of workers.")],
    mib: Annotated[float, typer.Option(help="Gradients of one worker, in MiB.")] = 97.5,
    grid: Annotated[str, typer.Option(help="Rows x row length of the torus, such as 32x64.")] = "",
    workers_per_node: Annotated[int, typer.Option(help="Workers that share a machine.")] = 1,
    alpha: Annotated[float, typer.Option(help="Seconds a message takes however short.")] = 50e-6,
    beta: Annotated[float, typer.Option(help="Seconds per byte between machines.")] = 0.8e-9,
    local_alpha: Annotated[float, typer.Option(help="Like alpha, inside a machine.")] = 20e-6,
    local_beta: Annotated[float, typer.Option(help="Like beta, inside a machine.")] = 0.2e-9,
    links: Annotated[
        str, typer.Option(help="File of `bench collectives --out`, in place of the four above.")
    ] = "",
    compute_seconds: Annotated[
        float | None,
        typer.Option(help="Forward and backward of a step: adds overlap and efficiency."),
    ] = None,
    bucket_mib: Annotated[float, typer.Option(help="Size of a bucket for the overlap.")] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Price every reduction plan for a cluster that need not exist."""
    from rich.console import Console

    from adaptive_platform.bench.plans import (
        Step,
        make_links,
        price_plans,
        print_plans,
        read_grid,
        read_links,
    )

    step = None
    if compute_seconds is not None:
        step = Step(compute_seconds=compute_seconds, bucket_bytes=bucket_mib * 2**20)
    rows = price_plans(
        workers,
        read_links(links) if links else make_links(alpha, beta, local_alpha, local_beta),
        mib * 2**20,
        workers_per_node=workers_per_node,
        grid=read_grid(grid) if grid else None,
        step=step,
    )
    print_plans(rows, as_json=as_json, console=Console())


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Tell the recipe from the `field=value` words.

    Raises:
        UserError: A second word that is not an override.
    """
    if words and "=" not in words[0]:
        recipe, rest = words[0], words[1:]
    else:
        recipe, rest = None, words
    for word in rest:
        if "=" not in word:
            raise UserError(f"{word}: write overrides as field=value, such as workers=2.")
    return recipe, list(rest)


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
