"""Settings that may change between start and resume."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import yaml
from ranks import data_parallel

from rayrec import recipes
from rayrec.training.resume import Change, compare_settings, with_old
from rayrec.workloads.base import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Own(data_parallel.Small):
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ("workers_note",)
    workers_note: str = "a"


def config(**changes: Any) -> TrainConfig:
    """Return a click model's configuration for up to four workers with 100 rows each."""
    return recipes.criteo_demo("log").replace(batch_size=100, steps=50, scaling={"num_workers": (1, 4)}).updated(changes)


def stored(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration after a round trip through config.yaml."""
    return yaml.safe_load(config.to_yaml())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"name": "b", "storage_path": "s3://b/runs", "cluster": {"address": "a:1"}}, []),
        ({"seed": 7}, ["seed: 0 -> 7"]),
        ({"precision": "bf16"}, ["precision: fp32 -> bf16"]),
        ({"train_data": {"shuffle": "none"}}, ["train_data.shuffle: window -> none"]),
        ({"train_data": {"block_bytes": 1 << 20}}, ["train_data.block_bytes: 33554432 -> 1048576"]),
        ({"train_data": {"files": ("a", "b")}}, ['train_data.files: [] -> ["a", "b"]']),
        ({"train_data": {"path": "moved", "prefetch_blocks": 9}}, ["train_data.path", "train_data.prefetch_blocks"]),
        (
            {"workload": {"dense_optimizer": {"kind": "adagrad", "learning_rate": 0.5}}},
            ["workload.dense_optimizer.kind: adam -> adagrad", "workload.dense_optimizer.learning_rate: 0.001 -> 0.5"],
        ),
        ({"workload": {"sparse_optimizer": {"eps": 1e-5}}}, ["workload.sparse_optimizer.eps: 0.005 -> 1e-05"]),
        ({"workload": {"preset": {"min_count": 9}}}, ["workload.preset.min_count: 2 -> 9"]),
        ({"workload": {"preprocessor": "other"}}, ["workload.preprocessor: null -> other"]),
        ({"workload": {"sharding": {"min_column_width": 8}}}, ["workload.sharding.min_column_width"]),
        (
            {"workload": {"sharding": {"exchange_precision": "fp16"}}, "scaling": {"network_interface": "eth0"}},
            ["workload.sharding.exchange_precision: fp32 -> fp16", "scaling.network_interface"],
        ),
        ({"tf32": True}, ["tf32: false -> true"]),
        (
            {"checkpoint": {"every": 5}, "log_every": 1, "trackers": {"tensorboard": False}, "failure": {"grace_s": 9.0}},
            ["log_every", "checkpoint.every", "failure.grace_s", "trackers.tensorboard"],
        ),
        ({"steps": 51, "epochs": 3}, ["steps", "epochs"]),
        ({"steps": None}, ["steps"]),
        ({"steps": 49}, ["steps: 50 -> 49"]),
        ({"scaling": {"num_workers": 2, "threads_per_worker": 1}}, ["scaling.num_workers", "scaling.threads_per_worker"]),
        ({"scaling": {"num_workers": 2}, "batch_size": 200}, ["batch_size", "scaling.num_workers"]),
        ({"scaling": {"num_workers": 2}, "batch_size": 100}, ["scaling.num_workers"]),
        ({"batch_size": 200}, ["batch_size: 100 -> 200"]),
        (
            {"scaling": {"batch_policy": "per_worker", "learning_rate_policy": "sqrt"}},
            ["scaling.batch_policy: global -> per_worker", "scaling.learning_rate_policy: constant -> sqrt"],
        ),
    ],
)
def test_compare_settings_classifies_changes(changes: dict[str, Any], expected: list[str]) -> None:
    """Rejected changes have values, accepted ones do not."""
    first, then = config(), config(**changes)
    found = compare_settings(stored(first), then)
    assert [*map(str, found.rejected), *(change.field for change in found.accepted)] == expected
    assert not compare_settings(stored(first), with_old(then, found.accepted)).accepted


def test_compare_settings_handles_fields_of_other_versions() -> None:
    settings = stored(config())
    del settings["min_steps_per_epoch"], settings["workload"]["dense_optimizer"]["momentum"]
    settings["gone"] = settings["workload"]["gone"] = 3
    found = compare_settings(settings, config(min_steps_per_epoch=2))
    assert found.rejected == (
        Change("workload.gone", 3, "not set"), Change("min_steps_per_epoch", "not set", 2), Change("gone", 3, "not set")
    )  # fmt: skip
    assert found.accepted == ()


def test_compare_settings_compares_ensemble_members_and_model_class() -> None:
    first = recipes.criteo_ensemble("log")
    settings = stored(first)
    del settings["workload"]["model"]["models"][1]["tower_losses"]  # added by a later version
    assert compare_settings(settings, first).rejected == ()
    settings["workload"]["model"]["models"][1]["first_dropout"] = 0.3
    (change,) = compare_settings(settings, first).rejected
    assert str(change) == "workload.model.models[1].first_dropout: 0.3 -> 0.1"
    widedeep, deepfm = (config(workload={"model": {"class": name}}) for name in ("widedeep", "deepfm"))
    (change,) = compare_settings(stored(widedeep), deepfm).rejected
    assert change.field == "workload.model.class"


def test_compare_settings_uses_free_fields_of_workload() -> None:
    first = data_parallel.config(1).replace(workload=Own())
    found = compare_settings(stored(first), first.replace(workload={"workers_note": "b"}))
    assert (found.rejected, found.accepted) == ((), (Change("workload.workers_note", "a", "b"),))
    found = compare_settings(stored(first), first.replace(workload={"optimizer": {"kind": "sgd"}}))
    assert [change.field for change in found.rejected] == ["workload.optimizer.kind"]
