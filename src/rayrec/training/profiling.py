"""Profiles of a running run, requested by a file in its folder that the driver finds and sends to
the workers.
"""

import contextlib
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rayrec import storage
from rayrec.background import in_background
from rayrec.config import InputError
from rayrec.observe.events import follow
from rayrec.training.stop_monitor import ControlChannel
from rayrec.workloads.run_config import MAX_PROFILED_STEPS

TRACE: Final = "trace.json.gz"
"""Last file that a rank writes, also at a URL."""
_REQUEST: Final = "request.json"
_POLL_S: Final = 1.0
_URL_POLL_S: Final = 10.0
_LEAD_S: Final = 3.0
"""Seconds, after a poll, for a request to reach all workers, so that they begin at the same
step.
"""
_WRITING_S: Final = 10.0
"""Seconds for workers to write their recordings after the attempt has ended."""
_KINETO: Final = "KINETO_"

_ENDS: Final = {
    "finish": "finished",
    "stop": "stopped",
    "failure": "failed",
    "run": "another driver began",
}
"""Event kinds after which an attempt trains no more."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Window:
    """Range of steps to record."""

    name: str
    first: int
    """Number of completed steps when recording begins."""
    end: int
    """Number of completed steps when it ends."""


def profile_folder(folder: str) -> str:
    return storage.join(folder, "profile")


def worker_variables(
    environment: Mapping[str, str], *, network_interface: str | None = None
) -> dict[str, str]:
    """Return the environment variables that workers need before they import torch; may be empty.
    They are the driver's KINETO_* variables (with KINETO_USE_DAEMON Kineto registers with dynolog's
    daemon), and the network interface for gloo and NCCL.
    """
    variables = {}
    if environment.get("KINETO_USE_DAEMON"):
        variables.update(
            {name: value for name, value in environment.items() if name.startswith(_KINETO)}
        )
    if network_interface is not None:
        variables.update(GLOO_SOCKET_IFNAME=network_interface, NCCL_SOCKET_IFNAME=network_interface)
    return variables


# -- Driver


# A profile on request, between a command and a run that share only a folder:
#
#   command     writes profile/request.json with the steps to record
#   driver      reads and removes it, which confirms it, and sends it through the channel
#   workers     record these steps, and write profile/NAME/rank_N
#   command     waits for all ranks' traces, and meanwhile follows the events for a failure
def watched_requests(
    folder: str, channel: ControlChannel
) -> contextlib.AbstractContextManager[None]:
    """Pass profile requests from the run's folder to `channel` within the context."""
    return in_background(partial(_watch, folder, channel), name="profile-requests")


def _watch(folder: str, channel: ControlChannel, ended: threading.Event) -> None:
    path = storage.join(profile_folder(folder), _REQUEST)
    while not ended.wait(_poll_s(folder)):
        try:
            with storage.retry_timeout(0):
                if storage.exists(path):
                    window = _window(storage.read_json(path))
                    storage.remove_file(path)  # its removal confirms the request
                    channel.send_profile_request(asdict(window))
        except InputError as error:
            _logger.warning("Removed the profile request %s (%s)", path, error)
            with contextlib.suppress(OSError):
                storage.remove_file(path)
        except OSError as error:
            _logger.warning("Cannot read %s (%s)", path, error)


def _window(request: Any) -> Window:
    try:
        window = Window(str(request["name"]), int(request["first"]), int(request["end"]))
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"not a profile request ({error!r})") from None
    if (
        not re.fullmatch(r"[\w-]+", window.name)
        or not 0 < window.end - window.first <= MAX_PROFILED_STEPS
    ):
        raise InputError(f"not a profile request: {request!r}")
    return window


def _poll_s(folder: str) -> float:
    return _URL_POLL_S if storage.is_url(folder) else _POLL_S


# -- Requests


