"""Object store monitor during short and permanent outages."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from builders.faults import until

from rayrec.training.launchers import ray_metrics
from rayrec.training.launchers.ray_metrics import ObjectStoreMonitor


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int], Any]], ObjectStoreMonitor]]:
    """Return a function that starts a monitor whose n-th poll (from 0) returns `answer(n)`."""
    monkeypatch.setattr(ray_metrics, "_POLL_S", 0.002)
    started: list[ObjectStoreMonitor] = []

    def start(answer: Callable[[int], Any]) -> ObjectStoreMonitor:
        asked = iter(range(10**9))
        monkeypatch.setattr(ray_metrics, "_store_stats", lambda: answer(next(asked)))
        started.append(ObjectStoreMonitor())
        return started[-1]

    yield start
    for one in started:
        one.close()
        one._thread.join(timeout=60)


def stats(number: int) -> Any:
    return SimpleNamespace(object_store_bytes_used=number, object_store_bytes_avail=1000, spilled_bytes_total=7 + number)


def test_object_store_monitor_returns_usage_and_spills(watch: Callable[..., ObjectStoreMonitor]) -> None:
    watched = watch(lambda number: stats(min(number, 5)))
    until(lambda: watched.latest().get("object_store_bytes") == 5)
    assert watched.latest() == {"object_store_bytes": 5, "object_store_limit_bytes": 1000, "spilled_bytes": 5}


def test_object_store_monitor_survives_nine_failures(watch: Callable[..., ObjectStoreMonitor]) -> None:
    seen: list[dict[str, int]] = []

    def answer(number: int) -> Any:
        if number:
            seen.append(watched.latest())
        if number % 10:
            raise TimeoutError("the control store does not answer")
        return stats(number)

    ready: list[ObjectStoreMonitor] = []
    watched: Any = SimpleNamespace(latest=lambda: ready[0].latest() if ready else {})
    ready.append(watch(answer))
    until(lambda: len(seen) > 60)
    assert ready[0]._thread.is_alive()
    after_failures = [fields for place, fields in enumerate(seen, start=1) if (place - 1) % 10]
    assert all(fields == {} for fields in after_failures[:50])  # nothing rather than what was once
    until(lambda: bool(ready[0].latest()))


def test_object_store_monitor_stops_after_ten_failures(
    watch: Callable[..., ObjectStoreMonitor], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def answer(number: int) -> Any:
        asked.append(number)
        if number:
            raise TimeoutError("the control store is gone")
        return stats(number)

    with caplog.at_level(logging.WARNING):
        watched = watch(answer)
        watched._thread.join(timeout=60)
    assert (len(asked), watched.latest()) == (11, {})
    assert caplog.text.count("Stopped polling the object store (the control store is gone)") == 1
