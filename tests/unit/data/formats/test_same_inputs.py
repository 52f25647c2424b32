"""One log in each format, as files, requests and rows of encode.py: the inputs are the same."""

import csv
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.encoded import check_same, encoded_by
from builders.logs import learn, open_index
from hypothesis import given, settings
from hypothesis import strategies as st

import rayrec
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.data.materialized.formats import named_columns
from rayrec.data.raw_block import RawBlock
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.schema import Feature, FittedFunction, Schema, Vector
from rayrec.serve.requests import RequestBody, RequestError, open_body
from rayrec.serve.row_readers import make_reader

Row = Mapping[str, Any]
Log = Sequence[Row]

COLUMNS = ("price", "click", "city", "age", "tags", "point")

decimals = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: float(repr(value)))
# Other than the markers of missing values, which no vector has.
coordinates = decimals.filter(lambda value: value not in (0, -1))
numbers = st.one_of(
    st.none(),
    st.integers(-(10**6), 10**6),
    decimals,
)
# Without marks that split slots, lists or lines, and without blanks at the ends.
texts = st.one_of(
    st.integers(-9, 10**9).map(str),
    st.text("abxyzA09._-\u00e9\u4e2d", min_size=1, max_size=6),
)
rows = st.fixed_dictionaries(
    {
        "price": numbers,
        "click": st.integers(0, 1),
        "city": st.none() | texts,
        "age": numbers,
        "tags": st.none() | st.lists(texts, max_size=4),
        "point": st.none() | st.lists(coordinates, min_size=3, max_size=3),
    }
)
# Requests without any value are rejected.
logs = st.lists(rows, min_size=12, max_size=30).map(
    lambda log: [{**log[0], "tags": ["a"]}, *log[1:]]
)
FORMULAS = {
    "log_price": "log(price) - clip(age, -10, 10.5)",
    "ratio": "price / age",
    "bucket": "bucketize(age, [-1, 0, 0.5, 100])",
    "pair": "cross(city, bucket)",
    "hashed": "cross(city, bucket, 50)",
    "row": "hash(city, 7)",
    "letters": "ngrams(lower(city), 2)",
    "count": "count_in(tags, city)",
    "size": "len(tags)",
    "recent": "last(concat(tags, letters), 3)",
    "same": "overlap(tags, letters)",
    "first": "coalesce(city, row, 'none')",
    "old": "when(age > 30, 'old', city)",
    "both": "when(city in ['a', '1'], price, age * 2)",
    "level": "quantile(price, 4)",
    "score": "zscore(age + aggregate(point, 'sum'))",
    "layer": "cross(level, quantile(score, 3))",
    "match": "dot(tags, letters)",
}
CONSTANTS = {
    "level": (-1.5, 0.0, 1000.0),
    "score": (0.25, 3.5),
    "layer": (-1.0, 0.1),
}
FITTED = tuple(
    FittedFunction(feature=name, number=0, constants=constants)
    for name, constants in CONSTANTS.items()
)
schemas = st.builds(
    lambda missing, max_length, list_delimiter, formulas: Schema(
        label="click",
        dense=("price", "age"),
        sparse=("city", "tags"),
        lists=("tags",),
        missing=missing,
        features=(
            Feature(name="tags", max_length=max_length, list_delimiter=list_delimiter),
            *(Feature(name=name, formula=FORMULAS[name]) for name in formulas),
        ),
        vectors=(Vector(name="point", length=3),) if formulas else (),
        fitted=FITTED if formulas else (),
    ),
    missing=st.sampled_from([(), ("NA", "-1"), ("0",)]),
    max_length=st.sampled_from([None, 2]),
    list_delimiter=st.sampled_from([None, "|", "^"]),
    formulas=st.sampled_from([(), tuple(FORMULAS)]),
)


# -- The log in each format
def _text(value: Any, mark: str) -> str:
    if value is None:
        return ""
    return mark.join(map(str, value)) if isinstance(value, list) else str(value)


def as_csv(
    log: Log,
    schema: Schema,
    *,
    delimiter: str = ",",
    names: Sequence[str] = COLUMNS,
) -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    if names:
        writer.writerow(names)
    marks = {name: schema.list_mark(name) for name in COLUMNS}
    writer.writerows([_text(row[name], marks[name]) for name in COLUMNS] for row in log)
    return out.getvalue()


def as_json(log: Log) -> str:
    return "".join(json.dumps(row) + "\n" for row in log)


