"""Threads that run while a context lasts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_JOIN_S: Final = 5.0
"""Maximum wait for a thread at the end of its context, in seconds."""


@contextmanager
def in_background(function: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Call the function in a thread. Its argument is set at the end of the context, and it must
    then return soon.
    """
    # The thread may be in a call to an unavailable store or a lost process, which no event ends. So
    # the wait is limited, and the thread is a daemon, which the process does not wait for at exit.
    ended = threading.Event()
    thread = threading.Thread(target=function, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_JOIN_S)
