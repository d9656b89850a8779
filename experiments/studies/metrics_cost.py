"""What live records and metrics cost a step: CPU time of the training thread, with a real mailbox.

    python experiments/studies/metrics_cost.py [STEPS] [STEP_MILLISECONDS]

The thread that trains hands over each step, asks whether it is to stop, and sleeps the rest of the
step, as if it computed; what it spends on the two is taken with `time.thread_time`, which other
programs hardly change.
"""

from __future__ import annotations

import sys
import time

import ray

from adaptive_platform.cluster.mailbox import MailboxClient, open_mailbox
from adaptive_platform.report.records import StepRecord


def record(number: int) -> StepRecord:
    """A step with everything measured, as rank 0 would make it."""
    return StepRecord(
        step=number, epoch=0, samples_seen=32 * number, scale_invariant_step=float(number),
        world_size=2, global_batch=32, microbatch=16, accumulation=1, lr=0.1, gain=1.0, loss=1.0,
        grad_sqnorm=1.0, noise_scale=80.0, noise_trace=8.0, signal_sqnorm=0.1, gsnr=0.5,
        samples_per_second=100.0, step_seconds=0.04, data_seconds=0.001, reduce_seconds=0.004,
        statistics_seconds=0.001, accuracy=0.5, time=time.time(),
    )  # fmt: skip


def cost(client: MailboxClient, steps: int, step_seconds: float) -> float:
    """CPU seconds per step of the thread that hands steps over."""
    spent = 0.0
    for number in range(1, steps + 1):
        made = record(number)
        began = time.thread_time()
        client.send("step", made, number / steps)
        asked = client.stop_requested or client.changing is not None
        spent += time.thread_time() - began
        assert not asked
        time.sleep(step_seconds)
    return spent / steps


def main() -> None:
    """Print the cost with metrics and without."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    milliseconds = float(sys.argv[2]) if len(sys.argv) > 2 else 40.0
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=128 * 2**20,
    )  # fmt: skip
    labels = {"run": "cost", "recipe": "cost", "sweep": ""}
    for name, given in (("records and metrics", labels), ("records alone", None)):
        mailbox = open_mailbox(given)
        ray.get(mailbox.collect.remote())  # its process is there
        client = MailboxClient(mailbox)
        cost(client, 50, milliseconds / 1000)
        spent = 1000 * cost(client, steps, milliseconds / 1000)
        client.flush()
        share = 100 * spent / milliseconds
        print(f"{name}: {spent:.3f} ms a step, {share:.2f} % of a step of {milliseconds:g} ms")


if __name__ == "__main__":
    main()
