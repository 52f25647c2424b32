"""Stopwatch of startup stages, and process age."""

import time
from pathlib import Path

import pytest

from rayrec.observe.timing import Stopwatch, process_age_s


def test_stopwatch_times_consecutive_stages_until_now() -> None:
    watch = Stopwatch(last_s=100.0)
    laps = (("imports", 102.5), ("index", 103.0), ("imports", 104.0), ("clock of another machine", 103.0), ("folder", 103.5))
    for name, at_s in laps:
        watch.lap(name, at_s=at_s)
    assert watch.stages == {"imports": 3.5, "index": 0.5, "clock of another machine": 0.0, "folder": 0.5}
    watch = Stopwatch(time.time() - 2.0)
    watch.lap("a")
    watch.lap("b")
    assert 2.0 <= watch.stages["a"] < 60.0
    assert 0.0 <= watch.stages["b"] < 60.0


def test_process_age_counts_from_start(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    stat = tmp_path / "proc/self/stat"
    stat.write_text("7 (a (strange) name) S " + " ".join(["0"] * 18) + " 0 9 9")  # Started with the machine.
    assert process_age_s(tmp_path) == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)
    stat.write_text("7 (short) S")
    assert process_age_s(tmp_path) is None
    assert process_age_s(tmp_path / "nothing") is None
    age_s = process_age_s()
    assert age_s is not None
    assert Stopwatch.of_process().last_s == pytest.approx(time.time() - age_s, abs=1.0)
