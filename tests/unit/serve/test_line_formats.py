"""Requests with lines of a log: they have the format that files with them have."""

from pathlib import Path

import numpy as np
import pytest
from builders.faults import fails_with
from builders.logs import open_index

from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema, load_schema
from rayrec.serve.requests import RequestError, open_body
from rayrec.serve.row_readers import make_reader

LOGS = {
    "jsonl": [
        f'{{"click": {n % 2}, "age": {n}.5, "user": "u{n % 7}", "tags": ["t{n % 3}", "t{n % 5}"]}}'
        for n in range(90)
    ],
    "libsvm": [f"{n % 2} {1 + n % 7}:0.5 {8 + n % 3}:{n}.25" for n in range(90)],
    "libffm": [f"{n % 2} 0:{n % 7}:1 0:{7 + n % 3}:1 1:{n % 5}:{n}.5" for n in range(90)],
    "vw": [f"{2 * (n % 2) - 1} |user u{n % 7} |tags t{n % 3}:.5 t{n % 5}:2" for n in range(90)],
    "slot_value": [f"click:{n % 2} user:u{n % 7} tag:t{n % 3} tag:t{n % 5}" for n in range(90)],
    "tsv": [
        "click\tage\tuser",
        *(f"{n % 2}\t{n % 60}.5\tu{n % 7}" for n in range(90)),
    ],
    "semicolons": [
        "click;age;user",
        *(f"{n % 2};{n % 60}.5;u{n % 7}" for n in range(90)),
    ],
}


def schema_of(log: Path) -> Schema:
    return LogSource.at(str(log)).schema(load_schema(draft(str(log)), "draft"))


def rows_of(raw: RawBlock) -> list[np.ndarray]:
    lists = [part for ids in raw.lists for part in (ids.lengths, ids.values, ids.weights)]
    arrays = [raw.numbers, raw.categories, raw.missing, *lists]
    return [array for array in arrays if array is not None]


def read(text: str, schema: Schema) -> RawBlock:
    body = open_body(text.encode(), "lines", schema=schema, max_rows=100)
    raw, (outcome,) = make_reader(schema).read([body])
    if isinstance(outcome, RequestError):
        raise outcome
    return raw


@pytest.mark.parametrize("name", LOGS)
def test_lines_equal_log(name: str, tmp_path: Path) -> None:
    lines = LOGS[name]
    log = tmp_path / "log.data"
    log.write_text("\n".join(lines) + "\n")
    schema = schema_of(log)
    logged = read_raw(open_index(log, schema, cache=tmp_path / "cache").segments, schema)
    assert logged.rows == 90
    served = read("\r\n".join(lines[-90:]), schema)
    assert len(rows_of(served)) == len(rows_of(logged))
    for array, expected in zip(rows_of(served), rows_of(logged), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_invalid_line_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.libsvm"
    log.write_text("\n".join(LOGS["libsvm"]))
    text = "1 3:0.5\n0 4:1\n1 5\n"
    schema = schema_of(log).replace(format="libsvm")
    fails_with(RequestError, "row 2: not a row of the file's format", read, text, schema)


def test_empty_line_between_lines_is_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log.libsvm"
    log.write_text("\n".join(LOGS["libsvm"]))
    fails_with(RequestError, "row 1: empty line", read, "1 3:0.5\n \n0 4:1\n", schema_of(log))


def test_lines_without_columns_are_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(LOGS["jsonl"]))
    text = '{"rows": [{"user": "u1"}]}'
    fails_with(RequestError, "no line of this jsonl text has a column", read, text, schema_of(log))


def test_lines_with_several_rows_are_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log.tsv"
    log.write_text("".join(f"{n}\tu{n % 9}\t\ti{n % 7}\ti2-{n % 2} i9-1\n" for n in range(90)))
    text = "1\tu1\t\ti4\ti2-0 i9-1"
    message = "a line of impressions is several rows; send them as application/json"
    fails_with(RequestError, message, read, text, schema_of(log))


def test_criteo_lines_are_scored() -> None:
    line = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    schema = CRITEO.replace(tokens="hexadecimal")
    assert read(line + "\n" + line, schema).numbers[1].tolist() == list(range(13))
