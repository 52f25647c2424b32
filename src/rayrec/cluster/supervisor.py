"""Supervisor that keeps a run alive from outside its cluster: submits it to Ray Jobs, follows it,
and resubmits it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn, TextIO

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from rayrec import storage
from rayrec.cluster import restart_policy
from rayrec.cluster.restart_policy import (
    FINISHED,
    AttemptHistory,
    AttemptResult,
    Quit,
    SuperviseConfig,
)
from rayrec.compat.ray_compat import SubmissionClient, maybe_enable_token_auth_if_token_available
from rayrec.config import InputError
from rayrec.observe.console import handling_signals
from rayrec.storage import cache

RUN_KEY = "rayrec_run"
CONFIG_KEY = "rayrec_config"
"""Job metadata: name of the trained run, and hash of its configuration."""
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TIMEOUT_S = (5.0, 30.0)
"""Timeouts to connect and to answer. Submission waits up to 10 s for the head's agent."""
_UPLOAD_TIMEOUT_S = (5.0, 600.0)
_POLL_S = 2.0
_LOG_CHARACTERS_PER_S = 100_000
_STOP_SLACK_S = 15.0
"""Seconds for Ray to notice the end of a job, after the time that the job has to end."""
_FIRST_PROBE_S = 1.0
_LONGEST_PROBE_S = 30.0
_NO_ANSWER = (RuntimeError, requests.RequestException)
"""Errors of Ray's client if the head is lost, or a proxy answers in its place."""


@dataclass(frozen=True)
class Outcome:
    """Result of a supervision."""

    name: str
    status: int
    """0: finished; 1: gave up; 2: user error; 130: stopped by a user."""
    cause: str
    attempts: int
    summary: dict[str, Any] | None = None
    """Summary printed by the run. None if it did not finish, or its log is gone."""


def supervise(
    arguments: Sequence[str],
    *,
    name: str,
    config_hash: str,
    config: SuperviseConfig,
    stop_wait_s: float,
    note: Callable[[str], None],
    show: Callable[[str], None] | None,
) -> Outcome:
    """Run `rayrec train ARGUMENTS`, for the run `name`, on a cluster until it finishes or the
    policy ends it. A stopped job has `stop_wait_s` seconds to end. `note` gets each event, a line,
    `show` the job's output. SIGTERM, SIGHUP and Ctrl-C stop the job, unless `config` detaches,
    before SystemExit(143) or KeyboardInterrupt. Raises InputError if the user can fix the
    problem.
    """
    url = dashboard_url(config.address)
    path = config.state or state_path(name)
    log_path = f"{os.path.splitext(path)[0]}.log"
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    busy = f"{path}: another supervisor of run {name} is running. End it, or set another --state"
    # The lock keeps a second supervisor from submitting a second job of the run.
    with storage.locked(log_path, busy), open(log_path, "a", encoding="utf-8", buffering=1) as log:
        supervisor = _Supervisor(
            jobs=_Jobs(url),
            state=_read_state(path, name, config_hash),
            path=path,
            log=log,
            entrypoint="exec " + shlex.join([config.python, "-m", "rayrec", "train", *arguments]),
            config=config,
            stop_wait_s=stop_wait_s,
            note=note,
            show=show,
        )
        with handling_signals(_end):
            try:
                return supervisor.run()
            except (KeyboardInterrupt, SystemExit) as error:
                supervisor.leave("SIGTERM" if isinstance(error, SystemExit) else "Ctrl-C")
                raise
            except AuthenticationError as error:
                message = str(error).splitlines()[0].rstrip(".")
                raise InputError(
                    f"{url}: {message}. Set the cluster's token with RAY_AUTH_MODE=token and "
                    "RAY_AUTH_TOKEN_PATH"
                ) from None


def dashboard_url(address: str | None) -> str:
    """Return the dashboard URL of a head: `address`, RAY_API_SERVER_ADDRESS or this machine's.
    Raises InputError.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    if not re.fullmatch(r"(https?://)?(\[[^]]+\]|[^/:]+)(:\d+)?(/.*)?", address):
        raise InputError(
            f"address: must be the URL of a Ray dashboard, such as {DEFAULT_ADDRESS}, got "
            f"{address!r}"
        )
    return (address if "://" in address else f"http://{address}").rstrip("/")


def state_path(name: str) -> str:
    """Return the default state file of a run's supervisor, in $RAYREC_CACHE or ~/.cache/rayrec."""
    return os.path.join(cache.folder(), "supervise", f"{name}.json")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM, SIGHUP or Ctrl-C."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(143)


