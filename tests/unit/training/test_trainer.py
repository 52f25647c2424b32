"""Summary of a run, also if its events are damaged."""

import html
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import ray.train
import torch
import yaml
from builders.digits import write_digits
from builders.faults import fails_with, raising, rejects
from builders.runs import LEAN, train
from ranks import data_parallel
from ray.train.v2.api.exceptions import WorkerGroupError
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rayrec import checkpoint, recipes, storage
from rayrec.checkpoint import full_tensors, open_checkpoint, step_folder
from rayrec.config import InputError, settings_hash
from rayrec.data.engine import TaskPlacement
from rayrec.data.numbered_rows import read_part
from rayrec.observe.console import Console
from rayrec.observe.events import EventWriter, read_events
from rayrec.observe.run_summary import RunSummary
from rayrec.training import session, trainer
from rayrec.training.launchers import ray_launcher
from rayrec.training.launchers.base import Driver, PreparedRun
from rayrec.training.result import CheckpointPath, Result
from rayrec.training.resume import changes_since, finished_summary, is_longer, run_hash
from rayrec.training.session import summarize
from rayrec.workloads.base import RunContext, TrainConfig
from rayrec.workloads.vision import ResNetConfig

NOTES: list[str] = []
CONFIGS: list[TrainConfig] = []
ROWS = data_parallel.ROWS["train"]
Failing = Callable[..., list[dict[str, Any]]]


