"""Detection of CPU contention, and short OpenMP waits during contention."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders.faults import until

from rayrec.layers import cpu_watch
from rayrec.layers.cpu_watch import CpuWatch, WaitPolicy, waiting_share

_MS = 1_000_000
ROW = [1.0] * cpu_watch._CONTENDED_INTERVALS


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    for name in cpu_watch._WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def decisions(policy: WaitPolicy, shares: list[float], *, start_s: float = 0.0) -> list[bool]:
    return [policy.update(share, start_s + place * 0.1) for place, share in enumerate(shares)]


def test_wait_policy_follows_consecutive_contention() -> None:
    assert decisions(WaitPolicy(), [0.9, 0.9, 0.9, 0.9, 0.1] * 3) == [False] * 15
    assert decisions(WaitPolicy(), [*ROW, 0.0]) == [False, False, False, False, True, True]
    policy, now_s, short_s = WaitPolicy(), 0.0, []
    decisions(policy, ROW[1:])
    for _ in range(9):
        assert policy.update(1.0, now_s)
        begin_s = now_s
        while policy.update(1.0, now_s):
            now_s += 0.125
        short_s.append(now_s - begin_s)
    assert short_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    policy = WaitPolicy()
    assert decisions(policy, ROW)[-1]
    assert decisions(policy, [0.3, 0.3, 1.0, 0.2], start_s=5.0) == [False, False, False, False]
    assert decisions(policy, ROW, start_s=6.0) == [False, False, False, False, True]
    assert policy.update(1.0, 7.3)
    assert not policy.update(1.0, 7.5)  # Initial duration again


def test_waiting_ratio_uses_slowest_runnable_thread() -> None:
    before = [(0, 0), (5 * _MS, 5 * _MS), (0, 0)]
    assert waiting_share(before, [(90 * _MS, 10 * _MS), (6 * _MS, 9 * _MS), (1 * _MS, 3 * _MS)]) == 0.1
    assert waiting_share(before, [(90 * _MS, 10 * _MS), (10 * _MS, 95 * _MS), (0, 0)]) == pytest.approx(90 / 95)
    assert waiting_share(before, before) == 0.0


_SPINNING = """
import threading, time, torch
from pathlib import Path
from rayrec.layers import cpu_watch

torch.set_num_threads(2)
(worker,) = set(cpu_watch._run_in_team(torch.get_num_threads())) - {threading.get_native_id()}
path, values = Path(f"/proc/self/task/{worker}/schedstat"), torch.ones(1_000_000)

def spinning_ns():
    before = cpu_watch._run_and_wait_ns(path)[0]
    for _ in range(20):
        values.add_(1)
        time.sleep(0.005)
    return cpu_watch._run_and_wait_ns(path)[0] - before

waits = cpu_watch._ShortWaits()
print(spinning_ns())
waits.set(True)
print(spinning_ns())
waits.set(False)
print(spinning_ns())
"""


def test_short_waits_make_threads_sleep() -> None:
    """Compare the CPU time of an idle thread between operators, in a process whose OpenMP may spin."""
    environment = {name: value for name, value in os.environ.items() if name not in cpu_watch._WAIT_VARIABLES}
    ended = subprocess.run([sys.executable, "-c", _SPINNING], env=environment, capture_output=True, text=True, check=True)
    long_ns, short_ns, long_again_ns = map(int, ended.stdout.split())
    assert short_ns < min(long_ns, long_again_ns) / 3


def test_cpu_watch_reports_contention_once(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter(range(10**9))

    def waits_always(path: Path) -> tuple[int, int]:
        return 0, next(reads) * 100 * _MS

    monkeypatch.setattr(cpu_watch, "_run_and_wait_ns", waits_always)
    monkeypatch.setattr(cpu_watch, "_INTERVAL_S", 0.005)
    shares: list[float] = []
    watch = CpuWatch(shares.append)
    until(lambda: "rayrec-idle-team" in [thread.name for thread in threading.enumerate()])
    watch.close()
    assert shares == [1.0]
    assert not {"rayrec-idle-team", "rayrec-cpu-watch"} & {thread.name for thread in threading.enumerate()}


def test_cpu_watch_respects_user_settings(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_watch._can_shorten_waits(2)
    assert not cpu_watch._can_shorten_waits(1)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert not cpu_watch._can_shorten_waits(2)
