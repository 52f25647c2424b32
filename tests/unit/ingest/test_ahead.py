"""Values that a thread makes ahead: in order, few at a time, errors in their place, and an end when the reader goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest

from rayrec.ingest.ahead import Ahead


class Source:
    def __init__(self, size: int, *, fails_at: int | None = None) -> None:
        self.made, self.closed, self.threads = 0, False, set[int]()
        self._size, self._fails_at = size, fails_at

    def values(self) -> Generator[int, None, None]:
        try:
            for number in range(self._size):
                self.threads.add(threading.get_ident())
                if number == self._fails_at:
                    raise ValueError("broken")
                self.made += 1
                yield number
        finally:
            self.closed = True


def test_values_come_in_order_prepared_in_another_thread() -> None:
    source = Source(50)
    assert list(Ahead(source.values(), most=2, prepare=lambda value: value * 10)) == list(range(0, 500, 10))
    assert threading.get_ident() not in source.threads


def test_few_are_made_ahead_and_closing_ends_the_source() -> None:
    source = Source(50)
    ahead = Ahead(source.values(), most=2)
    assert [next(ahead), next(ahead)] == [0, 1]
    deadline_s = time.monotonic() + 5
    while source.made < 5 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.05)
    assert source.made == 5  # two read, two that wait, and one that finds no room
    ahead.close()
    assert source.closed
    assert next(ahead, None) is None


def test_an_error_comes_behind_the_values_before_it() -> None:
    ahead = Ahead(Source(5, fails_at=2).values(), most=4)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    assert next(ahead, None) is None
    ahead.close()
