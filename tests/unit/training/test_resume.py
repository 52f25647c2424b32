"""Resume from the latest readable checkpoint, regardless of when damage is found."""

import contextlib
import errno
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from builders.events import NEW_ITEMS, USERS, events_run, grown_events, write_events
from builders.faults import flip, rejects, unreadable
from builders.interactions import ITEMS
from builders.runs import LEAN, QUIET, events_of, train
from ranks import data_parallel
from ranks.checkpoint import same

import rayrec
from rayrec import checkpoint, recipes
from rayrec import checkpoint as checkpoints
from rayrec.checkpoint import (
    Checkpoint,
    DamagedError,
    full_tensors,
    latest_valid_checkpoint,
    open_checkpoint,
    step_folder,
)
from rayrec.checkpoint.state import all_tensors, start_from
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.models.base import TableInit
from rayrec.models.ranking.dcnv2 import DCNv2Config
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.sharded_model import TableValues
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.schema import Feature, Schema
from rayrec.training import worker
from rayrec.training.progress import Counters, Progress
from rayrec.training.resume import Change, compare_settings, with_old
from rayrec.workloads.base import TrainConfig

pytestmark = pytest.mark.usefixtures("own_cache")


class Resumed:
    """Start in a folder of checkpoints whose only weight is their step."""

    def __init__(
        self, folder: Path, *steps: int, files: dict[str, bytes | str] | None = None
    ) -> None:
        self.folder = str(folder)
        self.events = list[tuple[str, int]]()
        self.damaged = set[int]()
        self.files = files or {}
        self.loaders: list[Mock] = []
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.models_before: list[int] = []
        """Number of existing models when each model was built."""
        extra = ExtraFiles({"config.yaml": b"a: 1", **self.files})
        for step in steps:
            state = {"progress": Progress(Counters(step)).state(), "loader": {"at": step}}
            weights = {"model.weight": torch.full((1, 1), float(step))}
            checkpoint.save(
                step_folder(self.folder, step), weights, state=state, extra_files=extra.write
            )

    def checkpoint_files(self, prepared: Any) -> dict[str, bytes | str]:
        return self.files

    def make_loader(
        self, context: Any, prepared: Any, *, state: dict[str, Any] | None, step: int
    ) -> Mock:
        self.loaders.append(Mock(state=state))
        return self.loaders[-1]

    def set_up(self, context: Any, prepared: Any) -> Any:
        self.models_before.append(sum(made() is not None for made in self.models))
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        self.models.append(weakref.ref(model))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))

    def start(self) -> worker.Resumed:
        config = SimpleNamespace(workload=self, to_yaml=lambda: "a: 1", init_from=None)
        context: Any = SimpleNamespace(config=config, rank=0)
        attempt: Any = SimpleNamespace(folder=self.folder, prepared=None, config=config)

        def log(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, checkpoint.parse_step(fields["path"])))

        stack = contextlib.ExitStack()
        return worker.Resumption(context, attempt, log, self.damaged, Stopwatch(), stack).run()


def tear(folder: str, step: int, name: str) -> None:
    # before it, a file so small is mostly header
    flip(f"{step_folder(folder, step)}/{name}", -2, bit=4)


