"""Model changes of a replica while it answers: swap, rollback, shadow."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from builders.click_models import ANY, logits_of, make_model, make_preprocessor, row_text
from builders.faults import until
from builders.requests import ask, post, post_async, sample_values

from rayrec.config import InputError
from rayrec.inference.model import ServedModel
from rayrec.serve import replica_models
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.counters import Counters
from rayrec.serve.replica_models import DesiredState, ModelSource, ReplicaModels

MODELS = {name: make_model(seed=number) for number, name in enumerate("abc")}
OTHER = make_model(make_preprocessor(ANY))
TEXT = b"".join(row_text(number) for number in range(20))
A, B = ModelSource(0, "a"), ModelSource(1, "b")


def load(path: str) -> ServedModel:
    if path not in MODELS:
        raise InputError(f"{path}: damaged")
    return MODELS[path]


def _switch(models: ReplicaModels, desired: DesiredState) -> str:
    models.set_desired(desired)
    return models.switch()


def _host(*, load: object = load) -> tuple[ReplicaModels, Counters]:
    counters = Counters()
    models = ReplicaModels(load, counters)  # type: ignore[arg-type]
    assert not _switch(models, DesiredState(0, A))
    return models, counters


def test_swap_under_load_loses_no_request() -> None:
    models, counters = _host(load=lambda path: time.sleep(0.2) or load(path))
    app = ScoringApp(models, counters, config=ServeConfig())
    expected = {model.version: logits_of(model, TEXT) for model in MODELS.values()}
    done = threading.Event()

    def swap() -> None:
        for serial, name in enumerate("bcabc", start=1):
            _switch(models, DesiredState(serial, ModelSource(serial, name)))
        done.set()

    answers: list[dict[str, Any]] = []

    async def load_it() -> None:
        async def client() -> None:
            while not done.is_set():
                reply = await post_async(app, TEXT)
                assert reply.status == 200
                answers.append(reply.json())

        threading.Thread(target=swap).start()
        await asyncio.gather(*(client() for _ in range(8)))

    asyncio.run(load_it())
    assert {answer["model"] for answer in answers} == set(expected)
    for answer in answers:
        np.testing.assert_allclose(np.array(answer["logits"], np.float32), expected[answer["model"]], atol=1e-5)
    app.close()


def test_rejected_model_changes_no_state() -> None:
    models, _ = _host()
    assert models.load(DesiredState(1, ModelSource(1, "gone"))) == "gone: damaged"
    assert (models.status().failed, models.status().cause) == (ModelSource(1, "gone"), "gone: damaged")
    models, _ = _host(load={"a": MODELS["a"], "other": OTHER}.__getitem__)
    for desired in (DesiredState(1, ModelSource(1, "other")), DesiredState(1, A, shadow=ModelSource(1, "other"))):
        assert "schemas differ in" in models.load(desired)
    assert models.model is MODELS["a"]
    models, _ = _host()
    assert not models.load(DesiredState(1, B))
    assert models.model is MODELS["a"]
    models.drop(DesiredState(1, B))
    assert models.status().model == A


def test_late_replica_checks_accepted_columns() -> None:
    models = ReplicaModels({"other": OTHER, "a": MODELS["a"]}.__getitem__, Counters())
    schema = MODELS["a"].preprocessor.schema
    assert "schemas differ in" in _switch(models, DesiredState(2, ModelSource(1, "other"), schema=schema))
    assert not models.ready
    assert "schemas differ in" in _switch(models, DesiredState(3, A, schema=schema, shadow=ModelSource(3, "other")))
    assert models.model is MODELS["a"]


def test_failed_accepted_model_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    result = dict(MODELS)
    models, _ = _host(load=lambda path: result[path])
    model = result.pop("b")
    assert _switch(models, DesiredState(1, B)) == "'b'"
    assert models.model is MODELS["a"]
    assert not models.incomplete  # for some seconds
    monkeypatch.setattr(replica_models, "RETRY_S", -1.0)
    assert models.incomplete
    result["b"] = model
    assert not models.switch()
    assert models.model is MODELS["b"]
    assert not models.incomplete
    assert models.status().failed is None


def test_older_change_is_ignored_and_rollback_needs_no_loading() -> None:
    models, _ = _host()
    assert not _switch(models, DesiredState(2, ModelSource(2, "c"), previous=B))
    assert not _switch(models, DesiredState(1, B, previous=A))
    assert models.model is MODELS["c"]
    opened: list[str] = []
    models, _ = _host(load=lambda path: opened.append(path) or load(path))
    for serial, (model, previous) in enumerate(((B, A), (A, B), (B, A)), start=1):
        _switch(models, DesiredState(serial, model, previous=previous))
    assert models.model is MODELS["b"]
    assert opened == ["a", "b"]
    _switch(models, DesiredState(4, ModelSource(4, "b")))  # wished for again: the folder may hold something else now
    assert opened == ["a", "b", "b"]


def test_shadow_counts_score_differences() -> None:
    models, counters = _host()
    app = ScoringApp(models, counters, config=ServeConfig())
    plain = post(app, TEXT).json()
    _switch(models, DesiredState(1, A, shadow=B))
    assert post(app, TEXT).json() == plain
    for _ in range(3):
        post(app, TEXT)
    version = MODELS["b"].version
    until(lambda: sample_values(counters.snapshot()).get(("rayrec_serve_shadow_rows_total", (("model", version),))) == 80.0)
    counted = sample_values(counters.snapshot())
    scores = [1 / (1 + np.exp(-logits_of(MODELS[name], TEXT).astype(np.float64))) for name in "ab"]
    differences = np.tile(np.abs(scores[0] - scores[1]), 4)
    name = "rayrec_serve_shadow_score_difference"
    assert counted[f"{name}_sum", ()] == pytest.approx(differences.sum(), rel=1e-3)
    assert counted[f"{name}_count", ()] == 80
    assert counted[f"{name}_bucket", (("le", "0.01"),)] == np.count_nonzero(differences <= 0.01)
    assert f'rayrec_serve_shadow_rows_total{{model="{version}"}} 80' in ask(app, "GET", "/metrics").body.decode()
    _switch(models, DesiredState(2, A))
    assert models.status().shadow is None
    app.close()


def test_slow_shadow_drops_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    models, counters = _host()
    go_on = threading.Event()
    monkeypatch.setattr("rayrec.serve.responses.BatchScorer.score", lambda *_: go_on.wait(30))
    _switch(models, DesiredState(1, A, shadow=B))
    app = ScoringApp(models, counters, config=ServeConfig())
    for _ in range(20):
        assert post(app, TEXT).status == 200
    dropped = sample_values(counters.snapshot())["rayrec_serve_shadow_dropped_rows_total", ()]
    assert dropped in (20 * 11, 20 * 12)  # 8 wait, and one may be at work
    go_on.set()
    app.close()
