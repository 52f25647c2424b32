"""What to do when a supervised run's job has ended: pure, so that every case of it is tested without a cluster."""

import signal
from dataclasses import dataclass, field
from typing import Literal

from rayrec.bounds import Amount, Limit
from rayrec.config import Config

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Between short-lived attempts."""
FINISHED = "finished already"
"""Words of the error for a finished run whose data changed. The supervisor looks for them: another attempt would not help."""
_NOT_STARTED = (126, 127)
"""What a shell ends with where it cannot run, or find, the program."""


@dataclass(frozen=True, kw_only=True)
class Policy(Config):
    """When to give up."""

    max_failures: Limit = 5
    """Failures in a row that are followed by another attempt; -1: without limit. One is an attempt that was short-lived or ended
    with an error of the user's."""
    healthy_after_s: Amount = 300.0
    """An attempt that ran for fewer seconds was short-lived."""
    max_wait_s: Amount = 86_400.0
    """Seconds to wait for a head that does not answer, or answers and takes no job."""


@dataclass(frozen=True)
class Tally:
    """What is remembered of a run's attempts."""

    attempts: int = 0
    """Jobs submitted so far; the newest one's number."""
    short_lived: int = 0
    """How many of the latest, in a row, were that or ended with an error of the user's."""
    accepted: bool = False
    """Whether an attempt lived long, or ran and did not end with an error of the user's: the flags are good then."""


@dataclass(frozen=True)
class Ending:
    """How one attempt ended."""

    outcome: Literal["succeeded", "failed", "stopped", "lost"]
    """As Ray Jobs has it; lost: its record went with the head."""
    status: int | None = None
    """Exit status of the command, as a shell counts it; None where it has none."""
    lived_s: float = 0.0
    """From first seen running to last seen running."""
    ran: bool = False
    told_to: bool = False
    """Whether a supervisor had told it to stop."""
    run_finished: bool = False
    """Whether it ended with an error because the run had finished before, on other data."""


@dataclass(frozen=True)
class Resubmit:
    """Another attempt is due."""

    wait_s: float


@dataclass(frozen=True)
class Quit:
    """The supervisor ends."""

    status: int
    """Its own exit status."""
    cause: str


def shell_status(status: int | None) -> int | None:
    """An exit status as a shell counts it: that of a process which died of signal n is 128 + n."""
    return 128 - status if status is not None and status < 0 else status


def judge(policy: Policy, tally: Tally, ending: Ending, *, jitter: float) -> tuple[Tally, Resubmit | Quit]:
    """Whether to go on after an attempt. `jitter` is a random number from 0 to 1. Pure."""
    status = ending.status
    if ending.outcome == "succeeded":
        return tally, Quit(0, "finished")
    if ending.outcome == "stopped" and ending.told_to:
        return Tally(tally.attempts), Resubmit(0.0)
    if ending.outcome == "stopped":
        return tally, Quit(130, "someone stopped the job")
    if status == 130:
        return tally, Quit(130, "someone interrupted the job")
    users_error = status == 2 or status in _NOT_STARTED
    healthy = ending.lived_s >= policy.healthy_after_s
    if users_error and (ending.run_finished or not (tally.accepted or healthy)):
        return tally, Quit(2, describe(ending))
    short_lived = 0 if healthy and not users_error else tally.short_lived + 1
    accepted = tally.accepted or healthy or (ending.ran and not users_error)
    tally = Tally(attempts=tally.attempts, short_lived=short_lived, accepted=accepted)
    if 0 <= policy.max_failures < short_lived:
        attempts = f"{short_lived} attempts in a row" if short_lived > 1 else "the attempt"
        failed = f"ran for less than {policy.healthy_after_s:g} s or ended with an error of yours"
        cause = f"{attempts} {failed}; the last {describe(ending)}"
        return tally, Quit(2 if users_error else 1, cause)
    return tally, Resubmit(pause_s(short_lived, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=jitter))


def pause_s(times: int, *, first_s: float, longest_s: float, jitter: float) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, and spread by a quarter, so that many supervisors
    do not come back at once. Pure."""
    if times == 0:
        return 0.0
    doubled = min(first_s * 2.0 ** min(times - 1, 30), longest_s)
    return doubled * (0.75 + 0.5 * jitter)


def describe(ending: Ending) -> str:
    """How an attempt ended, in words that follow "it"."""
    status = ending.status
    if ending.outcome == "lost":
        return "was lost with the head"
    if ending.outcome == "stopped" and ending.told_to:
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
class SuperviseConfig(Config):
    """How a run is supervised."""

    address: str | None = None
    """URL of the dashboard of the cluster's head; None: RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265."""
    python: str = "python"
    """The cluster's Python that has rayrec."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the job gets, with the values they have here."""
    working_dir: str | None = None
    """Folder that the job begins in, uploaded from here, or URL of a zip; None: what the head was started in."""
    state: str | None = None
    """File of what the supervisor remembers, with its log beside it; None: see `state_path`."""
    detach_on_signal: bool = False
    """Ctrl-C and SIGTERM end the supervisor alone, and the job goes on."""
    policy: Policy = field(default_factory=Policy)