def test_manifest_damaged_after_check_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_restart_without_checkpoint_builds_no_second_model(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
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
        with pytest.raises(
            DamagedError, match=r"tokens\.npy: damaged, its checksum does not match"
        ):
            checkpoint.verify(Checkpoint(step_folder(resumed.folder, step)))
    found, setup, loader, _ = resumed.start()
    assert (found.step, loader.state, float(setup.model.weight)) == (3, {"at": 3}, 3)
    assert (resumed.events, resumed.damaged) == ([("checkpoint_repaired", 3)], set())
    checkpoint.verify(found)
    with pytest.raises(DamagedError, match="damaged"):  # the link to the others is broken
        checkpoint.verify(Checkpoint(step_folder(resumed.folder, 2)))
    tear(resumed.folder, 3, "data_00000.safetensors")  # so that the one before is needed
    # shorter: seen without reading
    Path(step_folder(resumed.folder, 1), "more/tokens.npy").write_bytes(b"abc")
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
def test_unreadable_disk_does_not_restart_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    resumed = Resumed(tmp_path, 1)
    unreadable(monkeypatch, name, OSError(errno.EIO, "Input/output error"))
    rejects(
        rf"{name}: cannot be read .*, and there is no other checkpoint to resume from",
        resumed.start,
    )


# -- Settings that may change between start and resume
@dataclass(frozen=True, kw_only=True)
class Own(data_parallel.Small):
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ("workers_note",)
    workers_note: str = "a"


def config(**changes: Any) -> TrainConfig:
    return (
        recipes.criteo_demo("log")
        .replace(batch_size=100, steps=50, scaling={"num_workers": (1, 4)})
        .updated(changes)
    )


def stored(config: TrainConfig) -> dict[str, Any]:
    return yaml.safe_load(config.to_yaml())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, [], id="case-0"),
        pytest.param(
            {"name": "b", "storage_path": "s3://b/runs", "cluster": {"address": "a:1"}},
            [],
            id="name-b-storage_path-s3-b-runs",
        ),
        pytest.param({"seed": 7}, ["seed: 0 -> 7"], id="seed-7"),
        pytest.param({"precision": "bf16"}, ["precision: fp32 -> bf16"], id="precision-bf16"),
        pytest.param(
            {"train_data": {"shuffle": "none"}},
            ["train_data.shuffle: window -> none"],
            id="train_data-shuffle-none",
        ),
        pytest.param(
            {"train_data": {"block_bytes": 1 << 20}},
            ["train_data.block_bytes: 33554432 -> 1048576"],
            id="train_data-block_bytes-1-20",
        ),
        pytest.param(
            {"train_data": {"files": ("a", "b")}},
            ['train_data.files: [] -> ["a", "b"]'],
            id="train_data-files-a-b",
        ),
        pytest.param(
            {"train_data": {"path": "moved", "prefetch_blocks": 9}},
            ["train_data.path", "train_data.prefetch_blocks"],
            id="train_data-path-moved",
        ),
        pytest.param(
            {"workload": {"dense_optimizer": {"kind": "adagrad", "learning_rate": 0.5}}},
            [
                "workload.dense_optimizer.kind: adam -> adagrad",
                "workload.dense_optimizer.learning_rate: 0.001 -> 0.5",
            ],
            id="workload-dense_optimizer-kind",
        ),
        pytest.param(
            {"workload": {"sparse_optimizer": {"eps": 1e-5}}},
            ["workload.sparse_optimizer.eps: 0.005 -> 1e-05"],
            id="workload-sparse_optimizer-eps",
        ),
        pytest.param(
            {"workload": {"preset": {"min_count": 9}}},
            ["workload.preset.min_count: 2 -> 9"],
            id="workload-preset-min_count-9",
        ),
        pytest.param(
            {"workload": {"preprocessor": "other"}},
            ["workload.preprocessor: null -> other"],
            id="workload-preprocessor-other",
        ),
        pytest.param(
            {"workload": {"sharding": {"min_column_width": 8}}},
            ["workload.sharding.min_column_width"],
            id="workload-sharding",
        ),
        pytest.param(
            {
                "workload": {"sharding": {"exchange_precision": "fp16"}},
                "scaling": {"network_interface": "eth0"},
            },
            ["workload.sharding.exchange_precision: fp32 -> fp16", "scaling.network_interface"],
            id="workload-sharding-workload.sharding.exchange_pre",
        ),
        pytest.param({"tf32": True}, ["tf32: false -> true"], id="tf32-True"),
        pytest.param(
            {
                "checkpoint": {"every": 5},
                "log_every": 1,
                "trackers": {"tensorboard": False},
                "failure": {"grace_s": 9.0},
            },
            ["log_every", "checkpoint.every", "failure.grace_s", "trackers.tensorboard"],
            id="checkpoint-every-5-log_every-1",
        ),
        pytest.param({"steps": 51, "epochs": 3}, ["steps", "epochs"], id="steps-51-epochs-3"),
        pytest.param({"steps": None}, ["steps"], id="steps-None"),
        pytest.param({"steps": 49}, ["steps: 50 -> 49"], id="steps-49"),
        pytest.param(
            {"scaling": {"num_workers": 2, "threads_per_worker": 1}},
            ["scaling.num_workers", "scaling.threads_per_worker"],
            id="scaling-num_workers-2",
        ),
        pytest.param(
            {"scaling": {"num_workers": 2}, "batch_size": 200},
            ["batch_size", "scaling.num_workers"],
            id="scaling-num_workers-2-batch_size-scaling.num_wor",
        ),
        pytest.param(
            {"scaling": {"num_workers": 2}, "batch_size": 100},
            ["scaling.num_workers"],
            id="scaling-num_workers-2-scaling.num_workers",
        ),
        pytest.param({"batch_size": 200}, ["batch_size: 100 -> 200"], id="batch_size-200"),
        pytest.param(
            {"global_batch_size": 400},
            ["batch_size", "global_batch_size"],
            id="global_batch_size-400",
        ),
        pytest.param(
            {"global_batch_size": 200},
            ["batch_size: 100 -> null", "global_batch_size: null -> 200"],
            id="global_batch_size-200",
        ),
        pytest.param(
            {"scaling": {"batch_policy": "per_worker", "learning_rate_policy": "sqrt"}},
            [
                "scaling.batch_policy: global -> per_worker",
                "scaling.learning_rate_policy: constant -> sqrt",
            ],
            id="scaling-batch_policy-per_worker",
        ),
    ],
)
def test_compare_settings_classifies_changes(changes: dict[str, Any], expected: list[Any]) -> None:
    first = config()
    then = config(**changes)
    found = compare_settings(stored(first), then)
    assert [*map(str, found.rejected), *(change.field for change in found.accepted)] == expected
    assert not compare_settings(stored(first), with_old(then, found.accepted)).accepted


