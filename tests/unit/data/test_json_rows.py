"""Rows of JSON requests: plain ones become columns without an object for each value, and are the
same rows.
"""

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data.json_rows import split_rows
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.schema import Schema
from rayrec.serve import requests as served
from rayrec.serve.requests import RequestError, open_body
from rayrec.serve.row_readers import make_reader

TEXTS = Schema(
    label="click",
    dense=("age", "prix €"),
    sparse=("user", "city", "code"),
    integers=("code",),
    missing=("NA", "-1"),
    optional=("age", "prix €", "user", "city", "code"),
)
SHORT_CRITEO = Schema(
    label="label",
    dense=("i0", "i1"),
    sparse=("c0", "c1"),
    tokens="hexadecimal",
    optional=CRITEO.optional,
)
NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20),
    st.integers(-300, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["0", "-0", "-0.5", "1.50", "1e5", "1E-3", "2e400", "01", "+1", ".5", "1.", "7.0"]
    ),
)
STRINGS = st.one_of(
    st.sampled_from(
        ["", "a", " b ", "NA", "-1", "true", "07", "0a1b2c3d", "0A1B2C3D", "2024-05-01"]
    ),
    st.text(max_size=6),
)


@st.composite
def values(draw: st.DrawFn) -> str:
    """Return the text of a JSON value."""
    kind = draw(st.integers(0, 11))
    if kind < 4:
        number = draw(NUMBERS)
        return number if isinstance(number, str) else json.dumps(number)
    if kind < 9:
        return json.dumps(draw(STRINGS), ensure_ascii=draw(st.booleans()))
    return draw(st.sampled_from(["null", "true", "false", "[]", "[1]", "{}", '{"a": 1}', "nul"]))


@st.composite
def bodies(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """Return the body of a request that is mostly valid."""

    def blank() -> str:
        return draw(st.sampled_from(["", "", "", " ", "\n\t", "\r\n"]))

    def member(name: str) -> str:
        return f"{blank()}{json.dumps(name, ensure_ascii=False)}{blank()}:{blank()}{draw(values())}"

    known = st.sampled_from([*names] * 9 + ["other"])
    rows = [
        "{" + f"{blank()},".join(map(member, draw(st.lists(known, max_size=5)))) + blank() + "}"
        for _ in range(draw(st.integers(0, 5)))
    ]
    text = f'{{{blank()}"rows"{blank()}:{blank()}[{f"{blank()},".join(rows)}{blank()}]}}{blank()}'
    if draw(st.integers(0, 9)) == 0:  # Not quite JSON
        place = draw(st.integers(0, len(text) - 1))
        text = text[:place] + draw(st.sampled_from(["", ",", "}", '"', "\x00"])) + text[place + 1 :]
    return text.encode()


def answer_of(content: bytes, schema: Schema, *, as_objects: bool) -> Any:
    """Return the rows of a request, or its error."""
    try:
        with mock.patch.object(served, "_SPLIT_BYTES", 1 << 20 if as_objects else 0):
            body = open_body(content, "json", schema=schema, max_rows=100)
        raw, (outcome,) = make_reader(schema).read([body])
    except RequestError as error:
        return error.status, error.message, error.row, error.field
    if isinstance(outcome, RequestError):
        return outcome.status, outcome.message, outcome.row, outcome.field
    return raw


def check_same(content: bytes, schema: Schema) -> None:
    expected = answer_of(content, schema, as_objects=True)
    found = answer_of(content, schema, as_objects=False)
    if not isinstance(expected, RawBlock):
        assert found == expected
        return
    assert isinstance(found, RawBlock)
    assert found.rows == expected.rows
    for name in ("numbers", "categories", "missing"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@given(bodies(TEXTS.columns))
def test_rows_match_objects(content: bytes) -> None:
    check_same(content, TEXTS)


@given(bodies(SHORT_CRITEO.columns))
def test_hexadecimal_rows_match_objects(content: bytes) -> None:
    check_same(content, SHORT_CRITEO)


PLAIN = [
    {"age": 3, "prix €": -2.5, "user": "ü", "city": "NA", "code": 7, "click": 1},
    {},
    {"code": "0042", "city": None, "age": True, "prix €": 10**18 - 1},
    {"user": 5, "age": 1e20 / 1e2},
]


def test_plain_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_SPLIT_BYTES", 0)
    for rows, schema in (
        (PLAIN, TEXTS),
        ([{"i0": -4, "c1": "0a1b2c3d", "label": 1}, {"c0": "ffffffff"}], SHORT_CRITEO),
    ):
        content = json.dumps({"rows": rows}, ensure_ascii=False).encode()
        body = open_body(content, "json", schema=schema, max_rows=len(rows))
        assert body.split is not None
        assert body.num_rows == len(body.split) == len(rows)
        check_same(content, schema)
    assert body.split.lines(np.array([1, 2, 3, 4])) == b"0\t-4\t\t\t0a1b2c3d\n0\t\t\tffffffff\t\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"rows": [{"age": 1}, {"age": 2}, {"age": 3}]}', id="too-many-rows"),
        pytest.param(b'{"rows": []}', id="no-row"),
        pytest.param(b'{"rows": [{"age": [1]}]}', id="list"),
        pytest.param(b'{"rows": [{"age": {"a": 1}}]}', id="object"),
        pytest.param(b'{"rows": [{"user": "\\u0041"}]}', id="escape"),
        pytest.param(b'{"rows": [{"user": "\x1f"}]}', id="control-character"),
        pytest.param(b'{"rows": [{"user": "\xff"}]}', id="not-utf8"),
        pytest.param(b'{"rows": [{"age": 1, "age": 2}]}', id="repeated-name"),
        pytest.param(b'{"rows": [{"ages": 1}]}', id="unknown-name"),
        pytest.param(b'{"rows": [{"age": 1234567890123456789}]}', id="19-digits"),
        pytest.param(b'{"rows": [{"age": -0}]}', id="negative-zero"),
        pytest.param(b'{"rows": [{"age": 01}]}', id="leading-zero"),
        pytest.param(b'{"rows": [{"age": 1e400}]}', id="infinite"),
        pytest.param(b'{"rows": [{"age": 1}], "k": 3}', id="other-field"),
        pytest.param(b'{"rows": [{"age": 1}]} {}', id="trailing-text"),
        pytest.param(b'{"rows": [{"age": 1,}]}', id="trailing-comma"),
        pytest.param(b'{"rows": [{"age": 1}', id="cut"),
    ],
)
def test_other_requests_are_not_split(text: bytes) -> None:
    assert split_rows(text, TEXTS.columns, max_rows=2) is None


def test_request_for_another_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may switch models between the two steps."""
    monkeypatch.setattr(served, "_SPLIT_BYTES", 0)
    content = json.dumps({"rows": [{"age": 3, "user": "b"}]}).encode()
    other = TEXTS.replace(dense=("age",), optional=("age", "user"))
    body = open_body(content, "json", schema=TEXTS, max_rows=1)
    assert body.split is not None
    raw, outcomes = make_reader(other).read([body])
    expected = answer_of(content, other, as_objects=True)
    assert outcomes == [slice(0, 1)]
    np.testing.assert_array_equal(raw.numbers, expected.numbers)
    np.testing.assert_array_equal(raw.categories, expected.categories)


def test_objects_are_made_for_short_requests_only() -> None:
    for num_rows in (1, 500):
        content = json.dumps({"rows": [{"user": "a"}] * num_rows}).encode()
        body = open_body(content, "json", schema=TEXTS, max_rows=500)
        assert (body.split is None) == (num_rows == 1)
        assert len(body.objects()) == num_rows
