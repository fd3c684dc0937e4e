"""Submit a Ray job and end with its true exit code, however often the connection breaks.

    python infra/submit.py --id translate-2026-11-30 -- python jobs/translate.py --config ...

`ray job submit` follows the log and may end with 0 when only the log's connection ended, and turns
every failure into 1. This asks for the status until there is a final one. The same command again is
harmless: a job of this id that runs is followed, one that succeeded is left alone, and one that
failed is tried again as `ID-a2`, `ID-a3`, ..., since Ray never accepts an id twice.
"""

import argparse
import shlex
import signal
import sys
import threading
import time
from typing import Any

FINAL = {"SUCCEEDED", "FAILED", "STOPPED"}
RETRY_S = 120.0  # the dashboard or its agent may be late, and come back
ANSWER_S = 60.0  # Ray's own client would wait for ever on a connection that fell silent
POLL_S = 1.0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with the job's own command behind `--`."""
    parser = argparse.ArgumentParser(description="Submit a Ray job; end with its own exit code.")
    parser.add_argument("--id", required=True, help="names the work: the same id, the same work")
    parser.add_argument("--address", default=None, help="default: RAY_API_SERVER_ADDRESS")
    parser.add_argument("--working-dir", default=None, help="code that travels with the job")
    parser.add_argument("--stop-with-me", action="store_true", help="SIGTERM stops the job too")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit code: the job's; 143 if it was stopped; 1 if it died without one."""
    options = parse(argv)
    client = patiently(connect, options.address)
    job_id = start(client, options)
    if options.stop_with_me:
        signal.signal(signal.SIGTERM, lambda *_: client.stop_job(job_id))
    log = threading.Thread(target=follow, args=(client, job_id), daemon=True)
    log.start()
    while patiently(client.get_job_status, job_id).value not in FINAL:
        time.sleep(POLL_S)
    log.join(timeout=10)
    info = patiently(client.get_job_info, job_id)
    print(f"{job_id}: {info.status.value}: {info.message}", file=sys.stderr, flush=True)
    if info.status.value == "SUCCEEDED":
        return 0
    if info.status.value == "STOPPED":
        return 143
    return info.driver_exit_code or 1


def connect(address: str | None) -> Any:
    """A client of the cluster's dashboard."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **{"timeout": ANSWER_S, **kwargs})

    return Client(address)


def start(client: Any, options: argparse.Namespace) -> str:
    """The id of the job that does the work: one that runs or succeeded, else a new one."""
    attempt = 1
    while True:
        job_id = options.id if attempt == 1 else f"{options.id}-a{attempt}"
        status = patiently(status_of, client, job_id)
        if status in ("FAILED", "STOPPED"):
            attempt += 1
            continue
        if status is None:
            patiently(submit, client, job_id, options)
        else:
            print(f"{job_id} is {status} already", file=sys.stderr, flush=True)
        return job_id


def status_of(client: Any, job_id: str) -> str | None:
    """The job's status; None if the cluster does not know it."""
    try:
        return str(client.get_job_status(job_id).value)
    except RuntimeError as error:
        if "does not exist" in str(error):
            return None
        raise


def submit(client: Any, job_id: str, options: argparse.Namespace) -> None:
    """Submit the job, unless an earlier try got through although its answer was lost."""
    if status_of(client, job_id) is None:
        environment = {"working_dir": options.working_dir} if options.working_dir else {}
        client.submit_job(
            submission_id=job_id,
            entrypoint=shlex.join(options.command),
            runtime_env=environment,
        )


def follow(client: Any, job_id: str) -> None:
    """Print the job's log as it grows. What was printed stays printed when a connection breaks."""
    shown = 0
    while True:
        try:
            text = client.get_job_logs(job_id)
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = max(shown, len(text))
            if client.get_job_status(job_id).value in FINAL:
                rest = client.get_job_logs(job_id)[shown:]
                sys.stdout.write(rest)
                sys.stdout.flush()
                return
        except (RuntimeError, ConnectionError, OSError):
            pass  # the log is a courtesy: the status decides
        time.sleep(POLL_S)


def patiently(call: Any, *args: Any) -> Any:
    """The call's result, tried again for a while where the cluster does not answer."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return call(*args)
        except (RuntimeError, ConnectionError, OSError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"error: no answer from the cluster: {error}") from None
            time.sleep(2 * POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
