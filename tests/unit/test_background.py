"""Threads that run while a context lasts."""

import threading

import pytest

from rayrec.background import in_background


def test_thread_ends_with_context() -> None:
    ended = threading.Event()

    def wait(closed: threading.Event) -> None:
        closed.wait()
        ended.set()

    with in_background(wait, name="waiter"):
        assert "waiter" in [thread.name for thread in threading.enumerate()]
        assert not ended.is_set()
    assert ended.is_set()


def test_thread_ends_after_error() -> None:
    def wait(closed: threading.Event) -> None:
        closed.wait()

    with pytest.raises(KeyError), in_background(wait, name="waiter"):
        raise KeyError
    assert "waiter" not in [thread.name for thread in threading.enumerate()]