def test_compare_settings_handles_versions_members_and_class() -> None:
    settings = stored(config())
    del settings["min_steps_per_epoch"], settings["workload"]["dense_optimizer"]["momentum"]
    settings["gone"] = settings["workload"]["gone"] = 3
    found = compare_settings(settings, config(min_steps_per_epoch=2))
    assert found.rejected == (
        Change("workload.gone", 3, "not set"),
        Change("min_steps_per_epoch", "not set", 2),
        Change("gone", 3, "not set"),
    )
    assert found.accepted == ()
    first = recipes.criteo_ensemble("log")
    settings = stored(first)
    del settings["workload"]["model"]["models"][1]["tower_losses"]  # added by a later version
    assert compare_settings(settings, first).rejected == ()
    settings["workload"]["model"]["models"][1]["first_dropout"] = 0.3
    (change,) = compare_settings(settings, first).rejected
    assert str(change) == "workload.model.models[1].first_dropout: 0.3 -> 0.1"
    widedeep, deepfm = (
        config(workload={"model": {"class": name}}) for name in ("widedeep", "deepfm")
    )
    (change,) = compare_settings(stored(widedeep), deepfm).rejected
    assert change.field == "workload.model.class"


def test_compare_settings_uses_free_fields_of_workload() -> None:
    first = data_parallel.config(1).replace(workload=Own())
    found = compare_settings(stored(first), first.replace(workload={"workers_note": "b"}))
    assert (found.rejected, found.accepted) == ((), (Change("workload.workers_note", "a", "b"),))
    found = compare_settings(stored(first), first.replace(workload={"optimizer": {"kind": "sgd"}}))
    assert [change.field for change in found.rejected] == ["workload.optimizer.kind"]


