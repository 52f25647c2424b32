"""Supervisor that keeps a run alive from outside its cluster: submits it to Ray Jobs, follows it,
and resubmits it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn

from rayrec import storage
from rayrec.cluster import restart_policy
from rayrec.cluster.jobs import Job, Jobs, LogFollower, Unreachable, dashboard_url
from rayrec.cluster.restart_policy import (
    FINISHED,
    AttemptHistory,
    AttemptResult,
    Policy,
    Quit,
    SuperviseConfig,
)
from rayrec.config import InputError
from rayrec.observe.console import handling_signals
from rayrec.storage import cache

RUN_KEY = "rayrec_run"
CONFIG_KEY = "rayrec_config"
"""Job metadata: name of the trained run, and hash of its configuration."""
_POLL_S = 2.0
_SEEN_EVERY_S = 30.0
"""Seconds between two writes of a state in which only the time changed."""
_STOP_SLACK_S = 15.0
"""Seconds for Ray to notice the end of a job, after the time that the job has to end."""
_LAST_LINES_S = 5.0
"""Timeout for the last lines of a log, which Ray polls once a second."""
_NO_JOB: dict[str, Any] = {
    "submission_id": None,
    "submitted": False,
    "running_since": None,
    "seen": None,
    "stopping": False,
}


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
    jobs = Jobs(dashboard_url(config.address))
    state_file = StateFile(
        config.state or state_path(name), name=name, config_hash=config_hash, note=note
    )
    try:
        supervisor = _Supervisor(
            jobs, state_file, arguments, config=config, stop_wait_s=stop_wait_s, show=show
        )
        with handling_signals(_end):
            try:
                return supervisor.run()
            except (KeyboardInterrupt, SystemExit) as error:
                supervisor.leave("SIGTERM" if isinstance(error, SystemExit) else "Ctrl-C")
                raise
    finally:
        state_file.close()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM, SIGHUP or Ctrl-C."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(143)


class _Supervisor:
    """Supervision loop. Writes its state before each action."""

    def __init__(
        self,
        jobs: Jobs,
        state_file: StateFile,
        arguments: Sequence[str],
        *,
        config: SuperviseConfig,
        stop_wait_s: float,
        show: Callable[[str], None] | None,
    ) -> None:
        self._jobs = jobs
        self._state_file = state_file
        self._config = config
        self._show = show
        self._stop_wait_s = stop_wait_s
        self._report = state_file.report
        self._entrypoint = "exec " + shlex.join(
            [config.python, "-m", "rayrec", "train", *arguments]
        )
        self._log: LogFollower | None = None
        self._own: str | None = None
        """Job that this process has submitted or reported as followed."""
        self._outage = Outage(jobs, config.policy, report=state_file.report)
        self._written = 0.0
        """Unix time of the last write for the time only."""

    @property
    def _state(self) -> State:
        return self._state_file.state

    def run(self) -> Outcome:
        while True:
            try:
                job = self._follow(self._current())
            except Unreachable as error:
                cause = self._outage.wait(str(error))
                if cause is None:
                    continue
                # keeps the job's id: it may still run on an unreachable cluster
                self._report(f"gave up: {cause}")
                return Outcome(self._state.name, 1, cause, self._state.tally.attempts)
            ending = _ending(job, self._state)
            tally, decision = restart_policy.judge(
                self._config.policy, self._state.tally, ending, jitter=random.random()
            )
            self._end_log(job)
            if isinstance(decision, Quit):
                return self._quit(decision, job)
            why = (
                f": {last_message(job.message)}"
                if job is not None and job.exit_status is None
                else ""
            )
            self._report(
                f"{self._state.submission_id} {restart_policy.describe(ending)}{why}; again in "
                f"{decision:.0f} s"
            )
            self._state_file.write(tally=tally, **_NO_JOB)
            time.sleep(decision)

    # -- One attempt

    def _current(self) -> Job | None:
        """Return the job to follow: the stored one (None if it is gone), another live one of this
        run, or a new one.
        """
        name = self._state.name
        remembered = self._state.submission_id
        number = 0
        if remembered is not None:
            job = self._jobs.find(remembered)
            if (
                job is not None
                and self._state.submitted
                and self._own is None
                and job.status == "SUCCEEDED"
            ):
                # An earlier supervisor's job. A new job checks whether the finished run's data is
                # unchanged.
                self._state_file.write(tally=AttemptHistory(self._state.tally.attempts), **_NO_JOB)
            elif job is not None and job.metadata.get(RUN_KEY) == name:
                return self._follow_job(job)
            elif self._state.submitted:
                self._outage.end()
                return None
            # The same number, in case the first submission still arrives.
            number = self._state.tally.attempts if job is None else 0
        jobs = self._jobs.all()
        for job in jobs:
            if job.live and job.metadata.get(RUN_KEY) == name:
                return self._adopt(job)
        numbers = [_number(job.submission_id, name) for job in jobs]
        return self._submit(number or max(self._state.tally.attempts, *numbers, 0) + 1)

    def _follow_job(self, job: Job) -> Job:
        self._outage.end()
        if not self._state.submitted:
            self._state_file.write(submitted=True)
        if self._own != job.submission_id:
            self._own = job.submission_id
            self._report(
                f"following {job.submission_id} on {self._jobs.url}, which is {job.status.lower()}"
            )
            if job.live:
                self._show_log(job.submission_id, skip=len(self._log_of(job.submission_id)))
        return job

    def _adopt(self, job: Job) -> Job:
        if job.metadata.get(CONFIG_KEY) != self._state.config_hash:
            raise InputError(
                f"{self._jobs.url}: job {job.submission_id} trains run {self._state.name} with "
                "other flags. Stop that job, use the same flags, or choose another --name"
            )
        tally = replace(
            self._state.tally,
            attempts=max(_number(job.submission_id, self._state.name), self._state.tally.attempts),
        )
        self._state_file.write(
            tally=tally, **{**_NO_JOB, "submission_id": job.submission_id, "submitted": True}
        )
        return self._follow_job(job)

    def _submit(self, number: int) -> Job | None:
        """Submit a job, after storing its id so that it can be found if the answer is lost."""
        submission_id = f"{self._state.name}-{number:04d}"
        self._state_file.write(
            tally=replace(self._state.tally, attempts=number),
            **{**_NO_JOB, "submission_id": submission_id},
        )
        runtime_env = self._config.fields()
        stop_s = str(round(self._stop_wait_s))
        variables = {**(runtime_env.get("env_vars") or {}), **self._config.variables(os.environ)}
        runtime_env["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": stop_s, **variables}
        if self._config.working_dir is not None:
            runtime_env["working_dir"] = self._config.working_dir
        metadata = {RUN_KEY: self._state.name, CONFIG_KEY: self._state.config_hash}
        self._jobs.submit(
            submission_id, self._entrypoint, runtime_env=runtime_env, metadata=metadata
        )
        self._state_file.write(submitted=True)
        self._outage.end()
        self._own = submission_id
        self._report(f"submitted {submission_id} to {self._jobs.url}")
        self._show_log(submission_id, skip=0)
        return self._jobs.find(submission_id)

    def _follow(self, job: Job | None) -> Job | None:
        while job is not None and job.live:
            if job.status == "RUNNING":
                self._see(job)
            time.sleep(_POLL_S)
            job = self._jobs.find(job.submission_id)
        return job

    def _see(self, job: Job) -> None:
        now = time.time()
        state = self._state
        if state.running_since is None:
            self._state_file.write(running_since=now, seen=now)
            self._report(f"{job.submission_id} is running")
        elif now - self._written >= _SEEN_EVERY_S:
            self._state_file.write(seen=now)
        else:
            self._state_file.remember(seen=now)
            return
        self._written = now

    # -- The end

    def _quit(self, decision: Quit, job: Job | None) -> Outcome:
        attempts = self._state.tally.attempts
        if decision.status == 0:
            assert job is not None
            self._report(f"finished, as {job.submission_id}")
            return Outcome(
                self._state.name,
                0,
                decision.cause,
                attempts,
                summary_of(self._log_of(job.submission_id)),
            )
        users_error = job is not None and job.exit_status == 2
        cause = last_message(job.message) if job is not None and users_error else decision.cause
        self._report(f"gave up: {decision.cause}" + (f": {cause}" if users_error else ""))
        # running the same command again starts a new count
        self._state_file.write(tally=AttemptHistory(attempts), **_NO_JOB)
        return Outcome(self._state.name, decision.status, cause, attempts)

    def leave(self, why: str) -> None:
        """Stop the job after a signal, or detach from it if configured."""
        submission_id = self._state.submission_id
        if submission_id is None:
            self._report(f"{why}: ending, while no job is there")
            return
        if self._config.detach_on_signal:
            self._report(
                f"{why}: ending; {submission_id} goes on, and the same command follows it again"
            )
            return
        self._report(
            f"{why}: {submission_id} is told to save and end, which may take "
            f"{span(self._stop_wait_s)}"
        )
        deadline_s = time.monotonic() + self._stop_wait_s + _STOP_SLACK_S
        self._state_file.write(stopping=True)
        try:
            self._jobs.stop(submission_id)
            while (job := self._jobs.find(submission_id)) is not None and job.live:
                if time.monotonic() > deadline_s:
                    self._report(f"{submission_id} has not ended; see to it with `ray job stop`")
                    return
                time.sleep(_POLL_S / 2)
        except Unreachable as error:
            self._report(f"{submission_id} may go on, for its head gives no good answer ({error})")
            return
        self._end_log(job)
        self._report(
            f"{submission_id} has ended; the same command resumes from its last checkpoint"
        )
        self._state_file.write(tally=AttemptHistory(self._state.tally.attempts), **_NO_JOB)

    # -- The log

    def _show_log(self, submission_id: str, *, skip: int) -> None:
        self._end_log(None)
        if self._show is not None:
            self._log = self._jobs.follow_log(submission_id, self._show, skip=skip)

    def _end_log(self, job: Job | None) -> None:
        """Show the last lines of an ended job, and log the message of a failed one."""
        if self._log is not None:
            self._log.finish(timeout_s=_LAST_LINES_S if job is not None else 0.0)
            self._log = None
        if job is not None and job.status == "FAILED":
            for line in job.message.splitlines():
                self._state_file.keep(f"    {line}")

    def _log_of(self, submission_id: str) -> str:
        try:
            return self._jobs.log(submission_id)
        except Unreachable:
            return ""


def _ending(job: Job | None, state: State) -> AttemptResult:
    ran = state.running_since is not None
    if job is None:
        return AttemptResult("lost", duration_s=state.duration_s, ran=ran)
    return AttemptResult(
        job.status.lower(),  # type: ignore[arg-type]  # an ended job has one of these statuses
        status=job.exit_status,
        duration_s=state.duration_s,
        ran=ran or job.exit_status is not None,
        stop_requested=state.stopping,
        run_finished=job.exit_status == 2 and FINISHED in last_message(job.message),
    )


def _number(submission_id: str, name: str) -> int:
    """Return the attempt number in a submission id, or 0 for another kind of job."""
    match = re.fullmatch(re.escape(name) + r"-(\d{4,})", submission_id)
    return int(match[1]) if match else 0


def summary_of(log: str) -> dict[str, Any] | None:
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


def last_message(message: str) -> str:
    """Return rayrec's last line in a failed job's log, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rayrec train: ")]
    return (ours or lines or ["no more is known"])[-1].removeprefix("rayrec train: ")


