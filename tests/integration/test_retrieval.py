"""Retrieval models go the whole road: train, resume, evaluate, predict, export, HTTP."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.interactions import ITEMS, small, write_log
from builders.requests import ask, post

import rayrec
from rayrec.checkpoint import committed
from rayrec.config import InputError
from rayrec.inference.model import open_served
from rayrec.observe.console import Console

pytestmark = pytest.mark.slow
QUIET: dict[str, Any] = {"console": Console(quiet=True)}


@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_retrieval_model_goes_the_whole_road(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)
    log = write_log(str(tmp_path / "log"), name)
    config = small(name, log, storage_path=str(tmp_path), steps=60, evaluate_every=60, checkpoint={"every": 30})
    whole = rayrec.train(config.replace(name="whole"), **QUIET)
    rayrec.train(config.replace(name="parts", steps=30), **QUIET)
    parts = rayrec.train(config.replace(name="parts"), **QUIET)
    assert parts.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert parts.summary["rows_lost"] == parts.summary["rows_repeated"] == 0

    # It learned which item comes next; a user's items are some of the six next to each other that it began with.
    metrics = rayrec.evaluate(whole.checkpoint, log, **QUIET)
    assert metrics["recall_at_5"] == pytest.approx(whole.metrics["recall_at_5"], abs=1e-6)
    assert metrics["ndcg_at_5"] > (0.8 if name == "next_item" else 0.25)  # 0.12 at random
    rayrec.predict(whole.checkpoint, log, out=str(tmp_path / "predicted"), **QUIET)
    predicted = pq.read_table(tmp_path / "predicted").sort_by("row")
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
    run = rayrec.train(config.replace(name="run"), **QUIET)
    with pytest.raises(InputError, match=r"recipe two_tower does not predict clicks\. Only click models can be compared"):
        rayrec.compare([run.checkpoint, run.checkpoint], log, **QUIET)
    with pytest.raises(InputError, match=r"does not predict clicks, .*confidence"):
        rayrec.evaluate(run.checkpoint, log, confidence=0.9, **QUIET)
    with pytest.raises(InputError, match="members"):
        rayrec.train(config.replace(name="two", workload={"model": {"members": 2}}), **QUIET)
    teacher = {"checkpoint": run.checkpoint, "weight": 0.5}
    with pytest.raises(InputError, match=r"teacher\.checkpoint: must be None for TwoTowerConfig"):
        rayrec.train(config.replace(name="student", workload={"teacher": teacher}), **QUIET)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["next_item", "two_tower"])
def test_killed_worker_of_two_changes_no_weights(name: str, tmp_path: Path) -> None:
    log = write_log(str(tmp_path / "log"), name)
    config = small(name, log, steps=200, batch_size=8, evaluate_every=200, checkpoint={"every": 20})
    (tmp_path / "config.yaml").write_text(config.replace(scaling={"num_workers": 2}).to_yaml())
    whole, killed = (_torchrun(tmp_path, run, kill=run == "killed") for run in ("whole", "killed"))
    assert killed["weights_sha256"] == whole["weights_sha256"]
    assert (killed["restarts"], killed["rows_lost"], killed["rows_repeated"]) == (1, 0, 0)


def _torchrun(folder: Path, name: str, *, kill: bool) -> dict[str, Any]:
    """Train by two processes; `kill` ends the second one after the first checkpoint. Returns the summary."""
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1", "-m", "rayrec", "train"]
    arguments = ["--config", str(folder / "config.yaml"), "--storage-path", str(folder), "--name", name]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
    with (folder / f"{name}.err").open("w") as err:
        torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        deadline_s = time.monotonic() + 120
        while kill and not committed(str(folder / name)):
            assert torchrun.poll() is None, (folder / f"{name}.err").read_text()[-3000:]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        if kill:
            workers = [child for child in psutil.Process(torchrun.pid).children() if child.environ().get("RANK") == "1"]
            workers[0].kill()
        out, _ = torchrun.communicate(timeout=180)
    finally:
        torchrun.terminate()
    assert torchrun.returncode == 0, (folder / f"{name}.err").read_text()[-3000:]
    summary: dict[str, Any] = json.loads(out)
    return summary
