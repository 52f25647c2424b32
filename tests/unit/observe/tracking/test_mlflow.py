"""MLflow tracker: content, one run for all drivers, and unreachable servers."""

import time
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from builders.faults import rejects
from hosts.ports import free_ports

from rayrec import recipes
from rayrec.observe.events import EventWriter
from rayrec.observe.tracking import tracker as tracking_module
from rayrec.observe.tracking.config import TrackersConfig
from rayrec.observe.tracking.tracker import tracking

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a file store, because the server's own store needs a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    # The tracker sets it, and the end of the test removes it.
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    return (tmp_path / "mlruns").as_uri()


def track(store: str, events: list[dict[str, Any]], **config: Any) -> None:
    from rayrec.observe.tracking.mlflow import MlflowTracker

    values = recipes.criteo_demo().replace(name="run", **config).to_dict()
    run_events.feed(MlflowTracker(store, experiment="rayrec", config=values), events, close=True)


def runs(store: str) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=store)
    return list(client.search_runs([client.get_experiment_by_name("rayrec").experiment_id]))


def history(store: str, run: Any, key: str) -> list[tuple[int, float]]:
    client = mlflow.MlflowClient(tracking_uri=store)
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)
    ]


def test_resuming_driver_continues_mlflow_run(store: str) -> None:
    events = run_events.run()
    track(store, events[: run_events.cut(events) + 1])
    (run,) = runs(store)
    assert (run.info.status, run.info.run_name) == ("FAILED", "run")
    assert history(store, run, "train/loss")[-1] == (120, 9.0)
    track(store, run_events.ended(events, loss=0.5))
    (run,) = runs(store)
    assert run.info.status == "FINISHED"
    steps = [step for step, _ in history(store, run, "train/loss")]
    assert steps == list(range(10, 201, 10))  # Repeated steps keep their first values.
    assert [step for step, _ in history(store, run, "validation/loss")] == [50, 100, 150, 200]
    assert history(store, run, "final/loss") == [(200, 0.5)]
    assert run.data.params["scaling.num_workers"] == "2"
    assert len(run.data.params) > 100  # More than one request takes.
    assert run.data.tags["rayrec.config_hash"] == "0123456789abcdef"
    assert run.data.tags["version.torch"] == "2.13.0"


def test_new_run_with_same_name_is_separate(store: str) -> None:
    first = run_events.run(finished=False)
    track(store, first)
    track(store, [{**event, "time": event["time"] + 1000.0} for event in first])
    assert len(runs(store)) == 2
    assert {run.info.status for run in runs(store)} == {"RUNNING"}  # Without an end event.


@pytest.mark.parametrize(
    "uri",
    [
        "file:/a/mlruns",
        "/a/mlruns",
        "mlruns",
        "http://host:5000",
        "https://host/x",
        "databricks",
        "sqlite:///mlflow.db",
    ],
)
def test_config_accepts_server_folder_and_database(
    monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: name != "sqlalchemy" or uri.startswith("sqlite") or None,
    )
    TrackersConfig(mlflow=True, mlflow_uri=uri).check({})
    TrackersConfig(mlflow=True).check({"MLFLOW_TRACKING_URI": uri})


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        pytest.param(
            "sqlite:///mlflow.db",
            "sqlite:///mlflow.db: databases require the full package, .* `pip install mlflow`",
            id="sqlite-mlflow.db",
        ),
        pytest.param(
            "postgresql+psycopg2://me:hush@host/db",
            r"postgresql\+psycopg2://\*\*\*@host/db: databases require",
            id="postgresql-psycopg2-me-hush",
        ),
        pytest.param(
            "s3://bucket/mlruns",
            "s3://bucket/mlruns: MLflow does not support s3:. Use a server",
            id="s3-bucket-mlruns",
        ),
    ],
)
def test_config_rejects_unwritable_address(
    uri: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else True
    )
    rejects(
        f"trackers.mlflow_uri: {line}",
        TrackersConfig(mlflow=True).check,
        {"MLFLOW_TRACKING_URI": uri},
    )


def test_unreachable_server_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayrec.observe.tracking.mlflow import MlflowTracker

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracking_module, "CLOSE_S", 2.0)
    uri = f"http://127.0.0.1:{free_ports(1)}"
    path = tmp_path / "events.jsonl"
    notes = list[str]()
    config = recipes.gpt2_tiny().replace(name="run").to_dict()
    make = {"MLflow": lambda: MlflowTracker(uri, experiment="x", config=config)}
    with tracking(make, str(path), note=notes.append), EventWriter(path) as writer:
        writer.write("run", config_hash="", versions={})
        begin_s = time.monotonic()
        for step in range(1000):
            writer.write("step", step=step, loss=1.0)
        assert time.monotonic() - begin_s < 10
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 9.0  # Less than the default of 10.
    (line,) = notes
    assert line.startswith("MLflow: ")
    assert "\n" not in line
