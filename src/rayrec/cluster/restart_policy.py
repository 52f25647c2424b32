"""Restart policy: the next action after a supervised job ends. Pure, so that all cases are tested
without a cluster.
"""

import signal
from dataclasses import dataclass, field

from rayrec.bounds import Amount, Limit
from rayrec.cluster.node_storage import RuntimeEnvConfig
from rayrec.config import Config

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
"""First and longest pause between short-lived attempts."""
FINISHED = "finished already"
"""Text in the error for a finished run whose data changed. The supervisor does not retry after
it.
"""
_NOT_STARTED = (126, 127)
"""Exit statuses of a shell that cannot run or find the program."""


@dataclass(frozen=True, kw_only=True)
class Policy(Config):
    """Limits of supervision."""

    max_failures: Limit = 5
    """Maximum number of consecutive failures, i.e. attempts that were short-lived or ended with a
    user error. -1 for no limit.
    """
    healthy_after_s: Amount = 300.0
    """Minimum duration of a healthy attempt, in seconds. Shorter ones are short-lived."""
    max_wait_s: Amount = 86_400.0
    """Maximum wait in seconds for a head that does not answer, or answers without accepting
    jobs.
    """


@dataclass(frozen=True)
class AttemptHistory:
    """Attempt counts of a run."""

    attempts: int = 0
    """Number of submitted jobs."""
    short_lived: int = 0
    """Number of consecutive latest attempts that were short-lived or ended with a user error."""
    accepted: bool = False
    """Whether an attempt was healthy, or ran without a user error, which proves the flags valid."""


@dataclass(frozen=True)
class AttemptResult:
    """Result of one attempt."""

    outcome: str
    """Status in Ray Jobs: succeeded, failed or stopped. lost: the head lost its record."""
    status: int | None = None
    """Exit status of the command in shell convention, or None without one."""
    duration_s: float = 0.0
    """Seconds between the first and last observation as running."""
    ran: bool = False
    stop_requested: bool = False
    """Whether a supervisor requested the stop."""
    run_finished: bool = False
    """Whether it failed because the run had already finished with other data."""


@dataclass(frozen=True)
class Quit:
    """Decision to end the supervision."""

    status: int
    cause: str


def shell_status(status: int | None) -> int | None:
    """Return an exit status in shell convention: 128 + n after signal n."""
    return 128 - status if status is not None and status < 0 else status


# Decision after a job ends:
#
#   outcome                         next
#   succeeded                       quit with 0
#   stopped by a supervisor         again at once, with a new count
#   stopped, or exit status 130     quit with 130: a user wanted that
#   user's error, never healthy     quit with 2: it would fail again
#   healthy, then failed            again at once, with a new count
#   short-lived                     again after a pause, until max_failures in a row
def judge(
    policy: Policy, tally: AttemptHistory, ending: AttemptResult, *, jitter: float
) -> tuple[AttemptHistory, float | Quit]:
    """Return the counts after an attempt, and the seconds before the next one or `Quit`. `jitter`:
    random, in [0, 1]. Pure.
    """
    if ending.outcome == "succeeded":
        return tally, Quit(0, "finished")
    if ending.outcome == "stopped" and ending.stop_requested:
        return AttemptHistory(tally.attempts), 0.0
    if ending.outcome == "stopped":
        return tally, Quit(130, "someone stopped the job")
    if ending.status == 130:
        return tally, Quit(130, "someone interrupted the job")
    return _judge_failure(policy, tally, ending, jitter=jitter)


def _judge_failure(
    policy: Policy, tally: AttemptHistory, ending: AttemptResult, *, jitter: float
) -> tuple[AttemptHistory, float | Quit]:
    status = ending.status
    users_error = status == 2 or status in _NOT_STARTED
    healthy = ending.duration_s >= policy.healthy_after_s
    if users_error and (ending.run_finished or not (tally.accepted or healthy)):
        return tally, Quit(2, describe(ending))
    short_lived = 0 if healthy and not users_error else tally.short_lived + 1
    accepted = tally.accepted or healthy or (ending.ran and not users_error)
    tally = AttemptHistory(attempts=tally.attempts, short_lived=short_lived, accepted=accepted)
    if 0 <= policy.max_failures < short_lived:
        attempts = f"{short_lived} attempts in a row" if short_lived > 1 else "the attempt"
        failed = f"ran for less than {policy.healthy_after_s:g} s or ended with an error of yours"
        return tally, Quit(
            2 if users_error else 1, f"{attempts} {failed}; the last {describe(ending)}"
        )
    return tally, pause_s(short_lived, jitter=jitter)


def pause_s(times: int, *, jitter: float) -> float:
    """Return the seconds to wait after `times` consecutive failures: doubled each time, with 25 %
    jitter. Pure.
    """
    if times == 0:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 30), LONGEST_PAUSE_S) * (0.75 + 0.5 * jitter)


def describe(ending: AttemptResult) -> str:
    """Describe the end of an attempt, as the predicate of a sentence."""
    status = ending.status
    if ending.outcome == "lost":
        return "was lost with the head"
    if ending.outcome == "stopped" and ending.stop_requested:
        return "had been told to stop when the supervisor before this one ended"
    if status is None:
        return "was ended by Ray"
    if status in _NOT_STARTED:
        return f"found no Python to run (exit status {status}); name the cluster's with --python"
    if status == 143:
        return "was preempted (exit status 143)"
    if status > 128 and status - 128 in set(signal.Signals):
        return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"


@dataclass(frozen=True, kw_only=True)
class SuperviseConfig(RuntimeEnvConfig):
    """Supervision settings."""

    address: str | None = None
    """Dashboard URL of the cluster's head. None for RAY_API_SERVER_ADDRESS, or
    http://127.0.0.1:8265.
    """
    python: str = "python"
    """Python interpreter on the cluster that has rayrec installed."""
    working_dir: str | None = None
    """Working folder of the job: a local folder to upload, or the URL of a zip file. None: of
    runtime_env, else the head's.
    """
    state: str | None = None
    """State file of the supervisor, with its log next to it. None for the default; see
    `state_path`.
    """
    detach_on_signal: bool = False
    """Whether Ctrl-C and SIGTERM end only the supervisor and leave the job running."""
    policy: Policy = field(default_factory=Policy)
