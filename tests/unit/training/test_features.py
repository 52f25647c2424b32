"""Formulas and side tables of a schema, from training to scores and exports."""

import csv
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.click_models import hashed_preprocessor, make_app
from builders.faults import rejects
from builders.requests import score
from builders.runs import QUIET, check_same_in_two_parts, events_of
from builders.shop import SCHEMA, config_of, schema_of, write_rows, write_shop

import rayrec
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.features import lookups
from rayrec.data.log_source import LogSource
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.inference.export.side_tables import write_tables
from rayrec.inference.export.write import encoder_program
from rayrec.inference.model import open_served
from rayrec.models.boosted.lightgbm import LightGBMConfig
from rayrec.prepare.feature_table import compute_features
from rayrec.recipes import load_config
from rayrec.schema import Feature, NamedTable, Schema, Vector, load_schema
from rayrec.serve.requests import open_body
from rayrec.serve.row_readers import make_reader


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


def copied(shop: Path, folder: Path) -> Path:
    """Copy the log and its tables, to change them. Returns the folder."""
    return Path(shutil.copytree(shop, folder))


def change_items(folder: Path, name: str = "items.csv") -> None:
    """Write the items with another category, as table `name`."""
    text = (folder / "items.csv").read_text()
    assert "c3" in text
    (folder / name).write_text(text.replace("c3", "c5"))


def train(folder: Path, runs: Path, **changes: Any) -> Any:
    return rayrec.train(config_of(folder, runs, **changes), console=QUIET)


def test_computed_columns_have_values_of_their_rows(shop: Path) -> None:
    rows = compute_features(schema_of(shop), str(shop / "log.csv"), 40)
    with (shop / "log.csv").open() as file:
        log = list(csv.DictReader(file))[:40]
    assert {int(row["item"]) >= 30 for row in log} == {True, False}
    for row, source in zip(rows, log, strict=True):
        item = int(source["item"])
        is_known = item < 30
        assert row["category"] == (f"c{item % 4}" if is_known else None)
        assert row["hour"] == str(int(source["time"][11:13]))
        assert row["seen"] == source["history"].split("|").count(source["item"])
        price = item + (11 if source["time"] >= "2026-01-11" else 1)
        bucket = str((price >= 50) + (price >= 100)) if is_known else None
        assert row["bucket"] == bucket
        assert row["taste"] == (f"{source['user']}\x1fc{item % 4}" if is_known else None)
        assert (row["days"] is None) == (not source["registered"])


def test_rows_of_two_keys_are_newest_ones(shop: Path) -> None:
    rows = compute_features(schema_of(shop), str(shop / "log.csv"), 600)
    with (shop / "log.csv").open() as file:
        log = list(csv.DictReader(file))
    expected = []
    for source in log:
        user = int(source["user"])
        item = int(source["item"])
        days = [day for day in (5, 12) if source["time"] >= f"2026-01-{day:02d}"]
        has_offer = user % 2 == 0 and item % 2 == 0 and item < 30 and days
        expected.append(f"{user}-{item}-{days[-1]}" if has_offer else None)
    assert [row["offer"] for row in rows] == expected
    assert len({*expected}) > 50


def test_run_with_tables_is_scored_and_exported(shop: Path, tmp_path: Path) -> None:
    result = train(shop, tmp_path)
    metrics = rayrec.evaluate(result.summary["checkpoint"], console=QUIET)
    assert metrics["rows"] > 0
    report = rayrec.export(result.summary["checkpoint"], out=str(tmp_path / "out"))
    assert report["encoder_parity"] == {
        "rows": 600,
        "origin": f"rows of {shop / 'log.csv'}",
        "failure": None,
    }


