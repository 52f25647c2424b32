"""End of a process and of all processes that it has started, and signals that request it. The
process becomes this program, which is run by its path.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Final, NoReturn

_KILL_S: Final = 1.0
"""Maximum seconds to wait for killed processes, which the kernel may delay."""
_POLL_S: Final = 0.01
_PR_SET_CHILD_SUBREAPER: Final = 36
"""Constant of Linux's <sys/prctl.h>."""


def end_with_children(status: int, *, spared: Collection[int] = ()) -> NoReturn:
    """End this process with an exit status, and kill all its descendants, except child processes
    with ids `spared`. Call it from any thread at any moment. Runs no handlers and flushes no
    buffers.
    """
    try:
        # Processes whose parents are killed become children of this process, and thus visible to
        # the program below.
        # A glibc function, since Python has none. The setting stays in the process across `execv`.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A new program in this process ends all threads at once. Ray's would otherwise notice the
        # end of Ray's processes, print a stack and abort with another status.
        os.execv(
            sys.executable, [sys.executable, "-I", "-S", __file__, str(status), *map(str, spared)]
        )
    finally:
        # For instance, Python was removed. The kernel ends those of Ray's processes that are to end
        # with their parent.
        os._exit(status)


def stop_signals() -> frozenset[signal.Signals]:
    """Return the signals that stop a server. nohup ignores SIGHUP, so that a command outlives its
    terminal.
    """
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return frozenset(numbers)


def child_processes() -> set[int]:
    """Return the ids of this process's running children."""
    process_id = os.getpid()
    children = set[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                # The command, in parentheses, may contain anything.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # Has ended meanwhile
            continue
        if int(parent) == process_id and state not in "ZX":
            children.add(int(name))
    return children


def main() -> NoReturn:
    """Kill the children of this process, and theirs, which become its own, then exit. Arguments:
    exit status, spared children.
    """
    start_s = time.monotonic()
    status = int(sys.argv[1])
    spared = {int(word) for word in sys.argv[2:]}
    while children := child_processes() - spared:
        if time.monotonic() - start_s > _KILL_S:
            break
        for child in children:
            # Of this process, so that no other process gets its id before it is awaited
            os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)
    os._exit(status)


if __name__ == "__main__":
    main()
