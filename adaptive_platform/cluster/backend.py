"""What Ray Train does around our workers: signals, early imports, and no actor without a use.

Ray's TorchTrainer would start a default process group, which can't outlive a lost peer, and pull
torch into its controller, which costs seconds of start-up; a backend without both is enough here.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

__all__ = ["AdaptiveBackendConfig", "LeanTrainer", "prepare_worker", "stop_signalled"]

_stop = threading.Event()


def stop_signalled() -> bool:
    """True when this worker process received SIGTERM since training began."""
    return _stop.is_set()


def _on_signal(number: int, frame: FrameType | None) -> None:
    _stop.set()


def prepare_worker() -> None:
    """Runs on the worker's main thread; training itself runs on another one, which can't do this.

    A preempted node sends SIGTERM: all workers then finish the step, save and leave together.
    """
    _stop.clear()
    signal.signal(signal.SIGTERM, _on_signal)
    threading.Thread(target=_import_early, name="early-import", daemon=True).start()


def _import_early() -> None:
    # The slowest import, begun while Ray still wires the workers up.
    import adaptive_platform.cluster.worker  # noqa: F401


class _AdaptiveBackend(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(prepare_worker)


class AdaptiveBackendConfig(BackendConfig):
    """Names the backend to Ray Train."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend's class."""
        return _AdaptiveBackend


class LeanTrainer(DataParallelTrainer):
    """Ray Train without processes that have nothing to do here.

    With a mailbox, lost workers are the business of those that are left; see `failure.py`.

    We pass no Ray Data sets, so nobody need shard them. The actor that frees the workers' place
    after their controller died asks Ray's dashboard; where Ray has none it learns nothing, and
    Ray Train can wait for its end for twelve seconds (seen with 2.60). Each is a process that
    starts while the workers import torch, for one to two seconds of start-up on a small machine.
    Should Ray rename a callback, it comes back and nothing else changes.
    """

    mailbox: Any = None

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        if self.mailbox is not None:
            from adaptive_platform.cluster.failure import LiveFailurePolicy

            config = self.run_config.failure_config
            kwargs["failure_policy"] = LiveFailurePolicy(config, self.mailbox)
        return super()._initialize_and_run_controller(**kwargs)

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        idle = {"DatasetsCallback"}
        if not _has_dashboard():
            idle.add("PlacementGroupCleanerCallback")
        return [c for c in callbacks if type(c).__name__ not in idle]


def _has_dashboard() -> bool:
    """True where this Ray has a dashboard, or doesn't say."""
    try:
        from ray._private.services import get_webui_url_from_internal_kv

        return get_webui_url_from_internal_kv() != ""
    except (ImportError, AssertionError):
        return True