def as_table(log: Log) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "price": pa.array([_float(row["price"]) for row in log], pa.float64()),
        "click": pa.array([row["click"] for row in log], pa.int8()),
        "city": pa.array([row["city"] for row in log], pa.string()).dictionary_encode(),
        "age": pa.array([_float(row["age"]) for row in log], pa.float64()),
        "tags": pa.array([row["tags"] for row in log], pa.list_(pa.string())),
        "point": pa.array([row["point"] for row in log], pa.list_(pa.float64())),
    }
    return pa.table(columns)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def zipped(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("log.csv", text)
    return out.getvalue()


def in_parquet(log: Log) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(as_table(log), out, row_group_size=7)
    return out.getvalue().to_pybytes()


TYPES = ("float", "float", "token", "float", "token_seq", "float_seq")
FILES: dict[str, Callable[[Log, Schema], bytes]] = {
    "csv": lambda log, schema: as_csv(log, schema).encode(),
    "tsv": lambda log, schema: as_csv(log, schema, delimiter="\t").encode(),
    "semicolons": lambda log, schema: as_csv(log, schema, delimiter=";").encode(),
    "gzip": lambda log, schema: gzip.compress(as_csv(log, schema).encode()),
    "zip": lambda log, schema: zipped(as_csv(log, schema)),
    "old Mac": lambda log, schema: as_csv(log, schema).replace("\n", "\r").encode(),
    "byte order mark": lambda log, schema: b"\xef\xbb\xbf" + as_csv(log, schema).encode(),
    "typed header": lambda log, schema: as_csv(
        log,
        schema,
        names=[f"{name}:{kind}" for name, kind in zip(COLUMNS, TYPES, strict=True)],
    ).encode(),
    "JSON lines": lambda log, schema: as_json(log).encode(),
    "Parquet": lambda log, schema: in_parquet(log),
}


def read_file(content: bytes, schema: Schema, folder: Path) -> RawBlock:
    path = folder / "log"
    path.write_bytes(content)
    completed = LogSource.at(str(path)).schema(schema)
    index = open_index(path, completed, cache=folder / "cache")
    return read_raw(index.segments, completed)


# -- Requests
def as_requests(log: Log, schema: Schema) -> dict[str, tuple[bytes, str]]:
    """Return bodies with all rows, and their formats."""
    objects = [{name: row[name] for name in schema.unlabelled().columns} for row in log]
    lines = as_csv(log, schema, names=()).encode()
    return {
        "JSON": (json.dumps({"rows": objects}).encode(), "json"),
        "CSV": (lines, "csv"),
        "CSV with a header": (as_csv(log, schema).encode(), "csv"),
        "TSV": (as_csv(log, schema, delimiter="\t", names=()).encode(), "tsv"),
        "plain CSV": (lines, "lines"),
        "plain JSON lines": (as_json(log).encode(), "lines"),
    }


def read_body(body: RequestBody, schema: Schema) -> RawBlock:
    raw, (outcome,) = make_reader(schema).read([body])
    if isinstance(outcome, RequestError):
        raise outcome
    return raw


@settings(max_examples=20, deadline=None)
@given(log=logs, schema=schemas)
def test_inputs_are_same_in_all_formats(
    log: Log,
    schema: Schema,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    (folder / "log.csv").write_bytes(FILES["csv"](log, schema))
    schema = LogSource.at(str(folder / "log.csv")).schema(schema)
    assert schema.header == COLUMNS
    preprocessor = learn(open_index(folder / "log.csv", schema, cache=folder / "cache"), schema)
    expected = None
    for name, write in FILES.items():
        raw = read_file(write(log, schema), schema, folder)
        encoded = preprocessor.encode(raw)
        expected = expected or encoded
        check_same(encoded, expected, name)
        assert raw.labels["click"].tolist() == [row["click"] for row in log]
    assert expected is not None
    for name, (content, kind) in as_requests(log, schema).items():
        body = open_body(content, kind, schema=schema, max_rows=len(log))  # type: ignore[arg-type]
        check_same(preprocessor.encode(read_body(body, schema)), expected, name)
    check_same(encoded_by_program(log, preprocessor, folder), expected, "encode.py")
    transformed = rayrec.transform(preprocessor, as_table(log))
    again = named_columns(expected, preprocessor.inputs)
    for name in (*preprocessor.inputs.dense, *preprocessor.inputs.sparse):
        assert transformed.column(name).to_pylist() == again.column(name).to_pylist(), name


def encoded_by_program(log: Log, preprocessor: Preprocessor, folder: Path) -> EncodedRows:
    preprocessor.save(str(folder / "preprocessor"))
    encoder = Encoder(str(folder / "preprocessor"))
    lines = as_csv(log, preprocessor.schema, names=()).splitlines()
    encoded = encoded_by(encoder, encoder.parse(lines))
    np.testing.assert_array_equal(encoded.dense, encoded_by(encoder, log).dense)
    return encoded
