"""The forecast of the demo, held against the demo."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from rayrec import recipes
from rayrec.data.synthetic import generate
from rayrec.observe.events import read_events
from rayrec.training.forecast import ClusterShape, forecast
from rayrec.training.trainer import train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

STEPS = 240


def test_the_forecast_of_the_demo_is_within_a_quarter_of_what_is_measured(tmp_path: Path) -> None:
    import ray

    generate(str(tmp_path / "log"), rows=400_000, seed=0, parallelism=2)
    config = recipes.criteo_demo(str(tmp_path / "log" / "train.txt")).replace(
        batch_size=1024,
        min_steps_per_epoch=1,
        steps=STEPS,
        evaluate_every=10**6,
        early_stopping={"patience": 0},
        storage_path=str(tmp_path / "runs"),
        name="demo",
    )
    told = [forecast(config, ClusterShape(float(os.cpu_count() or 1)))]
    ray.shutdown()
    result = train(config)
    ray.shutdown()
    told.append(forecast(config, ClusterShape(float(os.cpu_count() or 1))))
    steps = read_events(os.path.join(result.folder, "events.jsonl"), kinds={"step"})
    late = [(a, b) for a, b in pairwise(steps) if b["step"] > STEPS // 4]
    seconds = sum((b["rows"] - a["rows"]) / b["rows_per_s"] for a, b in late)
    measured = (late[-1][1]["rows"] - late[0][0]["rows"]) / seconds
    # Before and after, since what else the machine does changes meanwhile.
    expected = sum(found.rows_per_s for found in told) / len(told)
    assert expected == pytest.approx(measured, rel=0.25), [found.text() for found in told]
