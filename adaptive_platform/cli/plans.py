"""`plan`: say what will happen, before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from adaptive_platform.cli.words import split_words
from adaptive_platform.errors import UserError

__all__ = ["commands"]


class _DefaultsToCollectives(typer.core.TyperGroup):
    """`plan --workers 2048 ...` means `plan collectives --workers 2048 ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("--") and args[0] != "--help":
            args = ["collectives", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(
    cls=_DefaultsToCollectives,
    no_args_is_help=True,
    help="Say what will happen, before anything runs.",
)


@commands.command("schedule")
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


@commands.command("parameters")
def plan_parameters(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [FIELD=VALUE]...", help="As for train.")
    ] = None,
    classes: Annotated[int, typer.Option(help="Classes that the model tells apart.")] = 10,
) -> None:
    """List which parameters decay, which are excluded, and which are preconditioned."""
    from adaptive_platform.optimizers import ListeningOptimizer, describe_groups
    from adaptive_platform.recipe import load_recipe

    name, overrides = split_words(words or [])
    recipe = load_recipe(name or "quickstart", overrides)
    optimizer = recipe.optimizer.build_for(recipe.model.build(classes, recipe.seed))
    typer.echo(describe_groups(optimizer))
    if isinstance(optimizer, ListeningOptimizer):
        typer.echo(optimizer.describe())


@commands.command("collectives")
def plan_collectives(
    workers: Annotated[list[int], typer.Option(help="Number of workers; may be repeated.")],
    model: Annotated[str, typer.Option(help="Model, such as resnet50; or give --mib.")] = "",
    network: Annotated[
        str, typer.Option(help="10gbe, 25gbe, 100gbe, edr, 2xedr or hdr, for the four below.")
    ] = "",
    fit: Annotated[
        str,
        typer.Option(help="Fit latency to a published efficiency first, such as 32x32:84.75%."),
    ] = "",
    batch: Annotated[int, typer.Option(help="Samples of one worker and step.")] = 32,
    images_per_second: Annotated[
        float | None, typer.Option(help="Speed of one worker alone; V100 for resnet50 if absent.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Length of training.")] = 90.0,
    samples: Annotated[int, typer.Option(help="Size of the training set.")] = 1_281_167,
    image_size: Annotated[int, typer.Option(help="Side of an image in pixels.")] = 224,
    element_bytes: Annotated[
        float, typer.Option(help="Bytes of one gradient number on the wire.")
    ] = 4.0,
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
        typer.Option(help="Forward and backward of a step, in the place of batch and speed."),
    ] = None,
    bucket_mib: Annotated[float, typer.Option(help="Size of a bucket for the overlap.")] = 25.0,
    out: Annotated[
        str, typer.Option(help="Also draw it over the workers: a file in .html or .png.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Price every reduction plan for a cluster that need not exist."""
    from dataclasses import replace

    from rich.console import Console

    from adaptive_platform.bench.networks import links_of_network
    from adaptive_platform.bench.plan_pictures import counts_up_to, write_plans
    from adaptive_platform.bench.planner import Question, answer
    from adaptive_platform.bench.plans import make_links, print_plans, read_grid, read_links

    if links and network:
        raise UserError("--links and --network: give one of the two.")
    if links:
        chosen = read_links(links)
    elif network:
        chosen = links_of_network(network)
    else:
        chosen = make_links(alpha, beta, local_alpha, local_beta)
    question = Question(
        workers=tuple(workers),
        links=chosen,
        model=model,
        image_size=image_size,
        message_bytes=mib * 2**20,
        element_bytes=element_bytes,
        bucket_bytes=bucket_mib * 2**20,
        grid=read_grid(grid) if grid else None,
        workers_per_node=workers_per_node,
        batch=batch,
        images_per_second=images_per_second,
        compute_seconds=compute_seconds,
        samples=samples,
        epochs=epochs,
        fit=fit,
    )
    rows, fitted = answer(question)
    print_plans(rows, as_json=as_json, console=Console())
    if fit:
        latency = fitted.remote.latency_seconds * 1e6
        typer.echo(f"latency fitted to {fit}: {latency:.3g} microseconds a message", err=True)
    if out:
        if len(workers) == 1 and workers_per_node == 1:
            counts = tuple(counts_up_to(workers[0]))
            rows, _ = answer(replace(question, workers=counts, grid=None))
        write_plans(rows, f"{model or 'gradients'} on up to {max(workers):,} workers", out)
        typer.echo(out)
