"""MLPerf log and DLRM iteration lines, checked with the grammar and rules of their parsers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import run_events

from rayrec import recipes
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.log_files import IterationTracker, MlLogTracker, optimizer_lines

VALUES: dict[str, object] = {"submission_division": "open", "submission_benchmark": "dlrm_dcnv2", "opt_name": "adagrad"}
ZERO = ["weight_decay", "adagrad_learning_rate_decay", "adagrad_initial_accumulator_value", "learning_rate_warmup_steps"]
ZERO += ["learning_rate_decay_start_step", "learning_rate_decay_steps"]
VALUES |= {f"opt_{name}": 0 for name in ZERO} | {"opt_adagrad_epsilon": 1e-8, "gradient_accumulation_steps": 1}
VALUES |= {"global_batch_size": 64, "train_samples": 6400, "eval_samples": 640}
"""Values required by closed_dlrm_dcnv2 of the rules 6.0, as far as the fake run fulfils them."""
EXACTLY_ONE = [*VALUES, "submission_org", "submission_platform", "init_stop", "run_start", "run_stop", "seed"]
EXACTLY_ONE += ["opt_base_learning_rate"]


def parse(path: Path) -> list[dict[str, Any]]:
    """Parse a log with the grammar of mlperf-logging: token, one JSON object, these fields."""
    found = []
    for line in path.read_text(encoding="latin-1").splitlines():
        assert line.startswith(":::MLLOG ")
        record = json.loads(line.removeprefix(":::MLLOG "))
        assert list(record) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert isinstance(record["time_ms"], int)
        assert record["event_type"] in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")
        assert {"file", "lineno"} <= record["metadata"].keys()
        found.append(record)
    return found


def check(records: list[dict[str, Any]]) -> None:
    """Check the rules for any benchmark (common.yaml of 6.0)."""
    keys = [record["key"] for record in records]
    for key in EXACTLY_ONE:
        assert keys.count(key) == 1, key
    for key in ("cache_clear", "init_start", "eval_accuracy", "eval_start", "eval_stop", "epoch_start", "epoch_stop"):
        assert key in keys, key
    assert keys.index("init_start") < keys.index("init_stop") < keys.index("run_start") < keys.index("epoch_start")
    assert keys[-1] == "run_stop"
    for record in records:
        metadata, key = record["metadata"], record["key"]
        if re.match("(epoch|eval)_", key) and key != "eval_samples":
            assert "epoch_num" in metadata or "samples_count" in metadata
        if key == "run_stop":
            assert "status" in metadata
        if key == "eval_accuracy":
            assert record["value"] <= 1.0
            assert "epoch_num" in metadata
    times = [record["time_ms"] for record in records]
    assert times == sorted(times)
    for name in ("init", "run", "epoch", "eval"):  # Each opened interval is closed.
        opened = [record["event_type"] for record in records if record["key"] in (f"{name}_start", f"{name}_stop")]
        assert opened == ["INTERVAL_START", "INTERVAL_END"] * (len(opened) // 2), name


def run(*, finished: bool = True) -> list[dict[str, Any]]:
    """Return a fake run of a click model: 200 steps of 64 rows, two epochs, resumed from step 100 after a failure."""
    events = []
    for event in run_events.run(finished=finished):
        event = dict(event)
        if event["kind"] == "prepared":
            event["rows_of_sets"] = {"train": 6400, "validation": 640}
        elif event["kind"] == "start":
            event |= {"batch_size": 64 // event["world_size"], "rows": event["step"] * 64}
        elif event["kind"] == "evaluate":
            event["auroc"] = 0.7 + event["step"] / 10_000
        elif event["kind"] == "finish":
            event["metrics"] = {"auroc": 0.72}
        events.append(event)
    return events


def write(folder: Path, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run_events.feed(MlLogTracker(str(folder), config=recipes.mlperf_dcnv2().to_dict()), events, close=True)
    return parse(folder / "mllog.log")


def test_mllog_of_restarted_run_follows_rules(tmp_path: Path) -> None:
    write(tmp_path, run()[:20])  # A lost driver. The next one rewrites the file.
    records = write(tmp_path, run())
    check(records)
    values = {record["key"]: record["value"] for record in records}
    assert {key: values[key] for key in VALUES} == VALUES
    assert records[-1]["metadata"]["status"] == "success"
    scores = [(record["metadata"]["epoch_num"], record["value"]) for record in records if record["key"] == "eval_accuracy"]
    assert scores == [(0.5, 0.705), (1.0, 0.71), (1.5, 0.715), (2.0, 0.72)]
    assert [record["metadata"]["epoch_num"] for record in records if record["key"] == "epoch_start"] == [0, 1]


def test_mllog_of_stopped_run_is_aborted(tmp_path: Path) -> None:
    events = run(finished=False)
    assert "run_stop" not in [record["key"] for record in write(tmp_path, events)]
    events.append({"kind": "stop", "time": events[-1]["time"] + 1, "step": 150, "cause": "SIGTERM"})
    records = write(tmp_path, events)
    check(records)
    assert records[-1]["metadata"]["status"] == "aborted"


@pytest.mark.parametrize("name", list(recipes.ALL))
def test_optimizer_lines_of_all_recipes(name: str) -> None:
    assert dict(optimizer_lines(recipes.ALL[name]().to_dict()["workload"]))["opt_base_learning_rate"] > 0


def iteration_lines(folder: Path, events: list[dict[str, Any]]) -> list[str]:
    run_events.feed(IterationTracker(str(folder)), events, close=True)
    return (folder / "iterations.log").read_text().splitlines()


def test_iteration_lines_match_dlrm_format(tmp_path: Path) -> None:
    lines = iteration_lines(tmp_path, run())
    pattern = r"Finished training it (\d+)/(\d+) of epoch (\d+), (\d+\.\d\d) ms/it, loss (\d+\.\d{6})"
    found = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(found) == 12 + 10  # Repeated steps appear again.
    assert found[0] == ("10", "100", "0", f"{1000 * 640 / 1010 / 10:.2f}", "9.000000")
    assert found[12][:3] == ("10", "100", "1")  # Step 110, repeated.
    assert found[-1][:3] == ("100", "100", "1")
    assert "Testing at - 50/100 of epoch 0, loss 0.573753, perplexity 2.000000, auroc 0.705000" in lines
    assert len(lines) == len(found) + 4


def resized() -> list[dict[str, Any]]:
    """Return a run of two workers with 64 rows per step, and of one from step 25: an epoch of 6400 rows ends at step 75."""
    events = run_events.Events()
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("prepared", seconds=1.0, rows_of_sets={"train": 6400})
    for first, end, workers, rows in ((0, 25, 2, 0), (25, 100, 1, 3200)):
        events.add("start", step=first, steps=200, rows=rows, world_size=workers, batch_size=64)
        for step in range(first + 25, end + 1, 25):
            done = rows + (step - first) * 64 * workers
            events.add("step", step=step, steps=200, loss=0.5, rows=done, rows_per_s=1000.0, blocked_fraction=0.0)
            events.add("evaluate", step=step, set="validation", auroc=0.7, rows=640)
    return events.all


def test_epochs_count_rows_after_resize_and_default_to_full_run(tmp_path: Path) -> None:
    records = write(tmp_path, resized())
    places = [record["metadata"] for record in records if record["key"] == "eval_start"]
    assert [place["samples_count"] for place in places] == [3200, 4800, 6400, 8000]
    assert [place["epoch_num"] for place in places] == [0.5, 0.75, 1.0, 1.25]
    assert [record["metadata"]["epoch_num"] for record in records if record["key"] == "epoch_start"] == [0, 1]
    places = re.findall(r"Testing at - (\d+/\d+ of epoch \d+)", "\n".join(iteration_lines(tmp_path, resized())))
    assert places == ["25/50 of epoch 0", "75/100 of epoch 0", "100/100 of epoch 0", "25/100 of epoch 1"]
    run = RunSummary([{"time": 0.0, "kind": "start", "step": 0, "steps": 150, "world_size": 2}])
    assert run.epoch_of(16) == (0, 16)
    assert run.steps_per_epoch == 150
    assert run.epoch_of(0) == (0, 1)
