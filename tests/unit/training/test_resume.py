"""Resume from the latest readable checkpoint, regardless of when damage is found."""

import errno
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import yaml
from builders.faults import flip, rejects, unreadable
from ranks import data_parallel

from rayrec import checkpoint, recipes
from rayrec.checkpoint import Checkpoint, DamagedError, folder_of, latest_valid_checkpoint
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.observe.timing import Stopwatch
from rayrec.training import worker
from rayrec.training.progress import Progress
from rayrec.training.resume import Change, compare_settings, with_old
from rayrec.workloads.base import TrainConfig


class Resumed:
    """Start in a folder of checkpoints whose only weight is their step."""

    def __init__(self, folder: Path, *steps: int, files: dict[str, bytes | str] | None = None) -> None:
        self.folder, self.events, self.damaged = str(folder), list[tuple[str, int]](), set[int]()
        self.files = files or {}
        self.loaders: list[Mock] = []
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.models_before: list[int] = []
        """Number of existing models when each model was built."""
        extra = ExtraFiles({"config.yaml": b"a: 1", **self.files})
        for step in steps:
            state = {"progress": Progress(step=step).state(), "loader": {"at": step}}
            weights = {"model.weight": torch.full((1, 1), float(step))}
            checkpoint.save(folder_of(self.folder, step), weights, state=state, extra_files=extra.write)

    def checkpoint_files(self, prepared: Any) -> dict[str, bytes | str]:
        return self.files

    def make_loader(self, context: Any, prepared: Any, *, state: dict[str, Any] | None, step: int) -> Mock:
        self.loaders.append(Mock(state=state))
        return self.loaders[-1]

    def set_up(self, context: Any, prepared: Any) -> Any:
        self.models_before.append(sum(made() is not None for made in self.models))
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        self.models.append(weakref.ref(model))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))

    def start(self) -> tuple[Checkpoint | None, Any, Any, Progress]:
        config = SimpleNamespace(workload=self, to_yaml=lambda: "a: 1", init_from=None)
        context: Any = SimpleNamespace(config=config, rank=0)
        assignment: Any = SimpleNamespace(folder=self.folder, prepared=None, config=config)

        def log(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, checkpoint.step_of(fields["path"])))

        return worker._resume(context, assignment, log, self.damaged, Stopwatch())


def tear(folder: str, step: int, name: str) -> None:
    flip(f"{folder_of(folder, step)}/{name}", -2, bit=4)  # before it, a file so small is mostly header


def test_manifest_damaged_after_check_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = Resumed(tmp_path, 1, 2)

    def look_and_tear(folder: str, **arguments: Any) -> Checkpoint | None:
        found = latest_valid_checkpoint(folder, **arguments)
        if found is not None and found.step == 2:
            tear(folder, 2, "manifest.json")
        return found

    monkeypatch.setattr(worker, "latest_valid_checkpoint", look_and_tear)
    found, setup, loader, progress = resumed.start()
    assert (found.step, progress.step, loader.state) == (1, 1, {"at": 1})
    assert float(setup.model.weight) == 1
    assert (resumed.events, resumed.damaged) == ([("checkpoint_damaged", 2)], {2})
    assert len(resumed.loaders) == 1  # none was started for what could not be read


def test_damage_found_by_reading_is_skipped(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path, 1, 2, 3)
    tear(resumed.folder, 3, "manifest.json")
    tear(resumed.folder, 2, "data_00000.safetensors")
    found, setup, *_ = resumed.start()
    assert (found.step, float(setup.model.weight)) == (1, 1)
    assert resumed.models_before == [0]  # one model for both
    assert resumed.damaged == {2, 3}
    assert resumed.events == [("checkpoint_damaged", 3), ("checkpoint_damaged", 2)]
    assert [loader.close.called for loader in resumed.loaders] == [True, False]


@pytest.mark.parametrize("steps", [(), (1, 2)])
def test_restart_without_checkpoint_builds_no_second_model(tmp_path: Path, steps: tuple[int, ...]) -> None:
    resumed = Resumed(tmp_path, *steps)
    for step in steps:
        tear(resumed.folder, step, "data_00000.safetensors")
    found, setup, loader, progress = resumed.start()
    assert (found, loader.state, progress) == (None, None, Progress())
    assert float(setup.model.weight) == 0
    assert resumed.models_before == ([0, 0] if steps else [0])
    assert resumed.damaged == set(steps)


def test_shared_checkpoint_file_is_repaired_from_run(tmp_path: Path) -> None:
    source = tmp_path / "tokens.npy"
    source.write_bytes(b"abcdef")
    resumed = Resumed(tmp_path, 1, 2, 3, files={"more/tokens.npy": str(source)})
    tear(resumed.folder, 2, "more/tokens.npy")  # in place, so of all three
    for step in (1, 2, 3):
        with pytest.raises(DamagedError, match=r"tokens\.npy: damaged, its checksum does not match"):
            checkpoint.verify(Checkpoint(folder_of(resumed.folder, step)))
    found, setup, loader, _ = resumed.start()
    assert (found.step, loader.state, float(setup.model.weight)) == (3, {"at": 3}, 3)
    assert (resumed.events, resumed.damaged) == ([("checkpoint_repaired", 3)], set())
    checkpoint.verify(found)
    with pytest.raises(DamagedError, match="damaged"):  # the link to the others is broken
        checkpoint.verify(Checkpoint(folder_of(resumed.folder, 2)))
    tear(resumed.folder, 3, "data_00000.safetensors")  # so that the one before is needed
    Path(folder_of(resumed.folder, 1), "more/tokens.npy").write_bytes(b"abc")  # shorter: seen without reading
    found, setup, *_ = resumed.start()
    assert (found.step, float(setup.model.weight)) == (2, 2)
    assert resumed.events[1:] == [("checkpoint_damaged", 3), ("checkpoint_repaired", 2)]


def test_shared_file_is_not_repaired_from_different_source(tmp_path: Path) -> None:
    source = tmp_path / "tokens.npy"
    source.write_bytes(b"abcdef")
    resumed = Resumed(tmp_path, 1, 2, files={"tokens.npy": str(source)})
    tear(resumed.folder, 2, "tokens.npy")
    source.write_bytes(b"abcdeg")
    found, *_ = resumed.start()
    assert (found, resumed.damaged) == (None, {1, 2})
    assert resumed.events == [("checkpoint_damaged", 2), ("checkpoint_damaged", 1)]
    source.unlink()
    found, *_ = resumed.start()
    assert found is None


@pytest.mark.parametrize("name", ["manifest.json", "data_00000.safetensors"])
def test_unreadable_disk_does_not_restart_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    resumed = Resumed(tmp_path, 1)
    unreadable(monkeypatch, name, OSError(errno.EIO, "Input/output error"))
    rejects(rf"{name}: cannot be read .*, and there is no other checkpoint to resume from", resumed.start)


# Settings that may change between start and resume --------------------------------------------------------------------
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