def test_resumed_and_preprocessed_runs_have_equal_weights(shop: Path, tmp_path: Path) -> None:
    constant = {"schedule": {"decay_fraction": 0.0}}
    config = config_of(shop, tmp_path, workload=constant, evaluate_every=3)
    whole = rayrec.train(config, console=QUIET)
    check_same_in_two_parts(config, whole, steps=3)
    ready = str(tmp_path / "ready")
    rayrec.preprocess(
        str(shop / "log.csv"),
        out=ready,
        format="parquet",
        preprocessor=f"{whole.folder}/preprocessor",
        schema=schema_of(shop),
        console=QUIET,
    )
    config = config.replace(storage_path=str(tmp_path / "runs"), train_data={"path": ready})
    check_same_in_two_parts(config, whole, steps=3)


def test_joined_network_and_trees_of_formulas_score_and_serve(shop: Path, tmp_path: Path) -> None:
    log = str(shop / "log.csv")
    trees = {"model": LightGBMConfig(trees=6, leaves=4)}
    models = [
        train(shop, tmp_path, name=name, workload=workload).checkpoint
        for name, workload in (("network", {}), ("trees", trees))
    ]
    together = str(tmp_path / "together")
    rayrec.ensemble(models, out=together)
    options = {"importance": True, "importance_repeats": 1, "slice_by": ("category",)}
    metrics = rayrec.evaluate(together, log, console=QUIET, **options)
    rayrec.predict(together, log, out=str(tmp_path / "scores"), console=QUIET)
    predicted = pq.read_table(tmp_path / "scores").sort_by("row")["score"].to_numpy()
    schema = LogSource.at(log).schema(schema_of(shop))
    features = {each["feature"] for each in metrics["importance"]["features"]}
    assert features == {*schema.dense, *schema.sparse}
    values = [part["value"] for part in metrics["slices"]["category"]]
    assert sorted(values) == ["(missing)", "c0", "c1", "c2", "c3"]
    teacher = {"checkpoint": together, "weight": 0.5}
    student = train(shop, tmp_path, name="student", workload={"teacher": teacher}).checkpoint
    compared = rayrec.compare([together, student], log, resamples=10, console=QUIET)
    assert compared["models"][0]["auroc"] == metrics["auroc"]
    assert compared["differences"][0]["logloss"]["difference"] != 0

    with open(log) as file:
        rows = [request_of(row) for row in list(csv.DictReader(file))[:50]]
    answer = score(make_app(open_served(together)), {"rows": rows})
    np.testing.assert_allclose(answer["scores"], predicted[:50], atol=1e-6)


def request_of(row: dict[str, str]) -> dict[str, Any]:
    """Return a line of the log as a request, without what is missing."""
    values: dict[str, Any] = {name: text for name, text in row.items() if text and name != "click"}
    if "age" in values:
        values["age"] = float(values["age"])
    if "history" in values:
        values["history"] = values["history"].split("|")
    if "point" in values:
        values["point"] = [float(number) for number in values["point"].split("|")]
    return values


def test_constants_are_of_training_rows(shop: Path, tmp_path: Path) -> None:
    run = train(shop, tmp_path)
    preprocessor = Preprocessor.load(run.summary["checkpoint"])
    rows = preprocessor.constants["rows"]
    assert rows < 600
    with (shop / "log.csv").open() as file:
        log = list(csv.DictReader(file))[:rows]
    ages = np.array([float(row["age"]) for row in log if row["age"]])
    fitted = {each.feature: each.constants for each in preprocessor.schema.fitted}
    assert fitted["youth"] == (ages.mean(), ages.std())
    assert [len(fitted[name]) for name in ("level", "mixed")] == [3, 1]


def test_warm_start_keeps_constants(shop: Path, tmp_path: Path) -> None:
    first = train(shop, tmp_path).summary["checkpoint"]
    lines = (shop / "log.csv").read_text().replace(",33.5,", ",70,")
    (tmp_path / "newer.csv").write_text(lines)
    second = train(
        shop,
        tmp_path,
        name="newer",
        init_from=first,
        train_data={"path": str(tmp_path / "newer.csv")},
    ).summary["checkpoint"]
    schemas = [Preprocessor.load(path).schema for path in (first, second)]
    assert schemas[0].fitted == schemas[1].fitted


