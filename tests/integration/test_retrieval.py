"""Retrieval models go the whole road: train, resume, evaluate, predict, export, HTTP."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.faults import rejects
from builders.interactions import ITEMS, small, write_log
from builders.requests import ask, score
from builders.runs import QUIET, check_same_in_two_parts, check_same_run, evaluated_and_predicted, export, train
from hosts.processes import torchrun

import rayrec
from rayrec.inference.model import open_served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_retrieval_model_trains_exports_and_serves(name: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", name)
    config = small(name, log, tmp_path, 60, checkpoint={"every": 30})
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=30)

    # It learned which item comes next; a user's items are some of the six next to each other that it began with.
    metrics, predicted = evaluated_and_predicted(whole.checkpoint, log, tmp_path / "predicted")
    assert metrics["recall_at_5"] == pytest.approx(whole.metrics["recall_at_5"], abs=1e-6)
    assert metrics["ndcg_at_5"] > (0.8 if name == "next_item" else 0.25)  # 0.12 at random
    rows = pq.read_table(log)
    if name == "next_item":
        last = np.array([items[-1] for items in rows["item"].to_pylist()])
        first = np.array([items[0] for items in predicted["items"].to_pylist()])
        assert np.mean(first == 100 + (last - 99) % ITEMS) > 0.8
        columns = ("items", "scores")
    else:
        # All items by an index of the predicted vectors: the metrics of the evaluation, which ranks the table.
        users, items = (np.array(predicted[column].to_pylist()) for column in ("user", "item"))
        catalog, place = np.unique(rows["item"].to_numpy(), return_index=True)
        scores = users @ items[place].T
        own = scores[np.arange(len(scores)), np.searchsorted(catalog, rows["item"].to_numpy())]
        recall = np.mean((scores > own[:, None] + 1e-6).sum(1) < 5)
        assert recall == pytest.approx(metrics["recall_at_5"], abs=0.02)  # the table has two rows of no item
        columns = ("user", "item")

    # Exported, with small tables too, and served: the answers are the predictions.
    plain = export(whole.checkpoint, tmp_path / "plain")
    assert plain["program_parity"]["max_logit_difference"] < 1e-4
    export(whole.checkpoint, tmp_path / "int8", quantize="int8")
    asked = [{key: value for key, value in row.items() if value} for row in rows.slice(0, 8).to_pylist()]
    for path in (whole.checkpoint, f"{tmp_path}/plain", f"{tmp_path}/int8"):
        app = make_app(open_served(path))
        answer = score(app, {"rows": asked})
        for column in columns:
            expected = predicted[column].to_pylist()[:8]
            if column == "items":
                assert [row[:1] for row in answer[column]] == [row[:1] for row in expected]
            else:
                np.testing.assert_allclose(answer[column], expected, atol=0.2)
        described = ask(app, "GET", "/openapi.json").json()
        assert set(columns) <= set(json.dumps(described).replace('"', " ").split())


def test_commands_for_labels_reject_retrieval_models(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower", users=20)
    config = small("two_tower", log, tmp_path, 2)
    run = train(config)
    message = r"recipe two_tower does not predict clicks\. Only click models can be compared"
    rejects(message, rayrec.compare, [run.checkpoint, run.checkpoint], log, console=QUIET)
    rejects(r"does not predict clicks, .*confidence", rayrec.evaluate, run.checkpoint, log, confidence=0.9, console=QUIET)
    rejects("members", train, config, name="two", workload={"model": {"members": 2}})
    teacher = {"checkpoint": run.checkpoint, "weight": 0.5}
    rejects(r"teacher\.checkpoint: must be None for TwoTowerConfig", train, config, name="student", workload={"teacher": teacher})


@pytest.mark.extended
@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_killed_worker_of_two_changes_no_weights(name: str, tmp_path: Path) -> None:
    log, path = write_log(tmp_path / "log", name), tmp_path / "config.yaml"
    config = small(name, log, tmp_path, 200, batch_size=8, checkpoint={"every": 20}, scaling={"num_workers": 2})
    path.write_text(config.to_yaml())
    whole, killed = (torchrun(tmp_path, run, path, kill=run == "killed") for run in ("whole", "killed"))
    check_same_run(killed, whole, restarts=1)