class _Jobs(JobSubmissionClient):
    """Ray's client with timeouts, so that a lost or hanging head never blocks the caller."""

    def __init__(self, url: str) -> None:
        self.url = url
        for logger in ("ray", "ray.dashboard.modules.job.sdk"):  # the second has a separate level
            logging.getLogger(logger).setLevel(logging.ERROR)
        # as ray.init does; the client does not
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        # The constructor of JobSubmissionClient prefers RAY_ADDRESS to its argument.
        SubmissionClient.__init__(self, url)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", _UPLOAD_TIMEOUT_S if method == "PUT" else _TIMEOUT_S)
        return super()._do_request(method, endpoint, **options)

    def find(self, submission_id: str) -> JobDetails | None:
        """Return a job, or None if the head has no record of it."""
        try:
            return self.get_job_info(submission_id)
        except RuntimeError as error:
            # A proxy without its head also returns 404, with a different text.
            if "does not exist" in str(error):
                return None
            raise


@dataclass
class _State:
    """Persistent record of a run's supervision, from which the next supervisor continues."""

    name: str
    config_hash: str
    """Hash of the training configuration. Another hash means another run, even under the same
    name.
    """
    tally: AttemptHistory = field(default_factory=AttemptHistory)
    submission_id: str | None = None
    submitted: bool = False
    """Whether the head is known to have received that job."""
    running_since: float | None = None
    """Unix time when it was first seen running."""
    seen: float | None = None
    """Unix time when it was last seen running."""
    stopping: bool = False
    """Whether a supervisor, possibly interrupted since, requested its stop."""


def _read_state(path: str, name: str, config_hash: str) -> _State:
    new = _State(name, config_hash)
    if not storage.exists(path):
        return new
    try:
        fields = storage.read_json(path)
        stored = _State(**{**fields, "tally": AttemptHistory(**fields["tally"])})
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{path}: must be a supervisor's state file ({error}). Delete it or set another --state"
        ) from None
    return stored if (stored.name, stored.config_hash) == (name, config_hash) else new


