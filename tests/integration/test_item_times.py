"""Times of items from events to training, evaluations, predictions, exports and answers."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.faults import rejects
from builders.interactions import interactions
from builders.recommendations import post_recommend, recommend
from builders.requests import ask
from builders.runs import LEAN, QUIET, export, short_run, train

import rayrec
from rayrec import recipes
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.inference.evaluation_report import render
from rayrec.inference.model import open_served
from rayrec.inference.result_tables import evaluation_text
from rayrec.schema import Schema, SequenceColumns
from rayrec.serve.app import ScoringApp
from rayrec.serve.histories import open_histories
from rayrec.training.result import Result

pytestmark = pytest.mark.usefixtures("own_cache")

USERS = 60
START = 1_700_000_000
SCHEMA = Schema(
    label=None,
    sequence=SequenceColumns(
        user="user",
        item="item",
        time="time",
        max_length=5,
    ),
)


def events() -> pd.DataFrame:
    """Return events with seconds to weeks between them, in no order."""
    user, item = interactions(USERS)
    chance = np.random.default_rng(2)
    gaps = (10 ** chance.uniform(0, 6, len(user))).astype(int)
    names = [f"u{number:02}" for number in user]
    frame = pd.DataFrame({"user": names, "item": item, "time": START + gaps.cumsum()})
    return frame.sample(frac=1, random_state=1)


def run_of(
    folder: Path,
    model: str,
    *,
    name: str,
    schema: Schema = SCHEMA,
    **settings: Any,
) -> Result:
    """Train a model with larger embeddings than at the start, so that times matter."""
    settings = {"class": model, "embedding_dim": 16, "k": 5, "dropout": 0.1, **settings}
    config = short_run(
        recipes.next_item(str(folder / "events.csv"), schema),
        folder / "runs",
        4,
        batch_size=32,
        workload={"model": settings, "table_start": {"kind": "normal", "std": 0.3}},
        **LEAN,
    )
    return train(config, name=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("times")
    events().to_csv(folder / "events.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Result:
    """Run of a model with times of items."""
    return run_of(folder, "hstu", name="plain")


@pytest.fixture(scope="module")
def asking(folder: Path) -> Result:
    """Run of a model that knows when it is asked."""
    return run_of(folder, "fuxi", name="asking", request_time=True)


@pytest.fixture(scope="module")
def ignoring(folder: Path) -> Result:
    """Run of a model without times."""
    return run_of(folder, "sasrec", name="ignoring")


def rows_of(frame: pd.DataFrame, left_out: int = 0) -> list[dict[str, Any]]:
    """Return a request's row for each user without her last items, asked when the first of them
    follows, or else after all events.
    """
    latest = int(frame["time"].max())
    rows = []
    for _, own in frame.sort_values("time").groupby("user"):
        items = own["item"].tolist()
        times = own["time"].tolist()
        stop = len(items) - left_out
        asked = times[stop] if left_out else latest
        rows.append({"history": items[:stop], "times": times[:stop], "time": asked})
    return rows


@pytest.mark.parametrize("name", ["plain", "asking"])
def test_answers_equal_predictions(
    name: str,
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    run = request.getfixturevalue(name)
    out = tmp_path / "scores"
    rayrec.predict(
        run.folder,
        str(folder / "events.csv"),
        out=str(out),
        console=QUIET,
        k=5,
    )
    predicted = pq.read_table(out).sort_by("user")
    rows = rows_of(events())
    app = make_app(open_served(run.checkpoint))
    answer = recommend(app, rows, k=5)
    assert answer["items"] == predicted["items"].to_pylist()
    np.testing.assert_allclose(
        answer["scores"],
        predicted["scores"].to_pylist(),
        atol=1e-5,
    )
    without = recommend(app, [{"history": row["history"]} for row in rows], k=5)
    assert np.abs(np.subtract(without["scores"], answer["scores"])).max() > 0.01


def test_export_answers_alike(asking: Result, tmp_path: Path) -> None:
    report = export(asking.checkpoint, tmp_path / "export")
    assert report["program_parity"]["max_logit_difference"] < 1e-4
    assert report["encoder_parity"]["failure"] is None
    rows = rows_of(events())
    paths = (asking.checkpoint, str(tmp_path / "export"))
    answers = [recommend(make_app(open_served(path)), rows) for path in paths]
    assert answers[0]["items"] == answers[1]["items"]
    assert "the seconds from each item" in (tmp_path / "export" / "README.md").read_text()


@pytest.mark.parametrize("name", ["plain", "asking"])
def test_answers_equal_evaluation(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    metrics = rayrec.evaluate(run.folder, console=QUIET)
    frame = events()
    app = make_app(open_served(run.checkpoint))
    answer = recommend(app, rows_of(frame, left_out=1), k=5)
    last = frame.sort_values("time").groupby("user")["item"].last()
    hits = [item in items for item, items in zip(last, answer["items"], strict=True)]
    assert metrics["recall_at_5"] == pytest.approx(np.mean(hits), abs=1e-9)
    assert 0 < np.mean(hits) < 1


def test_request_time_is_in_report(plain: Result, asking: Result) -> None:
    result = rayrec.evaluate(asking.folder, compare=plain.folder, console=QUIET)
    assert result["request_time"] == "the network reads the time of each row's first target"
    assert "request_time" not in result["compared"]
    for text in (evaluation_text(result), render(result)):
        assert result["request_time"].replace("'", "") in text.replace("'", "").replace("&#39;", "")
    other = rayrec.evaluate(plain.folder, compare=asking.folder, console=QUIET)
    assert "request_time" not in other
    assert "request_time of the other: the network reads" in evaluation_text(other)


def test_request_time_defaults_to_clock(asking: Result) -> None:
    app = make_app(open_served(asking.checkpoint))
    row = rows_of(events())[0]
    row.pop("time")
    before = recommend(app, [row, {**row, "time": f"{time.time()}"}])["scores"]
    assert before[0] == before[1]
    iso = pd.to_datetime(row["times"], unit="s").strftime("%Y-%m-%dT%H:%M:%SZ").tolist()
    soon = row["times"][-1] + 1
    asked = recommend(app, [{**row, "time": soon}, {**row, "times": iso, "time": soon * 1000}])
    assert asked["scores"][0] == asked["scores"][1] != before[0]


def test_stored_histories_have_times(plain: Result, asking: Result, folder: Path) -> None:
    lists = str(next((folder / "runs" / ".cache" / "sequences").glob("*/histories")))
    rows = rows_of(events())
    for run in (plain, asking):
        app = make_app(open_served(run.checkpoint), histories=lists)
        named = [{"user": f"u{user:02}", "time": row["time"]} for user, row in enumerate(rows)]
        assert recommend(app, named) == recommend(app, rows)
        mixed = recommend(app, [named[1], rows[0], {"user": "nobody"}, named[2]])
        given = recommend(app, [rows[1], rows[0], {}, rows[2]])
        assert mixed == given


def test_histories_need_time_of_ages_for_requests(
    plain: Result,
    asking: Result,
    tmp_path: Path,
) -> None:
    columns = {"user": ["a", "b"], "item": [[100, 101], [102]]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    pq.write_table(pa.table({**columns, "age": [[9.0, 3.0], None]}), tmp_path / "ages.parquet")
    rows = [{"history": [100, 101], "times": [1, 7]}, {"history": [102]}]
    named = [{"user": "a"}, {"user": "b"}]
    model = open_served(plain.checkpoint)
    app = make_app(model, histories=str(tmp_path / "ages.parquet"))
    assert recommend(app, named) == recommend(app, rows)
    without = [{"history": row["history"]} for row in rows]
    for run in (plain, asking):
        app = make_app(open_served(run.checkpoint), histories=str(tmp_path / "items.parquet"))
        assert recommend(app, named) == recommend(app, without)
    message = "histories must have the time of age 0 in a column time, because the model has"
    ages = str(tmp_path / "ages.parquet")
    rejects(
        message,
        open_histories,
        ages,
        model.preprocessor.schema,
        "item",
        needs_time=True,
    )


def test_other_number_of_ages_is_rejected(plain: Result, tmp_path: Path) -> None:
    columns = {"user": [1, 2], "item": [[100, 101], [102]], "age": [[9.0], [1.0]]}
    pq.write_table(pa.table(columns), tmp_path / "other.parquet")
    schema = Preprocessor.load(plain.checkpoint).schema
    path = str(tmp_path / "other.parquet")
    rejects(
        "age must have as many numbers as items",
        open_histories,
        path,
        schema,
        "item",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"times": [1]}, "the time of each of 2 items, got 1 times", id="count"),
        pytest.param({"times": 5}, "got a number", id="number"),
        pytest.param({"times": [1, "soon"]}, "must be times as in the log, got 'soon'", id="text"),
        pytest.param({"times": [1, None]}, "must be times as in the log, got None", id="null"),
        pytest.param({"times": [1, [2]]}, "times is a list, not a time", id="list"),
        pytest.param(
            {"times": [1, 2], "time": "soon"},
            "time must be times as in the log, got 'soon'",
            id="time",
        ),
        pytest.param({"age": [1, 2]}, "has a column age; send its items as times", id="column"),
    ],
)
def test_invalid_times_are_rejected(asking: Result, row: dict[str, Any], message: str) -> None:
    app = make_app(open_served(asking.checkpoint))
    rows = [{"history": [101], "times": [3]}, {"history": [100, 101], **row}]
    reply = post_recommend(app, {"rows": rows})
    assert reply.status == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["row"] == 1


def test_invalid_time_of_stored_history_is_rejected(asking: Result, tmp_path: Path) -> None:
    columns = {"user": ["a"], "item": [[100]], "age": [[5.0]], "time": [START]}
    pq.write_table(pa.table(columns), tmp_path / "ages.parquet")
    app = make_app(open_served(asking.checkpoint), histories=str(tmp_path / "ages.parquet"))
    rows = [{"history": [101]}, {"user": "a", "time": "soon"}]
    assert post_recommend(app, {"rows": rows}).json()["error"]["row"] == 1


def test_openapi_describes_times(plain: Result, asking: Result) -> None:
    def fields(run: Result) -> dict[str, Any]:
        app: ScoringApp = make_app(open_served(run.checkpoint))
        described = ask(app, "GET", "/openapi.json").json()
        body = described["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]
        properties = body["application/json"]["schema"]["properties"]
        return properties["rows"]["items"]["properties"]

    assert fields(plain)["time"]["description"] == "Ignored."
    assert fields(asking)["time"]["description"] == "The time for which the row asks. Null: now."
    assert "age" not in fields(plain)


# -- Models and logs without times
def test_models_with_and_without_times_are_compared(plain: Result, ignoring: Result) -> None:
    result = rayrec.compare([plain.folder, ignoring.folder], console=QUIET)
    assert result["rows"] == USERS
    assert len(result["models"]) == 2


def test_models_without_times_read_no_ages(plain: Result, ignoring: Result) -> None:
    ages = [Preprocessor.load(run.checkpoint).schema.aged for run in (plain, ignoring)]
    assert ages == [("item",), ()]
    app = make_app(open_served(ignoring.checkpoint))
    rows = rows_of(events())
    histories = [{"history": row["history"]} for row in rows]
    assert recommend(app, rows) == recommend(app, histories)


def test_logs_without_time_train_without_times(folder: Path) -> None:
    schema = Schema(label=None, sequence=SequenceColumns(user="user", item="item", max_length=5))
    run = run_of(folder, "hstu", name="no-time", schema=schema)
    assert Preprocessor.load(run.checkpoint).schema.aged == ()
    settings = {"name": "no-time-2", "schema": schema, "request_time": True}
    rejects(
        "request_time: the log has no times",
        run_of,
        folder,
        "fuxi",
        **settings,
    )


@pytest.mark.parametrize(
    ("model", "other", "aged"),
    [
        pytest.param("hstu", "ignoring", ("item",), id="added"),
        pytest.param("sasrec", "plain", (), id="removed"),
    ],
)
def test_preprocessor_of_other_model_gets_ages(
    model: str,
    other: str,
    aged: tuple[str, ...],
    folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    config = short_run(
        recipes.next_item(str(folder / "events.csv"), SCHEMA),
        folder / "runs",
        1,
        workload={
            "model": {"class": model},
            "preprocessor": request.getfixturevalue(other).checkpoint,
        },
        **LEAN,
    )
    run = train(config, name=f"{model}-of-{other}")
    assert Preprocessor.load(run.checkpoint).schema.aged == aged


def test_ages_of_earlier_lists_are_rejected(folder: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    rayrec.sequences(
        str(folder / "events.csv"),
        out=str(lists),
        schema=SCHEMA,
        console=QUIET,
    )
    manifest = lists / "sequences.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    config = short_run(
        recipes.next_item(str(lists), SCHEMA),
        tmp_path / "runs",
        1,
        **LEAN,
    )
    train(config)
    timed = config.replace(workload={"model": {"class": "hstu"}})
    rejects(
        "the lists have ages of an earlier version. Build them again",
        train,
        timed,
        name="x",
    )
