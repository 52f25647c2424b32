"""Training with two workers on a local Ray and one in this process: outputs, determinism, resume
and rejections.
"""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
import ray.train
import ray.train.torch
import yaml
from builders import shop
from builders.faults import rejects
from builders.golden import check_golden
from builders.process_state import unchanged_process
from builders.runs import (
    check_no_rows_lost,
    check_same_run,
    events_of,
    losses,
    one_worker,
    short_run,
    small_run,
)
from hosts.planned_memory import SIZES, measured
from hosts.processes import (
    RAYREC,
    RayHead,
    Run,
    environment_for,
    run_command,
    torchrun,
    wait_for_ray,
)
from hosts.processes import finished as finished_run

from rayrec import recipes
from rayrec.checkpoint import Checkpoint, committed, weights_sha256
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.synthetic import generate
from rayrec.ingest.block_order import spread
from rayrec.ingest.loader import Loader
from rayrec.training.forecast import ClusterShape, Forecast, forecast
from rayrec.training.result import Result
from rayrec.training.resume import run_hash
from rayrec.training.trainer import train
from rayrec.workloads.base import Target, TrainConfig, WorkerContext, WorkerSetup
from rayrec.workloads.recsys.planning import local_memory, tables_of
from rayrec.workloads.recsys.workload import ClickWorkload

pytestmark = pytest.mark.slow


LEARNING: dict[str, Any] = {
    "model": {"top_mlp": (256, 128, 1), "embedding_penalty": 3e-3},
    "sparse_optimizer": {"learning_rate": 0.05, "eps": 1e-8},
    "dense_optimizer": {"learning_rate": 0.002},
}
"""Fixed settings for these tests and the golden curves, independent of the recipe's tuning."""


Trained = tuple[TrainConfig, Result]


def small(log: Path, storage: Path, **changes: Any) -> TrainConfig:
    return one_worker(log, storage).replace(workload=LEARNING).replace(**changes)


