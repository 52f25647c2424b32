"""Process that ranks are forked from, itself forked from pytest once tests are collected: it has
imported what they need.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

_FORK = multiprocessing.get_context("fork")
_requests: Connection


def start() -> None:
    """Fork the server. No test may have run: threads of autograd, OpenMP and Ray, once started, do
    not survive a fork.
    """
    global _requests
    _requests, theirs = _FORK.Pipe()
    if os.fork() == 0:
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()


def call_each(
    function: Callable[..., object], places: Sequence[tuple[Any, ...]]
) -> list[int | None]:
    """Call a function with the arguments of each place in a process of its own. Returns the exit
    codes, None after 5 minutes.
    """
    _requests.send((function, places))
    return _requests.recv()


def _serve(requests: Connection) -> None:
    """Serve until pytest ends, and with it the pipe."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {requests.fileno(), nothing}:
        os.dup2(nothing, descriptor)  # pytest-xdist waits for the end of its own
    while True:
        function, places = requests.recv()
        processes = [_FORK.Process(target=function, args=place) for place in places]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        requests.send([process.exitcode for process in processes])
        for process in processes:
            process.kill()
