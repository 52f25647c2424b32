"""Drafts of schemas for the shapes of public logs, and training with them unchanged."""

import json
import random
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from builders.faults import rejects

from rayrec import cli, recipes
from rayrec.config import InputError
from rayrec.data.encoding.rules import seconds_of
from rayrec.data.logs.column_values import REJECTED, parse_numbers
from rayrec.prepare import schema_draft
from rayrec.prepare.schema_draft import draft, recipe_of
from rayrec.schema import Schema, SequenceColumns, SequenceSplit, load_schema

ROWS = range(400)
RANDOM = random.Random(0)


def pick(*values: Any) -> list[Any]:
    return [RANDOM.choice(values) for _ in ROWS]


CLICKS = pick(0, 1)
IDS = [f"{n:016x}" for n in ROWS]
PRICES = [RANDOM.random() * 9 for _ in ROWS]
ITEMS = pick(*range(9))
TIMES = [datetime(2026, 1, 1) + timedelta(minutes=n) for n in ROWS]
GENRES = [
    RANDOM.sample(
        (
            "action",
            "comedy",
            "drama",
            "horror",
            "war",
        ),
        RANDOM.randrange(1, 4),
    )
    for _ in ROWS
]
AMOUNTS = [int(RANDOM.expovariate(0.01)) for _ in ROWS]
CODES = [RANDOM.randrange(10_000_000, 99_999_999) for _ in ROWS]
EPOCHS = [1_574_000_000 + 61 * n for n in ROWS]


def joined(mark: str) -> list[str]:
    return [mark.join(row_values) for row_values in GENRES]


def with_gaps(values: list[Any], marker: Any) -> list[Any]:
    values = list(map(str, values)) if isinstance(marker, str) else values
    return [marker if n % 20 == 3 else value for n, value in enumerate(values)]


