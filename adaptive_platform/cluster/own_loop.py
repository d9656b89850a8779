"""`Run`: for people who keep their own Ray Train loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.backend import stop_signalled
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.cluster.rendezvous import meet
from adaptive_platform.cluster.trainer import resolve_recipe
from adaptive_platform.data import DataSource, PythonConfig, wrap_dataset
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.journal import Journal
from adaptive_platform.training.run import TrainingRun

__all__ = ["Run"]


class Run(TrainingRun):
    """One worker's part of a run inside a plain Ray Train loop.

        def loop(config):
            run = ap.Run("quickstart", model, (train_set, test_set))
            for batch in run:
                outputs = run.model(batch.inputs)
                run.backward(F.cross_entropy(outputs, batch.targets, reduction="none"), outputs)

    Batch, learning rate, reduction, optimizer, evaluation and checkpoints happen inside the
    iteration. `backward` takes one loss per sample, so the scaling can't be got wrong.

    Args:
        recipe: As for `ap.train`; with `out` the run is recorded and saved there, and goes on from
            the newest checkpoint when the loop is started again.
        model: The module, on its device; equal on all workers or made so.
        data: A map-style data set, `(train, eval)`, or nothing for the recipe's data.
        overrides: `field=value` words.
        loss: Losses per sample for evaluation; the recipe's cross entropy where None.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path | dict[str, Any],
        model: nn.Module,
        data: Any = None,
        *overrides: str,
        loss: SampleLoss | None = None,
    ) -> None:
        resolved = resolve_recipe(recipe, list(overrides))
        if data is not None and resolved.data.kind != "python":
            resolved = resolved.model_copy(update={"data": PythonConfig()})
        membership = meet(resolved.reducer.timeout_seconds)
        run_dir = resolved.resume or resolved.out
        keeps = membership.rank == 0 and run_dir is not None
        self._recorder = Recorder(None, resolved.report.flush_seconds)
        super().__init__(
            resolved,
            model,
            _source(data, resolved),
            resolved.data,
            membership,
            loss=loss,
            store=CheckpointStore(run_dir) if keeps and run_dir else None,
            observer=self._recorder,
            must_resume=resolved.resume is not None,
        )
        if keeps and run_dir:
            self._recorder.open(Journal(run_dir, resume_step=self.progress.step))

    @property
    def stopping(self) -> bool:
        """True when this worker was told to leave."""
        return stop_signalled()

    def close(self) -> None:
        """Write the records and end process groups."""
        self._recorder.close()
        super().close()


def _source(data: Any, recipe: Recipe) -> DataSource:
    if data is None:
        return recipe.data.open()
    if isinstance(data, DataSource):
        return data
    train, evaluation = data if isinstance(data, tuple) else (data, None)
    return wrap_dataset(train, evaluation)
