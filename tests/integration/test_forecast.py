"""Forecasts held against what they forecast: the speed of the demo, and the memory of workers."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from builders.runs import events_of
from hosts.planned_memory import SIZES, measured

from rayrec import recipes
from rayrec.data.synthetic import generate
from rayrec.training.forecast import ClusterShape, Forecast, forecast
from rayrec.training.trainer import train
from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]

STEPS = 240
TRIES = 3
"""A run is held against the forecasts before and after it, which says nothing where the machine was another meanwhile."""


def told(config: TrainConfig) -> Forecast:
    ray.shutdown()
    return forecast(config, ClusterShape(float(os.cpu_count() or 1)))


def measured_rows_per_s(config: TrainConfig) -> float:
    """Of a run, less its first quarter."""
    ray.shutdown()
    result = train(config)
    late = [(a, b) for a, b in pairwise(events_of(result.folder, "step")) if b["step"] > STEPS // 4]
    seconds = sum((b["rows"] - a["rows"]) / b["rows_per_s"] for a, b in late)
    return float((late[-1][1]["rows"] - late[0][0]["rows"]) / seconds)


def test_demo_forecast_matches_measured_speed(tmp_path: Path) -> None:
    generate(str(tmp_path / "log"), rows=400_000, seed=0, parallelism=2)
    fields = {"batch_size": 1024, "min_steps_per_epoch": 1, "evaluate_every": 10**6, "early_stopping": {"patience": 0}}
    config = recipes.criteo_demo(str(tmp_path / "log" / "train.txt"))
    config = config.replace(steps=STEPS, storage_path=str(tmp_path / "runs"), **fields)
    found = [told(config)]
    for number in range(TRIES):
        measured = measured_rows_per_s(config.replace(name=f"demo-{number}"))
        found.append(told(config))
        expected = sum(one.rows_per_s for one in found[-2:]) / 2
        if expected == pytest.approx(measured, rel=0.25):
            break
    assert expected == pytest.approx(measured, rel=0.25), [one.text() for one in found]


@pytest.mark.parametrize("rows", SIZES)
def test_planned_memory_matches_measured_peak(rows: int) -> None:
    """Of a CPU worker, against that of a process that trains and saves."""
    found = measured(rows)
    assert found["forecast"] == pytest.approx(found["peak"], rel=0.15)
