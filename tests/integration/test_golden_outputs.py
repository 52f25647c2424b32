"""What commands write if Ray does the work: the bytes that threads write, which are the same as ever."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.golden import FOLDER, check_golden
from builders.golden_outputs import digests, output_makers, predictions

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray", "own_cache")]


def test_outputs_of_ray_are_golden(tmp_path: Path) -> None:
    """One output of each command and of each way to write it: the others are the threads'."""
    (tmp_path / "scored").mkdir()
    golden: dict[str, Any] = json.loads((FOLDER / "outputs.json").read_text())
    makers = output_makers(tmp_path)
    for name in ("npy, shuffled", "parquet of lists", "split by rows", "split by last-out", "text by characters"):
        makers[name](tmp_path / name, "ray")
        assert digests(tmp_path / name, of=tmp_path) == golden[name], name
    check_golden("predictions_own", predictions("own", tmp_path / "scored", address="local"), tolerance=1e-4)
