"""`Run`: for people who keep their own Ray Train loop."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.cluster.directory import hold
from adaptive_platform.cluster.recorder import Recorder
from adaptive_platform.cluster.rendezvous import meet
from adaptive_platform.cluster.trainer import resolve_recipe, with_own_data
from adaptive_platform.data import DataSource, wrap_dataset
from adaptive_platform.gradients.loss import SampleLoss
from adaptive_platform.recipe import Recipe
from adaptive_platform.report.journal import Journal
from adaptive_platform.report.run_data import RECIPE_NAME
from adaptive_platform.storage import join, open_location, write_bytes
from adaptive_platform.training.run import TrainingRun

__all__ = ["Run"]


class Run(TrainingRun):
    """One worker's part of a run inside a plain Ray Train loop.

        def loop(config):
            with ap.Run("quickstart", model, (train_set, test_set)) as run:
                for batch in run:
                    with run.autocast():
                        outputs = model(batch.inputs)
                        losses = F.cross_entropy(outputs, batch.targets, reduction="none")
                    run.backward(losses, outputs)

    Batch, learning rate, reduction, optimizer, evaluation and checkpoints happen inside the
    iteration. `backward` takes one loss per sample, so the scaling can't be got wrong. Every worker
    has to run the loop to its end; `ask_to_stop` on any of them ends it on all.

    What stays the loop's own, whatever the recipe says: the model, the loss in training, the number
    of workers and what happens to lost ones, and signals.

    Args:
        recipe: As for `ap.train`; with `out` the run is recorded and saved there, and goes on from
            the newest checkpoint when the loop is started again.
        model: The module, on its device; equal on all workers or made so.
        data: A map-style data set, `(train, eval)`, an opened `DataSource`, or None for the
            recipe's data.
        overrides: `field=value` words.
        loss: Losses per sample for evaluation; the recipe's cross entropy where None.

    Raises:
        UserError: Recipe, data or checkpoint can't be used, or another process is at work in the
            run directory.
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
        if data is not None and not isinstance(data, DataSource):
            resolved = with_own_data(resolved)
        membership, _ = meet(resolved.reducer.timeout_seconds)
        run_dir = resolved.resume or resolved.out
        keeps = membership.rank == 0 and run_dir is not None
        self._recorder = Recorder(None, resolved.report.flush_seconds, first=membership.rank == 0)
        with ExitStack() as held:
            if keeps and run_dir:
                held.enter_context(hold(run_dir))
            super().__init__(
                resolved,
                model,
                _source(data, resolved),
                resolved.data,
                membership,
                loss=loss,
                store=CheckpointStore(run_dir, self._recorder.saved_in)
                if keeps and run_dir
                else None,
                observer=self._recorder,
                must_resume=resolved.resume is not None,
            )
            if keeps and run_dir:
                self._begin_records(run_dir, resolved)
            self._held = held.pop_all()

    def _begin_records(self, run_dir: str, recipe: Recipe) -> None:
        journal = Journal(
            run_dir,
            resume_step=self.progress.step,
            skipped=self.state.skipped_in_a_row,
            epoch=self.progress.epoch,
        )
        self._recorder.open(journal)
        system, root = open_location(run_dir)
        stored = recipe.model_copy(update={"out": run_dir, "resume": None})
        write_bytes(system, join(root, RECIPE_NAME), stored.to_yaml().encode())

    def ask_to_stop(self) -> None:
        """Let all workers finish the step in hand, save, and end their loops."""
        self._recorder.ask_to_stop()

    def close(self) -> None:
        """Finish checkpoint and records, end process groups. Safe to call twice."""
        super().close()
        self._recorder.close()
        self._held.close()


def _source(data: Any, recipe: Recipe) -> DataSource:
    if data is None:
        return recipe.data.open()
    if isinstance(data, DataSource):
        return data
    train, evaluation = data if isinstance(data, tuple) else (data, None)
    return wrap_dataset(train, evaluation)
