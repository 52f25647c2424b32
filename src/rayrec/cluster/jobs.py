"""Ray Jobs client over HTTP with timeouts, so that a lost or hanging head never blocks the
caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from rayrec.cluster.restart_policy import shell_status
from rayrec.compat.ray_compat import SubmissionClient, maybe_enable_token_auth_if_token_available
from rayrec.config import InputError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_PROBE_TIMEOUT_S = 3.0
_TIMEOUT_S = (5.0, 30.0)
"""Timeouts to connect and to answer. Submission waits up to 10 s for the head's agent."""
_UPLOAD_TIMEOUT_S = (5.0, 600.0)
_REOPEN_S = 2.0


class Unreachable(Exception):
    """No valid answer from the head; the message is one line."""


@dataclass(frozen=True)
class Job:
    """Job record of the head."""

    submission_id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    exit_status: int | None
    """Exit status of its command in shell convention, or None if unknown."""
    message: str
    """Status message; for failed jobs, it includes the last lines of the log."""
    metadata: Mapping[str, str]

    @property
    def live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def dashboard_url(address: str | None) -> str:
    """Return the dashboard URL of a head: `address`, RAY_API_SERVER_ADDRESS or this machine's.
    Raises InputError.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    url = urlsplit(address if "://" in address else f"http://{address}")
    try:
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InputError(
            f"address: must be the URL of a Ray dashboard, such as {DEFAULT_ADDRESS}, got "
            f"{address!r}"
        )
    return url.geturl().rstrip("/")


class _Client(JobSubmissionClient):
    """Ray's client with timeouts, and without RAY_ADDRESS overriding its address."""

    def __init__(self, url: str) -> None:
        SubmissionClient.__init__(self, url)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", _UPLOAD_TIMEOUT_S if method == "PUT" else _TIMEOUT_S)
        return super()._do_request(method, endpoint, **options)


class Jobs:
    """Jobs of one head. All methods raise Unreachable without a valid answer, and InputError if the
    head rejects this user.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        for logger in ("ray", "ray.dashboard.modules.job.sdk"):  # the second has a separate level
            logging.getLogger(logger).setLevel(logging.ERROR)
        # as ray.init does; the client does not
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        self._client = _Client(url)

    def probe(self) -> None:
        """Check that the head answers. TCP comes first, because HTTP takes much longer to detect a
        dead address.
        """
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if not requests.utils.get_environ_proxies(self.url):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                socket.create_connection((parts.hostname, port), timeout=_PROBE_TIMEOUT_S).close()
            except OSError as error:
                raise Unreachable(error.strerror or str(error)) from None
        self.all()

    def find(self, submission_id: str) -> Job | None:
        answer = self._request("GET", f"/api/jobs/{quote(submission_id)}", may_lack=True)
        return None if answer is None else _job(answer.json())

    def all(self) -> list[Job]:
        """Return all submitted jobs, including ended ones."""
        answer = self._request("GET", "/api/jobs/")
        assert answer is not None
        return [_job(fields) for fields in answer.json() if fields["submission_id"]]

    def submit(
        self,
        submission_id: str,
        entrypoint: str,
        *,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Submit a job. After Unreachable, use `find` to learn whether it was submitted."""
        try:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=runtime_env,
                metadata=metadata,
            )
        except requests.RequestException as error:
            raise Unreachable(_why(error)) from None
        except AuthenticationError as error:
            raise _auth_error(self.url, error) from None
        except RuntimeError as error:
            raise Unreachable(_last_line(str(error))) from None
        except (ValueError, TypeError) as error:
            raise InputError(f"cannot submit the job: {_last_line(str(error))}") from None

    def stop(self, submission_id: str) -> None:
        """Send SIGTERM to the job's processes, then SIGKILL after RAY_JOB_STOP_WAIT_TIME_S of its
        environment.
        """
        self._request("POST", f"/api/jobs/{quote(submission_id)}/stop", may_lack=True)

    def log(self, submission_id: str) -> str:
        """Return the job's full output, or "" if it is gone."""
        answer = self._request("GET", f"/api/jobs/{quote(submission_id)}/logs", may_lack=True)
        return "" if answer is None else answer.json()["logs"]

    def follow_log(
        self, submission_id: str, show: Callable[[str], None], *, skip: int
    ) -> LogFollower:
        """Show the job's output in a thread, without its first `skip` characters."""
        return LogFollower(self._client, submission_id, show, skip=skip)

    def _request(
        self, method: str, endpoint: str, *, may_lack: bool = False
    ) -> requests.Response | None:
        try:
            answer = self._client._do_request(method, endpoint)
        except requests.RequestException as error:
            raise Unreachable(_why(error)) from None
        except AuthenticationError as error:
            raise _auth_error(self.url, error) from None
        # A proxy without its head also returns 404, with a different text.
        if may_lack and answer.status_code == 404 and "does not exist" in answer.text:
            return None
        if answer.status_code != 200 or "json" not in answer.headers.get("Content-Type", ""):
            raise Unreachable(f"HTTP status {answer.status_code} {_last_line(answer.text)}".strip())
        return answer


class LogFollower:
    """Thread that shows a growing job log, and reconnects when the connection breaks."""

    def __init__(
        self,
        client: JobSubmissionClient,
        submission_id: str,
        show: Callable[[str], None],
        *,
        skip: int,
    ) -> None:
        self._client = client
        self._submission_id = submission_id
        self._show = show
        self._shown = skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job log", daemon=True)
        self._thread.start()

    def finish(self, *, timeout_s: float) -> None:
        self._thread.join(timeout=timeout_s)
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                asyncio.run(self._read())
            # aiohttp has many errors for a lost connection. Polling the job detects its end.
            except Exception:
                self._ended.wait(_REOPEN_S)
            else:
                return

    async def _read(self) -> None:
        position = 0
        async for text in self._client.tail_job_logs(self._submission_id):
            new = text[max(0, self._shown - position) :]
            position += len(text)
            if self._ended.is_set():
                return
            if new:
                self._show(new)
                self._shown = position


def _job(fields: Mapping[str, Any]) -> Job:
    return Job(
        submission_id=fields["submission_id"],
        status=fields["status"],
        exit_status=shell_status(fields["driver_exit_code"]),
        message=fields["message"] or "",
        metadata=fields["metadata"] or {},
    )


def _auth_error(url: str, error: Exception) -> InputError:
    message = str(error).splitlines()[0].rstrip(".")
    return InputError(
        f"{url}: {message}. Set the cluster's token with RAY_AUTH_MODE=token and "
        "RAY_AUTH_TOKEN_PATH"
    )


def _why(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    return (
        "the connection broke"
        if isinstance(error, requests.ConnectionError)
        else type(error).__name__
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1][:200] if lines else ""