def test_vectors_of_other_lengths_are_faults(shop: Path, tmp_path: Path) -> None:
    rows = (shop / "log.csv").read_text().replace("1|2|3", "1|2", 1)
    (tmp_path / "log.csv").write_text(rows)
    rejects(
        "not as many numbers as its vector has in column point",
        train,
        shop,
        tmp_path,
        train_data={"path": str(tmp_path / "log.csv")},
        max_bad_fraction=0.0,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vectors": [{"name": "v", "length": 0}]}, "length of vector v must be 1 to 4096, got 0"),
        ({"vectors": ["v", "v"]}, "vectors must name each column once"),
        ({"vectors": ["user"]}, "vectors names user, which has another use too"),
        ({"vectors": [{"name": "v", "list_delimiter": "ab"}]}, "list_delimiter of vector v"),
        ({"vectors": ["v"], "tokens": "hexadecimal"}, "vectors needs tokens: any"),
    ],
)
def test_unusable_vectors_are_rejected(changes: dict[str, Any], message: str) -> None:
    rejects(message, Schema(sparse=("user",)).updated, changes)


def test_vectors_without_lists_are_rejected(tmp_path: Path) -> None:
    write_rows(tmp_path / "log.csv", [{"click": 0, "user": 1, "v": ""}])
    schema = Schema(label="click", sparse=("user",), delimiter=",", vectors=(Vector(name="v"),))
    rejects(
        "the first rows have no list in v", LogSource.at(str(tmp_path / "log.csv")).schema, schema
    )


def test_changed_table_is_rejected(shop: Path, tmp_path: Path) -> None:
    folder = copied(shop, tmp_path / "shop")
    checkpoint = train(folder, tmp_path).summary["checkpoint"]
    change_items(folder)
    rejects(
        "items.csv: changed since the model was trained",
        rayrec.evaluate,
        checkpoint,
        str(folder / "log.csv"),
        console=QUIET,
    )
    rejects("trained with other settings", train, folder, tmp_path, steps=8)
    config = load_config((tmp_path / "run" / "config.yaml").read_text())
    rejects(
        "items.csv: changed .* train with it, without `content` in the schema$",
        rayrec.train,
        config.replace(name="second"),
        console=QUIET,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hour(time)": "hour(user)"}, "feature hour: .*hour: argument 1 must be a time"),
        ({"hour(time)": "hours(time)"}, "function hours not found; did you mean 'hour'"),
        ({"hour(time)": "time"}, "feature hour: a time is no input of a model"),
        ({"hour(time)": "last(history, 2"}, "feature hour: formula .* expected"),
        ({"lookup(items, item, category)": "cross(taste, user)"}, "need each other"),
        ({"hour(time)": "log(click)"}, "formulas read click, which rows to score lack"),
        ({"timestamp: time\n": ""}, "table prices has a time, so that rows of the log need one"),
        ({"lookup(items,": "lookup(goods,"}, "look up goods, which must be in tables"),
        ({"name: hour,": "name: hour, weights: age,"}, "feature hour is computed"),
    ],
)
def test_invalid_formulas_are_rejected(shop: Path, changes: dict[str, str], message: str) -> None:
    text = SCHEMA
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    rejects(message, load_schema, text, "schema.yaml")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("label: x", "label"),
        ("label: {name: x, at_least: 1}", "label"),
        ("label: click\nlabels: [{name: x, kind: number}]", "labels"),
        ("weight: x", "weight"),
        ("timestamp: x", "timestamp"),
        ("weight: 'v[0]'", "weight"),
    ],
)
def test_computed_label_weight_and_time_are_rejected(field: str, name: str) -> None:
    text = f"sparse: [user]\n{field}\nvectors: [{{name: v, length: 2}}]\n"
    rejects(
        rf"schema.yaml: schema: {name} names (x|v\[0\]), which a formula computes as an input of "
        "the model; name a column of the log",
        load_schema,
        text + "features: [{name: x, from: log(price)}]",
        "schema.yaml",
    )


