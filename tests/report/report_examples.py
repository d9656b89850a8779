"""Made-up runs that look like real ones, for the tests of the report."""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any

from adaptive_platform.report import (
    DecisionRecord,
    EvalRecord,
    EventRecord,
    Journal,
    RunResult,
    StepRecord,
    write_result,
)

START = 1_790_000_000.0


def step_record(step: int, **changes: Any) -> StepRecord:
    """A plausible step; `changes` replace fields."""
    values: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "samples_seen": 32 * step,
        "scale_invariant_step": float(step),
        "world_size": 2,
        "global_batch": 32,
        "microbatch": 16,
        "accumulation": 1,
        "lr": 0.1,
        "gain": 1.0,
        "loss": 2.3 / step,
        "grad_sqnorm": 0.5,
        "samples_per_second": 100.0,
        "step_seconds": 0.32,
        "time": START + 0.32 * step,
    }
    return StepRecord(**{**values, **changes})


def write_run(
    run_dir: str | os.PathLike[str], *, steps: int = 400, seed: int = 0, name: str = "quickstart"
) -> None:
    """A run that doubles its batch now and then, loses a worker, skips a step, and ends well."""
    rng = random.Random(seed)
    journal = Journal(run_dir, None)
    batch, samples, moved, now = 32, 0, 0.0, START
    for step in range(1, steps + 1):
        share = step / steps
        noise = None if step < 8 else 40 * math.exp(3.2 * share + rng.gauss(0, 0.15))
        world = 1 if 0.5 < share < 0.62 else 2
        gain = 1.0 if noise is None else (noise / 32 + 1) / (noise / batch + 1)
        rate = 120 * world * (0.6 + 0.4 * batch / (batch + 64)) * rng.uniform(0.9, 1.05)
        seconds = batch / rate
        samples, moved, now = samples + batch, moved + gain, now + seconds
        common: dict[str, Any] = {"step": step, "epoch": int(4 * share), "samples_seen": samples}
        if step == steps // 3:
            journal.step(
                step_record(
                    step, skipped=True, loss=math.nan, grad_sqnorm=math.inf,
                    samples_seen=samples - batch, global_batch=batch, time=now,
                    step_seconds=seconds, lr=0.03, gain=gain, efficiency=gain * 32 / batch,
                    samples_per_second=rate,
                )
            )  # fmt: skip
        journal.step(
            StepRecord(
                **common,
                scale_invariant_step=moved,
                world_size=world,
                global_batch=batch,
                microbatch=min(batch // world, 64),
                accumulation=max(1, batch // world // 64),
                lr=0.02 * gain * 0.5 * (1 + math.cos(math.pi * share)),
                gain=gain,
                loss=2.3 * math.exp(-4 * share) * rng.uniform(0.75, 1.3) + 0.05,
                grad_sqnorm=rng.uniform(0.2, 2.0),
                noise_scale=noise,
                efficiency=gain * 32 / batch,
                samples_per_second=rate,
                step_seconds=seconds,
                data_seconds=0.04 * seconds * rng.uniform(0.5, 2),
                reduce_seconds=0.12 * seconds if world > 1 else 0.0,
                statistics_seconds=0.02 * seconds,
                accuracy=min(1.0, max(0.0, 1 - math.exp(-5 * share) + rng.gauss(0, 0.04))),
                time=now,
            )
        )
        if step % max(1, steps // 12) == 0 and noise is not None:
            bigger = min(512, batch * 2) if noise > 1.5 * batch else batch
            reason = (
                f"noise scale {noise:.0f} is above 1.5 x the batch of {batch}: double it"
                if bigger > batch
                else f"noise scale {noise:.0f} is within 1.5 x of the batch of {batch}: hold"
            )
            journal.decision(
                DecisionRecord(
                    **common, kind="noise_scale", old_batch=batch, new_batch=bigger, time=now,
                    reason=reason, inputs=json.dumps({"noise_scale": noise, "observations": step}),
                    candidates=json.dumps([{"batch": batch}, {"batch": 2 * batch}]),
                )
            )  # fmt: skip
            batch = bigger
        if step % max(1, steps // 4) == 0:
            now += 2.0
            journal.evaluation(
                EvalRecord(
                    **common, loss=2.1 * math.exp(-3.6 * share) + 0.06,
                    accuracy=1 - 0.9 * math.exp(-3.4 * share), samples=360, seconds=2.0, time=now,
                )
            )  # fmt: skip
        if step in (math.floor(0.5 * steps) + 1, math.floor(0.62 * steps) + 1):
            text = f"now {world} of 2 workers; the batch of {batch} is shared out again"
            journal.event(EventRecord(time=now, step=step, kind="resize", text=text))
        if step % max(1, steps // 5) == 0:
            text = f"checkpoints/step-{step}"
            journal.event(
                EventRecord(time=now, step=step, kind="checkpoint", text=text, seconds=0.4)
            )
    journal.event(
        EventRecord(time=now, step=steps, kind="broken_sample", text="train/7/a.jpg is cut short")
    )
    journal.flush()
    recipe = (
        f"name: {name}\nseed: {seed}\nmodel:\n  kind: torchvision\n  name: resnet50\n"
        "batch:\n  kind: noise_scale\n  largest: 512\noptimizer:\n  kind: sgd\n  lr: 0.02\n"
    )
    with open(os.path.join(run_dir, "recipe.yaml"), "w", encoding="utf-8") as file:
        file.write(recipe)
    write_result(
        run_dir,
        RunResult(
            status="done", exit_code=0, accuracy=0.97, loss=0.11, steps=steps, samples=samples,
            epochs=4.0, seconds=now - START + 14.0, skipped_steps=1, broken_samples=1,
            startup_seconds={"ray": 3.1, "workers": 5.4, "first_step": 2.0}, decisions=4,
            initial_batch=32, final_batch=batch, workers=2,
            outputs={"report": os.path.join(run_dir, "report.html")},
        ),
    )  # fmt: skip