SHAPES: dict[str, tuple[dict[str, list[Any]], str]] = {
    "e-commerce.csv": (
        {
            "event_time": TIMES,
            "product_id": ITEMS,
            "category": pick("tv", "sofa", None),
            "price": PRICES,
            "session": IDS,
            "is_weekend": pick(0, 1),
            "country": pick("de"),
            "purchased": CLICKS,
        },
        "{label: purchased, dense: [price], sparse: [product_id, category, session, is_weekend], "
        "timestamp: event_time}",
    ),
    "ads.csv": (
        {
            "id": list(ROWS),
            "click": CLICKS,
            "hour": pick(*range(14102100, 14102124)),
            "C1": ITEMS,
            "app": pick("a", "b"),
        },
        "{label: click, dense: [], sparse: [hour, C1, app]}",
    ),
    "ratings.csv": (
        {
            "user": pick(*range(50)),
            "movie": CODES,
            "rating": pick(1, 2, 3, 4, 5),
            "timestamp": EPOCHS,
            "genres": joined("|"),
        },
        "{label: {name: rating, at_least: 3}, dense: [], sparse: [user, movie, genres], lists: "
        "[genres], timestamp: timestamp}",
    ),
    "news.tsv": (
        {
            "clicked": CLICKS,
            "user": pick("u1", "ü2"),
            "topics": joined(","),
            "dwell": PRICES,
        },
        "{label: clicked, dense: [dwell], sparse: [user, topics], lists: [topics], "
        "features: [{name: topics, list_delimiter: ','}]}",
    ),
    "log.parquet": (
        {
            "user": pick("u1", "u2"),
            "history": [[len(row_values), 7] for row_values in GENRES],
            "tags": GENRES,
            "at": TIMES,
            "price": [float("nan"), *PRICES[1:]],
            "vector": [[0.5, 0.1]] * len(ROWS),
            "label": CLICKS,
        },
        "{label: label, dense: [price], sparse: [user, history, tags], lists: [history, tags], "
        "vectors: [{name: vector, length: 2}], nan: missing, timestamp: at}",
    ),
    "bank.csv": (
        {
            "age": AMOUNTS,
            "job": pick("cook", "unknown"),
            "balance": with_gaps(AMOUNTS, "unknown"),
            "pdays": with_gaps(AMOUNTS, -1),
            "housing": pick("yes", "no"),
            "campaign": pick(*range(9)),
            "duration": AMOUNTS,
            "y": pick("yes", "no"),
        },
        "{label: {name: y, positive: ['yes']}, dense: [age, balance, pdays, duration], sparse: "
        "[job, housing, campaign], missing: [unknown, '-1']}",
    ),
    "census.csv": (
        {
            "age": AMOUNTS,
            "workclass": pick("Private", "?"),
            "fnlwgt": AMOUNTS,
            "zip": [f"{n * n:05d}" for n in ROWS],
            "hours": with_gaps(AMOUNTS, "?"),
            "income": pick("<=50K", ">50K"),
        },
        "{label: {name: income, positive: ['>50K']}, dense: [age, fnlwgt, hours], sparse: "
        "[workclass, zip], missing: ['?']}",
    ),
    "physics.csv": (
        {"label": CLICKS, "mass": with_gaps(PRICES, "NA"), "energy": with_gaps(PRICES, "null")},
        "{label: label, dense: [mass, energy], sparse: [], missing: [NA, 'null']}",
    ),
    "signs.tsv": (
        {"target": pick(-1, 1), "i1": AMOUNTS, "c1": CODES},
        "{label: {name: target, positive: ['1']}, dense: [i1], sparse: [c1]}",
    ),
    "decimals.parquet": (
        {
            "y": CLICKS,
            "user_id": [Decimal(code) for code in CODES],
            "item": [float(code) for code in with_gaps(CODES, "nan")],
            "cost": [Decimal(amount) for amount in AMOUNTS],
        },
        "{label: y, dense: [cost], sparse: [user_id, item]}",
    ),
    "unique.csv": (
        {"like": CLICKS, "visitor": [f"v{n}" for n in ROWS], "item_id": CODES},
        "{label: like, dense: [], sparse: [visitor, item_id]}",
    ),
    "clicks.csv": (
        {
            "user": pick("a", "b"),
            "seen_ms": [at * 1000 for at in EPOCHS],
            "signup": with_gaps(TIMES, None),
            "click": CLICKS,
        },
        "{label: click, dense: [signup], sparse: [user], timestamp: seen_ms}",
    ),
    "american.csv": (
        {
            "user": pick("a", "b"),
            "click": CLICKS,
            "date": [f"{1 + n % 12}/{1 + n % 28}/2019 {1 + n % 11}:05:00 PM" for n in ROWS],
        },
        "{label: click, dense: [], sparse: [user], timestamp: date}",
    ),
    "grades.csv": (
        {"query": pick(*range(60)), "bm25": PRICES, "grade": pick(0, 1, 2, 3, 4)},
        "{label: {name: grade, at_least: 2}, dense: [bm25], sparse: [query]}",
    ),
    "only-times.csv": (
        {"click": CLICKS, "time": TIMES},
        "{label: click, dense: [time], sparse: [], timestamp: time}",
    ),
}


def write(path: Path, columns: dict[str, list[Any]], delimiter: str = ",") -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        # Arrow's writer has delimiters of one character
        mark = delimiter if len(delimiter) == 1 else "\x1f"
        options = pa_csv.WriteOptions(delimiter=mark, quoting_style="needed")
        pa_csv.write_csv(pa.table(columns), path, options)
        path.write_text(path.read_text().replace(mark, delimiter))
    return str(path)