def request_profile(
    folder: str,
    events: list[dict[str, Any]],
    *,
    steps: int,
    note: Callable[[str], None],
    timeout_s: float,
) -> dict[str, Any]:
    """Request a profile from the run in `folder` with these `events` and wait until all workers
    have written it. Raises InputError if the run does not answer, ends before, or a worker fails to
    write it.
    """
    if not 1 <= steps <= MAX_PROFILED_STEPS:
        raise InputError(
            f"steps: must be between 1 and {MAX_PROFILED_STEPS}, which fit into memory, got "
            f"{steps:,}"
        )
    start = _running(folder, events)
    first, goal = _first_step(events, lead_s=_LEAD_S + _poll_s(folder))
    first = max(0, min(first, goal - steps))
    window = Window(f"step_{first:08d}-{uuid.uuid4().hex[:6]}", first, first + steps)
    request = storage.join(profile_folder(folder), _REQUEST)
    storage.make_folder(profile_folder(folder))
    storage.write_json(request, asdict(window))
    note(f"Requested {steps} steps from step {first:,}")
    target = storage.join(profile_folder(folder), window.name)
    ranks = [storage.join(target, f"rank_{rank}") for rank in range(start["world_size"])]
    deadline_s = time.monotonic() + timeout_s
    failures = list[str]()
    # Follows the events in a thread, since the main one polls for the traces, which may be in a
    # store.
    watch = partial(_watch_failures, folder, window.name, events[-1]["time"], failures)
    try:
        with in_background(watch, name="profile-failures"):
            while not all(storage.exists(storage.join(rank, TRACE)) for rank in ranks):
                if failures:
                    raise InputError(f"{folder}: no profile. {failures[0]}")
                if time.monotonic() > deadline_s:
                    why = "Training is slow, or has ended; see its events"
                    if _is_pending(request, window):
                        why = "The run has no running driver"
                    raise InputError(f"{folder}: no profile after {timeout_s:.0f} s. {why}")
                time.sleep(_POLL_S)
    finally:
        if _is_pending(request, window):
            storage.remove_file(request)
    return {"profile": target, "first_step": first, "steps": steps, "ranks": len(ranks)}


def _is_pending(request: str, window: Window) -> bool:
    """Return whether the request has not been taken yet. The file may contain another process's
    request.
    """
    try:
        return storage.exists(request) and storage.read_json(request) == asdict(window)
    except (InputError, FileNotFoundError):  # taken between the two calls
        return False


def _watch_failures(
    folder: str, name: str, since_s: float, failures: list[str], ended: threading.Event
) -> None:
    """Append to `failures` what workers report about this profile, and the end of their attempt
    after `since_s`.
    """
    # damaged or unreachable events: the caller has a timeout
    with contextlib.suppress(InputError, OSError):
        for event in follow(storage.join(folder, "events.jsonl"), stop=ended):
            if event["kind"] == "profile_failed" and event["name"] == name:
                failures.append(f"worker {event['rank']}: {event['cause']}")
            elif event["kind"] in _ENDS and event["time"] > since_s:
                ended.wait(_WRITING_S)
                failures.append(
                    "training ended before the profile was complete "
                    f"({event.get('cause', _ENDS[event['kind']])})"
                )


def _running(folder: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last start event. Raises InputError if the run is not training."""
    for event in reversed(events):
        if event["kind"] == "start":
            return event
        if event["kind"] in _ENDS:
            break
    raise InputError(f"{folder}: is not training. Only a run in progress can be profiled")


def _first_step(events: list[dict[str, Any]], *, lead_s: float) -> tuple[int, int]:
    """Return (the expected step in `lead_s` seconds at the latest speed, the run's last step).
    Pure.
    """
    logs = [event for event in events if event["kind"] in ("start", "step")]
    last = logs[-1]
    sooner = logs[-2] if len(logs) > 1 else last
    elapsed_s = last["time"] - sooner["time"]
    rate = max(0.0, (last["step"] - sooner["step"]) / elapsed_s) if elapsed_s > 0 else 0.0
    return last["step"] + math.ceil(rate * (max(0.0, time.time() - last["time"]) + lead_s)), last[
        "steps"
    ]
