"""Lines without a header, in requests, files and encode.py: they have the column order of the
training log.
"""

import asyncio
import csv
import dataclasses
import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.click_models import ANY, make_app, make_model, make_preprocessor
from builders.engines import LoopEngine
from builders.faults import fails_with, rejects
from builders.requests import Reply, post, request

import rayrec
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.observe.console import Console
from rayrec.schema import Schema
from rayrec.serve.app import ScoringApp

QUIET = Console(quiet=True)
CLICKS = Schema(
    label="click", dense=("age", "price"), sparse=("user", "job", "tags"), lists=("tags",)
)
ORDERS = {
    "label first": (
        "click",
        "job",
        "age",
        "note",
        "user",
        "tags",
        "price",
    ),
    "label in the middle": (
        "price",
        "user",
        "note",
        "click",
        "tags",
        "age",
        "job",
    ),
    "label last": (
        "user",
        "age",
        "tags",
        "note",
        "price",
        "job",
        "click",
    ),
}
JOBS = ["clerk; a", "cook, b", 'the "boss"', "none"]


def rows_of_log(count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {
            "click": rng.randrange(2),
            "age": rng.randrange(20, 60),
            "price": round(rng.random() * 9, 3),
            "user": f"u{rng.randrange(6)}",
            "job": rng.choice(JOBS),
            "tags": "|".join(rng.sample("abcd", rng.randrange(1, 3))),
            "note": rng.choice(["x", "y,z"]),
        }
        for _ in range(count)
    ]