def test_computed_category_may_be_group(shop: Path, tmp_path: Path) -> None:
    """Its ranking metrics are those of a log with the same column."""
    grouped = SCHEMA.replace("delimiter:", "group: category\ndelimiter:")
    workload = {"schema": schema_of(shop, grouped)}
    run = train(shop, tmp_path, workload=workload, evaluate_every=3)
    log = str(shop / "log.csv")
    measured = rayrec.evaluate(run.folder, log, console=QUIET)
    rayrec.predict(run.folder, log, out=str(tmp_path / "scores"), console=QUIET)
    scores = pq.read_table(tmp_path / "scores").sort_by("row")["score"].to_numpy()
    rows = compute_features(schema_of(shop), log, 600)
    with (shop / "log.csv").open() as file:
        labels = np.array([int(row["click"]) for row in csv.DictReader(file)])
    groups = np.array([str(row["category"]) for row in rows])
    total = 0.0
    for group in sorted({*groups} - {"None"}):
        chosen = groups == group
        positive = scores[chosen & (labels == 1)]
        negative = scores[chosen & (labels == 0)]
        wins = positive[:, None] > negative
        ties = positive[:, None] == negative
        total += chosen.sum() * (wins.mean() + ties.mean() / 2)
    assert measured["gauc"] == pytest.approx(total / (groups != "None").sum(), abs=1e-3)


def test_unusable_value_of_table_is_rejected_before_training(shop: Path, tmp_path: Path) -> None:
    for name in ("items", "prices", "offers", "log"):
        (tmp_path / f"{name}.csv").write_bytes((shop / f"{name}.csv").read_bytes())
    text = (tmp_path / "prices.csv").read_text().replace("\n3,4,", "\n3,cheap,")
    (tmp_path / "prices.csv").write_text(text)
    rejects(
        "prices.csv: column price has 'cheap' in row 6, which is no number",
        train,
        tmp_path,
        tmp_path / "runs",
    )
    assert not (tmp_path / "runs").exists()


def test_faults_of_formula_inputs_are_counted(shop: Path, tmp_path: Path) -> None:
    lines = (shop / "log.csv").read_text().splitlines()
    lines[3] = lines[3].rsplit(",", 1)[0] + ",some day"
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    rejects(
        "not a time in column registered",
        train,
        shop,
        tmp_path,
        train_data={"path": str(tmp_path / "log.csv")},
        max_bad_fraction=0.0,
    )


def test_keys_of_integers_match_in_any_form(tmp_path: Path) -> None:
    keys = ["7", "08", "+9"]
    write_rows(tmp_path / "items.csv", [{"item": key, "genre": f"g{int(key)}"} for key in keys])
    forms = ["7", "07", "+7", "7.0", " 7", "8", "", "99"]
    write_rows(tmp_path / "log.csv", [{"click": 0, "item": form} for form in forms])
    schema = Schema(
        label="click",
        sparse=("item",),
        integers=("item",),
        delimiter=",",
        tables=(NamedTable(name="items", path=str(tmp_path / "items.csv"), key="item"),),
        features=(Feature(name="genre", formula="lookup(items, item, genre)"),),
    )
    rows = compute_features(schema, str(tmp_path / "log.csv"), 8)
    assert [row["genre"] for row in rows] == ["g7"] * 5 + ["g8", None, None]
    preprocessor = hashed_preprocessor([50, 50], schema)
    preprocessor.save(str(tmp_path / "preprocessor"))
    write_tables(str(tmp_path / "preprocessor"), schema)
    encoder = Encoder(str(tmp_path / "preprocessor"))
    _, (_, genres) = encoder.encode([{"item": form} for form in forms])
    assert len(set(genres[:5].tolist())) == 1
    assert genres[5] != genres[0]
    assert genres[6] == genres[7]


PAIRS = [("5", "7"), ("7", "5"), ("Ä", "true"), ("05", "5.0"), ("-1", "9" * 19), ("0", "0")]