# -- Warm start with another run's weights and optimizer state, by category and under any sharding
# plan
ROWS = 600
SEED = 3
Captured = Callable[[], dict[str, torch.Tensor]]
SCHEMA = Schema(
    label="click",
    dense=("price",),
    sparse=("item", "user", "history"),
    lists=("history",),
    features=(Feature(name="history", vocabulary="item"),),
    tokens="any",
)
DIM = 8
DLRM = DLRMConfig(interaction="dot", embedding_dim=DIM, bottom_mlp=(8, DIM), top_mlp=(8, 1))


def day(folder: Path, number: int) -> str:
    """Write a log with 40 items, shifted by 10 each day, and changing frequencies."""
    rng = np.random.default_rng(number)
    first = 10 * number
    item = first + (40 * rng.random(ROWS) ** (1 + number)).astype(int)
    user = rng.integers(0, 30, ROWS)
    history = [first + rng.integers(0, 40, size) for size in rng.integers(0, 4, ROWS)]
    table = pa.table(
        {
            "click": (rng.random(ROWS) < 0.2 + 0.5 * (item % 3 == 0)).astype(np.int8),
            "price": rng.random(ROWS),
            "item": pa.array(
                [None if row % 50 == 0 else f"i{value}" for row, value in enumerate(item)]
            ),
            "user": pa.array([f"u{value}" for value in user]),
            "history": pa.array([[f"i{value}" for value in row] for row in history]),
        }
    )
    path = folder / f"day_{number}.parquet"
    pq.write_table(table, path)
    return str(path)


WORKLOAD: dict[str, Any] = {
    "model": DLRM,
    "schema": SCHEMA,
    "preset": {"min_count": 1},
    "schedule": {"decay_fraction": 0.0},
    "sparse_optimizer": {"learning_rate": 0.1},
    "dense_optimizer": {"learning_rate": 0.02},
}
RUN = {
    "batch_size": 100,
    "min_steps_per_epoch": 1,
    "steps": 8,
    "evaluate_every": 8,
    "seed": SEED,
    **LEAN,
}
# the last weights: a resumed run has more evaluations to choose from
RUN["early_stopping"] = {"patience": 0}


def warm_config(path: str, folder: Path, name: str, **workload: Any) -> rayrec.TrainConfig:
    return recipes.clicks(path).replace(
        name=name, storage_path=str(folder), workload={**WORKLOAD, **workload}, **RUN
    )


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Captured:
    """Return weights and optimizer state after a warm start, before the first step."""
    places: list[str] = []

    def noted(checkpoint: Any, row_maps: Any, model: torch.nn.Module, optimizer: Any) -> None:
        start_from(checkpoint, row_maps, model, optimizer)
        places.append(str(tmp_path / f"captured_{len(places)}" / "step_00000000"))
        checkpoints.save(places[-1], all_tensors(model, optimizer), state={})

    monkeypatch.setattr(worker, "start_from", noted)
    return lambda: dict(full_tensors(Checkpoint(places[-1])))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return dict(full_tensors(open_checkpoint(str(run))))


def vocabularies_of(column: str, *runs: Path) -> list[dict[int, int]]:
    """Return the row of each category of a column, for each run."""
    found = []
    for run in runs:
        preprocessor = Preprocessor.load(str(run / "preprocessor"))
        number = preprocessor.inputs.sparse.index(column)
        ids = preprocessor.sparse[number].ids().tolist()
        found.append(dict(zip(preprocessor.vocabulary(number).tolist(), ids, strict=True)))
    return found


OPTIMIZERS = {
    "rowwise_adagrad": "adam",
    "adagrad": "adagrad",
    "adam": "adamw",
    "adamw": "sgd",
    "sparse_adam": "lamb",
}


