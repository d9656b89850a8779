"""Submit a run to a Ray cluster, follow its log, and end as it ends.

    python experiments/examples/submit_job.py http://127.0.0.1:8265 -- \
        python -m adaptive_platform train quickstart out=/shared/run1

The driver runs on the cluster: when this client goes away, the job goes on. Exit code 0 where the
job succeeded, 1 where it failed, 3 where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys

from ray.job_submission import JobStatus, JobSubmissionClient

CODES = {JobStatus.SUCCEEDED: 0, JobStatus.FAILED: 1, JobStatus.STOPPED: 3}

STOP_SECONDS = "60"
"""A stopped job gets this long to finish the step in hand and save; Ray's own default is 3 s."""


async def follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Submit a run to a Ray cluster.")
    parser.add_argument("address", help="the cluster's dashboard, such as http://127.0.0.1:8265")
    parser.add_argument("--working-dir", help="folder to send along, where nodes lack the package")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--id", help="name of the job")
    parser.add_argument("--no-wait", action="store_true", help="only submit")
    parser.add_argument("command", nargs="+", help="what to run, behind --")
    words = parser.parse_args()

    variables = dict(word.split("=", 1) for word in words.env)
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": STOP_SECONDS, **variables}}
    if words.working_dir:
        environment["working_dir"] = words.working_dir
    client = JobSubmissionClient(words.address)
    job = client.submit_job(
        entrypoint=shlex.join(words.command), runtime_env=environment, submission_id=words.id
    )
    print(f"submitted {job}", flush=True)
    if words.no_wait:
        return 0
    asyncio.run(follow(client, job))
    info = client.get_job_info(job)
    print(f"{job}: {info.status} {info.message or ''}")
    return CODES[info.status]


if __name__ == "__main__":
    sys.exit(main())
