"""Logs in the shapes that people have, from the file to a server, without an edit."""

import random
from pathlib import Path

import numpy as np
import pytest
from builders.click_models import make_app
from builders.file_shapes import SHAPES, Shape
from builders.requests import post
from builders.runs import LEAN, evaluated_and_predicted, export, short_run, train

from rayrec import recipes
from rayrec.inference.model import open_served
from rayrec.prepare.schema_draft import draft, recipe_of
from rayrec.schema import load_schema

pytestmark = pytest.mark.extended

_SERVED_ROWS = 9
"""Lines at the end of a log that are sent to a server."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_log_is_drafted_trained_scored_and_served(shape: Shape, tmp_path: Path) -> None:
    log = shape.write(tmp_path, random.Random(7))
    text = draft(str(log))
    schema = load_schema(text, "draft")
    assert schema.label == shape.label
    assert {*schema.dense} == {*shape.dense}
    assert {*schema.sparse} == {*shape.sparse}
    assert schema.lists == tuple(shape.lists)
    recipe, *flags = recipe_of(text).split()
    assert recipe == shape.recipe
    config = getattr(recipes, recipe)(str(log), schema)
    model = {"item_features": (flags[-1],)} if flags else {}
    run = train(
        short_run(config, tmp_path / "runs", 4, batch_size=64, workload={"model": model}, **LEAN)
    ).folder
    metrics, predicted = evaluated_and_predicted(run, str(log), tmp_path / "scores")
    assert metrics["rows"] == predicted.num_rows == shape.num_rows
    export(run, tmp_path / "exported")
    if not shape.has_lines:
        return
    lines = log.read_bytes().decode(schema.encoding or "utf-8").splitlines()[-_SERVED_ROWS:]
    app = make_app(open_served(run))
    reply = post(app, "\n".join(lines).encode(), media_type="text/plain")
    assert reply.status == 200, reply.body
    served, name = ("scores", "score") if recipe == "clicks" else ("user", "user")
    values = reply.json()[served]
    logged = np.array(predicted.column(name).to_pylist())[-len(values) :]
    np.testing.assert_allclose(values, logged, rtol=1e-5, atol=1e-6)