# Next action, by the state file and the jobs of the head:
# - No id, and a live job of the run: follow it, or reject other flags.
# - No id, and no live job: store the next id, then submit.
# - An id that is not `submitted`, and no such job: submit under the same id.
# - A `submitted` id, and its job: follow it. Submit again if it had succeeded before.
# - A `submitted` id, and no such job: the head was lost. Count a lost attempt, drop the id.
@dataclass(kw_only=True)
class _Supervisor:
    """Supervision loop. It writes its state before each action, so that the same command continues
    after the supervisor was killed.
    """

    jobs: _Jobs
    state: _State
    path: str
    log: TextIO
    entrypoint: str
    config: SuperviseConfig
    stop_wait_s: float
    note: Callable[[str], None]
    show: Callable[[str], None] | None
    _followed_id: str | None = None
    """Job that this process has submitted or reported as followed."""
    _lost_s: float | None = None
    """Monotonic time when the head was lost."""
    _num_shown: int = 0
    _next_log_s: float = 0.0

    @property
    def _id(self) -> str:
        """Id of the current job, which is stored before the job exists."""
        return self.state.submission_id or ""

    def run(self) -> Outcome:
        # Ends by `_quit`, or when the head has been away for too long. Each round follows one job
        # to its end.
        while True:
            try:
                job = self._attempt()
            except _NO_ANSWER as error:
                cause = self._wait_for_head(_reason(error))
                if cause is None:
                    continue
                # keeps the job's id: it may still run on an unreachable cluster
                self._report(f"gave up: {cause}")
                return Outcome(self.state.name, 1, cause, self.state.tally.attempts)
            ending = _ending(job, self.state)
            tally, decision = restart_policy.judge(
                self.config.policy, self.state.tally, ending, jitter=random.random()
            )
            if job is not None and job.status == "FAILED":
                self.log.writelines(f"    {line}\n" for line in (job.message or "").splitlines())
            if isinstance(decision, Quit):
                return self._quit(decision, job)
            why = restart_policy.describe(ending)
            if job is not None and ending.status is None:
                why += f": {_last_message(job)}"
            self._report(f"{self.state.submission_id} {why}; again in {decision:.0f} s")
            self._forget_job(tally)
            time.sleep(decision)

    def _attempt(self) -> JobDetails | None:
        """Return the ended job of the current attempt, or None if the head lost it."""
        job = self._current()
        if self._lost_s is not None:
            self._report(f"head is back after {time.monotonic() - self._lost_s:.0f} s")
            self._lost_s = None
        while job is not None:
            if job.status == "RUNNING":
                self._see()
            self._show_log(job)
            if job.status.is_terminal():
                break
            time.sleep(_POLL_S)
            job = self.jobs.find(self._id)
        return job

    def _current(self) -> JobDetails | None:
        """Return the job to follow: the stored one (None if it is gone), another live one of this
        run, or a new one.
        """
        state = self.state
        jobs = {job.submission_id or "": job for job in self.jobs.list_jobs()}
        run_jobs = {
            submission_id: job
            for submission_id, job in jobs.items()
            if (job.metadata or {}).get(RUN_KEY) == state.name
        }
        stored = run_jobs.get(self._id)
        if stored is None and state.submitted:
            return None
        if (
            stored
            and state.submitted
            and self._followed_id is None
            and stored.status == "SUCCEEDED"
        ):
            # An earlier supervisor's job. A new job checks whether the finished run's data is
            # unchanged.
            self._forget_job(AttemptHistory(state.tally.attempts))
        elif stored is not None:
            return self._follow(stored)
        live = [job for job in run_jobs.values() if not job.status.is_terminal()]
        return self._follow(live[0]) if live else self._submit(set(jobs))

    def _follow(self, job: JobDetails) -> JobDetails:
        name = self.state.name
        status = job.status.value.lower()
        if (job.metadata or {}).get(CONFIG_KEY) != self.state.config_hash:
            raise InputError(
                f"{self.jobs.url}: job {job.submission_id} trains run {name} with other flags. "
                "Stop that job, use the same flags, or choose another --name"
            )
        if self.state.submission_id != job.submission_id:
            attempts = max(_number(job.submission_id, name), self.state.tally.attempts)
            self._forget_job(replace(self.state.tally, attempts=attempts))
        self._write(submission_id=job.submission_id, submitted=True)
        if self._followed_id != job.submission_id:
            self._followed_id = job.submission_id
            self._num_shown = len(self.jobs.get_job_logs(self._id))
            self._report(f"following {job.submission_id} on {self.jobs.url}, which is {status}")
        return job

    def _submit(self, used: set[str]) -> JobDetails | None:
        """Submit a job under an id that is not used, and stored before, so that the job can be
        found if the answer is lost.
        """
        name = self.state.name
        # A stored id stays, in case its first submission still arrives.
        if self.state.submission_id is None or self.state.submission_id in used:
            tally = self.state.tally
            number = max([tally.attempts, *(_number(each, name) for each in used)]) + 1
            self._forget_job(replace(tally, attempts=number))
            self._write(submission_id=f"{name}-{number:04d}")
        runtime_env = self.config.fields()
        stop_s = str(round(self.stop_wait_s))
        variables = {**(runtime_env.get("env_vars") or {}), **self.config.variables(os.environ)}
        runtime_env["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": stop_s, **variables}
        if self.config.working_dir is not None:
            runtime_env["working_dir"] = self.config.working_dir
        try:
            self.jobs.submit_job(
                entrypoint=self.entrypoint,
                submission_id=self._id,
                runtime_env=runtime_env,
                metadata={RUN_KEY: name, CONFIG_KEY: self.state.config_hash},
            )
        except _NO_ANSWER:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"cannot submit the job: {_reason(error)}") from None
        self._followed_id = self._id
        self._num_shown = 0
        self._write(submitted=True)
        self._report(f"submitted {self._id} to {self.jobs.url}")
        return self.jobs.find(self._id)

    def _see(self) -> None:
        now = time.time()
        if self.state.running_since is None:
            self._report(f"{self.state.submission_id} is running")
            self.state.running_since = now
        self._write(seen=now)

    def _show_log(self, job: JobDetails) -> None:
        now_s = time.monotonic()
        if self.show is None or (now_s < self._next_log_s and not job.status.is_terminal()):
            return
        log = self.jobs.get_job_logs(self._id)
        if len(log) > self._num_shown:
            self.show(log[self._num_shown :])
        self._num_shown = len(log)
        # Ray returns the full log, so a long one is read less often.
        self._next_log_s = now_s + len(log) / _LOG_CHARACTERS_PER_S

    def _wait_for_head(self, why: str) -> str | None:
        """Wait before the next try and return None, or return a cause once the policy's limit is
        exceeded. Pauses grow with the outage, which only a followed or submitted job ends: a head
        may answer without accepting jobs.
        """
        limit_s = self.config.policy.max_wait_s
        if self._lost_s is None:
            self._lost_s = time.monotonic()
            self._report(
                f"head lost: {self.jobs.url} gives no good answer ({why}); waiting for it, "
                f"{limit_s:,.0f} s at most"
            )
        silent_s = time.monotonic() - self._lost_s
        if silent_s >= limit_s:
            return f"no head at {self.jobs.url} for {silent_s:,.0f} s ({why})"
        # Jitter keeps supervisors of many runs from calling a new head at the same time.
        # The wait grows with the outage itself, so it doubles without a counter.
        wait_s = min(max(silent_s, _FIRST_PROBE_S), _LONGEST_PROBE_S) * random.uniform(0.75, 1.25)
        time.sleep(min(wait_s, limit_s - silent_s))
        return None

    def _quit(self, decision: Quit, job: JobDetails | None) -> Outcome:
        name = self.state.name
        attempts = self.state.tally.attempts
        cause = decision.cause
        if job is not None and decision.status == 0:
            self._report(f"finished, as {job.submission_id}")
            try:
                summary = find_summary(self.jobs.get_job_logs(self._id))
            except _NO_ANSWER:
                summary = None
            return Outcome(name, 0, cause, attempts, summary)
        self._report(f"gave up: {cause}")
        if job is not None and job.driver_exit_code == 2:
            cause = _last_message(job)
            self._report(cause)
        # running the same command again starts a new count
        self._forget_job(AttemptHistory(attempts))
        return Outcome(name, decision.status, cause, attempts)

    def leave(self, why: str) -> None:
        """Stop the job after a signal, or detach from it if configured."""
        submission_id = self.state.submission_id
        if submission_id is None or self.config.detach_on_signal:
            self._report(f"{why}: ending; the same command follows {submission_id or 'the run'}")
            return
        self._report(
            f"{why}: stopping {submission_id}, which may take {self.stop_wait_s:.0f} s to save"
        )
        deadline_s = time.monotonic() + self.stop_wait_s + _STOP_SLACK_S
        self._write(stopping=True)
        try:
            # SIGTERM for the job's processes, SIGKILL after RAY_JOB_STOP_WAIT_TIME_S.
            self.jobs.stop_job(submission_id)
            # Ray Jobs has no call that waits. It polls until the job has saved and ended.
            while (job := self.jobs.find(self._id)) and not job.status.is_terminal():
                if time.monotonic() > deadline_s:
                    self._report(f"{submission_id} has not ended; see to it with `ray job stop`")
                    return
                time.sleep(_POLL_S / 2)
        except _NO_ANSWER as error:
            self._report(f"{submission_id} may go on, because its head is lost ({_reason(error)})")
            return
        self._report(
            f"{submission_id} has ended; the same command resumes from its last checkpoint"
        )
        self._forget_job(AttemptHistory(self.state.tally.attempts))

    def _write(self, **changes: Any) -> None:
        """Change the state in memory and, atomically, on disk."""
        self.state = replace(self.state, **changes)
        storage.write_json(self.path, asdict(self.state))

    def _forget_job(self, tally: AttemptHistory) -> None:
        """Set the counts, without a current job."""
        self.state = _State(self.state.name, self.state.config_hash)
        self._write(tally=tally)

    def _report(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self.state.name}  {text}"
        self.note(line)
        self.log.write(f"{line}\n")


