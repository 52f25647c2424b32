"""A model is one file and a recipe: what knows no other file of rayrec's goes the whole road, from training to HTTP."""

from pathlib import Path

import numpy as np
import pytest
from builders import own_click_model
from builders.click_models import make_app
from builders.faults import rejects
from builders.logs import unlabelled
from builders.requests import score
from builders.runs import check_same_in_two_parts, evaluated_and_predicted, export, train

import rayrec
from rayrec import recipes
from rayrec.inference.model import open_served
from rayrec.metrics.binary import auroc, sigmoid
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.serve.config import ServeConfig
from rayrec.serve.deployment import custom_network_class

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

FILE, ROWS = own_click_model.__file__, 3000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("log")
    rayrec.generate(str(folder), rows=ROWS, seed=0)
    return str(folder / "train.txt")


def _finalnet(path: str) -> rayrec.TrainConfig:
    model = FinalNetConfig(embedding_dim=4, first_tower=(16, 8), second_tower=(12,), first_dropout=0.2)
    workload = {"model": model, "preset": {"num_embeddings": None}}
    return recipes.criteo_finalnet(path).replace(workload=workload, train_data={"files": ()}, batch_size=64)


@pytest.mark.parametrize("name", ["own_model", "criteo_finalnet"])
def test_custom_model_trains_exports_and_serves(name: str, log: str, tmp_path: Path) -> None:
    is_own = name == "own_model"
    recipe = own_click_model.own_model if is_own else None
    config = own_click_model.own_model(log) if is_own else _finalnet(log)
    config = config.replace(workload={"schedule": {"decay_fraction": 0.0}})  # one that does not look at the last step
    config = config.replace(storage_path=str(tmp_path), steps=20, evaluate_every=10, checkpoint={"every": 10})

    # Trained in one go, and in two: with the same weights, whatever chance and running statistics are in the network.
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=10)
    num_tables = len(config.workload.preset.inputs(config.workload.schema).sparse)  # type: ignore[attr-defined]
    assert "multiply-adds a row" in rayrec.plan(config, tables=[100] * num_tables)

    # Evaluated and predicted with: the same scores.
    metrics, predicted = evaluated_and_predicted(whole.checkpoint, log, tmp_path / "scores", recipe=recipe)
    assert metrics["rows"] == len(predicted) == ROWS
    assert auroc(predicted["logit"].to_numpy(), predicted["label"].to_numpy()) == pytest.approx(metrics["auroc"])

    # Exported as it is and with small tables, and opened again: by its own class alone where it is not rayrec's.
    own = own_click_model.OwnConfig if is_own else None
    served = {whole.checkpoint: 1e-5}
    for quantize, tolerance in ((None, 1e-5), ("int8", 0.05)):
        out, onnx = str(tmp_path / f"export_{quantize}"), quantize is None
        told = export(whole.checkpoint, out, recipe=recipe, quantize=quantize, parity_rows=500, triton=onnx)
        assert not onnx or told["triton"]
        if is_own:
            rejects(r"network must be rayrec's, got .*OwnConfig\. Pass its training recipe", open_served, out)
        served[out] = tolerance
    text = unlabelled(Path(log).read_bytes().splitlines(keepends=True)[:20])
    for place, tolerance in served.items():
        scores = score(make_app(open_served(place, own=own)), text)["scores"]
        np.testing.assert_allclose(scores, sigmoid(predicted["logit"].to_numpy()[:20]), atol=tolerance)


def test_server_accepts_recipe_of_custom_model() -> None:
    assert custom_network_class(None) is None
    own = custom_network_class(f"{FILE}:own_model")  # of the file, which is another module than the one imported here
    assert own is not None
    assert own.__qualname__ == own_click_model.OwnConfig.__qualname__
    message = r"does not train a click model\. Only click models can be served"
    rejects(message, custom_network_class, f"{FILE}:own_images")
    rejects(r"must be FILE\.py:FUNCTION, got 'criteo_demo'", ServeConfig, recipe="criteo_demo")
