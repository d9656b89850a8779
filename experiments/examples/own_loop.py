"""Door 3: your own Ray Train loop keeps its shape; the batch, the rate and the sums are ours."""

import sys

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional as F

import adaptive_platform as ap


def loop(config: dict) -> None:
    recipe = ap.load_recipe("quickstart", ["model.name=resnet8_cifar", *config["overrides"]])
    source = recipe.data.open()
    model = recipe.model.build(len(source.classes), recipe.seed)
    with ap.Run(recipe, model, source) as run:
        for batch in run:  # micro-batches; an optimizer step ends inside whenever one is complete
            outputs = model(batch.inputs)
            losses = F.cross_entropy(outputs, batch.targets, reduction="none")  # one per sample
            run.backward(losses, outputs)
        accuracy = run.state.accuracy
        print(f"rank {run.reducer.rank}: {run.progress.step} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        loop,
        train_loop_config={"overrides": ["stop.epochs=2", *sys.argv[2:]]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1] if len(sys.argv) > 1 else None),
    ).fit()