_FIRST_PROBE_S = 1.0
_LONGEST_PROBE_S = 30.0
_FIRST_REPORT_S = 15.0
"""Delay of the first report of an outage. Each next report comes after twice the duration."""


class Outage:
    """Outage of the head until `end`. Successful probes do not end it, because a head may answer
    without accepting jobs.
    """

    def __init__(self, jobs: Jobs, policy: Policy, *, report: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._limit_s = policy.max_wait_s
        self._report = report
        self._since_s: float | None = None
        self._num_probes = 0
        self._report_s = 0.0

    def wait(self, why: str) -> str | None:
        """Wait until the head answers and return None, or return a cause once the policy's limit is
        exceeded.
        """
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._num_probes = 0
            self._report_s = _FIRST_REPORT_S
            limit = span(self._limit_s)
            self._report(
                f"head lost: {self._jobs.url} gives no good answer ({why}); waiting for it, "
                f"{limit} at most"
            )
        silent_s = time.monotonic() - self._since_s
        while True:
            self._num_probes += 1
            wait_s = restart_policy.pause_s(
                self._num_probes,
                first_s=_FIRST_PROBE_S,
                longest_s=_LONGEST_PROBE_S,
                jitter=random.random(),
            )
            time.sleep(min(wait_s, max(0.0, self._limit_s - silent_s)))
            silent_s = time.monotonic() - self._since_s
            if silent_s >= self._limit_s:
                return f"no head at {self._jobs.url} for {span(silent_s)} ({why})"
            if silent_s >= self._report_s:
                self._report(f"head still lost ({why}), for {span(silent_s)} now")
                self._report_s = 2 * silent_s
            try:
                self._jobs.probe()
                return None
            except Unreachable as error:
                why = str(error)

    def end(self) -> None:
        if self._since_s is not None:
            self._report(f"head is back after {span(time.monotonic() - self._since_s)}")
            self._since_s = None


def span(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


# -- Persistent state and log, from which a supervisor's successor resumes


@dataclass(frozen=True)
class State:
    """Persistent record of a run's supervision."""

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

    @property
    def duration_s(self) -> float:
        """Seconds for which the current attempt was seen running."""
        return (
            0.0
            if self.running_since is None or self.seen is None
            else max(0.0, self.seen - self.running_since)
        )


def state_path(name: str) -> str:
    """Return the default state file of a run's supervisor, in $RAYREC_CACHE or ~/.cache/rayrec."""
    return os.path.join(cache.folder(), "supervise", f"{name}.json")


class StateFile:
    """State file and log of one supervisor, locked for exclusive use."""

    def __init__(
        self, path: str, *, name: str, config_hash: str, note: Callable[[str], None]
    ) -> None:
        """Lock and read the files. Raises InputError if another supervisor uses them or the file is
        not a supervisor's.
        """
        self.path = path
        self._note = note
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        log_path = f"{os.path.splitext(path)[0]}.log"
        self._opened = ExitStack()
        busy = (
            f"{path}: another supervisor of run {name} is running. End it, or set another --state"
        )
        self._opened.enter_context(storage.locked(log_path, busy))
        self._log = self._opened.enter_context(
            open(log_path, "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        )
        before = _read_state(path)
        same = before is not None and (before.name, before.config_hash) == (name, config_hash)
        self.state = before if before is not None and same else State(name, config_hash)

    def remember(self, **changes: Any) -> None:
        """Change the state in memory only."""
        self.state = replace(self.state, **changes)

    def write(self, **changes: Any) -> None:
        """Change the state in memory and, atomically, on disk."""
        self.remember(**changes)
        storage.write_json(self.path, asdict(self.state))

    def report(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self.state.name}  {text}"
        self._note(line)
        self.keep(line)

    def keep(self, text: str) -> None:
        self._log.write(f"{text}\n")
        self._log.flush()

    def close(self) -> None:
        self._opened.close()


def _read_state(path: str) -> State | None:
    if not storage.exists(path):
        return None
    try:
        fields = storage.read_json(path)
        return State(**{**fields, "tally": AttemptHistory(**fields["tally"])})
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{path}: must be a supervisor's state file ({error}). Delete it or set another --state"
        ) from None
