"""Headers with types, as in RecBole's atomic files."""

from pathlib import Path

import pytest
from builders.logs import open_index

from rayrec.data.formats.typed_header import split_types
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema, Vector, load_schema
from rayrec.serve.requests import open_body
from rayrec.serve.row_readers import make_reader

TYPES = {
    "item_id": "token",
    "user_id": "token",
    "class": "token_seq",
    "price": "float",
    "vector": "float_seq",
    "rating": "float",
}
HEADER = "\t".join(f"{name}:{kind}" for name, kind in TYPES.items())
KINDS = ("comedy", "drama", "war", "western")
ROWS = [
    f"{n}\t{n * 7919 % 101}\t{KINDS[n % 4]} {KINDS[n % 3]}\t{n % 9}\t.5 {n}.25\t{1 + n * 13 % 5}"
    for n in range(300)
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "films.inter").write_text("\n".join([HEADER, *ROWS]) + "\n")
    return tmp_path / "films.inter"


def test_types_are_split_if_each_name_has_one() -> None:
    assert split_types(["a:token", " b:c:float_seq "]) == (
        ("a", "b:c"),
        {"a": "token", "b:c": "float_seq"},
    )
    for names in (["a:token", "b"], ["a:word"], [":token"], []):
        assert split_types(names) == (tuple(names), {})


def test_draft_follows_declared_types(log: Path) -> None:
    text = draft(str(log))
    schema = load_schema(text, "draft")
    assert (schema.label, schema.label_rule.at_least) == ("rating", 3)
    # Ids that count up are no row numbers, and few small amounts are numbers.
    assert schema.sparse == ("item_id", "user_id", "class")
    assert schema.dense == ("price", "vector[0]", "vector[1]")
    assert (schema.lists, schema.list_mark("class")) == (("class",), " ")
    vector = Vector(name="vector", length=2, list_delimiter=" ")
    assert schema.vectors == (vector,)
    assert "Vectors, whose numbers are inputs each: vector." in text


def test_rows_have_names_without_types(log: Path, tmp_path: Path) -> None:
    schema = LogSource.at(str(log)).schema(load_schema(draft(str(log)), "draft"))
    assert schema.header == tuple(TYPES)
    raw = read_raw(open_index(log, schema, cache=tmp_path / "cache").segments, schema)
    assert raw.rows == 300
    assert raw.numbers[:, 0].tolist() == [n % 9 for n in range(300)]
    assert raw.lists[0].lengths.tolist() == [2] * 300


def test_typed_header_of_request_is_accepted(log: Path) -> None:
    schema = LogSource.at(str(log)).schema(load_schema(draft(str(log)), "draft"))
    content = "\n".join([HEADER, ROWS[7]]).replace("\t", ",").encode()
    bodies = [
        open_body(content, "csv", schema=schema, max_rows=9),
        open_body(ROWS[7].encode(), "tsv", schema=schema, max_rows=9),
    ]
    raw, outcomes = make_reader(schema).read(bodies)
    assert outcomes == [slice(0, 1), slice(1, 2)]
    assert raw.categories[0].tolist() == raw.categories[1].tolist()


def test_names_with_other_colons_stay(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("y,a:token,b:word\n1,u,v\n")
    schema = Schema(label="y", sparse=("a:token", "b:word"))
    assert open_index(tmp_path / "log.csv", schema, cache=tmp_path / "cache").rows == 1