def offers_schema(folder: Path, **changes: Any) -> Schema:
    """Write a table of PAIRS, and return a schema that looks it up by both columns."""
    rows = [{"shop": a, "item": b, "price": n} for n, (a, b) in enumerate(PAIRS)]
    write_rows(folder / "offers.csv", rows)
    table = NamedTable(name="offers", path=str(folder / "offers.csv"), key=("shop", "item"))
    formula = "number(lookup(offers, shop, item, price)) + 1"
    schema = Schema(
        label="click",
        sparse=("shop", "item"),
        delimiter=",",
        tables=(table,),
        features=(Feature(name="price", formula=formula),),
    )
    return schema.updated(changes)


def test_two_keys_find_rows_of_both(tmp_path: Path) -> None:
    schema = offers_schema(tmp_path)
    others = [("5", "5"), ("5", ""), ("", "7"), ("", ""), ("7", "Ä"), ("true", "Ä")]
    log = [{"click": 0, "shop": a, "item": b} for a, b in PAIRS + others]
    write_rows(tmp_path / "log.csv", log)
    rows = compute_features(schema, str(tmp_path / "log.csv"), 20)
    assert [row["price"] for row in rows] == [1, 2, 3, 4, 5, 6] + [None] * 6


def test_two_keys_are_encoded_alike_everywhere(tmp_path: Path) -> None:
    """In batches, in requests, and by encode.py: with no bit apart."""
    schema = offers_schema(tmp_path)
    columns = (DenseColumn("identity", indicator=True),)
    preprocessor = hashed_preprocessor([50, 50], schema, dense=columns)
    preprocessor.save(str(tmp_path / "preprocessor"))
    write_tables(str(tmp_path / "preprocessor"), schema)
    parts = [*{part for pair in PAIRS for part in pair}, None, "no"]
    rows = [{"shop": a, "item": b} for a in sorted(parts, key=str) for b in sorted(parts, key=str)]
    program = tmp_path / "encode.py"
    program.write_text(encoder_program())
    encoder = runpy.run_path(str(program))["Encoder"](str(tmp_path / "preprocessor"))
    numbers, _ = encoder.encode(rows)
    found = numbers[numbers[:, 1] == 0, 0]
    assert sorted(found.tolist()) == [1, 2, 3, 4, 5, 6]
    batch = rayrec.transform(str(tmp_path / "preprocessor"), pa.Table.from_pylist(rows))
    for index, name in enumerate(("price", "price is missing")):
        np.testing.assert_array_equal(batch[name].to_numpy(), numbers[:, index])
    reader = make_reader(preprocessor.schema.unlabelled())
    for row, expected in zip(rows, numbers, strict=True):
        body = json.dumps({"rows": [row]}).encode()
        request = open_body(body, "json", schema=preprocessor.schema, max_rows=1)
        raw, _ = reader.read([request])
        np.testing.assert_array_equal(preprocessor.encode(raw).dense[0], expected)


@pytest.mark.parametrize(("integers", "found"), [(["shop"], [1, None]), (["item"], [None, 1])])
def test_each_of_two_keys_may_be_integers(
    tmp_path: Path, integers: list[str], found: list[float | None]
) -> None:
    schema = offers_schema(tmp_path, integers=integers)
    write_rows(tmp_path / "offers.csv", [{"shop": "5", "item": "7", "price": 0}])
    log = [{"click": 0, "shop": "05", "item": "7"}, {"click": 0, "shop": "5", "item": "+7"}]
    write_rows(tmp_path / "log.csv", log)
    rows = compute_features(schema, str(tmp_path / "log.csv"), 2)
    assert [row["price"] for row in rows] == found


def test_yaml_declares_form_of_table(tmp_path: Path) -> None:
    path = tmp_path / "movies.dat"
    path.write_bytes("1::Amélie::no::2\n2::null::null::NA\n".encode("latin-1"))
    text = f"""
sparse: [movie]
delimiter: ","
tables:
  movies:
    path: {path}
    key: id
    header: [id, title, null, stars]
    delimiter: "::"
    encoding: latin-1
    missing: [NA, no]
features:
- {{name: title, from: "lookup(movies, movie, title)"}}
- {{name: genre, from: "lookup(movies, movie, null)"}}
- {{name: stars, from: "log(lookup(movies, movie, stars)) * 0 + 1"}}
"""
    schema = load_schema(text, "schema.yaml")
    write_rows(tmp_path / "log.csv", [{"label": 0, "movie": n} for n in (1, 2)])
    rows = compute_features(schema, str(tmp_path / "log.csv"), 2)
    values = [(row["title"], row["genre"], row["stars"]) for row in rows]
    assert values == [("Amélie", None, 1), ("null", "null", None)]
    assert Schema.described(schema.describe()).tables[0].to_dict() == schema.tables[0].to_dict()