@pytest.fixture(scope="module")
def finished(local_ray: None, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    config = small(
        click_log, tmp_path_factory.mktemp("runs"), batch_size=64, scaling={"num_workers": 2}
    )
    return config, train(config)


@pytest.fixture(scope="module")
def alone(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    config = small(click_log, tmp_path_factory.mktemp("runs"), cluster={"address": "none"})
    return config, train(config)


def lines_of(click_log: Path) -> list[bytes]:
    return (click_log / "train.txt").read_bytes().splitlines(keepends=True)


def test_summary_describes_run(finished: Trained) -> None:
    summary = finished[1].summary
    assert json.loads(Path(finished[1].folder, "summary.json").read_text()) == summary
    assert (summary["recipe"], summary["steps"], summary["rows"]) == (
        "criteo_demo",
        20,
        20 * 2 * 64,
    )
    check_no_rows_lost(summary, restarts=0)
    assert {"auroc", "logloss", "normalized_entropy", "calibration"} <= summary["metrics"].keys()
    assert summary["metrics"]["rows"] == summary["rows_of_sets"]["test"] == 1428
    assert sum(summary["rows_of_sets"].values()) == 20_000
    assert 0 <= summary["blocked_fraction"] <= 1
    assert summary["rows_per_s"] > 0
    assert summary["best_auroc"] > 0.75  # known, since the log is synthetic
    assert committed(finished[1].folder)[-1].step == 20
    assert summary["weights_sha256"] == weights_sha256(Checkpoint(summary["checkpoint"]))
    assert summary["verdict"].endswith(".")


def test_run_stores_configuration(finished: Trained) -> None:
    config, result = finished
    stored = Path(result.folder, "config.yaml").read_text()
    assert result.summary["config_hash"] in stored.splitlines()[0]
    assert recipes.load_config(stored) == config
    assert yaml.safe_load(stored)["steps"] == 20


def test_events_have_times_of_phases(finished: Trained) -> None:
    folder = Path(finished[1].folder)
    first, *others = (event["kind"] for event in events_of(folder))
    assert first == "run"
    assert {"prepared", "start", "step", "evaluate", "checkpoint", "finish", "summary"} <= set(
        others
    )
    assert list((folder / "logs").glob("worker_*.log"))
    for before, step in pairwise(events_of(folder, "step")):
        assert sum(step["times_s"].values()) == pytest.approx(
            (step["rows"] - before["rows"]) / step["rows_per_s"]
        )
        assert (
            min(
                step["times_s"][phase]
                for phase in ("forward", "backward", "optimizer", "collectives")
            )
            > 0
        )
        assert step["peak_fraction"] > 0


def test_report_and_dataframe_end_with_summary(finished: Trained) -> None:
    result = finished[1]
    page = Path(result.folder, "report.html").read_text()
    assert all(text in page for text in ("Validation auroc", result.summary["config_hash"]))
    frame = result.metrics_dataframe
    assert frame["step"].tolist()[-1] == 20
    assert frame["validation_auroc"].dropna().tolist()[-1] == result.summary["validation"]["auroc"]


@pytest.mark.extended
def test_other_trainer_gets_datasets_after_run(finished: Trained, tmp_path: Path) -> None:
    def count_rows() -> int:
        shard = ray.train.get_dataset_shard("train")
        return sum(len(batch["id"]) for batch in shard.iter_batches(batch_size=None))

    trainer = ray.train.torch.TorchTrainer(
        count_rows,
        datasets={"train": ray.data.range(30)},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    )
    assert trainer.fit().return_value == 30  # type: ignore[attr-defined]  # typed as Train V1's


class FailingSetUp(ClickWorkload):
    """Workload whose workers fail when they set up the model."""

    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        raise InputError("no room for the tables")


class FailingStep(ClickWorkload):
    """Workload whose workers fail in their third step."""

    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        setup = super().set_up(context, prepared)
        begin_step = setup.begin_step

        def begin(step: int, total: int) -> None:
            if step == 2:
                raise InputError("no third step")
            begin_step(step, total)

        setup.begin_step = begin
        return setup


@pytest.mark.extended
@pytest.mark.parametrize(
    "num_workers",
    [
        pytest.param(1, id="one_worker", marks=pytest.mark.exhaustive),
        pytest.param(2, id="two_workers"),
    ],
)
def test_run_on_ray_leaves_callers_process_unchanged(
    finished: Trained, tmp_path: Path, num_workers: int
) -> None:
    config = finished[0].replace(
        storage_path=str(tmp_path),
        name="run",
        scaling={"num_workers": num_workers},
        steps=4,
        evaluate_every=4,
    )
    with unchanged_process():
        train(config)
        for name, workload, cause in (
            ("a", FailingSetUp, "no room for the tables"),
            ("b", FailingStep, "no third step"),
        ):
            rejects(
                cause,
                train,
                dataclasses.replace(config, name=name, workload=workload(**vars(config.workload))),
            )


def test_plan_lists_tables_of_each_worker(finished: Trained) -> None:
    config, result = finished
    assert isinstance(config.workload, ClickWorkload)
    preprocessor = Preprocessor.load(os.path.join(result.folder, "preprocessor"))
    planned = tables_of(
        config.workload,
        config,
        preprocessor.num_embeddings,
        inputs=preprocessor.inputs,
        target=Target(2, 2),
        memory_bytes=local_memory(config, workers=2),
    )
    (start,) = events_of(result.folder, "start")
    held = [
        sum(table["bytes_of_rank"].get(rank, 0) for table in start["tables"]) for rank in ("0", "1")
    ]
    assert list(planned.worker_bytes) == held
    assert min(held) > 0


def test_finished_run_is_not_retrained(finished: Trained) -> None:
    config, result = finished
    before = events_of(result.folder)
    assert train(config).summary == result.summary
    assert events_of(result.folder) == before
    rejects("finished with another configuration", train, config.replace(steps=19))
    rejects(
        r"trained with other settings \(seed: 0 -> 1\)", train, config.replace(steps=21, seed=1)
    )
    assert json.loads(Path(result.folder, "summary.json").read_text()) == result.summary


class RepeatingWorkload(ClickWorkload):
    """Workload whose worker trains its second batch twice and skips its third."""

    def make_loader(
        self, context: WorkerContext, prepared: Any, *, state: dict[str, Any] | None, step: int
    ) -> Loader[Any, Any]:
        loader = super().make_loader(context, prepared, state=state, step=step)
        loader.start()
        assert loader._batches is not None
        first, second, _ = (next(loader._batches) for _ in range(3))
        loader._batches = chain([first, second, second], loader._batches)
        return loader


def test_summary_counts_lost_and_repeated_rows(
    click_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(click_log, tmp_path, steps=4, evaluate_every=4)
    assert isinstance(config.workload, ClickWorkload)
    # The configuration's own class; a subclass has all of its fields.
    summary = train(
        dataclasses.replace(config, workload=RepeatingWorkload(**vars(config.workload)))
    ).summary
    assert summary["rows"] == 4 * 128
    assert summary["rows_lost"] == summary["rows_repeated"]
    assert 120 < summary["rows_lost"] <= 128  # two rows with equal residues cancel each other
    assert "rows of the log were not trained" in capsys.readouterr().err


MIXED_CLUSTER = """
import sys
from pathlib import Path

import pyarrow as pa
import ray
from ray.cluster_utils import Cluster

memory = {"object_store_memory": 200_000_000}
head = {"num_cpus": 0, "include_dashboard": False, **memory}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=1, **memory)
cluster.add_node(num_cpus=1, resources={"accelerator": 2}, **memory)
cluster.wait_for_nodes()

from rayrec import recipes
from rayrec.config import InputError
from rayrec.ingest.ray_engine import tasks_dataset
from rayrec.cluster.connection import alive_nodes
from rayrec.cluster.layout import layout
from rayrec.training.trainer import train

needs = {"cpus_per_worker": 0.5, "resources_per_worker": {"accelerator": 1.0}}
config = recipes.load_config(Path(sys.argv[1]).read_text())
config = config.replace(
    storage_path=sys.argv[2], cluster={"address": cluster.address}, scaling=needs
)
train(config)

nodes = alive_nodes()
shares = layout(nodes, num_workers=2, use_gpu=False, data_nodes="auto", **needs)
where = lambda item: pa.table({"node": [ray.get_runtime_context().get_node_id()]})
tasks = tasks_dataset("where", where, list(range(6)), placement=shares.per_worker)
found = {row["node"] for row in tasks.take_all()}
plain = {
    node.node_id
    for node in nodes
    if node.resources.get("CPU") and not node.resources.get("accelerator")
}
assert found == plain, (found, plain)
try:
    train(config.replace(name="many", scaling={"num_workers": 5}))
except InputError as error:
    assert "accelerator" in str(error), error
    print("mixed cluster: ok", flush=True)  # at its end the process may lose its raylet first
"""
"""Script that trains on several Ray nodes of this machine, one of them with a simulated
accelerator.
"""


@pytest.mark.extended
def test_separate_data_nodes_keep_weights(finished: Trained, tmp_path: Path) -> None:
    config, result = finished
    script = [
        sys.executable,
        "-c",
        MIXED_CLUSTER,
        os.path.join(result.folder, "config.yaml"),
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        script, capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert "mixed cluster: ok" in done.stdout, (
        done.returncode,
        done.stdout[-3000:] + done.stderr[-3000:],
    )
    check_same_run(
        json.loads((tmp_path / config.name / "summary.json").read_text()), result.summary
    )
    assert losses(tmp_path / config.name) == losses(result.folder)


@pytest.mark.extended
def test_torchrun_matches_weights_after_killed_process(finished: Trained, tmp_path: Path) -> None:
    check_same_run(
        torchrun(tmp_path, "run", f"{finished[1].folder}/config.yaml", kill=True),
        finished[1].summary,
        restarts=1,
    )


def test_other_seed_changes_weights(alone: Trained, tmp_path: Path) -> None:
    config, result = alone
    other = train(config.replace(storage_path=str(tmp_path), name="other", seed=1, steps=4))
    assert losses(other.folder)[0] != losses(result.folder)[0]


def test_one_worker_on_ray_matches_in_process_run(
    local_ray: None, alone: Trained, tmp_path: Path
) -> None:
    config, here = alone
    on_ray = train(config.replace(storage_path=str(tmp_path), cluster={"address": None}))
    stages = [
        [event["stages"] for event in events_of(run.folder, "start_up")] for run in (here, on_ray)
    ]
    assert [any("worker_imports" in each for each in run_values) for run_values in stages] == [
        False,
        True,
    ]
    check_same_run(on_ray.summary, here.summary, "metrics", "validation", "bad_rows")
    assert losses(on_ray.folder) == losses(here.folder)


def test_golden_loss_curves(finished: Trained, alone: Trained) -> None:
    """Changes that should not affect training must not move these curves. Otherwise regenerate
    them.
    """
    measured = {"1 worker": losses(alone[1].folder), "2 workers": losses(finished[1].folder)}
    check_golden("criteo_demo_losses", measured, tolerance=1e-4)


def test_invalid_rows_are_counted_or_rejected(click_log: Path, tmp_path: Path) -> None:
    lines = lines_of(click_log)[:3000]
    lines[10] = b"not a row\n"
    lines[20] = lines[20].replace(b"\t", b"\tx", 1)
    (tmp_path / "train.txt").write_bytes(b"".join(lines))
    config = small(tmp_path, tmp_path / "runs", steps=3, evaluate_every=3)
    result = train(config)
    assert (result.summary["bad_rows"], sum(result.summary["rows_of_sets"].values())) == (2, 2998)
    rejects(
        "more than max_bad_fraction.*too few columns.*at byte",
        train,
        config.replace(name="strict", max_bad_fraction=0.0001),
    )
    assert not os.path.exists(tmp_path / "runs" / "strict" / "summary.json")


def test_short_evaluations_reach_target(click_log: Path, tmp_path: Path) -> None:
    config = small(
        click_log,
        tmp_path,
        eval_rows=300,
        early_stopping={"patience": 0, "target": 0.4},
        log_every=2,
        observe={"accuracy": True, "by_worker": True},
        cluster={"address": "none"},
    )
    summary = train(config).summary
    short, last = events_of(tmp_path / "run", "evaluate")
    rows = summary["rows_of_sets"]["validation"]
    first = summary["rows_of_sets"]["train"]
    assert [(event["step"], event["rows"], event["counted"]) for event in (short, last)] == [
        (8, 300, True),
        (8, rows, False),
    ]
    labels = [line.startswith(b"1") for line in lines_of(click_log)[first : first + rows]]
    assert short["label_rate"] * 300 == pytest.approx(
        sum(sum(labels[start:stop]) for start, stop in spread(rows, 300))
    )
    assert last["label_rate"] * rows == pytest.approx(sum(labels))
    assert (summary["validation"]["rows"], summary["metrics"]["rows"]) == (
        rows,
        summary["rows_of_sets"]["test"],
    )
    assert (summary["steps"], summary["target_step"], summary["target_rows"]) == (8, 8, 8 * 128)
    assert summary["target_s"] > summary["train_s"]
    for event in events_of(tmp_path / "run", "step"):
        assert event["workers"] == [{"loss": event["loss"], "accuracy": event["accuracy"]}]
        assert (256 * event["accuracy"]).is_integer()


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_tables", [False, True])
def test_other_worker_count_resumes_without_loss(
    has_tables: bool, click_log: Path, tmp_path: Path
) -> None:
    """Two workers train to a checkpoint, one finishes the epoch, and every row counts once."""
    if has_tables:
        config = shop.config_of(shop.write_shop(tmp_path, rows=20_000), tmp_path)
    else:
        config = small(click_log, tmp_path)
    config = config.replace(
        steps=None,
        epochs=2,
        evaluate_every=300,
        checkpoint={"every": 40},
        batch_size=96,
        scaling={"num_workers": 2},
        cluster={"num_cpus": 2},
    )
    with Run(config, tmp_path / "two", cache=tmp_path).start() as two:
        two.wait_for_save()
        two.session.end()
        assert not two.events("finish")
    summary = finished_run(
        config.replace(scaling={"num_workers": 1}), tmp_path / "one", cache=tmp_path
    )
    assert [event["world_size"] for event in events_of(tmp_path / "run", "start")] == [2, 1]
    check_no_rows_lost(summary)
    assert summary["rows"] == 2 * summary["rows_of_sets"]["train"]


def test_kaggle_recipe_trains_two_steps(click_log: Path, tmp_path: Path) -> None:
    log = {"path": str(click_log / "train.txt")}
    summary = train(
        short_run(
            recipes.criteo_kaggle(), tmp_path, 2, train_data=log, batch_size=64, precision="bf16"
        )
    ).summary
    assert summary["steps"] == 2
    assert 0.3 < summary["metrics"]["auroc"] < 0.9


# -- Trackers and profiles of real runs, including a profile requested while a run trains
def observed(log: Path, storage: Path, **changes: Any) -> TrainConfig:
    return one_worker(log, storage, steps=12, evaluate_every=12, **changes)


@pytest.mark.extended
def test_run_writes_trackers_and_profile_window(
    click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = observed(
        click_log,
        tmp_path,
        trackers={
            "mlflow": True,
            "mlflow_uri": (tmp_path / "mlruns").as_uri(),
            "wandb": "offline",
            "mllog": True,
            "iteration_lines": True,
        },
        profile={"steps": "5:8"},
    )
    folder = Path(train(config).folder)
    for pattern in (
        "run/tensorboard/*tfevents*",
        "run/wandb/offline-run-*/run-*.wandb",
        "mlruns/*/*/metrics/train/loss",
    ):
        assert list(tmp_path.glob(pattern)), pattern
    lines = (folder / "mllog.log").read_text().splitlines()
    assert json.loads(lines[-1].removeprefix(":::MLLOG "))["metadata"]["status"] == "success"
    assert "Finished training it 12/" in (folder / "iterations.log").read_text()
    (profile,) = events_of(folder, "profile")
    assert (profile["step"], profile["end"], profile["ranks"]) == (5, 8, 1)
    window = folder / "profile" / "step_00000005"
    assert profile["path"] == str(window)
    trace = json.loads(gzip.decompress((window / "rank_0" / "trace.json.gz").read_bytes()))
    assert {"step 6", "step 7", "step 8"} <= {event["name"] for event in trace["traceEvents"]}
    assert not (window / "ray_timeline.json").exists()  # Without Ray.
    # Trackers and profiles do not change the result.
    assert run_hash(config) == run_hash(observed(click_log, tmp_path))


def test_missing_tracker_settings_raise_before_start(
    click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rejects(r"missing server", train, observed(click_log, tmp_path, trackers={"mlflow": True}))
    rejects(
        "MLFLOW_TRACKING_PASSWORD",
        observed,
        click_log,
        tmp_path,
        trackers={"mlflow_uri": "https://me:secret@host"},
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_profile_command_records_running_job(click_log: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "steps": 100_000,
        "evaluate_every": 50_000,
        "checkpoint": {"every": 50_000},
    }
    # The first recorded step depends on the speed between two logs, which must not be too close.
    config = small_run(click_log, tmp_path, log_every=50, **fields)
    with Run(config, tmp_path / "asked", cache=tmp_path, KINETO_USE_DAEMON="1").start() as run:
        run.wait_for_step(100)
        (worker, *_) = run.session.find("train worker")
        assert b"KINETO_USE_DAEMON=1" in Path(f"/proc/{worker.pid}/environ").read_bytes()
        command = (*RAYREC, "profile", run.path, "--steps", "3")
        reported = json.loads(run_command(*command).stdout)
        assert reported["ranks"] == 2
        starts = set()
        for rank in range(2):
            trace = gzip.decompress(
                Path(reported["profile"], f"rank_{rank}", "trace.json.gz").read_bytes()
            )
            names = {event["name"] for event in json.loads(trace)["traceEvents"]}
            starts.add(min(int(name[5:]) for name in names if name.startswith("step ")))
        assert starts == {reported["first_step"] + 1}  # Equal on both ranks.
        assert run.wait_for("profile")["path"] == reported["profile"]
        assert json.loads(Path(reported["profile"], "ray_timeline.json").read_bytes())
        run.session.process.terminate()
        assert run.exit_status() == 143
    assert "is not training" in run_command(*command, status=2).stderr


SECRET = "swordfish-4711"
RECIPE = """
import json, os
from dataclasses import dataclass
import pyarrow as pa
from rayrec import recipes
from rayrec.models.ranking.linear import LinearConfig

NAMES = ("NCCL_DEBUG", "FI_PROVIDER", "MY_TOKEN", "FROM_FILE", "KINETO_USE_DAEMON")

@dataclass(frozen=True, kw_only=True)
class Seen(LinearConfig):
    def build(self, inputs, *, precision="fp32"):
        from rayrec.cluster import worker_pool
        from rayrec.data.engine import TaskPlacement
        from rayrec.ingest.ray_engine import RayEngine
        def seen(item):
            return pa.table({name: [os.environ.get(name)] for name in item})
        variables = worker_pool.task_variables(os.environ)
        engine = RayEngine(TaskPlacement(num_cpus=0.1), variables, f"seen_{os.getpid()}")
        (in_task,) = engine.run("look", seen, [NAMES])
        with open(f"{os.environ['SEEN']}/{os.getpid()}", "w") as file:
            json.dump([seen(NAMES).to_pylist()[0], in_task.to_pylist()[0]], file)
        return super().build(inputs, precision=precision)

def recipe(path=None):
    return recipes.criteo_demo(path).replace(workload={"model": Seen()})
"""
"""Click model that writes the variables of its worker, and of a data task from there, to the folder
SEEN.
"""
CLUSTER_STATE = """
import json, sys
import ray
from ray._private.worker import global_worker
from ray.data._internal.stats import get_or_create_stats_actor
from ray.train.v2._internal.state.state_actor import get_state_actor
from rayrec.cluster import connection
connection.connect(sys.argv[1])
runs = ray.get(get_state_actor().get_train_runs.remote()).values()
datasets = ray.get(get_or_create_stats_actor().get_datasets.remote())
jobs = global_worker.gcs_client.get_all_job_info(
    skip_submission_job_info_field=True, skip_is_running_tasks_field=True
)
print(json.dumps({
    "runs": [run.model_dump_json() for run in runs],
    "datasets": sorted(datasets),
    "jobs": str(jobs),
}))
"""


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayHead, Path]]:
    """A Ray that `ray start` started, and its session folder."""
    with (
        tempfile.TemporaryDirectory(prefix="rayrec-") as folder,
        RayHead(Path(folder), cache=Path(folder), num_cpus=3) as head,
    ):
        wait_for_ray(head)
        yield head, Path(folder)


def check_cluster_state(address: str, environment: dict[str, str]) -> None:
    """Check the run, its Datasets and its job, as Ray's dashboard shows them."""
    state = json.loads(
        run_command(sys.executable, "-c", CLUSTER_STATE, address, env=environment).stdout
    )
    (shown,) = map(json.loads, state["runs"])
    assert (shown["name"], shown["status"]) == ("seen", "FINISHED")
    for rank in range(2):
        assert any(name.startswith(f"seen_worker_{rank}_ingest_") for name in state["datasets"])
    assert all(name.startswith("seen_") for name in state["datasets"])
    assert "--cluster.env" in state["jobs"]
    assert SECRET not in state["jobs"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "is_local",
    [
        pytest.param(False, id="cluster", marks=pytest.mark.exhaustive),
        pytest.param(True, id="local"),
    ],
)
def test_environment_reaches_workers_and_tasks(
    click_log: Path, tmp_path: Path, running_cluster: tuple[RayHead, Path], is_local: bool
) -> None:
    """And of a running cluster, Ray's Train page and metrics have the run, but no log has a
    value.
    """
    head, session = running_cluster
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "env.yaml").write_text("env_vars: {FROM_FILE: 'yes'}")
    (seen := tmp_path / "environments").mkdir()
    environment = environment_for(
        tmp_path / "cache", FI_PROVIDER="efa", MY_TOKEN=SECRET, SEEN=str(seen)
    )
    flags = (
        f"--train-data.path {click_log}/train.txt --name seen --storage-path {tmp_path} --steps "
        "30 --log-every 5"
    )
    flags += " --scaling.num-workers 2 --scaling.cpus-per-worker 0.5 --cluster.address " + (
        "local" if is_local else head.address
    )
    flags += (
        f" --cluster.runtime-env {tmp_path}/env.yaml --cluster.data-task-memory-bytes 10000000 "
        "--batch-size 64"
    )
    flags += (
        " --cluster.env NCCL_DEBUG=WARN MY_TOKEN FI_PROVIDER SEEN --cluster.env KINETO_USE_DAEMON=1"
    )
    run_command(
        *RAYREC,
        "train",
        f"{tmp_path}/recipe.py:recipe",
        *flags.split(),
        env=environment,
        timeout_s=300,
    )
    variables = {
        "NCCL_DEBUG": "WARN",
        "FI_PROVIDER": "efa",
        "MY_TOKEN": SECRET,
        "FROM_FILE": "yes",
        "KINETO_USE_DAEMON": "1",
    }
    assert [json.loads(file.read_text()) for file in seen.iterdir()] == [[variables, variables]] * 2
    for file in seen.iterdir():
        file.unlink()
    run_command("grep", "-r", "-l", "-a", "--devices=skip", SECRET, tmp_path, status=1)
    (run,) = events_of(tmp_path / "seen", "run")
    assert "--cluster.env NCCL_DEBUG=*** MY_TOKEN FI_PROVIDER SEEN" in run["command"]
    (start,), tasks = (
        events_of(tmp_path / "seen", "start"),
        events_of(tmp_path / "seen", "data_nodes"),
    )
    assert (start["nodes"], tasks[-1]["nodes"]) == (
        [os.uname().nodename] * 2,
        [os.uname().nodename],
    )
    if not is_local:
        run_command("grep", "-r", "-l", "-a", "--devices=skip", SECRET, session, status=1)
        check_cluster_state(head.address, environment)
        logs = run_command(
            "grep",
            "-r",
            "-l",
            "Registering daemon config loader",
            session / "ray" / "session_latest" / "logs",
        ).stdout
        assert len(logs.split()) >= 2


# -- Forecasts of speed and memory
STEPS = 240
TRIES = 3
"""A run is held against the forecasts before and after it, which says nothing where the machine was
another meanwhile.
"""


def reported(config: TrainConfig) -> Forecast:
    ray.shutdown()
    return forecast(config, ClusterShape(float(os.cpu_count() or 1)))


def measured_rows_per_s(config: TrainConfig) -> float:
    """Of a run, less its first quarter."""
    ray.shutdown()
    result = train(config)
    late = [(a, b) for a, b in pairwise(events_of(result.folder, "step")) if b["step"] > STEPS // 4]
    seconds = sum((b["rows"] - a["rows"]) / b["rows_per_s"] for a, b in late)
    return float((late[-1][1]["rows"] - late[0][0]["rows"]) / seconds)


@pytest.mark.exhaustive
def test_demo_forecast_matches_measured_speed(tmp_path: Path) -> None:
    generate(str(tmp_path / "log"), rows=400_000, seed=0, parallelism=2)
    config = recipes.criteo_demo(str(tmp_path / "log" / "train.txt")).replace(
        steps=STEPS,
        storage_path=str(tmp_path / "runs"),
        batch_size=1024,
        min_steps_per_epoch=1,
        evaluate_every=10**6,
        early_stopping={"patience": 0},
    )
    found = [reported(config)]
    for number in range(TRIES):
        measured = measured_rows_per_s(config.replace(name=f"demo-{number}"))
        found.append(reported(config))
        expected = sum(one.rows_per_s for one in found[-2:]) / 2
        if expected == pytest.approx(measured, rel=0.25):
            break
    assert expected == pytest.approx(measured, rel=0.25), [one.text() for one in found]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.exhaustive
def test_planned_memory_matches_measured_peak(rows: int) -> None:
    found = measured(rows)
    assert found["forecast"] == pytest.approx(found["peak"], rel=0.15)