@pytest.mark.parametrize("name", SHAPES)
def test_draft_trains_unchanged(name: str, tmp_path: Path) -> None:
    log = write(tmp_path / name, SHAPES[name][0], "\t" if name.endswith(".tsv") else ",")
    out = str(tmp_path / "schema.yaml")
    assert cli.run(["schema", log, "--out", out, "-q"]) == 0
    assert yaml.safe_load(Path(out).read_text()) == yaml.safe_load(SHAPES[name][1])
    settings = f"--steps 2 --batch-size 64 --workers 1 --storage-path {tmp_path} --name run -q"
    assert cli.run(["train", "clicks", "--schema", out, "--data", log, *settings.split()]) == 0
    assert recipes.clicks(log, schema=out) == recipes.clicks(
        log,
        schema=load_schema(Path(out).read_text(), out),
    )


@pytest.mark.parametrize(
    ("delimiter", "list_values"),
    [
        (";", "|"),
        ("|", ";"),
        ("\x01", "|"),
        ("^", "|"),
        ("::", "|"),
    ],
)
def test_draft_finds_delimiters(delimiter: str, list_values: str, tmp_path: Path) -> None:
    log = {
        "is_new": CLICKS,
        "user": pick("a", "b"),
        "id": IDS,
        "click": CLICKS,
        "bought": CLICKS,
        "answer": pick("yes", "no"),
    }
    text = draft(write(tmp_path / "log.csv", log, delimiter))
    assert "Left out: bought (may be another label)." in text
    expected = Schema(
        label="click",
        sparse=("is_new", "user", "id", "answer"),
        delimiter=delimiter,
        list_delimiter=list_values,
    )
    assert load_schema(text, "draft") == expected


@pytest.mark.parametrize(
    "mark",
    [
        "|",
        ";",
        ",",
        "^",
        " ",
        "\x01",
        "\x02",
        "\x03",
        "\x1d",
    ],
)
def test_draft_finds_lists_by_mark(mark: str, tmp_path: Path) -> None:
    columns = {
        "click": CLICKS,
        "genres": joined(mark),
        "title": [f"The story, part {n}" for n in ROWS],
    }
    schema = load_schema(draft(write(tmp_path / "log.parquet", columns)), "draft")
    assert schema.lists == ("genres",)
    assert schema.list_mark("genres") == mark
    assert schema.sparse == ("genres", "title")


@pytest.mark.parametrize("write_list", [str, json.dumps], ids=["Python", "JSON"])
def test_draft_finds_lists_in_brackets(write_list: Any, tmp_path: Path) -> None:
    columns = {
        "click": CLICKS,
        "genres": [write_list(row_values) for row_values in GENRES],
        "user": pick("[a]", "b"),
    }
    schema = load_schema(draft(write(tmp_path / "log.csv", columns)), "draft")
    assert (schema.lists, schema.list_mark("genres")) == (("genres",), "brackets")


def test_draft_keeps_lists_of_distinct_rows(tmp_path: Path) -> None:
    histories = ["^".join(f"i{RANDOM.randrange(500)}" for _ in range(20)) for _ in ROWS]
    schema = load_schema(
        draft(write(tmp_path / "log.csv", {"click": CLICKS, "history": histories})),
        "draft",
    )
    assert (len(set(histories)), schema.lists) == (len(ROWS), ("history",))


@pytest.mark.parametrize(
    ("texts", "sparse"),
    [
        pytest.param([f"{n},{n % 10}" for n in ROWS], True, id="decimal commas"),
        pytest.param([f"1,{n:03d}" for n in ROWS], True, id="thousands"),
        pytest.param(pick("New York", "Los Angeles", "San Jose"), True, id="cities"),
        pytest.param([f"0.{n} 0.5 0.25" for n in ROWS], False, id="vectors"),
    ],
)
def test_text_with_marks_is_no_list(texts: list[str], sparse: bool, tmp_path: Path) -> None:
    text = draft(
        write(tmp_path / "log.parquet", {"click": CLICKS, "text": texts, "user": pick("a", "b")})
    )
    schema = load_schema(text, "draft")
    assert schema.lists == ()
    assert ("text" in schema.sparse) == sparse