def check_rows(
    name: str,
    before: torch.Tensor,
    after: torch.Tensor,
    vocabularies: Sequence[dict[int, int]],
    *,
    table: str,
    start: TableInit | None = None,
) -> int:
    """Check that each row of a table's tensor is that of its category before, or fresh. Returns the
    number of categories whose row is another one.
    """
    old, new = vocabularies
    fresh = torch.zeros_like(after)
    if name.startswith("model."):
        TableValues(SEED, table, len(after), after.shape[1], start).fill(fresh)
    for token, row in new.items():
        source = before[old[token]] if token in old else fresh[row]
        assert torch.equal(after[row], source), (name, row)
    assert torch.equal(after[:2], before[:2])  # unknown and missing
    return sum(old.get(token, row) != row for token, row in new.items())


@pytest.mark.parametrize(("sparse", "dense"), OPTIMIZERS.items())
def test_warm_start_keeps_known_and_starts_new_rows(
    tmp_path: Path, captured: Captured, sparse: Any, dense: Any
) -> None:
    decay = {"weight_decay": 0.01} if sparse in ("adam", "adamw") else {}
    optimizers = {
        "sparse_optimizer": {"kind": sparse, "learning_rate": 0.1, **decay},
        "dense_optimizer": {"kind": dense, "learning_rate": 0.02},
    }
    train(warm_config(day(tmp_path, 0), tmp_path, "old", **optimizers))
    # Counted again, so that ids are in another order, some categories are new, and others dropped.
    new = warm_config(day(tmp_path, 1), tmp_path, "new", **optimizers)
    train(new.replace(init_from=str(tmp_path / "old"), steps=1, evaluate_every=1))
    before = tensors(tmp_path / "old")
    after = captured()
    assert before.keys() == after.keys()
    moved = 0
    compared = 0
    for name, tensor in after.items():
        vocabulary = name.partition("embedding_bags.")[2].partition(".")[0]
        if not vocabulary or not tensor.dim():
            # the network, and the numbers of Adam's steps
            assert torch.equal(tensor, before[name]), name
            continue
        vocabularies = vocabularies_of(vocabulary, tmp_path / "old", tmp_path / "new")
        moved += check_rows(name, before[name], tensor, vocabularies, table=vocabulary)
        compared += bool(before[name].any())
    assert moved > 50
    assert compared >= 4
    (event,) = events_of(tmp_path / "new", "warm_start")
    assert event["tables"]["item"] == {"kept": 30, "fresh": 10, "dropped": 10}
    assert (event["kept"], event["fresh"], event["dropped"]) == (60, 10, 10)
    assert event["preprocessor"] == Preprocessor.load(str(tmp_path / "old" / "preprocessor")).hash()
    assert "60 kept, 10 fresh, 10 dropped" in (tmp_path / "new" / "report.html").read_text()


def test_warm_start_without_changes_matches_original_run(tmp_path: Path) -> None:
    log = day(tmp_path, 0)
    old = str(tmp_path / "old")
    first = train(warm_config(log, tmp_path, "old")).summary
    still: dict[str, Any] = {
        "sparse_optimizer": {"learning_rate": 0.0},
        "dense_optimizer": {"learning_rate": 0.0},
    }
    shutil.copytree(f"{old}/preprocessor", tmp_path / "vocabulary")
    same = {"preprocessor": str(tmp_path / "vocabulary")}
    kept = train(
        warm_config(log, tmp_path, "kept", **still, **same).replace(init_from=old, steps=1)
    ).summary
    assert (kept["weights_sha256"], kept["metrics"]) == (first["weights_sha256"], first["metrics"])
    runs = [
        warm_config(log, tmp_path, name, **same).replace(init_from=old, steps=4)
        for name in ("one", "two", "three")
    ]
    one = train(runs[0]).summary
    two = train(runs[1]).summary
    assert one["weights_sha256"] == two["weights_sha256"] != first["weights_sha256"]
    assert (one["steps"], one["rows"]) == (4, 400)
    # What resumes has its own checkpoint, and does not start with the old one again, which may be
    # gone.
    train(runs[2].replace(steps=2))
    shutil.move(old, tmp_path / "moved")
    assert train(runs[2]).summary["weights_sha256"] == one["weights_sha256"]
    assert [event["step"] for event in events_of(tmp_path / "three", "start")] == [0, 2]
    assert len(events_of(tmp_path / "three", "warm_start")) == 1
    rejects("old: no such folder. Pass a run", train, runs[0].replace(name="four"))
    assert not (tmp_path / "four" / "events.jsonl").exists()


