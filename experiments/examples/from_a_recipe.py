"""Door 1: everything from a recipe, changed in two places."""

import sys

from rich.console import Console

import adaptive_platform as ap

if __name__ == "__main__":
    result = ap.train(
        "quickstart",
        "model.name=resnet8_cifar",
        "stop.epochs=2",
        *sys.argv[1:],
        console=Console(),
    )
    print(f"{result.status}: {result.steps} steps, held-out accuracy {result.accuracy:.3f}")