def reported() -> list[dict[str, Any]]:
    """Write the events of two drivers of a run, running for 30 and 20 seconds with a night between
    them.
    """
    step = {"kind": "step", "loss": 0.5, "rows_per_s": 10.0, "blocked_fraction": 0.1, "steps": 20}
    return [
        {"kind": "run", "time": 1000.0},
        {"kind": "start", "time": 1010.0, "step": 0, "steps": 20, "world_size": 1},
        {**step, "time": 1020.0, "step": 5, "rows": ROWS // 2},
        {"kind": "stop", "time": 1030.0, "step": 5, "cause": "SIGTERM"},
        {"kind": "run", "time": 51_000.0},
        {"kind": "start", "time": 51_010.0, "step": 5, "steps": 20, "world_size": 1},
        {**step, "time": 51_019.0, "step": 15, "rows": ROWS * 3 // 2},
        {"kind": "finish", "time": 51_020.0, "step": 15},
    ]


def lines() -> list[str]:
    return [json.dumps(event) + "\n" for event in reported()]


def summarized(folder: Path, damaged: list[str] | None = None) -> tuple[Result, list[str]]:
    (folder / "events.jsonl").write_text("".join(lines() if damaged is None else damaged))
    saved = step_folder(str(folder), 15)
    checkpoint.save(saved, {"model.weight": torch.ones(3)}, state={})
    metrics = {"accuracy": 0.5}
    finish: dict[str, Any] = {
        "step": 15,
        "chosen_step": 10,
        "rows": ROWS * 3 // 2,
        "rows_lost": 0,
        "rows_repeated": 0,
        "train_s": 12.0,
        "metrics": metrics,
        "validation": metrics,
        "blocked_fraction": 0.1,
        "checkpoint": saved,
        "weights_sha256": "00ff",
        "metrics_set": "validation",
    }
    notes: list[str] = []
    with EventWriter(folder / "events.jsonl") as events:
        config = data_parallel.config(1).replace(name="run", epochs=4)
        result = summarize(config, str(folder), None, finish, events=events, note=notes.append)
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    return result, notes


@pytest.mark.parametrize(
    ("ended", "asked", "longer"),
    [
        pytest.param({"steps": 12}, {"steps": 13}, True, id="steps-12"),
        pytest.param({"steps": 12}, {"steps": 11}, False, id="steps-12-steps-11"),
        pytest.param({"steps": 12}, {"steps": None}, False, id="steps-12-steps-None"),
        pytest.param({"steps": 12}, {"steps": 13, "seed": 1}, False, id="steps-12-steps-13-seed-1"),
        pytest.param(
            {"steps": 12}, {"steps": 13, "epochs": 5}, False, id="steps-12-steps-13-epochs-5"
        ),
        pytest.param({"steps": None, "epochs": 2}, {"epochs": 3}, True, id="steps-None-epochs-2"),
        pytest.param(
            {"steps": None, "epochs": 2}, {"epochs": 1}, False, id="steps-None-epochs-2-epochs-1"
        ),
        pytest.param(
            {"steps": None, "epochs": 2}, {"steps": 13}, True, id="steps-None-epochs-2-steps-13"
        ),
        pytest.param(
            {"steps": None, "epochs": 2}, {"steps": 12}, False, id="steps-None-epochs-2-steps-12"
        ),
        pytest.param(
            {"steps": None, "epochs": 2},
            {"epochs": 3, "batch_size": 7},
            False,
            id="steps-None-epochs-2-epochs-3-batch_size-7",
        ),
    ],
)
def test_only_more_steps_or_epochs_extend_run(
    ended: dict[str, Any], asked: dict[str, Any], longer: bool
) -> None:
    config = data_parallel.config(1).replace(name="run", **ended)
    summary = {"config_hash": run_hash(config), "steps": 12, "epochs": ended.get("epochs", 0.4)}
    assert is_longer(config.replace(**asked), summary) is longer
    # Where training stopped early there is nothing to go on with.
    assert not is_longer(config.replace(**asked), {**summary, "steps": 9, "epochs": 1.3})


@dataclass(frozen=True, kw_only=True)
class Prepared(data_parallel.Small):
    """Preparation that does nothing or fails."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ("wrong",)

    wrong: str = ""

    def prepare(self, context: RunContext) -> Any:
        context.note(
            f"waits {storage.outage_s():g} s for a store, its tasks "
            f"{context.engine.placement.max_outage_s:g} s"
        )
        if self.wrong:
            raise InputError(self.wrong)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Train a run that logs a step and fails: `wrong` before training, `finishes` in the summary.
    Notes go to NOTES.
    """
    monkeypatch.setattr(ray_launcher.connection, "connect", lambda *_, **__: None)
    monkeypatch.setattr(ray_launcher.connection, "ship_code", lambda *_: None)
    monkeypatch.setattr(
        ray_launcher,
        "allocate_resources",
        lambda *_: SimpleNamespace(driver=TaskPlacement(), num_nodes=1),
    )
    monkeypatch.setattr(ray_launcher, "wait_for_resources", ray_launcher.allocate_resources)
    # a test before may have left a Ray
    monkeypatch.setattr(ray_launcher, "start_worker_processes", lambda *_: None)
    monkeypatch.setenv("RAY_ADDRESS", "a-head:6379")

    def fail(
        error: BaseException, *, wrong: bool = False, finishes: bool = False, **changes: Any
    ) -> list[dict[str, Any]]:
        def run_attempts(run: PreparedRun, driver: Driver) -> dict[str, Any]:
            for event in reported()[1:3]:
                driver.events.write(
                    **{name: value for name, value in event.items() if name != "time"}
                )
            if finishes:
                return {"step": 15}
            raise error

        monkeypatch.setattr(ray_launcher, "run_attempts", run_attempts)
        config = data_parallel.config(1).replace(
            name="run",
            storage_path=str(tmp_path),
            trackers={"prometheus": False, "tensorboard": False, "mllog": True},
            workload=Prepared(wrong=str(error) if wrong else ""),
            failure={"max_outage_s": 900.0},
        )
        CONFIGS.append(config)
        NOTES.clear()
        with pytest.raises(type(error)) as raised:
            trainer.train(config.updated(changes), console=quiet(monkeypatch))
        assert str(raised.value) == str(error)
        return read_events(tmp_path / "run" / "events.jsonl")

    return fail


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (InputError("the loss is nan at step 5. Lower the learning rates"), None),
        (WorkerGroupError("died", {1: ValueError("no")}), "worker 1: ValueError: no"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    ],
)
def test_final_error_is_recorded_and_reported(
    tmp_path: Path, failing: Failing, error: Exception, cause: Any
) -> None:
    events, cause = failing(error), cause or str(error)
    assert [event["kind"] for event in events] == [
        "run",
        "prepared",
        "start_up",
        "start",
        "step",
        "failure",
    ]
    assert (events[-1]["cause"], events[-1]["last"]) == (cause, True)
    assert RunSummary(events).standing() == f"failed ({cause}) at step 5 of 20"
    assert f"failed ({cause})" in html.unescape((tmp_path / "run" / "report.html").read_text())
    assert '"status": "aborted"' in (tmp_path / "run" / "mllog.log").read_text().splitlines()[-1]


def test_error_before_training_is_recorded(tmp_path: Path, failing: Failing) -> None:
    assert [event["kind"] for event in failing(InputError("no such log"), wrong=True)] == [
        "run",
        "failure",
    ]
    assert (tmp_path / "run" / "report.html").exists()


def test_resumed_run_waits_longer_for_store(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_STORAGE_OUTAGE_S", "30")
    for waits_s in (30, 900):
        failing(InputError("no such log"), wrong=True)
        assert f"waits {waits_s} s for a store, its tasks {waits_s} s" in NOTES
        checkpoint.save(step_folder(str(tmp_path / "run"), 5), {"a": torch.ones(1)}, state={})


def test_rejected_settings_change_no_file(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a finished run that cannot be extended, nor of a run to be resumed with other
    settings.
    """
    failing(InputError("no room"))  # nothing is saved yet
    failing(InputError("no room"), seed=5)  # so that it may be another run
    assert (
        f"Starting {tmp_path}/run again with other settings, because no step was saved (seed: 0 "
        "-> 5)" in NOTES
    )
    checkpoint.save(step_folder(str(tmp_path / "run"), 5), {"a": torch.ones(1)}, state={})
    settings = tmp_path / "run" / "config.yaml"
    before = settings.read_bytes()
    other = "trained with other settings (seed: 5 -> 6). Use its config.yaml, or another --name"
    failing(InputError(f"{tmp_path}/run: {other}"), seed=6, log_every=3)
    assert settings.read_bytes() == before
    failing(InputError("no room"), seed=5, log_every=3)
    assert f"Resuming {tmp_path}/run with changed settings (log_every: 1 -> 3)" in NOTES
    assert b"log_every: 3" in settings.read_bytes()
    finished = CONFIGS[-1].replace(steps=20, log_every=3, seed=5)
    summary = {"config_hash": run_hash(finished), "steps": 20, "epochs": 0.4, "checkpoint": "c"}
    storage.write_json(str(tmp_path / "run" / "summary.json"), summary)
    settings.write_text(finished.to_yaml())
    before = settings.read_bytes()
    longer = {"seed": 5, "log_every": 3, "steps": 30}
    failing(InputError("no such log"), wrong=True, **longer)
    assert settings.read_bytes() == before
    failing(InputError("no room"), **longer)  # refused by the workers
    assert storage.read_json(str(tmp_path / "run" / "summary.json")) == summary
    NOTES.clear()
    assert (
        trainer.train(finished.replace(checkpoint={"every": 7}), console=quiet(monkeypatch)).summary
        == summary
    )
    assert NOTES[-1].endswith(
        "ignored, because nothing remains to be trained: checkpoint.every: null -> 7"
    )


def test_finished_run_of_earlier_version_returns_or_extends(tmp_path: Path) -> None:
    config = data_parallel.config(1).replace(storage_path="", steps=20)
    settings = config.to_dict()
    del (
        settings["global_batch_size"],
        settings["workload"]["parallel_options"],
        settings["checkpoint"]["keep_every"],
    )
    summary = {
        "config_hash": settings_hash(settings),
        "steps": 20,
        "epochs": 0.4,
        "checkpoint": "c",
    }
    storage.write_json(str(tmp_path / "summary.json"), summary)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    graph = {"parallel_options": {"static_graph": True}}
    for changes, expected in (({}, summary), ({"workload": graph}, summary), ({"steps": 30}, None)):
        new = config.replace(**changes)
        assert (
            finished_summary(str(tmp_path), new, changes_since(str(tmp_path), new), NOTES.append)
            == expected
        )
    other = config.replace(
        workload={"parallel": "fsdp", "parallel_options": {"param_dtype": "bf16"}}
    )
    differences = changes_since(str(tmp_path), other)
    rejects(
        r"\(workload.parallel_options.param_dtype: not set -> bf16\)",
        finished_summary,
        str(tmp_path),
        other,
        differences,
        NOTES.append,
    )


def test_failed_set_up_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader already reads when the model is built."""
    config = recipes.criteo_demo("random:2000").replace(
        storage_path=str(tmp_path), name="run", steps=4, scaling={"num_workers": 1}, **LEAN
    )
    monkeypatch.setattr(type(config.workload), "set_up", raising(ValueError("no model")))
    before = set(threading.enumerate())
    for _ in range(3):
        fails_with(ValueError, "no model", train, config)
    assert set(threading.enumerate()) == before


def test_summary_waits_for_store_like_save(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_: Any, **__: Any) -> Any:
        raise InputError(f"waits {storage.outage_s():g} s for a store")

    monkeypatch.setattr(session, "summarize", waits)
    failing(InputError("waits 900 s for a store"), finishes=True)


def quiet(monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return a console whose notes go to NOTES."""
    console = Console(quiet=True)
    monkeypatch.setattr(console, "note", NOTES.append)
    return console


def test_summary_covers_all_drivers_despite_damaged_events(tmp_path: Path) -> None:
    result, notes = summarized(tmp_path)
    # neither the four that were allowed nor one
    assert result.summary["epochs"] == pytest.approx(1.5, abs=0.02)
    assert (result.summary["wall_s"], result.summary["restarts"]) == (pytest.approx(50.0), 1)
    assert not notes
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "summary"
    damaged = lines()
    damaged[2:3] = ['{"time": 1020.0, "kind": "st{"time": 1020.5, "kind": "checkpoint"}\n']
    result, notes = summarized(tmp_path, damaged)
    assert result.summary["wall_s"] == pytest.approx(50.0)
    (note,) = notes
    assert "events.jsonl, line 3: not an event" in note
    assert "\n" not in note
    result, notes = summarized(tmp_path, [])
    assert (result.summary["wall_s"], result.summary["restarts"], result.summary["verdict"]) == (
        0.0,
        0,
        None,
    )
    assert result.summary["epochs"] == pytest.approx(1.5, abs=0.02)
    assert not notes


@pytest.fixture
def evaluated(tmp_path: Path) -> Result:
    """Result of a run of two workers with evaluations and checkpoints at steps 5 and 15."""
    evaluations = [
        {
            "kind": "evaluate",
            "time": 1021.0,
            "step": 5,
            "set": "validation",
            "accuracy": 0.75,
            "loss": 0.7,
        }
    ]
    evaluations.append(
        {**evaluations[0], "time": 51_019.5, "step": 15, "accuracy": 0.5, "loss": 0.6}
    )
    workers = {"workers": [{"loss": 0.25}, {"loss": 0.75}]}
    events = [
        {**event, **(workers if event["kind"] == "step" else {})} for event in reported()
    ] + evaluations
    checkpoint.save(step_folder(str(tmp_path), 5), {"model.weight": torch.ones(3)}, state={})
    return summarized(tmp_path, [json.dumps(event) + "\n" for event in events])[0]


def test_result_has_attributes_of_ray_train(evaluated: Result, tmp_path: Path) -> None:
    result = evaluated
    assert (result.path, result.filesystem.type_name, result.error) == (
        str(tmp_path),
        "local",
        None,
    )
    frame = result.metrics_dataframe
    assert frame.columns.tolist()[3:-1] == [
        "loss",
        "rows_per_s",
        "blocked_fraction",
        "loss_worker_0",
        "loss_worker_1",
        "validation_accuracy",
        "validation_loss",
    ]
    assert frame[["loss_worker_1", "validation_loss"]].to_numpy().tolist() == [
        [0.75, 0.7],
        [0.75, 0.6],
    ]
    assert repr(result).startswith("Result(\n  metrics={'accuracy': 0.5},\n")
    assert "<tr><th>accuracy</th><td>0.5000</td></tr>" in result._repr_html_()


def test_result_finds_best_checkpoint(evaluated: Result, tmp_path: Path) -> None:
    result = evaluated
    (early, first), (late, last) = result.best_checkpoints
    assert (early, first) == (step_folder(str(tmp_path), 5), {"accuracy": 0.75, "loss": 0.7})
    assert (late, last) == (result.checkpoint, {"accuracy": 0.5, "loss": 0.6})
    assert result.get_best_checkpoint("accuracy", "max") == early
    assert result.get_best_checkpoint("loss", "min") == late
    rejects(
        "metric: must be one of accuracy, loss, got 'auroc'",
        result.get_best_checkpoint,
        "auroc",
        "max",
    )
    rejects("mode: must be min or max, got 'best'", result.get_best_checkpoint, "loss", "best")

    ray_result = result.to_ray()
    assert isinstance(ray_result, ray.train.Result)
    assert (ray_result.path, ray_result.error, ray_result.metrics) == (
        result.path,
        None,
        result.metrics,
    )
    assert ray_result.checkpoint.path == result.checkpoint
    assert ray_result.get_best_checkpoint("accuracy", "max").path == early
    assert ray_result.metrics_dataframe.equals(result.metrics_dataframe)


def test_result_checkpoint_has_path_and_directory(tmp_path: Path) -> None:
    result, _ = summarized(tmp_path)
    assert (result.checkpoint.path, type(result.checkpoint.path)) == (str(result.checkpoint), str)
    assert checkpoint.open_checkpoint(result.checkpoint).step == 15
    with result.checkpoint.as_directory() as folder:
        assert folder == result.checkpoint
    assert (
        checkpoint.open_checkpoint(
            result.checkpoint.to_directory(str(tmp_path / "copy" / "step_00000015"))
        ).step
        == 15
    )
    files = {path.name for path in Path(result.checkpoint).iterdir()}
    with CheckpointPath(f"file://{result.checkpoint}").as_directory() as folder:
        assert {path.name for path in Path(folder).iterdir()} == files
        assert checkpoint.open_checkpoint(folder).step == 15
    assert not Path(folder).exists()
    config = recipes.criteo_demo("log")
    given, plain = (
        config.replace(init_from=path).to_yaml()
        for path in (result.checkpoint, str(result.checkpoint))
    )
    assert given == plain


# -- Ray Train's tutorial of DDP, ResNet18 on MNIST: its loop trains the same model, its cells take
# our result
SMALL = ResNetConfig(blocks=(1, 1, 1, 1))


class ModelWorker:
    """The tutorial's actor, which loads the trained model and predicts."""

    def __init__(self, checkpoint: CheckpointPath) -> None:
        with checkpoint.as_directory() as ckpt_dir:
            # The tutorial: state_dict = torch.load(os.path.join(ckpt_dir, "model.pt"),
            # weights_only=True)
            stored = full_tensors(open_checkpoint(ckpt_dir), "model.")
            state_dict = {name.removeprefix("model."): value for name, value in stored}
        self.model = SMALL.build()
        self.model.load_state_dict(state_dict)
        self.model.eval()

    @torch.inference_mode()
    def predict(self, batch: torch.Tensor) -> list[int]:
        return self.model(batch).argmax(1).tolist()


def train_loop(data: TensorDataset, num_epochs: int, global_batch_size: int) -> list[float]:
    """Run the tutorial's training functions on one worker -> the mean loss of each epoch."""
    torch.manual_seed(0)
    model = SMALL.build()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=global_batch_size, sampler=sampler):
            loss = torch.nn.CrossEntropyLoss()(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return np.reshape(losses, (num_epochs, -1)).mean(1).tolist()


@pytest.mark.extended
def test_result_cells_of_ddp_tutorial(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", train=200, test=50)
    config = recipes.mnist_resnet18(str(digits)).replace(
        name="distributed-mnist-resnet18",
        storage_path=str(tmp_path / "training"),
        global_batch_size=20,
        scaling={"num_workers": 1, "threads_per_worker": 1},
        log_every=10,
        workload={"model": SMALL, "optimizer": {"learning_rate": 1e-3}},
        **LEAN,
    )
    result = train(config)

    # 3.8: `result`, `result.metrics_dataframe`
    assert result.path == str(tmp_path / "training" / "distributed-mnist-resnet18")
    assert result.error is None
    assert all(str(result.checkpoint) in shown for shown in (repr(result), result._repr_html_()))
    frame = result.metrics_dataframe
    assert frame[["epoch", "step"]].to_numpy().tolist() == [[1.0, 10], [2.0, 20]]
    rows = {
        name: torch.from_numpy(value)
        for name, value in read_part(str(digits), "train", num_classes=10).items()
    }
    data = TensorDataset((rows["images"][:, None] / 255 - 0.5) / 0.5, rows["labels"])
    assert frame["loss"].tolist() == pytest.approx(train_loop(data, 2, 20), abs=5e-3)
    (_, first), (last, metrics) = result.best_checkpoints
    assert frame["validation_accuracy"].tolist() == [first["accuracy"], metrics["accuracy"]]
    assert last == result.checkpoint

    # 3.9: the model of the checkpoint predicts
    test = read_part(str(digits), "t10k", num_classes=10)
    batch = (torch.from_numpy(test["images"])[:, None] / 255 - 0.5) / 0.5
    predictions = torch.tensor(ModelWorker(result.checkpoint).predict(batch))
    assert (
        int((predictions == torch.from_numpy(test["labels"])).sum())
        == round(50 * result.metrics["accuracy"])
        > 5
    )
