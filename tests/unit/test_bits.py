"""The bits of tiny runs: what counts as a difference, and that those of the stored runs are still the same."""

import subprocess
import sys
from typing import Any

import pytest
from builders.scripts import ROOT, script

bits = script("tools", "bits")
HASHES = {"weights_sha256": "aa", "predict_sha256": "bb"}
LINE: dict[str, Any] = {"name": "criteo", "losses": [0.5, 0.25], "metrics": {"auroc": "0.75"}, **HASHES}


@pytest.mark.parametrize(
    ("changes", "on_this_machine", "elsewhere"),
    [
        ({}, 0, 0),
        ({"losses": [0.5, 0.2500001]}, 1, 0),
        ({"losses": [0.5, 0.2501]}, 1, 1),
        ({"losses": [0.5, float("nan")]}, 1, 1),
        ({"losses": [0.5]}, 1, 1),
        ({"weights_sha256": "cc"}, 1, 0),
        ({"predict_sha256": "cc", "export_sha256": "dd"}, 2, 0),
        ({"metrics": {"auroc": "0.7500000000000001", "added": "1"}}, 1, 0),
        ({"metrics": {}}, 1, 0),
    ],
)
def test_differences_need_equal_bits_on_one_machine_only(changes: dict[str, Any], on_this_machine: int, elsewhere: int) -> None:
    now = {**LINE, **changes}
    assert len(bits.differences(now, LINE, bits=True)) == on_this_machine
    assert len(bits.differences(now, LINE, bits=False)) == elsewhere
    assert len(bits.differences(now, None, bits=False)) == 1


def test_chosen_runs_include_their_dependencies() -> None:
    assert bits.chosen(["distilled"]) == ["criteo", "distilled"]
    assert bits.chosen(["resumed_3"]) == ["torchrun_2", "resumed_3"]
    assert (bits.chosen(["quick"]), bits.chosen([])) == (list(bits.QUICK), list(bits.RUNS))


@pytest.mark.extended
@pytest.mark.slow
def test_quick_runs_keep_their_bits() -> None:
    """A process of its own: the number of threads counts from its start. CONTRIBUTING.md says how to store an intended change."""
    command = [sys.executable, "tools/bits.py", "quick", "--against", "tests/golden/bits.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 9