def test_code_of_format_is_not_stored() -> None:
    table = NamedTable(name="items", path="i.x", key="item", format="own.py:Own", delimiter=";")
    schema = Schema(sparse=("item",), tables=(table,))
    (stored,) = Schema.described(schema.describe()).tables
    assert (stored.format, stored.delimiter) == (None, ";")


def test_plain_table_is_stored_without_form() -> None:
    table = NamedTable(name="items", path="items.csv", key="item")
    stored = {"path": "items.csv", "key": "item", "time": None, "name": "items", "content": None}
    assert list(table.to_dict().items()) == list(stored.items())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ('delimiter: ""', "tables: o.csv: delimiter must be 1 to 16 printable"),
        ("delimiter: '\"'", "tables: o.csv: delimiter must be 1 to 16 printable"),
        ("encoding: utf-9", "tables: o.csv: encoding must be one of Python's"),
        ("escape: ab", "tables: o.csv: escape must be one ASCII character"),
        ("missing: NA", "missing: has the wrong type"),
        ("encodings: latin-1", "has no such field; did you mean 'encoding'"),
    ],
)
def test_unusable_form_of_table_is_rejected(form: str, message: str) -> None:
    text = f"sparse: [item]\ntables: {{offers: {{path: o.csv, key: item, {form}}}}}"
    rejects(message, load_schema, text, "schema.yaml")


@pytest.mark.parametrize(
    ("key", "formula", "message"),
    [
        (
            "[shop, item]",
            "lookup(offers, item, price)",
            "lookup: table offers has two keys, shop and item, got one key; give a column of the "
            "log for each",
        ),
        (
            "item",
            "lookup(offers, shop, item, price)",
            "lookup: table offers has one key, item, got two keys",
        ),
        ("[a, b, c]", "lookup(offers, shop, price)", "key must be one column or two, got 3"),
        ("[a, a]", "lookup(offers, shop, item, price)", "the columns of key must differ, got a"),
        ("[a, '']", "lookup(offers, shop, item, price)", "path, key and time must not be empty"),
        ("[a, at]", "lookup(offers, shop, item, price)", "key and time must differ, got at"),
    ],
)
def test_unusable_keys_are_rejected(key: str, formula: str, message: str) -> None:
    rejects(
        message,
        load_schema,
        f"""
sparse: [shop, item]
timestamp: day
tables: {{offers: {{path: o.csv, key: {key}, time: at}}}}
features: [{{name: price, from: "{formula}"}}]
""",
        "schema.yaml",
    )


