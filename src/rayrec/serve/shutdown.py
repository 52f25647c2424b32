"""End of a server's command on SIGTERM, Ctrl-C or SIGHUP, at any moment within seconds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final, Literal, NoReturn, final

from rayrec.cluster.process_end import child_processes, end_with_children, stop_signals

STOPPED: Final = 143
"""Exit status if a signal ended the command before it was ready, or before all requests in flight
were answered.
"""
DRAIN_S: Final = 4.0
"""Maximum seconds to answer requests in flight. Supervisors kill what has not ended a few seconds
after their signal.
"""
_WITHDRAW_S: Final = 3.0
"""Maximum seconds to withdraw an unfinished server from a running cluster."""
_STDERR: Final = 2


# starting: a signal ends the command at once, with `STOPPED`.
# serving: a signal makes it stopping. It answers requests in flight, then ends with 0.
# stopping: a second signal, or the end of `DRAIN_S` after the first, ends it at once, with
# `STOPPED`.


@final
class StopRequest:
    """State of a server's command with respect to signals."""

    def __init__(self, end: Callable[[str], object]) -> None:
        """`end` ends the command at once, or raises. It gets the reason."""
        # An event, since the main thread waits for it between polls and a signal thread sets it.
        self.requested = threading.Event()
        """Set when the server must answer its requests in flight and end."""
        self._state: Literal["starting", "serving", "stopping"] = "starting"
        self._end = end

    def begin_serving(self) -> None:
        """Answer requests in flight from now on before a signal ends the command."""
        # No lock: only this thread leaves "starting", and a signal that comes before ends the
        # command.
        self._state = "serving"

    def receive(self, number: int) -> None:
        """React to a signal."""
        if self._state == "serving":
            self._state = "stopping"
            self.requested.set()
        elif self._state == "starting":
            self._end(f"stopped by {signal.Signals(number).name} before it was ready")
        else:
            self._end("stopped by a second signal, without the answers to requests in flight")

    def expire(self) -> None:
        """End the command, whose requests in flight have not been answered in time."""
        self._end(
            f"stopped without the answers to requests in flight, which took more than {DRAIN_S:g} s"
        )


@final
class CommandEnd:
    """Signals and end of a process that runs nothing but a server's command."""

    def __init__(self) -> None:
        """Receive the signals of this process from now on. Call it in the main thread, before any
        thread starts.
        """
        self.stop = StopRequest(self._end_now)
        self.withdraw: Callable[[], object] | None = None
        """Function that removes an unfinished server from a running cluster."""
        self.owns_ray = False
        """Whether the command has a local Ray, whose processes end with this one."""
        self._before = child_processes()
        """Children of a shell that has become this process."""
        self._numbers = stop_signals()
        self._ending = self._closed = False
        # Blocked in all threads and processes that are started from now on. Ray's C++ handlers
        # would print a stack and abort. Ray's processes, which get signals to a process group or,
        # from systemd, to a control group, would end before the server has answered its requests.
        # So only the thread below receives signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        # A thread, because the main thread may be in a call that takes long, or that never returns
        # if Ray's head is lost.
        self._thread = threading.Thread(target=self._receive, name="signals", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Return, unless this process is ending: errors are then consequences of that."""
        if self._ending:
            # Waits forever: the thread that ends the process is at work.
            threading.Event().wait()

    def finish(self, status: int) -> int:
        """Return the exit status of the command, or end this process with it if there is a local
        Ray.
        """
        self.hold()
        if self.owns_ray:
            for stream in (sys.stdout, sys.stderr):
                # Closed, or its reader is gone
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            end_with_children(status, spared=self._before)
        return status

    def close(self) -> None:
        """Handle signals as other programs do."""
        self.hold()
        self._closed = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, signal.SIGTERM)  # Wakes the thread
        self._thread.join()
        # `rayrec.__main__` may have blocked them, too
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def _receive(self) -> None:
        """Pass on signals, and expire the first that lets the server answer its requests."""
        number = signal.sigwait(self._numbers)
        if self._closed:
            return
        self.stop.receive(number)
        second = signal.sigtimedwait(self._numbers, DRAIN_S)
        if self._closed:
            return
        if second is None:
            self.stop.expire()
        else:
            self.stop.receive(second.si_signo)

    def _end_now(self, reason: str) -> NoReturn:
        self._ending = True
        _write_line(f"rayrec serve: {reason}")
        if self.withdraw is not None:
            # In a thread, because the cluster may not answer
            thread = threading.Thread(target=self.withdraw, name="withdraw", daemon=True)
            thread.start()
            thread.join(_WITHDRAW_S)
        end_with_children(STOPPED, spared=self._before)


def _write_line(text: str) -> None:
    """Write a line to standard error, unless that would block or fail."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, f"{text}\n".encode())


_command_end: CommandEnd | None = None
"""End of the command that this process runs. There is one at most, because signals are sent to
processes.
"""


def command_end() -> CommandEnd | None:
    """Return the end of the command that this process runs. None if a program uses rayrec's
    functions.
    """
    return _command_end


def run_until_signal(run: Callable[[], int]) -> int:
    """Run a command to its end or until a signal ends it. Returns its exit status."""
    global _command_end
    if threading.current_thread() is not threading.main_thread():
        return run()
    _command_end = CommandEnd()
    try:
        return _command_end.finish(run())
    finally:
        _command_end.close()
        _command_end = None