@pytest.mark.parametrize("sparse", ["rowwise_adagrad", "adamw"])
def test_warm_start_is_independent_of_sharding_plan(
    tmp_path: Path, captured: Captured, sparse: str
) -> None:
    optimizer = {"sparse_optimizer": {"kind": sparse, "learning_rate": 0.1}}
    logs = [day(tmp_path, number) for number in (0, 1)]
    train(warm_config(logs[0], tmp_path, "old", **optimizer))
    found = []
    for plan in ("table_wise", "column_wise", "data_parallel"):
        new = warm_config(
            logs[1],
            tmp_path,
            plan,
            **optimizer,
            sharding={"sharding_types": (plan,), "min_column_width": 4},
        )
        train(new.replace(init_from=str(tmp_path / "old"), steps=1, evaluate_every=1))
        # Columns of a row-wise state have names of their own, and equal values after a start from
        # whole rows.
        found.append(
            {name.partition(".columns_")[0]: tensor for name, tensor in captured().items()}
        )
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_warm_start_supports_sequences_and_ensembles(
    tmp_path: Path, captured: Captured, capsys: Any
) -> None:
    model = {"model": DINConfig(embedding_dim=4, attention=(8,), mlp=(8,), members=2)}
    train(warm_config(day(tmp_path, 0), tmp_path, "old", **model))
    rayrec.vocabulary(
        day(tmp_path, 1),
        out=str(tmp_path / "extended"),
        extend=str(tmp_path / "old"),
        console=QUIET,
    )
    new = warm_config(
        day(tmp_path, 1), tmp_path, "new", **model, preprocessor=str(tmp_path / "extended")
    )
    rayrec.train(
        new.replace(init_from=str(tmp_path / "old"), steps=1, evaluate_every=1), console=Console()
    )
    assert "categories: 70 kept, 10 fresh, 0 dropped" in " ".join(capsys.readouterr().err.split())
    before = tensors(tmp_path / "old")
    after = captured()
    (table,) = [name for name in after if name.startswith("model.sequences.")]
    assert len(after[table]) == len(before[table]) + 10
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)] if tensor.dim() else after[name], tensor), (
            name
        )
    (event,) = events_of(tmp_path / "new", "warm_start")
    assert (event["kept"], event["fresh"], event["dropped"]) == (70, 10, 0)


@pytest.mark.parametrize("extended", [False, True])
def test_warm_start_of_events_keeps_items(
    extended: bool,
    captured: Captured,
    tmp_path: Path,
) -> None:
    """On a log with new users and new items, whose vocabulary is counted again or extended."""
    config = events_run(write_events(tmp_path), tmp_path, name="old", seed=SEED)
    train(config)
    path = write_events(tmp_path, grown_events())
    new = config.replace(
        name="new",
        train_data={"path": path},
        init_from=str(tmp_path / "old"),
        steps=1,
        evaluate_every=1,
    )
    if extended:
        out = str(tmp_path / "vocabulary")
        rayrec.vocabulary(path, out=out, extend=str(tmp_path / "old"), console=QUIET)
        new = new.replace(workload={"preprocessor": out})
    run = train(new)
    before = tensors(tmp_path / "old")
    after = captured()
    assert before.keys() == after.keys()
    vocabularies = vocabularies_of("item", tmp_path / "old", tmp_path / "new")
    moved = 0
    for name, tensor in before.items():
        if "embeddings.item" in name and tensor.dim():
            start = config.workload.table_start
            moved += check_rows(name, tensor, after[name], vocabularies, table="item", start=start)
        else:
            assert torch.equal(after[name], tensor), name
    assert (moved > NEW_ITEMS) != extended
    (event,) = events_of(tmp_path / "new", "warm_start")
    assert event["tables"]["item"] == {"kept": ITEMS, "fresh": NEW_ITEMS, "dropped": 0}
    assert run.metrics["targets"] == 2 * USERS


