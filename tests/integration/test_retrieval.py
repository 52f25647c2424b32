"""Retrieval models go the whole road: train, resume, evaluate, predict, export, HTTP."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.interactions import ITEMS, small, write_log
from builders.requests import ask, post
from builders.runs import QUIET, check_same_in_two_parts, evaluated_and_predicted, train
from hosts.processes import torchrun

import rayrec
from rayrec.config import InputError
from rayrec.inference.model import open_served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_retrieval_model_trains_exports_and_serves(name: str, tmp_path: Path) -> None:
    log = write_log(str(tmp_path / "log"), name)
    config = small(name, log, storage_path=str(tmp_path), steps=60, evaluate_every=60, checkpoint={"every": 30})
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
    asked = [{key: value for key, value in row.items() if value} for row in rows.slice(0, 8).to_pylist()]
    for path in (whole.checkpoint, *(_exported(whole.checkpoint, tmp_path, kind) for kind in (None, "int8"))):
        app = make_app(open_served(path))
        reply = post(app, {"rows": asked})
        assert reply.status == 200, reply.body
        for column in columns:
            if column == "items":
                found = [row[:1] for row in reply.json()[column]]
                assert found == [row[:1] for row in predicted[column].to_pylist()[:8]]
            else:
                np.testing.assert_allclose(reply.json()[column], predicted[column].to_pylist()[:8], atol=0.2)
        described = ask(app, "GET", "/openapi.json").json()
        assert set(columns) <= set(json.dumps(described).replace('"', " ").split())


def _exported(checkpoint: str, folder: Path, quantize: Any) -> str:
    out = str(folder / f"export_{quantize}")
    report = rayrec.export(checkpoint, out=out, quantize=quantize)
    assert report["parity"]["failure"] is None
    if quantize is None:
        assert report["program_parity"]["max_logit_difference"] < 1e-4
    return out


def test_commands_for_labels_reject_retrieval_models(tmp_path: Path) -> None:
    log = write_log(str(tmp_path / "log"), "two_tower", users=20)
    config = small("two_tower", log, storage_path=str(tmp_path), steps=2, evaluate_every=2)
    run = train(config, name="run")
    with pytest.raises(InputError, match=r"recipe two_tower does not predict clicks\. Only click models can be compared"):
        rayrec.compare([run.checkpoint, run.checkpoint], log, console=QUIET)
    with pytest.raises(InputError, match=r"does not predict clicks, .*confidence"):
        rayrec.evaluate(run.checkpoint, log, confidence=0.9, console=QUIET)
    with pytest.raises(InputError, match="members"):
        train(config, name="two", workload={"model": {"members": 2}})
    teacher = {"checkpoint": run.checkpoint, "weight": 0.5}
    with pytest.raises(InputError, match=r"teacher\.checkpoint: must be None for TwoTowerConfig"):
        train(config, name="student", workload={"teacher": teacher})


@pytest.mark.extended
@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_killed_worker_of_two_changes_no_weights(name: str, tmp_path: Path) -> None:
    log = write_log(str(tmp_path / "log"), name)
    config = small(name, log, steps=200, batch_size=8, evaluate_every=200, checkpoint={"every": 20})
    (tmp_path / "config.yaml").write_text(config.replace(scaling={"num_workers": 2}).to_yaml())
    whole, killed = (torchrun(tmp_path, run, tmp_path / "config.yaml", kill=run == "killed") for run in ("whole", "killed"))
    assert killed["weights_sha256"] == whole["weights_sha256"]
    assert (killed["restarts"], killed["rows_lost"], killed["rows_repeated"]) == (1, 0, 0)
