"""`bench`: measure ours against a baseline, in turn within one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from adaptive_platform.bench.rows import Row, print_rows

__all__ = ["commands"]

commands = typer.Typer(
    no_args_is_help=True, help="Measure ours against a baseline, in turn within one run."
)

_Quick = Annotated[bool, typer.Option("--quick", help="End within a minute, with less certainty.")]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@commands.command()
def overhead(
    quick: _Quick = False,
    as_json: _AsJson = False,
    case: Annotated[
        str, typer.Option(help="Only this case, such as resnet18 or resnet18-memory.")
    ] = "",
) -> None:
    """The loop and its statistics against bare DDP, fairscale and AdaptDL."""
    from adaptive_platform.bench.overhead import overhead as measure

    _print(*measure(quick=quick, case=case), as_json=as_json)


@commands.command()
def chaos(
    quick: _Quick = False,
    as_json: _AsJson = False,
    case: Annotated[
        list[str] | None, typer.Option(help="Only this scenario, such as kill-reduction.")
    ] = None,
    out: Annotated[
        str,
        typer.Option(help="Folder of the table; scenarios in it as expected aren't played again."),
    ] = "",
    soak: Annotated[
        float, typer.Option(help="Random trouble for so many minutes instead.", metavar="MINUTES")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of random trouble.")] = 0,
) -> None:
    """Runs in trouble: kills, drains, new nodes; how long it takes, and that nothing is lost."""
    from adaptive_platform.bench.chaos import chaos as measure
    from adaptive_platform.bench.chaos import rows_of

    say = partial(print, file=sys.stderr, flush=True)
    found = measure(quick=quick, cases=case or (), soak_minutes=soak, seed=seed, out=out, say=say)
    _print(rows_of(found), (), as_json=as_json)
    if not all(finding.as_expected or finding.was_not_run for finding in found):
        raise typer.Exit(1)


@commands.command()
def recovery(quick: _Quick = False, as_json: _AsJson = False) -> None:
    """From a killed worker to the next step, against Ray Train's restart and torchrun elastic."""
    from adaptive_platform.bench.recovery import recovery as measure

    _print(
        measure(quick=quick, say=partial(print, file=sys.stderr, flush=True)), (), as_json=as_json
    )


@commands.command()
def optimizers(
    quick: _Quick = False,
    as_json: _AsJson = False,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this stage, such as 'resnet50 at 224x224, 32 per worker'."),
    ] = None,
) -> None:
    """Steps of each optimizer against torch's own and kfac-pytorch."""
    from adaptive_platform.bench.optimizers import optimizers as measure

    _print(measure(quick=quick, stages=tuple(case or ())), (), as_json=as_json)


@commands.command("input")
def input_pipeline(
    quick: _Quick = False,
    as_json: _AsJson = False,
    data: Annotated[
        str, typer.Option(help="Folder of pictures to read; some are made if absent.")
    ] = "",
) -> None:
    """Pictures to batches against torchvision's ImageFolder."""
    from adaptive_platform.bench.input import input_pipeline as measure

    _print(*measure(quick=quick, data=data), as_json=as_json)


@commands.command()
def recipes(
    quick: _Quick = False,
    as_json: _AsJson = False,
    out: Annotated[
        str,
        typer.Option(help="Folder of the results; finished runs in it are not made again."),
    ] = "",
    images: Annotated[
        str, typer.Option(help="Folder with train.parquet and test.parquet, not digits.")
    ] = "",
    cards: Annotated[
        str, typer.Option(help="Folder of the recipes' cards, to be renewed from the results.")
    ] = "",
) -> None:
    """The published systems' small forms, several seeds each, as one table."""
    from adaptive_platform.bench.recipes import recipes as measure

    _print(measure(quick=quick, out=out, images=images, cards=cards), (), as_json=as_json)


@commands.command()
def collectives(
    quick: _Quick = False,
    as_json: _AsJson = False,
    out: Annotated[str, typer.Option(help="File for the links that `reducer.links` reads.")] = "",
    workers: Annotated[list[int] | None, typer.Option(help="Numbers of workers.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="Message sizes, such as 64KB or 25MB.")
    ] = None,
    plan: Annotated[list[str] | None, typer.Option(help="Plans, such as torus.")] = None,
    address: Annotated[
        str,
        typer.Option(help="Measure the links of a Ray cluster's own workers, such as `auto`."),
    ] = "",
) -> None:
    """Reduction plans against Gloo's own all-reduce, and what the links can do."""
    from adaptive_platform.bench.collectives import collectives as measure
    from adaptive_platform.bench.collectives import read_sizes

    rows = measure(
        quick=quick,
        out=out,
        workers=workers or (),
        sizes=read_sizes(size or ()),
        plans=plan or (),
        address=address,
    )
    _print(rows, (), as_json=as_json)


@commands.command()
def overlap(quick: _Quick = False, as_json: _AsJson = False) -> None:
    """Reduction time that a ResNet-50 step shows, against the reduction by itself."""
    from adaptive_platform.bench.overlap import overlap as measure

    _print(measure(quick=quick), (), as_json=as_json)


def _print(rows: list[Row], notes: Sequence[str], *, as_json: bool) -> None:
    from rich.console import Console

    print_rows(rows, as_json=as_json, console=Console())
    for note in notes:
        print(note, file=sys.stderr)