def test_served_export_has_tables(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shop"
    shutil.copytree(shop, folder)
    out = str(tmp_path / "out")
    rayrec.export(train(folder, tmp_path).summary["checkpoint"], out=out)
    rows = [{"item": n, "user": n, "time": f"2026-01-{n + 5:02d}"} for n in range(12)]

    def answer() -> Any:
        lookups._opened.cache_clear()  # As in another process
        return score(make_app(open_served(out)), {"rows": rows})

    expected = answer()
    # Another machine
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    (folder / "items.csv").unlink()
    (folder / "prices.csv").write_text("item,price,since\n1,2,2026-01-01\n")
    assert answer() == expected
    assert len(set(expected["logits"])) > 1
    kept = next(iter((tmp_path / "cache").glob("tables/*-*/rows.arrow"))).stat().st_ino
    assert answer() == expected
    assert next(iter((tmp_path / "cache").glob("tables/*-*/rows.arrow"))).stat().st_ino == kept


def test_preprocessor_of_other_formulas_or_tables_is_rejected(shop: Path, tmp_path: Path) -> None:
    log = str(copied(shop, tmp_path / "shop") / "log.csv")
    shop = tmp_path / "shop"
    schema = schema_of(shop)
    out = str(tmp_path / "vocabulary")
    rayrec.vocabulary(log, out=out, schema=schema, console=QUIET)
    other = schema_of(shop, SCHEMA.replace("[50, 100]", "[60]"))
    rejects(
        r"Preprocessor's features.bucket.formula must match .*\[60\].*, got .*\[50, 100\]",
        train,
        shop,
        tmp_path,
        workload={"preprocessor": out, "schema": other},
    )
    change_items(shop)
    rejects(
        r"Preprocessor's tables.items.content must match \w+, got \w+\. Use",
        train,
        shop,
        tmp_path,
        workload={"preprocessor": out},
    )
    rejects(
        r"vocabulary: tables.items.content must match \w+, got \w+$",
        rayrec.preprocess,
        log,
        out=str(tmp_path / "ready"),
        format="parquet",
        preprocessor=out,
        schema=schema,
        console=QUIET,
    )


@pytest.mark.parametrize("name", ["items.csv", "items-2.csv"])
def test_warm_start_takes_tables_of_today(name: str, shop: Path, tmp_path: Path) -> None:
    folder = copied(shop, tmp_path / "shop")
    first = train(folder, tmp_path, name="first")
    change_items(folder, name)
    schema = schema_of(folder, SCHEMA.replace("ITEMS", str(folder / name)))
    out = str(tmp_path / "extended")
    moved = {} if name == "items.csv" else {"schema": schema}
    made = rayrec.vocabulary(
        str(folder / "log.csv"), out=out, extend=first.folder, console=QUIET, **moved
    )
    assert made["appended"]["category"] == 1
    kept = {"kept": 4, "fresh": 1, "dropped": 0}
    counted = {"kept": 3, "fresh": 1, "dropped": 1}
    for rule, preprocessor, expected in (("extending", out, kept), ("counting", None, counted)):
        run = train(
            folder,
            tmp_path,
            name=rule,
            init_from=first.folder,
            workload={"schema": schema, "preprocessor": preprocessor},
        )
        (event,) = events_of(run.folder, "warm_start")
        assert event["tables"]["category"] == expected


def test_missing_list_is_empty(tmp_path: Path) -> None:
    schema = Schema(
        label="click",
        sparse=("item", "history"),
        lists=("history",),
        delimiter=",",
        features=(
            Feature(name="seen", formula="count_in(history, item)"),
            Feature(name="both", formula="overlap(history, concat(history, saved))"),
        ),
    )
    write_rows(tmp_path / "log.csv", [{"click": 0, "item": 1, "history": "", "saved": "2"}])
    lists = {"history": [None, []], "saved": [["2"], ["2"]]}
    table = pa.table({"click": [0, 0], "item": ["1", "1"], **lists})
    pq.write_table(table, tmp_path / "log.parquet")
    rows = compute_features(schema, str(tmp_path / "log.csv"), 1)
    rows += compute_features(schema, str(tmp_path / "log.parquet"), 2)
    assert [(row["seen"], row["both"]) for row in rows] == [(0.0, 0.0)] * 3
    preprocessor = hashed_preprocessor([50, 50], schema, dense=(DenseColumn(indicator=True),) * 2)
    preprocessor.save(str(tmp_path / "preprocessor"))
    encoder = Encoder(str(tmp_path / "preprocessor"))
    requests = [{"item": 1, "saved": [2]}, {"item": 1, "saved": [2], "history": []}]
    numbers, _ = encoder.encode(requests)
    assert numbers.tolist() == [[0.0] * 4] * 2
    no_type = table.set_column(2, "history", pa.nulls(2))
    encoded = rayrec.transform(str(tmp_path / "preprocessor"), no_type)
    assert encoded["seen is missing"].to_pylist() == [0.0, 0.0]
