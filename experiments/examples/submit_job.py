"""Submit a run to a Ray cluster, follow its log, and end as it ends.

    python experiments/examples/submit_job.py http://127.0.0.1:8265 -- \
        python -m adaptive_platform train quickstart out=/shared/run1

The driver runs on the cluster: when this client goes away, the job goes on. Exit code 0 where the
job succeeded, 1 where it failed, 3 where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 3}

STOP_SECONDS = "60"
"""A stopped job gets this long to finish the step in hand and save; Ray's own default is 3 s."""

AGENT_SECONDS = 60.0
"""A cluster that answers but takes no jobs yet is asked again for so long."""


def send_token() -> None:
    """Send the token where there is one: `ray start` then asks for it without being told to.

    To be called before Ray is imported, which is when it reads the mode.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if os.environ.get("RAY_AUTH_TOKEN") or path.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


async def follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def submit(client: JobSubmissionClient, command: str, environment: dict, name: str | None) -> str:
    """Submit; a cluster that has just begun needs some seconds until a node takes jobs."""
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            return client.submit_job(
                entrypoint=command, runtime_env=environment, submission_id=name
            )
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


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
    send_token()
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(words.address)
    job = submit(client, shlex.join(words.command), environment, words.id)
    print(f"submitted {job}", flush=True)
    if words.no_wait:
        return 0
    asyncio.run(follow(client, job))
    info = client.get_job_info(job)
    print(f"{job}: {info.status} {info.message or ''}")
    return CODES[info.status.value]


if __name__ == "__main__":
    sys.exit(main())
