"""`environment.json`: the software and machine a run was driven from, written once per attempt."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from adaptive_platform.storage import join, open_location, write_bytes

__all__ = ["ENVIRONMENT_NAME", "describe_environment", "write_environment"]

ENVIRONMENT_NAME = "environment.json"
_PACKAGES = ("adaptive-platform", "torch", "torchvision", "ray", "torchft-nightly", "torchft")


def describe_environment(resources: Mapping[str, float]) -> dict[str, str]:
    """What it is, and its value, in words.

    Args:
        resources: Of the whole Ray cluster, as `ray.cluster_resources()` gives them.
    """
    found = {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "CPUs of the driver's machine": str(os.cpu_count() or 0),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    nodes = [name for name in resources if name.startswith("node:") and "__" not in name]
    amounts = [f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind)]
    found["cluster"] = f"{len(nodes)} node(s), {', '.join(amounts)}"
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    if kinds:
        found["accelerators"] = ", ".join(sorted(kinds))
    return found


def write_environment(run_dir: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Write `environment.json` whole or not at all.

    Raises:
        OSError: The storage refused.
    """
    system, root = open_location(run_dir)
    text = json.dumps(dict(found), indent=2) + "\n"
    write_bytes(system, join(root, ENVIRONMENT_NAME), text.encode())