@pytest.mark.parametrize(
    ("name", "numbers", "is_dense"),
    [
        pytest.param("age", AMOUNTS, True, id="amount by name"),
        pytest.param("v", AMOUNTS, True, id="amount by shape"),
        pytest.param("v", CODES, False, id="code by shape"),
        pytest.param("user_id", AMOUNTS, False, id="code by name"),
        pytest.param("itemId", AMOUNTS, False, id="code by camel case"),
        pytest.param("movieid", AMOUNTS, False, id="code in one word"),
        pytest.param("zip", AMOUNTS, False, id="zip"),
        pytest.param("v", pick(*range(50)), False, id="few values"),
        pytest.param("age", pick(*range(18, 80)), True, id="few amounts"),
        pytest.param("count", pick(*range(9)), False, id="few small amounts"),
        pytest.param("balance", [amount - 99 for amount in AMOUNTS], True, id="negative"),
        pytest.param("price", [10**18 + code for code in CODES], False, id="beyond exact numbers"),
        pytest.param("date", [10**18 + code for code in CODES], False, id="nanoseconds"),
    ],
)
def test_integers_are_amounts_or_codes(
    name: str,
    numbers: list[int],
    is_dense: bool,
    tmp_path: Path,
) -> None:
    text = draft(write(tmp_path / "log.csv", {"click": CLICKS, name: numbers}))
    schema = load_schema(text, "draft")
    assert (name in schema.dense, name in schema.sparse) == (is_dense, not is_dense)
    assert f"as {'numbers' if is_dense else 'categories'} {name}" in text


@pytest.mark.parametrize(
    "marker",
    [
        "NA",
        "N/A",
        "#N/A",
        "NaN",
        "null",
        "NULL",
        "None",
        "\\N",
        "?",
        "-",
        "unknown",
    ],
)
def test_marker_among_numbers_is_missing(marker: str, tmp_path: Path) -> None:
    text = draft(write(tmp_path / "log.csv", {"click": CLICKS, "price": with_gaps(PRICES, marker)}))
    schema = load_schema(text, "draft")
    assert (schema.dense, schema.missing) == (("price",), (marker,))
    assert f"Missing among numbers: {marker} in price." in text
    assert ("Remove unknown from missing" in text) == (marker == "unknown")


def test_many_other_words_make_categories(tmp_path: Path) -> None:
    prices = [
        f"w{n % 5}" if n % 10 == 3 else price for n, price in enumerate(with_gaps(PRICES, "NA"))
    ]
    schema = load_schema(
        draft(write(tmp_path / "log.csv", {"click": CLICKS, "price": list(map(str, prices))})),
        "draft",
    )
    assert (schema.sparse, schema.missing) == (("price",), ())


@pytest.mark.parametrize(
    ("other", "is_missing"),
    [
        pytest.param(AMOUNTS, True, id="alone"),
        pytest.param([n % 7 - 3 for n in ROWS], False, id="with other negatives"),
    ],
)
def test_minus_one_is_missing_without_other_negatives(
    other: list[int],
    is_missing: bool,
    tmp_path: Path,
) -> None:
    log = write(
        tmp_path / "log.csv",
        {"click": CLICKS, "price": with_gaps(AMOUNTS, -1), "change": other},
    )
    text = draft(log)
    assert ("-1" in load_schema(text, "draft").missing, "Remove -1" in text) == (
        is_missing,
        is_missing,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(pick("yes", "no"), {"positive": ["yes"]}, id="words"),
        pytest.param(pick("<=50K", ">50K"), {"positive": [">50K"]}, id="census"),
        pytest.param(pick(-1, 1), {"positive": ["1"]}, id="signs"),
        pytest.param(pick(1, 2), {"positive": ["2"]}, id="one and two"),
        pytest.param(["rare", *["usual"] * 9] * 40, {"positive": ["rare"]}, id="unknown words"),
        pytest.param(pick(1, 2, 3, 4, 5, 5, 5), {"at_least": 4}, id="ratings"),
        pytest.param([1] * 300 + pick(2, 3)[:100], {"at_least": 2}, id="median is lowest"),
        pytest.param(pick(0.5, 1.5, 2.5), {"at_least": 1.5}, id="halves"),
    ],
)
def test_label_rule_is_drafted(values: list[Any], expected: dict[str, Any], tmp_path: Path) -> None:
    text = draft(write(tmp_path / "log.parquet", {"user": pick("a", "b"), "label": values}))
    assert yaml.safe_load(text)["label"] == {"name": "label", **expected}
    assert "# label: " in text
    assert "counts as 1" in text


