"""SIGTERM and Ctrl-C: at once, or noted while workers save."""

from __future__ import annotations

import signal
import threading

import pytest

from rayrec.training.stop_monitor import MORE_WORKERS, Signals, StopWatch


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signals(number: signal.Signals, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with Signals() as signals, pytest.raises(error):
        signal.raise_signal(number)
    with Signals() as signals:
        with signals.held():
            signal.raise_signal(number)
            assert signals.cause == number.name
            with pytest.raises(error):  # the second
                signal.raise_signal(number)
        with pytest.raises(error):
            signals.throw()
    assert signal.getsignal(number) is before


def test_sigterm_is_exit_status_143() -> None:
    with Signals(), pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_room_for_more_workers_waits_for_an_evaluation_and_a_signal_does_not() -> None:
    watch = StopWatch(None, rank=1)
    for cause, expected in ((None, (False, False)), (MORE_WORKERS, (True, False)), ("SIGTERM", (True, True))):
        watch.cause = cause
        assert (watch.seen()[0], watch.urgent()) == expected
