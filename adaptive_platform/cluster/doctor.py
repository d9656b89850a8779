"""`doctor`: what a run will find here, checked in a few seconds; each trouble with its way out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adaptive_platform.errors import UserError
from adaptive_platform.storage import is_local, join, open_location, write_bytes

__all__ = ["Finding", "examine"]

_SECONDS = 3.0
_LOW_DISK_BYTES = 5 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    """What was looked at."""
    state: Literal["ok", "note", "bad"]
    """`note`: works, with something left out; `bad`: runs will fail."""
    found: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty where there is nothing to do."""


def examine(address: str | None, out: str) -> Iterator[Finding]:
    """Look at everything, one finding after the other.

    Args:
        address: Ray cluster to join; None for RAY_ADDRESS, else none is joined.
        out: Where runs are to be written.
    """
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _torch,
        _ray,
        lambda: _cluster(address or os.environ.get("RAY_ADDRESS")),
        _authentication,
        _host,
        lambda: _directory(out),
        lambda: _service("Prometheus", "RAY_PROMETHEUS_HOST", "http://localhost:9090", "/-/ready"),
        lambda: _service("Grafana", "RAY_GRAFANA_HOST", "http://localhost:3000", "/api/health"),
    )
    for check in checks:
        yield check()


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} in {sys.prefix}")


def _torch() -> Finding:
    import torch

    version, cuda = f"torch {torch.__version__}", torch.version.cuda
    if not torch.cuda.is_available():
        built = "a CPU build" if cuda is None else f"built for CUDA {cuda}"
        fix = "" if cuda is None else "where there is a GPU, look at its driver with nvidia-smi"
        return Finding("torch", "note", f"{version}, {built}, no GPU is seen: Gloo on CPUs", fix)
    cards = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if not torch.distributed.is_nccl_available():
        return Finding("torch", "bad", f"{version}, {cards}, no NCCL", "install a build with NCCL")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding("torch", "ok", f"{version}, {cards}, CUDA {cuda}, NCCL {nccl}")


def _ray() -> Finding:
    version = f"Ray {importlib.metadata.version('ray')}"
    if importlib.util.find_spec("aiohttp_cors") is None:
        return Finding(
            "Ray", "note", f"{version} without dashboard, jobs and metrics",
            "pip install 'ray[default]'",
        )  # fmt: skip
    return Finding("Ray", "ok", f"{version} with dashboard, jobs and metrics")


def _cluster(address: str | None) -> Finding:
    if not address or address == "local":
        cpus = os.cpu_count()
        return Finding("cluster", "ok", f"none named: runs start a Ray of {cpus} CPUs here")
    import ray

    from adaptive_platform.cluster.ray_session import probe

    try:
        probe(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (UserError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        return Finding("cluster", "bad", f"{address}: {reason}", "start it with `ray start --head`")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        have, free = ray.cluster_resources(), ray.available_resources()
        amounts = ", ".join(
            f"{free.get(kind, 0):g} of {have[kind]:g} {kind} free"
            for kind in ("CPU", "GPU")
            if have.get(kind)
        )
        return Finding("cluster", "ok", f"{address}: {len(nodes)} node(s), {amounts}")
    finally:
        ray.shutdown()


def _authentication() -> Finding:
    mode = os.environ.get("RAY_AUTH_MODE", "")
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or token.is_file()
    if mode == "disabled":
        return Finding(
            "authentication", "note", "switched off by RAY_AUTH_MODE",
            "keep the cluster's ports inside your network",
        )  # fmt: skip
    if mode == "token" and not has_token:
        return Finding(
            "authentication", "bad", "RAY_AUTH_MODE=token and no token",
            "copy the cluster's token to ~/.ray/auth_token, or run `ray get-auth-token --generate`",
        )  # fmt: skip
    if has_token:
        return Finding("authentication", "ok", "a token is there; Ray uses it")
    return Finding("authentication", "note", "no token yet; Ray makes one for a local cluster")


def _host() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding(
            "host name", "bad", f"{name} does not resolve, so workers can't find each other",
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )  # fmt: skip
    return Finding("host name", "ok", f"{name} is {address}")


def _directory(out: str) -> Finding:
    made: Path | None = None
    try:
        system, root = open_location(out)
        if is_local(system) and not Path(root).exists():
            made = Path(root)
        system.create_dir(root, recursive=True)
        probe = join(root, ".doctor")
        write_bytes(system, probe, b"ok")
        system.delete_file(probe)
    except (OSError, ValueError) as error:  # a UserError is one of the latter
        return Finding(
            "run directory", "bad", f"{out} can't be written ({error})",
            "choose another with out=DIR",
        )  # fmt: skip
    if not is_local(system):
        return Finding("run directory", "ok", f"{out} can be written")
    free = shutil.disk_usage(root).free
    if made is not None:
        made.rmdir()
    told = f"{root} can be written, {free / 2**30:.0f} GiB free"
    if free < _LOW_DISK_BYTES:
        return Finding("run directory", "note", told, "checkpoints may fill it: make room")
    return Finding("run directory", "ok", told)


def _service(what: str, variable: str, default: str, path: str) -> Finding:
    host = os.environ.get(variable, default)
    try:
        with urllib.request.urlopen(host.rstrip("/") + path, timeout=_SECONDS):
            return Finding(what, "ok", f"answers at {host}")
    except urllib.error.HTTPError as error:
        return Finding(what, "note", f"{host} answers {error.code}", f"set {variable}")
    except (OSError, ValueError) as error:
        reason: Any = getattr(error, "reason", error)
        return Finding(
            what, "note", f"nobody answers at {host} ({reason}): no live panels",
            f"start it, or set {variable}; runs need neither",
        )  # fmt: skip