def test_numeric_label_is_learned_as_number(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", {"user": pick("a", "b"), "price": PRICES})
    schema = load_schema(draft(log, label="price"), "draft")
    assert (schema.label, [(label.name, label.kind) for label in schema.labels]) == (
        None,
        [("price", "number")],
    )


def test_draft_names_left_out_columns(tmp_path: Path) -> None:
    log = {
        "": IDS,
        "row": list(ROWS),
        "n": [7 + 3 * n for n in ROWS],
        "one": pick("x"),
        "click": CLICKS,
        "user": IDS,
    }
    text = draft(write(tmp_path / "log.csv", log))
    assert "Left out: '' (has no name), row (row number), n (row number), one (one value)." in text
    assert load_schema(text, "draft").sparse == ("user",)


NESTED = {
    "score_vector": pa.array([[0.5] * (1 + n % 3) for n in ROWS]),
    "order_items": pa.array([[{"sku": "a"}]] * 400),
    "struct": pa.array([{"a": 1}] * 400),
    "map": pa.array([[("a", 1)]] * 400, pa.map_(pa.string(), pa.int64())),
    "matrix": pa.array([[[1, 2]]] * 400),
    "span": pa.array([timedelta(seconds=n) for n in ROWS]),
    "clock": pa.array([datetime(2026, 1, 1).time()] * 400),
    "nothing": pa.nulls(400),
    "bytes": pa.array([bytes([200 + n % 50, n % 200]) for n in ROWS]),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_column_is_left_out(name: str, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({name: NESTED[name], "click": CLICKS, "user": pick("a", "b")}),
        tmp_path / "log.parquet",
    )
    text = draft(str(tmp_path / "log.parquet"))
    assert load_schema(text, "draft").sparse == ("user",)
    assert f"Left out: {name} (" in text


def test_two_columns_of_one_name_are_left_out(tmp_path: Path) -> None:
    table = pa.table(
        [
            CLICKS,
            pick("a", "b"),
            pick("c", "d"),
            IDS,
        ],
        names=["click", "user", "user", "item"],
    )
    pq.write_table(table, tmp_path / "log.parquet")
    text = draft(str(tmp_path / "log.parquet"))
    assert load_schema(text, "draft").sparse == ("item",)
    assert "Left out: user (name of several columns)." in text


def test_ambiguous_names_of_csv_header_are_left_out(tmp_path: Path) -> None:
    lines = [f"{n},{CLICKS[n]},{n % 7},a{n % 5},b{n % 3}" for n in ROWS]
    (tmp_path / "log.csv").write_text("\n".join([",click,item,user,user", *lines, ""]))
    text = draft(str(tmp_path / "log.csv"))
    assert load_schema(text, "draft").sparse == ("item",)
    assert "user (name of several columns)" in text
    assert "(has no name)" in text


def test_file_without_header_gets_names(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("".join(f"{CLICKS[n]},u{n % 9},{PRICES[n]:.2f}\n" for n in ROWS))
    text = draft(str(log))
    schema = load_schema(text, "draft")
    assert (schema.header, schema.label) == (("c0", "c1", "c2"), "c0")
    assert (schema.dense, schema.sparse) == (("c2",), ("c1",))
    assert "has no header" in text
    (tmp_path / "schema.yaml").write_text(text)
    settings = f"--steps 2 --batch-size 64 --workers 1 --storage-path {tmp_path} --name run -q"
    assert (
        cli.run(
            [
                "train",
                "clicks",
                "--schema",
                str(tmp_path / "schema.yaml"),
                "--data",
                str(log),
                *settings.split(),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(("name", "city"), [("größe", "a"), ("size", "Zürich")])
def test_draft_names_other_encoding(name: str, city: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    lines = [
        f"{name},city,click",
        *(f"{number},{city if number % 2 else 'Bern'},{CLICKS[number]}" for number in ROWS),
    ]
    log.write_bytes("\n".join(lines).encode("latin-1"))
    text = draft(str(log))
    schema = load_schema(text, "draft")
    assert (schema.encoding, "read as latin-1" in text) == ("latin-1", True)
    assert "�" not in text


def test_draft_keeps_utf8_despite_single_bad_row(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = [f"{n % 7},é{n % 9},{CLICKS[n % 400]}".encode() for n in range(2000)]
    log.write_bytes(b"\n".join([b"small,city,click", b"1,\xe9,1", *rows]))
    schema = load_schema(draft(str(log)), "draft")
    assert (schema.encoding, schema.sparse) == (None, ("small", "city"))


def test_words_of_income_are_label_without_header(tmp_path: Path) -> None:
    log = tmp_path / "census.data"
    log.write_text(
        "".join(f"{AMOUNTS[n]}, {n % 3}, {'<=50K' if CLICKS[n] else '>50K'}\n" for n in ROWS)
    )
    fields = yaml.safe_load(draft(str(log)))
    assert fields["label"] == {"name": "c2", "positive": [">50K"]}
    assert (fields["dense"], fields["sparse"]) == (["c0"], ["c1"])


def test_draft_reads_limited_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_draft, "_ROWS", 300)
    for name in ("log.csv", "log.parquet"):
        assert "from 300 rows" in draft(write(tmp_path / name, {"click": CLICKS, "user": IDS}))


@pytest.mark.parametrize(
    ("columns", "label", "message"),
    [
        pytest.param(
            {"click": CLICKS, "user": IDS},
            "nope",
            "no column named nope; it has click, user",
            id="no such label",
        ),
        pytest.param(
            {"user": IDS},
            None,
            "of ratings for the label, .*, among user. Add one",
            id="no label",
        ),
        pytest.param({"user": IDS}, "user", "labels must be 0 or 1", id="label in many words"),
        pytest.param({"user": []}, None, "no usable rows", id="no rows"),
        pytest.param({"click": CLICKS}, None, "no column to learn from", id="no features"),
        pytest.param(
            {"click": CLICKS[:9], "user": pick("a", "b")[:9]},
            None,
            "rows are too few",
            id="few rows",
        ),
        pytest.param(
            {"click": with_gaps(CLICKS, None), "user": IDS},
            None,
            "label is missing",
            id="missing labels",
        ),
    ],
)
def test_draft_rejects_log(
    columns: dict[str, list[Any]],
    label: str | None,
    message: str,
    tmp_path: Path,
) -> None:
    rejects(message, draft, write(tmp_path / "log.csv", columns), label=label)


def test_split_by_time_takes_drafted_schema(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", SHAPES["only-times.csv"][0])
    (tmp_path / "schema.yaml").write_text(draft(log))
    assert (
        cli.run(
            [
                "split",
                log,
                "--by",
                "time",
                "--out",
                str(tmp_path / "parts"),
                "--schema",
                str(tmp_path / "schema.yaml"),
                "-q",
            ]
        )
        == 0
    )


def test_times_in_text_are_equal_numbers_in_files_and_exports() -> None:
    texts = [
        "2024-02-29",
        "2024-02-29 10:00",
        "2024-02-29T10:00:00.25+02:00",
        "2024-02-30",
        "x",
    ]
    values, status = parse_numbers(
        pa.array([*texts, "7"]),
        "at",
        lambda name, fix: InputError(name),
        times=True,
    )
    assert [
        None if bad else value for value, bad in zip(values, status == REJECTED, strict=True)
    ] == [*map(seconds_of, texts), 7]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(pa.int64(), id="integers"), pytest.param(pa.decimal128(20, 0), id="decimals")],
)
def test_integers_of_databases_are_categories(tmp_path: Path, kind: pa.DataType) -> None:
    # Evenly spread, as no amounts are
    subscribers = [10_000 + 250_000 * (n % 4) + n * 7 % 40 for n in ROWS]
    column = pa.array(map(Decimal, subscribers), pa.decimal128(20, 0)).cast(kind)
    pq.write_table(
        pa.table({"click": CLICKS, "subscriber": column, "price": PRICES}),
        tmp_path / "log.parquet",
    )
    schema = load_schema(draft(str(tmp_path / "log.parquet")), "draft")
    assert (schema.dense, schema.sparse) == (("price",), ("subscriber",))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_small_files_are_read_together(tmp_path: Path, kind: str) -> None:
    for number in range(10):
        rows = pa.table({"click": [0, 1, 0], "item": [f"i{number}", "x", f"j{number}"]})
        path = tmp_path / f"part_{number}.{kind}"
        (pq.write_table if kind == "parquet" else pa_csv.write_csv)(rows, path)
    schema = load_schema(draft(str(tmp_path)), "draft")
    assert (schema.label, schema.sparse) == ("click", ("item",))


def test_files_with_other_types_are_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0, 1], "item": [1, 2]}), tmp_path / "part_0.parquet")
    pq.write_table(pa.table({"click": [0, 1], "item": [["a"], ["b"]]}), tmp_path / "part_1.parquet")
    rejects("a column has other types in other rows or files", draft, str(tmp_path))


def test_drafts_of_changing_types_are_text(tmp_path: Path) -> None:
    # More than a block of each type
    filling = "-" * 100_000
    rows = [f'{{"click": {n % 2}, "item": {n}, "page": "{filling}"}}' for n in range(60)]
    rows += [f'{{"click": {n % 2}, "item": "i{n}", "page": "a"}}' for n in range(60)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    assert "item" in load_schema(draft(str(tmp_path / "log.jsonl")), "draft").sparse


# -- Events without a label
def events_log(tmp_path: Path, head: str, rows: list[str]) -> str:
    (tmp_path / "log.csv").write_text("\n".join([*([head] if head else []), *rows]) + "\n")
    return str(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("user", "item"),
    [("user_id", "item_id"), ("customerid", "sku"), ("SessionId", "ProductId")],
)
def test_events_are_drafted_for_two_towers(user: str, item: str, tmp_path: Path) -> None:
    rows = [f"i{n * 7 % 30},{n},{n % 9}.25,u{n * 11 % 20}" for n in range(60)]
    text = draft(events_log(tmp_path, f"{item},row,price,{user}", rows))
    schema = load_schema(text, "draft")
    assert (schema.label, schema.dense, schema.sparse) == (None, (), (user, item))
    assert recipe_of(text) == f"two_tower --workload.model.item-features {item}"
    assert recipe_of(text) in text
    assert "price (of the item or the event)" in text


def write_events(tmp_path: Path, *, users: int, gaps: int = 0) -> str:
    times = [1_700_000_000 + 60 * n for n in range(120)]
    names = ["" if n < gaps else f"u{n % users}" for n in range(120)]
    rows = [f"{names[n]},i{n * 7 % 30},{times[n]},{n % 9}.25" for n in range(120)]
    return events_log(tmp_path, "user_id,item_id,timestamp,price", rows)


def test_events_with_times_are_drafted_as_lists(tmp_path: Path) -> None:
    text = draft(write_events(tmp_path, users=20))
    schema = load_schema(text, "draft")
    columns = SequenceColumns(user="user_id", item="item_id", time="timestamp")
    assert (schema.sequence, schema.split) == (columns, SequenceSplit())
    assert recipe_of(text) == "next_item"
    assert "`rayrec train next_item`" in text
    assert "price (of the item or the event)" in text


@pytest.mark.parametrize(
    ("users", "gaps"),
    [pytest.param(60, 0, id="few events"), pytest.param(20, 9, id="no user")],
)
def test_events_without_lists_are_drafted_for_two_towers(
    users: int,
    gaps: int,
    tmp_path: Path,
) -> None:
    text = draft(write_events(tmp_path, users=users, gaps=gaps))
    assert recipe_of(text) == "two_tower --workload.model.item-features item_id"


def test_ratings_become_events_by_request(tmp_path: Path) -> None:
    rows = [f"u{n % 20},i{n * 7 % 30},{n % 5 + 1},{1_700_000_000 + 60 * n}" for n in range(120)]
    path = events_log(tmp_path, "user_id,item_id,rating,timestamp", rows)
    assert load_schema(draft(path), "draft").label == "rating"
    schema = load_schema(draft(path, events=True), "draft")
    assert schema.sequence == SequenceColumns(user="user_id", item="item_id", time="timestamp")
    rejects("--label: must be left out with --events", draft, path, label="rating", events=True)


def test_events_without_names_have_users_items_and_times(tmp_path: Path) -> None:
    # In no order, and before 2000, as in MovieLens
    times = [881_250_949 + 977 * n % 100_003 for n in range(240)]
    rows = [f"{n % 20 + 1},{n * 7 % 211 + 1},{n % 5 + 1},{times[n]}" for n in range(240)]
    schema = load_schema(draft(events_log(tmp_path, "", rows)), "draft")
    assert schema.sequence == SequenceColumns(user="c0", item="c1", time="c3")
    assert schema.header == ("c0", "c1", "c2", "c3")


def test_log_without_users_has_no_events(tmp_path: Path) -> None:
    rows = [f"{n % 2},{n * 7 % 30},{n * 11 % 20}.5" for n in range(60)]
    path = events_log(tmp_path, "click,city,price", rows)
    rejects("no columns of a user and an item, among click", draft, path, events=True)


def test_users_counting_up_are_used(tmp_path: Path) -> None:
    rows = [f"{n},{n * 7 % 30}" for n in range(60)]
    schema = load_schema(draft(events_log(tmp_path, "", rows)), "draft")
    assert (schema.header, schema.sparse) == (("c0", "c1"), ("c0", "c1"))


def test_log_without_label_and_events_is_rejected(tmp_path: Path) -> None:
    rows = [f"{n * 7 % 30},{n * 11 % 20}.5" for n in range(60)]
    rejects(
        "no column of 0 and 1, .*, and no user and item of events, among city, price",
        draft,
        events_log(tmp_path, "city,price", rows),
    )


def test_times_before_2000_need_name_of_time(tmp_path: Path) -> None:
    times = [881250949 + 50 * n + n % 3 for n in range(60)]
    rows = [f"{n % 2},{time},{time}" for n, time in enumerate(times)]
    schema = load_schema(draft(events_log(tmp_path, "click,timestamp,code", rows)), "draft")
    assert schema.timestamp == "timestamp"
    assert "code" in schema.columns


def test_letters_of_html_join_no_list(tmp_path: Path) -> None:
    titles = ["Rock &amp; Roll", "A &amp; B", "Roll"]
    rows = [f'{n % 2};"{titles[n % 3]}"' for n in range(60)]
    schema = load_schema(draft(events_log(tmp_path, "click;title", rows)), "draft")
    assert (schema.sparse, schema.lists) == (("title",), ())