def _ending(job: JobDetails | None, state: _State) -> AttemptResult:
    duration_s = (state.seen or 0.0) - (state.running_since or 0.0)
    ran = state.running_since is not None
    if job is None:
        return AttemptResult("lost", duration_s=duration_s, ran=ran)
    status = restart_policy.shell_status(job.driver_exit_code)
    return AttemptResult(
        job.status.value.lower(),
        status=status,
        duration_s=duration_s,
        ran=ran or status is not None,
        stop_requested=state.stopping,
        run_finished=status == 2 and FINISHED in _last_message(job),
    )


def _number(submission_id: str | None, name: str) -> int:
    """Return the attempt number in a submission id, or 0 for another kind of job."""
    match = re.fullmatch(re.escape(name) + r"-(\d{4,})", submission_id or "")
    return int(match[1]) if match else 0


def find_summary(log: str) -> dict[str, Any] | None:
    """Return the summary that `rayrec train` prints last, ignoring later output of other programs,
    or None.
    """
    start = f"\n{log}".rfind("\n{\n")
    if start < 0:
        return None
    try:
        summary, _ = json.JSONDecoder().raw_decode(log, start)
    except ValueError:
        return None
    return summary if "weights_sha256" in summary else None


def _last_message(job: JobDetails) -> str:
    """Return rayrec's last line in a failed job's log, else the last line."""
    lines = [line.strip() for line in (job.message or "").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rayrec train: ")]
    return (ours or lines or ["no more is known"])[-1].removeprefix("rayrec train: ")


def _reason(error: Exception) -> str:
    """Return the last line of an answer, or the kind of a broken connection."""
    if isinstance(error, requests.RequestException):
        return type(error).__name__
    return str(error).strip().splitlines()[-1][:200]
