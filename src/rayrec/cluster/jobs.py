"""Ray Jobs over HTTP, in a way that a head which is gone, or half gone, cannot make anyone wait for ever."""

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
"""To connect, and for an answer; submitting waits up to 10 s for the head's agent."""
_UPLOAD_TIMEOUT_S = (5.0, 600.0)
_REOPEN_S = 2.0


class Unreachable(Exception):
    """The head gave no good answer; says why in one line."""


@dataclass(frozen=True)
class Job:
    """One job as the head knows it."""

    submission_id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    exit_status: int | None
    """Of its command, as a shell counts it."""
    message: str
    """Of a failed job with the last lines of its log."""
    metadata: Mapping[str, str]

    @property
    def live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def dashboard_url(address: str | None) -> str:
    """The URL of a head's dashboard: `address`, RAY_API_SERVER_ADDRESS, or the one of this machine. Raises InputError."""
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    url = urlsplit(address if "://" in address else f"http://{address}")
    try:
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"address: {address!r} is no URL of a Ray dashboard; give one like {DEFAULT_ADDRESS}")
    return url.geturl().rstrip("/")


class _Client(JobSubmissionClient):
    """Ray's own client, which would wait without limit, and let RAY_ADDRESS override the address it is given."""

    def __init__(self, url: str) -> None:
        SubmissionClient.__init__(self, url)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", _UPLOAD_TIMEOUT_S if method == "PUT" else _TIMEOUT_S)
        return super()._do_request(method, endpoint, **options)


class Jobs:
    """The jobs of one head. Every method raises Unreachable where the head gives no good answer, and InputError where it
    refuses this user."""

    def __init__(self, url: str) -> None:
        self.url = url
        for logger in ("ray", "ray.dashboard.modules.job.sdk"):  # the second has a level of its own
            logging.getLogger(logger).setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as ray.init does; the client does not
        self._client = _Client(url)

    def probe(self) -> None:
        """Returns if the head answers. TCP comes first: HTTP takes much longer to find an address dead."""
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
        """None where the head knows of no such job."""
        answer = self._request("GET", f"/api/jobs/{quote(submission_id)}", may_lack=True)
        return None if answer is None else _job(answer.json())

    def all(self) -> list[Job]:
        """Every job that was submitted, ended ones too."""
        answer = self._request("GET", "/api/jobs/")
        assert answer is not None
        return [_job(fields) for fields in answer.json() if fields["submission_id"]]

    def submit(self, submission_id: str, entrypoint: str, *, runtime_env: dict[str, Any], metadata: dict[str, str]) -> None:
        """Submits a job. Where it is not known whether this succeeded (Unreachable), `find` knows."""
        try:
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env, metadata=metadata
            )
        except requests.RequestException as error:
            raise Unreachable(_why(error)) from None
        except AuthenticationError as error:
            raise _refused(self.url, error) from None
        except RuntimeError as error:
            raise Unreachable(_last_line(str(error))) from None
        except (ValueError, TypeError) as error:
            raise InputError(f"the job cannot be submitted: {_last_line(str(error))}") from None

    def stop(self, submission_id: str) -> None:
        """Has the job's processes sent SIGTERM, and SIGKILL once RAY_JOB_STOP_WAIT_TIME_S of its environment are over."""
        self._request("POST", f"/api/jobs/{quote(submission_id)}/stop", may_lack=True)

    def log(self, submission_id: str) -> str:
        """All that the job printed; empty where that is gone."""
        answer = self._request("GET", f"/api/jobs/{quote(submission_id)}/logs", may_lack=True)
        return "" if answer is None else answer.json()["logs"]

    def follow_log(self, submission_id: str, show: Callable[[str], None], *, skip: int) -> LogFollower:
        """Shows what the job prints, in a thread, but for the first `skip` characters."""
        return LogFollower(self._client, submission_id, show, skip=skip)

    def _request(self, method: str, endpoint: str, *, may_lack: bool = False) -> requests.Response | None:
        try:
            answer = self._client._do_request(method, endpoint)
        except requests.RequestException as error:
            raise Unreachable(_why(error)) from None
        except AuthenticationError as error:
            raise _refused(self.url, error) from None
        # A proxy whose head is gone says 404 as well, though in other words.
        if may_lack and answer.status_code == 404 and "does not exist" in answer.text:
            return None
        if answer.status_code != 200 or "json" not in answer.headers.get("Content-Type", ""):
            raise Unreachable(f"HTTP status {answer.status_code} {_last_line(answer.text)}".strip())
        return answer


class LogFollower:
    """Shows a job's log while it grows, opening it again where the connection breaks."""

    def __init__(self, client: JobSubmissionClient, submission_id: str, show: Callable[[str], None], *, skip: int) -> None:
        self._client, self._submission_id, self._show = client, submission_id, show
        self._shown = skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job log", daemon=True)
        self._thread.start()

    def finish(self, *, timeout_s: float) -> None:
        """Waits for the last lines of a job that has ended, and shows no more after that."""
        self._thread.join(timeout=timeout_s)
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                asyncio.run(self._read())
            except Exception:  # the connection broke, in one of the many ways of aiohttp; who polls the job will tell
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


def _refused(url: str, error: Exception) -> InputError:
    said = str(error).splitlines()[0].rstrip(".")
    return InputError(f"{url}: {said}; give the cluster's token by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH")


def _why(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    return "the connection broke" if isinstance(error, requests.ConnectionError) else type(error).__name__


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1][:200] if lines else ""