def test_warm_start_rejects_mismatch_before_workers_start(tmp_path: Path) -> None:
    log = day(tmp_path, 0)
    train(warm_config(log, tmp_path, "old"))
    wrong: dict[str, dict[str, Any]] = {
        "model must be DCNv2Config, as in this run, got DLRMConfig": {
            "model": DCNv2Config(embedding_dim=DIM)
        },
        "shape must be .7., got .8.. Use the model and settings of its config.yaml": {
            "model": DLRM.replace(bottom_mlp=(7, DIM))
        },
        "embedding width .* must be 4, as in this run, got 8": {
            "model": DLRM.replace(embedding_dim=4, bottom_mlp=(8, 4))
        },
        "sparse_optimizer.kind rowwise_adagrad, this run has adam": {
            "sparse_optimizer": {"kind": "adam"}
        },
        "dense_optimizer.kind adam, this run has sgd": {"dense_optimizer": {"kind": "sgd"}},
        "sparse columns must be": {
            "schema": SCHEMA.replace(sparse=("item", "user"), lists=(), features=())
        },
        "shares? a row|hashing does not match": {
            "preset": {"min_count": 1, "max_num_embeddings": 20}
        },
    }
    for message, workload in wrong.items():
        rejects(
            message,
            train,
            warm_config(log, tmp_path, "new", **workload).replace(init_from=str(tmp_path / "old")),
        )
        assert events_of(tmp_path / "new", "attempt") == []
        shutil.rmtree(tmp_path / "new")


def test_warm_start_of_other_models_matches_by_name(tmp_path: Path) -> None:
    plain = data_parallel.config(1, steps=6)
    workload = data_parallel.Small(
        optimizer=plain.workload.optimizer,  # type: ignore[attr-defined]
        batch_norm=True,
    )
    settings = plain.replace(name="old", storage_path=str(tmp_path), workload=workload, **LEAN)
    first = train(settings).summary
    unmoved = {"optimizer": {"learning_rate": 0.0}}
    still = settings.replace(
        name="kept", init_from=str(tmp_path / "old"), steps=1, workload=unmoved
    )
    # batch norm has seen another batch
    assert train(still).summary["validation"]["loss"] != first["validation"]["loss"]
    before = tensors(tmp_path / "old")
    after = tensors(tmp_path / "kept")
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name])
        for name, tensor in before.items()
        if name.endswith("weight")
    )
    (steps,) = {int(tensor) for name, tensor in after.items() if name.endswith(".step")}
    assert steps == 7  # Adam's own, which goes with its moments
    absent = "bias: shape must be absent, got .6."
    rule = "optimizer.kind adamw, this run has sgd"
    for message, changes in (
        (absent, {"batch_norm": False}),
        (rule, {"optimizer": {"kind": "sgd"}}),
    ):
        rejects(message, train, still.replace(name="refused", workload=changes))


def test_warm_start_rejects_damaged_or_lost_checkpoints(tmp_path: Path) -> None:
    log = day(tmp_path, 0)
    train(warm_config(log, tmp_path, "old"))
    weights = next(Path(open_checkpoint(str(tmp_path / "old")).path).glob("data_*.safetensors"))
    flip(weights, -3, bit=4)
    new = warm_config(log, tmp_path, "new").replace(init_from=str(tmp_path / "old"))
    rejects("damaged, the checksum", train, new)
    os.truncate(weights, weights.stat().st_size - 1)
    rejects("bytes instead of", train, new.replace(name="newer"))
    rejects(
        "would start again from init_from",
        worker._start_warm,
        SimpleNamespace(folder="runs/new", warm_start=None),
        None,
    )