def text_of(
    rows: Sequence[Mapping[str, Any]], order: Sequence[str], delimiter: str, *, header: bool
) -> str:
    out = io.StringIO()
    # Python's writer has delimiters of one character
    mark = delimiter if len(delimiter) == 1 else "\x1f"
    writer = csv.DictWriter(out, order, delimiter=mark, lineterminator="\n", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().replace(mark, delimiter)


def json_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [*CLICKS.dense, *CLICKS.sparse]
    return {
        "rows": [
            {name: row[name].split("|") if name == "tags" else row[name] for name in scored}
            for row in rows
        ]
    }


def counted(path: Path | str, schema: Schema, out: Path) -> Preprocessor:
    rayrec.vocabulary(
        str(path),
        out=str(out),
        schema=schema,
        engine="threads",
        console=QUIET,
    )
    return Preprocessor.load(str(out))


def answers(app: ScoringApp, text: str, media_type: str) -> Reply:
    return post(app, text.encode(), media_type=media_type)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return rows_of_log()


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize(
    "declared", [pytest.param(False, id="header row"), pytest.param(True, id="declared header")]
)
@pytest.mark.parametrize(
    ("suffix", "delimiter"),
    [
        pytest.param("csv", ",", id="comma"),
        pytest.param("csv", ";", id="semicolon"),
        pytest.param("csv", "::", id="double colon"),
        pytest.param("tsv", "\t", id="tab"),
    ],
)
@pytest.mark.parametrize("order", [pytest.param(order, id=name) for name, order in ORDERS.items()])
def test_raw_lines_score_like_json(
    tmp_path: Path,
    order: tuple[str, ...],
    suffix: str,
    delimiter: str,
    declared: bool,
    rows: list[dict[str, Any]],
) -> None:
    log = tmp_path / f"log.{suffix}"
    log.write_text(text_of(rows, order, delimiter, header=not declared))
    schema = CLICKS.replace(header=order) if declared else CLICKS
    preprocessor = counted(log, schema, tmp_path / "prepared")
    assert preprocessor.schema.header == order
    app = make_app(make_model(preprocessor, seed=1))
    expected = post(app, json_rows(rows)).json()
    assert len(set(expected["logits"])) > 20
    media_type = "text/tab-separated-values" if delimiter == "\t" else "text/csv"
    full = text_of(rows, order, delimiter, header=False)
    bare = text_of(rows, [name for name in order if name != "click"], delimiter, header=False)
    for text, parameters in (
        (full, ""),
        (bare, ""),
        (full, "; label=present"),
        (bare, "; label=absent"),
    ):
        assert answers(app, text, media_type + parameters).json() == expected
    if delimiter != "\t":
        assert (
            answers(app, text_of(rows, order, delimiter, header=True), "text/csv").json()
            == expected
        )
    first = full.partition("\n")[0]
    assert answers(app, first, media_type).json()["logits"] == pytest.approx(
        expected["logits"][:1], rel=1e-5
    )
    error = answers(app, first + delimiter, media_type)
    assert (error.status, error.json()["error"]["message"]) == (
        400,
        "row 0 has 8 columns; 6 are needed, or 7 with click",
    )


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("order", [pytest.param(order, id=name) for name, order in ORDERS.items()])
def test_files_and_encoder_read_stored_order(
    tmp_path: Path, order: tuple[str, ...], rows: list[dict[str, Any]]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text_of(rows, order, ",", header=True))
    preprocessor = counted(log, CLICKS, tmp_path / "prepared")
    expected = preprocessor.encode(raw_of(log, preprocessor.schema, tmp_path))
    bare = [name for name in order if name != "click"]
    encoder = Encoder(str(tmp_path / "prepared"))
    for number, (columns, schema) in enumerate(
        ((order, preprocessor.schema), (bare, preprocessor.schema.unlabelled()))
    ):
        headless = tmp_path / f"headless{number}.csv"
        headless.write_text(text_of(rows, columns, ",", header=False))
        assert LogSource.at(str(headless)).is_labelled(preprocessor.schema) is (columns == order)
        encoded = preprocessor.encode(raw_of(headless, schema, tmp_path))
        dense, ids = encoder.encode(encoder.parse(headless.read_text().splitlines()))
        for each in (encoded.dense, dense):
            np.testing.assert_array_equal(each, expected.dense)
        np.testing.assert_array_equal(encoded.ids[0], expected.ids[0])
        np.testing.assert_array_equal(ids[0], expected.ids[0])
        np.testing.assert_array_equal(ids[1], expected.ids[1])


def raw_of(path: Path, schema: Schema, folder: Path) -> Any:
    context = TaskContext(LoopEngine(), str(folder / "cache"))
    index = LogSource.at(str(path)).index(schema, segment_bytes=1 << 20, context=context)
    assert index.faults.total == 0
    return read_raw(index.segments, schema)


@pytest.mark.usefixtures("cache_folder")
def test_criteo_lines_keep_order_of_schema(tmp_path: Path) -> None:
    lines = criteo_lines(50)
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    preprocessor = counted(tmp_path / "log.txt", CRITEO, tmp_path / "prepared")
    assert preprocessor.schema.header is None
    assert (
        "header"
        not in json.loads((tmp_path / "prepared" / "preprocessor.json").read_text())["schema"]
    )
    app = make_app(make_model(preprocessor, seed=1))
    expected = answers(app, "\n".join(lines), "text/tab-separated-values").json()
    assert (
        expected
        == answers(app, "\n".join(line[2:] for line in lines), "text/tab-separated-values").json()
    )
    assert expected == post(app, {"rows": criteo_json(lines)}).json()


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("position", [0, 7, 40])
def test_criteo_tables_keep_file_order(tmp_path: Path, position: int) -> None:
    lines = criteo_lines(50)
    features = [*CRITEO.dense, *CRITEO.sparse]
    random.Random(position).shuffle(features)
    order = (*features[:position], "label", "unused", *features[position:])
    table = pd.DataFrame([line.split("\t") for line in lines], columns=[*CRITEO.columns]).assign(
        unused="7"
    )
    table[[*order]].to_csv(tmp_path / "log.csv", index=False)
    preprocessor = counted(tmp_path / "log.csv", CRITEO, tmp_path / "prepared")
    assert preprocessor.schema.header == order
    app = make_app(make_model(preprocessor, seed=1))
    expected = post(app, {"rows": criteo_json(lines)}).json()
    for columns in (order, [name for name in order if name != "label"]):
        text = table[[*columns]].to_csv(index=False, header=False, sep="\t")
        assert answers(app, text, "text/tab-separated-values").json() == expected
    wrong = answers(app, text + "1\t2\n", "text/tab-separated-values")
    assert (wrong.status, wrong.json()["error"]["row"]) == (400, 50)


def criteo_lines(count: int) -> list[str]:
    rng = random.Random(1)
    return [
        "\t".join(
            [
                str(rng.randrange(2)),
                *(rng.choice(["", str(rng.randrange(-2, 90))]) for _ in CRITEO.dense),
                *(rng.choice(["", f"{rng.randrange(9):08x}"]) for _ in CRITEO.sparse),
            ]
        )
        for _ in range(count)
    ]


def criteo_json(lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        row = dict(zip(CRITEO.columns, line.split("\t"), strict=True))
        numbers = {name: int(row[name]) if row[name] else None for name in CRITEO.dense}
        rows.append(numbers | {name: row[name] or None for name in CRITEO.sparse})
    return rows


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("kind", ["earlier version", "files that differ"])
def test_lines_of_unknown_order_are_rejected(
    tmp_path: Path, kind: str, rows: list[dict[str, Any]]
) -> None:
    order = ORDERS["label last"]
    folder = tmp_path / "log"
    folder.mkdir()
    for number, columns in enumerate(
        (order, ORDERS["label first"] if kind == "files that differ" else order)
    ):
        (folder / f"part{number}.csv").write_text(text_of(rows, columns, ",", header=True))
    preprocessor = counted(folder, CLICKS, tmp_path / "prepared")
    if kind == "earlier version":
        old = preprocessor.schema.replace(header=None, header_row=False)
        preprocessor = dataclasses.replace(preprocessor, schema=old)
        preprocessor.save(str(tmp_path / "prepared"))
        preprocessor = Preprocessor.load(str(tmp_path / "prepared"))
    assert preprocessor.schema.header == (None if kind == "earlier version" else ())
    app = make_app(make_model(preprocessor, seed=1))
    text = text_of(rows, order, ",", header=False)
    for body, media_type in (
        (text, "text/csv"),
        (text.replace(",", "\t"), "text/tab-separated-values"),
    ):
        error = answers(app, body, media_type).json()["error"]["message"]
        assert error.startswith("rows without a header have no known order of columns, since ")
        assert kind in error
    used = [name for name in order if name != "note"]
    with_names = answers(app, text_of(rows, used, ",", header=True), "text/csv")
    assert with_names.json() == post(app, json_rows(rows)).json()
    (tmp_path / "headless.csv").write_text(text)
    rejects(
        "first row looks like data, so there is no header",
        raw_of,
        tmp_path / "headless.csv",
        preprocessor.schema,
        tmp_path,
    )
    fails_with(
        ValueError,
        "no known order of columns",
        Encoder(str(tmp_path / "prepared")).parse,
        text.splitlines(),
    )


@pytest.mark.usefixtures("cache_folder")
def test_parquet_order_is_stored(tmp_path: Path) -> None:
    order = ORDERS["label in the middle"]
    text = text_of(rows_of_log(), order, ",", header=True)
    pq.write_table(arrow_csv.read_csv(io.BytesIO(text.encode())), tmp_path / "log.parquet")
    preprocessor = counted(tmp_path / "log.parquet", CLICKS, tmp_path / "prepared")
    assert (preprocessor.schema.header, preprocessor.schema.header_row) == (order, True)


@pytest.mark.usefixtures("cache_folder")
def test_extended_preprocessor_keeps_order(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "log.csv").write_text(text_of(rows, ORDERS["label last"], ",", header=True))
    old = counted(tmp_path / "log.csv", CLICKS, tmp_path / "old")
    (tmp_path / "next.csv").write_text(text_of(rows, ORDERS["label last"], ",", header=False))
    rayrec.vocabulary(
        str(tmp_path / "next.csv"),
        out=str(tmp_path / "new"),
        extend=str(tmp_path / "old"),
        console=QUIET,
    )
    assert (
        Preprocessor.load(str(tmp_path / "new")).schema.header
        == old.schema.header
        == ORDERS["label last"]
    )


@pytest.mark.usefixtures("cache_folder")
def test_preprocessed_data_keeps_order(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        text_of(rows_of_log(), ORDERS["label last"], ",", header=True)
    )
    out = str(tmp_path / "rows")
    rayrec.preprocess(
        str(tmp_path / "log.csv"),
        out=out,
        format="parquet",
        schema=CLICKS,
        engine="threads",
        console=QUIET,
    )
    source = LogSource.at(out)
    assert Preprocessor.load(source.preprocessor() or "").schema.header == ORDERS["label last"]
    assert source.schema(CLICKS).header == ORDERS["label last"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param(
            (
                "user",
                "click",
                "unused",
                "tags",
                "price",
                "item",
                "age",
            ),
            "user,unused,tags,price,item,age.",
            id="known",
        ),
        pytest.param(None, "A header with the names of the columns", id="unknown"),
    ],
)
def test_openapi_names_order_of_lines(header: tuple[str, ...] | None, expected: str) -> None:
    app = make_app(make_model(make_preprocessor(ANY.replace(header=header))))
    reply = asyncio.run(request(app, "GET", "/openapi.json"))
    assert reply is not None
    content = reply.json()["paths"]["/v1/score"]["post"]["requestBody"]["content"]
    assert expected in content["text/csv"]["schema"]["description"]
    assert ("text/tab-separated-values" in content) is (header is not None)
