"""Answers of the HTTP application: scores, errors and counters."""

import asyncio
import csv
import hashlib
import io
import itertools
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from builders.click_models import (
    ANY,
    NUM_TOKENS,
    logits_of,
    make_app,
    make_model,
    make_preprocessor,
    row_object,
    row_text,
    token,
)
from builders.faults import fails_with
from builders.requests import Reply, ask, post, post_async, request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema
from rayrec.serve.app import ScoringApp, json_memory
from rayrec.serve.config import ServeConfig
from rayrec.serve.counters import Counters
from rayrec.serve.replica_models import ReplicaModels
from rayrec.serve.requests import RequestBody, RequestError, open_body
from rayrec.workloads.recsys.scorer import ClickScorer

TEXT = b"".join(row_text(number, known=False) for number in range(50))
ROWS = [row_object(line) for line in TEXT.splitlines()]
MODEL = make_model()


@pytest.fixture(scope="module")
def app() -> ScoringApp:
    return make_app(MODEL)


def error_of(reply: Reply, status: int) -> dict[str, Any]:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    result = reply.json()
    assert (set(result), set(result["error"])) == ({"error"}, {"message", "row", "field"})
    return result["error"]


# -- scores
def test_text_json_and_labelled_text_score_equally(app: ScoringApp) -> None:
    result = post(app, TEXT).json()
    assert (result["model"], result["preprocessor"]) == (MODEL.version, MODEL.preprocessor.hash())
    np.testing.assert_array_equal(np.array(result["logits"], np.float32), logits_of(MODEL, TEXT))
    np.testing.assert_allclose(
        result["scores"], 1 / (1 + np.exp(-np.array(result["logits"], np.float64))), rtol=1e-6
    )
    labelled = b"".join(
        b"%d\t%s\n" % (number % 2, line) for number, line in enumerate(TEXT.splitlines())
    )
    with_nulls = [
        {**dict.fromkeys(SCHEMA.dense + SCHEMA.sparse), "label": "whatever", **row} for row in ROWS
    ]
    odd_labels = b"".join(b"no label\t%s\n" % line for line in TEXT.splitlines())
    for content in (
        labelled,
        labelled.replace(b"\n", b"\r\n"),
        odd_labels,
        {"rows": ROWS},
        {"rows": with_nulls},
    ):
        assert post(app, content).json() == result
    one_by_one = [post(app, {"rows": [row]}).json() for row in ROWS[:5]]
    np.testing.assert_allclose(
        [one["logits"][0] for one in one_by_one], result["logits"][:5], rtol=1e-6, atol=1e-6
    )
    assert [one["unknown"][0] for one in one_by_one] == result["unknown"][:5]


def test_unknown_categories_are_counted_and_named(app: ScoringApp) -> None:
    unknown = {
        name: f"{token(column, NUM_TOKENS):08x}" for column, name in enumerate(SCHEMA.sparse)
    }
    expected = [[name for name in SCHEMA.sparse if row.get(name) == unknown[name]] for row in ROWS]
    assert sum(map(len, expected)) > 50
    before = _samples(app)
    result = post(app, TEXT, query="columns=true").json()
    assert result["unknown_columns"] == expected
    assert result["unknown"] == [len(names) for names in expected]
    assert "unknown_columns" not in post(app, {"rows": ROWS}, query="columns=false").json()
    after = _samples(app)
    counter_name = 'rayrec_serve_unknown_total{column="cat_3"}'
    assert after[counter_name] - before.get(counter_name, 0) == 2 * sum(
        "cat_3" in names for names in expected
    )


def test_clipped_numbers_are_counted_by_column() -> None:
    bounded = DenseColumn(lower=-1.0, upper=2.0, indicator=True)
    app = make_app(make_model(make_preprocessor(ANY, dense=(bounded, DenseColumn()))))
    assert (
        post(
            app,
            {
                "rows": [
                    {"age": 1e6, "price": 1e6},
                    {"age": -1e6},
                    {"age": 3.0},
                    {"age": None},
                    {},
                ]
            },
        ).status
        == 200
    )
    counts = {
        name: value
        for name, value in _samples(app).items()
        if "numbers_total" in name or "clipped_total" in name
    }
    assert counts == {
        'rayrec_serve_numbers_total{column="age"}': 3,
        'rayrec_serve_clipped_total{column="age"}': 2,
    }


def test_missing_category_is_not_unknown_unlike_hashed_and_bags() -> None:
    columns = tuple(
        SparseColumn(
            NUM_TOKENS,
            NUM_TOKENS,
            first_id=0,
            unknown_id=2,
            missing_id=2,
        )
        for _ in SCHEMA.sparse
    )
    shared = make_model(make_preprocessor(sparse=columns))
    assert (
        post(make_app(shared), TEXT).json()["unknown"]
        == post(make_app(MODEL), TEXT).json()["unknown"]
    )
    hashed = (
        SparseColumn(NUM_TOKENS + 2, NUM_TOKENS),
        *[SparseColumn(50, None)] * (len(SCHEMA.sparse) - 1),
    )
    vocabulary = np.array([token(0, number) for number in range(NUM_TOKENS)], np.uint32)
    result = post(
        make_app(make_model(make_preprocessor(sparse=hashed, tokens=vocabulary))),
        TEXT,
        query="columns=true",
    ).json()
    assert {name for names in result["unknown_columns"] for name in names} == {"cat_0"}
    bags = make_model(make_preprocessor(multi_hot=MultiHot(sizes=(3,) * len(SCHEMA.sparse))))
    result = post(make_app(bags), TEXT).json()
    assert result["unknown"] == post(make_app(MODEL), TEXT).json()["unknown"]
    np.testing.assert_array_equal(np.array(result["logits"], np.float32), logits_of(bags, TEXT))


def test_integer_buckets_are_categories() -> None:
    columns = tuple(SparseColumn(NUM_TOKENS + 2, NUM_TOKENS) for _ in SCHEMA.dense + SCHEMA.sparse)
    buckets = [
        np.arange(1, NUM_TOKENS + 1, dtype=np.uint32) + np.uint32(2**31) for _ in SCHEMA.dense
    ]
    tokens = [
        token(column, number)
        for column in range(len(SCHEMA.sparse))
        for number in range(NUM_TOKENS)
    ]
    vocabulary = np.concatenate([*buckets, np.array(tokens, np.uint32)])
    app = make_app(
        make_model(
            make_preprocessor(
                dense=(),
                sparse=columns,
                tokens=vocabulary,
                integer_buckets=True,
            )
        )
    )
    result = post(
        app,
        {
            "rows": [
                {"int_0": 1},
                {"int_0": 0},
                {},
                {"int_0": 1000, "int_3": -5},
            ]
        },
        query="columns=true",
    ).json()
    assert result["unknown_columns"] == [[], [], [], ["int_0", "int_3"]]


# -- a log of one's own
def test_custom_schema_scores_json_and_csv() -> None:
    app = APPS["own"]
    rows = [
        {
            "age": 3,
            "price": 1.5,
            "user": token(0, 1),
            "item": str(token(1, 0)),
            "tags": [token(2, 0), token(2, 1), None],
        },
        {
            "age": None,
            "price": -2e5,
            "user": "someone",
            "tags": ["a", str(token(2, 2)), "b"],
        },
        {"item": True, "click": 1, "importance": 0.5},
    ]
    result = post(app, {"rows": rows}, query="columns=true").json()
    assert (result["unknown"], result["unknown_columns"]) == (
        [0, 3, 1],
        [[], ["user", "tags"], ["item"]],
    )
    lines = [
        f"3,1.5,{token(0, 1)},{token(1, 0)},{token(2, 0)}|{token(2, 1)}",
        f',-2e5,"someone",,a|{token(2, 2)}|b',
        ",,,1,",
    ]
    bare = "\n".join(lines).encode()
    labelled = "\n".join("1,0.5," + line for line in lines).encode()
    header = b'"age",price,user,item,tags\n' + bare
    lines[0], lines[1] = lines[1].replace("someone", "some,one"), lines[0]
    quoted = "\n".join(lines).encode()
    turned = "\n".join(
        [
            "tags,click,user,item,age,price",
            f"{token(2, 0)}|{token(2, 1)},0,{token(0, 1)},{token(1, 0)},3,1.5",
        ]
    )
    for text in (bare, bare + b"\r\n", labelled, header):
        answer = csv_reply(app, text).json()
        assert (answer["logits"], answer["unknown"]) == (result["logits"], result["unknown"])
    assert csv_reply(app, quoted).json()["unknown"] == [3, 0, 1]
    assert csv_reply(app, turned.encode()).json()["unknown"] == [0]
    assert post(app, bare.replace(b",", b"\t")).json()["logits"] == result["logits"]


TEXTS = ANY.replace(dense=(), weight=None, header=("click", *ANY.sparse))
"""Every column is a category, so that any line could be a row."""
ONE = Schema(
    label="click", dense=(), sparse=("shop",), tokens="any", delimiter=",", header=("click", "shop")
)
ONE_HEXADECIMAL = Schema(
    label="click",
    dense=(),
    sparse=("shop",),
    tokens="hexadecimal",
)
SCHEMAS = {
    "criteo": SCHEMA,
    "own": ANY,
    "texts": TEXTS,
    "one": ONE,
    "one hexadecimal": ONE_HEXADECIMAL,
}
APPS = {name: make_app(make_model(make_preprocessor(schema))) for name, schema in SCHEMAS.items()}


def csv_reply(app: ScoringApp | str, text: bytes, parameters: str = "") -> Reply:
    """Score CSV, by the application of a schema if `app` names it."""
    return post(
        APPS[app] if isinstance(app, str) else app, text, media_type=f"text/csv{parameters}"
    )


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ("User,Item,Tags", "User"),
        ("user,user,tags", "user"),
        ("user,item,tags,price", "price"),
    ],
)
def test_wrong_header_is_rejected(header: str, field: str) -> None:
    text = f"{header}\n{'a,b,c,d' if field == 'price' else 'a,b,c'}\n".encode()
    error = error_of(csv_reply("texts", text, "; header=present"), 400)
    assert error["field"] == field
    assert field in error["message"]
    if field != "price":  # Undeclared, a line with other names than the columns' is a row
        for parameters in ("", "; header=absent"):
            assert csv_reply("texts", text, parameters).json()["unknown"] == [3, 3]


def test_csv_header_is_optional() -> None:
    app = APPS["texts"]
    rows = b"a,b,c\nuser,b,c\n"
    header = b"tags,user,item\n"
    turned = b"c,a,b\r\nc,user,b\r\n"
    as_json = {
        "rows": [
            {"user": "a", "item": "b", "tags": ["c"]},
            {"user": "user", "item": "b", "tags": ["c"]},
        ]
    }
    expected = post(app, as_json)
    mark = b"\xef\xbb\xbf"
    for text, media_type in (
        (rows, "text/csv"),
        (rows, 'text/csv; header="absent"'),
        (header + turned, "text/csv; header=present"),
        (mark + header + turned, "text/csv"),
        (mark + rows.replace(b",", b"\t"), "text/tab-separated-values"),
        (mark + json.dumps(as_json).encode(), "application/json"),
    ):
        assert post(app, text, media_type=media_type).json() == expected.json(), (text, media_type)
    assert error_of(csv_reply(app, rows, "; header=present"), 400)["field"] == "a"
    error_of(
        post(app, header.replace(b",", b"\t") + rows, media_type="text/tab-separated-values"), 400
    )
    assert error_of(csv_reply(app, b"\xff\xfe" + rows), 400)["row"] == 0
    assert (
        csv_reply(
            make_app(make_model(make_preprocessor(TEXTS)), max_rows=2), header + turned
        ).status
        == 200
    )


@pytest.mark.parametrize(
    "text",
    [
        b"a\n\nb\n",
        b"a\n\n",
        b"\na\n",
        b"\n",
        b"a\r\n\r\nb",
    ],
)
def test_empty_line_is_rejected(text: bytes) -> None:
    for name, line in (("one", b"a"), ("one hexadecimal", b"0000000a")):
        error = error_of(post(APPS[name], text.replace(b"a", line).replace(b"b", line)), 400)
        assert error["row"] == (0 if text.startswith(b"\n") else 1)
        assert "empty line" in error["message"]
    quoted = b'"a\n\nb",b,c\n\na,b,c\n'
    for three in (b"a,b,c\n\na,b,c\n", quoted):
        assert error_of(csv_reply("texts", three), 400)["row"] == 1
    assert csv_reply("texts", quoted.replace(b"\n\na", b"\na")).json()["unknown"] == [3, 3]


def test_quoted_line_ends_stay_and_rounded_floats_fail() -> None:
    good = b'u,"a ""\n\nb""","' + b"x" * 140_000 + b'\n"\n'
    assert csv_reply("texts", good * 3).json()["unknown"] == [3] * 3
    for text in (good + b"\n" + good, good + b"u,i,t\n\n\n" + good):
        assert (
            error_of(csv_reply("texts", text), 400)["message"]
            == f"row {1 + text.count(b'u,i,t')}: empty line"
        )
    assert (
        csv_reply(make_app(make_model(make_preprocessor(TEXTS)), max_rows=2), good * 2).status
        == 200
    )
    app = make_app(
        make_model(
            make_preprocessor(
                TEXTS.replace(sparse=("a\nb", 'c"', "tags"), header=("a\nb", 'c"', "tags"))
            )
        )
    )
    for parameters in ("", "; header=present"):
        assert csv_reply(app, b'tags,"c""","a\nb"\nt,u,x\nt,u,y\n', parameters).json()[
            "unknown"
        ] == [3, 3]
    app = APPS["own"]
    assert (
        post(app, {"rows": [{"item": 2.0**53 - 1}]}).json()
        == post(app, {"rows": [{"item": 2**53 - 1}]}).json()
    )
    assert (
        post(
            app,
            {
                "rows": [
                    {"item": 2**53 + 1},
                    {"item": -(2**63)},
                    {"item": 2**64 - 1},
                ]
            },
        ).status
        == 200
    )
    for value in ("9007199254740992.0", "-1e16"):
        error = error_of(
            post(
                app,
                f'{{"rows": [{{}}, {{"item": {value}}}]}}'.encode(),
                media_type="application/json",
            ),
            400,
        )
        assert (error["row"], error["field"]) == (1, "item")
        assert "2^53" in error["message"]


@pytest.mark.parametrize(
    "value", ["18446744073709551616", "-9223372036854775809", "123456789012345678901234567890"]
)
def test_json_integer_over_64_bits_is_explained(value: str) -> None:
    body = f'{{"rows": [{{}}, {{"item": {value}}}]}}'.encode()
    error = error_of(post(APPS["own"], body, media_type="application/json"), 400)
    assert error["message"] == "row 1: item is a number beyond 64 bits; send its digits as a string"
    assert post(APPS["own"], {"rows": [{"item": value}]}).status == 200


def test_repeated_json_names_are_rejected() -> None:
    app = APPS["own"]
    for content, field in (
        ('{"rows": [{}], "rows": [{}, {}]}', "rows"),
        (r'{"rows": [{"user": "a:\"b:", "item": "c", "\u0069tem": "d"}]}', "item"),
        ('{"rows": [{"age": {"a": 1, "a": 2}}]}', "a"),
    ):
        error = error_of(post(app, content.encode(), media_type="application/json"), 400)
        assert ("occurs twice" in error["message"], error["field"]) == (True, field)
    for text in ('a:b","c":"', "\\", '\\"', "::"):
        assert post(app, {"rows": [{"item": text, "user": text}, {"item": text}]}).json()[
            "unknown"
        ] == [2, 1]
    nested = b'{"rows": [' + b'{"age":' * 900 + b"1" + b"}" * 900 + b"]}"
    assert error_of(post(app, nested, media_type="application/json"), 400)["field"] == "age"


def _categories(schema: Schema) -> st.SearchStrategy[str | None]:
    if schema.tokens == "hexadecimal":
        return st.none() | st.integers(0, 2**32 - 1).map("{:08x}".format)
    strange = st.text(
        st.characters(codec="utf-8", exclude_characters="\0|"), min_size=1, max_size=6
    )
    return (
        st.none()
        | strange
        | st.sampled_from(
            [
                "user",
                "Item",
                "a,b",
                'q"q',
                "a\nb",
                "\r",
                "é",
                "1.5",
            ]
        )
    )


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]], list[int]]:
    """Return rows of a schema and a permutation."""
    name = draw(st.sampled_from(sorted(SCHEMAS)))
    schema = SCHEMAS[name]
    columns: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        schema.dense, st.none() | st.integers(-1000, 1000)
    )
    columns |= dict.fromkeys(schema.sparse, _categories(schema))
    columns |= dict.fromkeys(schema.lists, st.lists(_categories(schema).filter(bool), max_size=3))
    rows = draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=6))
    return name, rows, draw(st.permutations(range(len(rows))))


def _has_blanks(rows: list[dict[str, Any]]) -> bool:
    """Return whether a text of the rows begins or ends with a blank."""
    values = [value for row in rows for value in row.values()]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return any(text != text.strip(" \t") for text in texts if isinstance(text, str))


def _as_text(rows: list[dict[str, Any]], schema: Schema, *, header: bool) -> bytes:
    out = io.StringIO(newline="")
    hexadecimal = schema.tokens == "hexadecimal"
    settings: dict[str, Any] = {
        "delimiter": "\t" if hexadecimal else ",",
        "lineterminator": "\n" if hexadecimal else "\r\n",
        "quoting": csv.QUOTE_NONE,
    }
    columns = schema.unlabelled().columns
    if not hexadecimal:
        # Fields without quotes lose the blanks around them.
        settings["quoting"] = csv.QUOTE_ALL if _has_blanks(rows) else csv.QUOTE_MINIMAL
    writer = csv.writer(out, **settings)
    if header:
        writer.writerow(columns)
    for row in rows:
        fields = [
            "|".join(value) if isinstance(value, list) else value for value in map(row.get, columns)
        ]
        # Behind a label, since an empty line of a log is no row.
        writer.writerow(["0", *fields] if len(columns) == 1 and hexadecimal else fields)
    return out.getvalue().encode()


@settings(max_examples=60, deadline=None)
@given(bodies())
@example(
    (
        "one",
        [
            {"shop": " "},
            {"shop": ""},
            {"shop": "a "},
        ],
        [2, 0, 1],
    )
)
def test_every_row_is_scored_separately(body: tuple[str, list[dict[str, Any]], list[int]]) -> None:
    name, rows, order = body
    schema = SCHEMAS[name]
    app = APPS[name]
    alone = [post(app, {"rows": [row]}).json() for row in rows]
    expected = np.array([one["logits"][0] for one in alone])
    unknown = [one["unknown"][0] for one in alone]
    permuted = [rows[number] for number in order]
    replies = [post(app, {"rows": permuted})]
    if schema.tokens == "hexadecimal":
        replies.append(post(app, _as_text(permuted, schema, header=False)))
    else:
        for header, parameters in (
            (True, "; header=present"),
            (False, "; header=absent"),
            (True, ""),
        ):
            replies.append(csv_reply(app, _as_text(permuted, schema, header=header), parameters))
    for reply in replies:
        assert reply.status == 200, reply.body
        result = reply.json()
        np.testing.assert_allclose(result["logits"], expected[order], atol=1e-5)
        assert result["unknown"] == [unknown[number] for number in order]
        assert len(result["scores"]) == len(rows)


# -- refusals
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"rows": [{"int_0": ' + b"9" * 5000 + b"}]}", id="b-rows-int_0-b-9-5000-b"),
        pytest.param(
            b'{"rows": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="b-rows-b-100000-b-100000-b"
        ),
        pytest.param(b'{"rows": ' + b'[{"int_0":' * 50_000, id="b-rows-b-int_0-50000"),
        pytest.param(b'{"rows": [{"cat_5": "\\ud800"}]}', id="rows-cat_5-ud800"),
        pytest.param('{"rows": [{}]}'.encode("utf-16"), id="rows-.encode-utf-16"),
        pytest.param(b"\x1f\x8b\x08\x00", id="case-5"),
    ],
)
def test_invalid_json_is_rejected(content: Any, app: ScoringApp) -> None:
    error_of(post(app, content, media_type="application/json"), 400)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [
                b"\t",
                b"\n",
                b"7e0ccccf",
                b"-",
                b"3",
                b"\r",
            ]
        )
    ).map(b"".join)
)
def test_arbitrary_text_is_scored_or_rejected(content: bytes) -> None:
    assert post(APPS["criteo"], content).status in (200, 400)


def test_nonfinite_scores_return_422(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([0.5, np.nan, np.inf], np.float32)
    monkeypatch.setattr(
        ClickScorer,
        "predict",
        lambda self, rows: {self.heads[0].name: np.resize(logits, len(rows))},
    )
    app = make_app(MODEL)
    assert error_of(post(app, {"rows": [{}, {}, {}]}), 422)["row"] == 1
    assert post(app, {"rows": [{}]}).json()["logits"] == [0.5]


# -- limits
def test_content_types_and_request_sizes_are_checked(app: ScoringApp) -> None:
    error_of(post(app, TEXT, headers={"content-encoding": "gzip"}), 415)
    assert "with curl, add -H 'Content-Type: application/json'" in str(
        error_of(post(app, b"{}", media_type="application/x-www-form-urlencoded"), 415)
    )
    assert post(app, TEXT, media_type="Text/Tab-Separated-Values; charset=UTF-8").status == 200
    app = make_app(MODEL, max_body_bytes=2000, max_rows=3)
    assert post(app, b"".join(row_text(number) for number in range(3))).status == 200
    error_of(post(app, b"".join(row_text(number) for number in range(4))), 413)
    error_of(post(app, {"rows": [{}] * 4}), 413)
    error_of(post(app, b"x" * 2001), 413)
    # the first is refused before a byte of it is read
    for length, parts in (("9" * 30, [b""]), ("-1", [b"x" * 500] * 5)):
        error_of(
            ask(
                app,
                "POST",
                "/v1/score",
                headers={"content-type": "application/json", "content-length": length},
                parts=parts,
            ),
            413,
        )


@pytest.mark.parametrize(
    "headers",
    [pytest.param({}, id="chunked"), pytest.param({"content-length": "20000"}, id="announced")],
)
def test_body_is_read_up_to_four_times_limit(headers: dict[str, str]) -> None:
    app = make_app(MODEL, max_body_bytes=2000)
    sizes = []

    async def counted(
        scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        async def counting() -> Any:
            message = await receive()
            sizes.append(len(message["body"]))
            return message

        await app(scope, counting, send)

    form = {"content-type": "application/json", **headers}
    error_of(ask(counted, "POST", "/v1/score", headers=form, parts=[b"x" * 500] * 40), 413)
    assert sum(sizes) == 4 * 2000


def test_memory_of_waiting_requests_is_limited() -> None:
    app = make_app(MODEL, max_held_bytes=3 * 8 * len(TEXT))
    headers = {"content-type": "text/tab-separated-values"}

    async def scenario() -> list[int]:
        parts = [TEXT[:-1], 0.5, TEXT[-1:]]
        many = [request(app, "POST", "/v1/score", headers=headers, parts=parts) for _ in range(5)]
        replies = [reply for reply in await asyncio.gather(*many) if reply is not None]
        assert all(reply.status == 200 or "retry-after" in reply.headers for reply in replies)
        return sorted(reply.status for reply in replies)

    assert asyncio.run(scenario()) == [200, 200, 200, 503, 503]
    assert app.held_bytes == 0


@pytest.mark.parametrize("num_parts", [1, 2])
def test_memory_limit_rejects_one_request(num_parts: int) -> None:
    app = make_app(MODEL, max_held_bytes=3 * 8 * len(TEXT))
    blank = b" " * (2 * len(TEXT) // num_parts)  # Of JSON each byte counts for several
    reply = ask(
        app,
        "POST",
        "/v1/score",
        headers={"content-type": "application/json"},
        parts=[b'{"rows": [', *[blank] * num_parts, b"{}]}"],
    )
    assert "send them in several requests" in error_of(reply, 413)["message"]
    assert app.held_bytes == 0


_POOLS: list[pa.MemoryPool] = []
"""Pools that threads may still use after a call: Arrow frees memory through the pool that it came
from.
"""


def _peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak memory of Python, NumPy and Arrow during a call."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


LISTS = {
    "text/csv": (b"1,2,u,i," + b"|" * 1000 + b"\n") * 250,
    "text/tab-separated-values": (b"1\t2\tu\ti\t" + b"|".join([b"a"] * 500) + b"\n") * 250,
    "application/json": b'{"rows":['
    + b",".join([b'{"tags":[' + b",".join([b"1"] * 500) + b"]}"] * 250)
    + b"]}",
}


@pytest.mark.parametrize("media_type", LISTS)
def test_peak_memory_of_large_requests_is_limited(media_type: str) -> None:
    """Six requests at once, with lists of short categories, which grow most. Accepted ones stay
    within the limit.
    """
    content = LISTS[media_type]
    limit = 3 * 48 * len(content)
    app = make_app(
        make_model(make_preprocessor(ANY)),
        max_held_bytes=limit,
        max_batch_bytes=len(content),
        time_limit_s=120,
    )
    post(app, {"rows": [{}]})

    async def together() -> list[Reply]:
        return await asyncio.gather(
            *(post_async(app, content, media_type=media_type) for _ in range(6))
        )

    replies: list[Reply] = []
    peak = _peak_bytes(lambda: replies.extend(asyncio.run(together())))
    assert peak < limit + 8 * len(content)  # the requests themselves, and what is refused
    assert {reply.status for reply in replies} == {200, 503}
    assert app.held_bytes == 0
    error_of(
        post(
            make_app(make_model(make_preprocessor(ANY)), max_held_bytes=limit // 20),
            content,
            media_type=media_type,
        ),
        413,
    )


NESTED = ("[" * 900 + "]" * 900, '{"":' * 900 + "0" + "}" * 900)


@pytest.mark.parametrize(
    "row", ["{}", "[]", '{"":0}', "300", '"ab"', "1.5", '"é€"', '{"a":"bc","d":300}', *NESTED]
)
def test_parsed_json_fits_memory_estimate(row: str) -> None:
    content = f'{{"rows": [{",".join([row] * (200_000 // len(row)))}]}}'.encode()
    tracemalloc.start()
    try:
        result = orjson.loads(content)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result
    assert num_bytes <= json_memory(content, schema=SCHEMA)


def test_large_body_is_parsed_in_thread_with_any_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.serve.app._INLINE_BYTES", 1)
    opened_by: list[threading.Thread] = []

    def noted(*arguments: Any, **named: Any) -> RequestBody:
        opened_by.append(threading.current_thread())
        return open_body(*arguments, **named)

    monkeypatch.setattr("rayrec.serve.app.open_body", noted)
    app = make_app(MODEL)
    assert post(app, TEXT).status == 200
    error_of(post(app, b"\n\n"), 400)
    assert (len(opened_by), threading.main_thread() in opened_by) == (2, False)
    for content in (
        b"1\r2\r3",
        b"1\n2\n3\n",
        b"1\r\n2\r\n3\r\n",
        b"1\n2\r3\r\n",
        b'1,"\n\r\n"\n"2\n"\r3',
    ):
        assert (
            open_body(
                content,
                "csv",
                schema=TEXTS,
                max_rows=3,
                header=False,
            ).num_rows
            == 3
        )
        fails_with(
            RequestError,
            "3 rows in one request",
            open_body,
            content,
            "csv",
            schema=TEXTS,
            max_rows=2,
            header=False,
        )
        # one may be a header
        assert open_body(content, "csv", schema=TEXTS, max_rows=2).num_rows == 3
    # no quotes in such a log
    assert open_body(b'"\n"\n', "tsv", schema=SCHEMA, max_rows=3).num_rows == 2


def test_chunked_and_late_bodies_and_bearer_tokens() -> None:
    app = make_app(MODEL)
    headers = {"content-type": "text/tab-separated-values"}
    chunks = [TEXT[start : start + 100] for start in range(0, len(TEXT), 100)]
    assert (
        ask(app, "POST", "/v1/score", headers=headers, parts=chunks).json()
        == post(app, TEXT).json()
    )
    assert (
        asyncio.run(
            request(
                app,
                "POST",
                "/v1/score",
                headers=headers,
                parts=[b"1"],
                disconnect=True,
            )
        )
        is None
    )
    error_of(
        ask(
            make_app(MODEL, time_limit_s=0.2),
            "POST",
            "/v1/score",
            headers=headers,
            parts=[b"1", 5.0, b"2"],
        ),
        408,
    )
    app = make_app(MODEL, token_digest=hashlib.sha256(b"open sesame").digest())
    bearer = {"authorization": "Bearer open sesame"}
    assert post(app, TEXT, headers=bearer).status == 200
    assert ask(app, "GET", "/metrics", headers=bearer).status == 200
    for wrong in (
        {},
        {"authorization": "Bearer open"},
        {"authorization": "Basic open sesame"},
        {"authorization": "é"},
    ):
        reply = post(app, TEXT, headers=wrong)
        error_of(reply, 401)
        assert reply.headers["www-authenticate"] == "Bearer"
        assert b"sesame" not in reply.body
    for path in ("/metrics", "/openapi.json"):
        assert ask(app, "GET", path).status == 401
    for path in ("/", "/healthz", "/readyz"):
        assert ask(app, "GET", path).status == 200


def test_token_may_end_in_blank_byte_and_other_host_is_rejected(
    tmp_path: Path, monkeypatch: Any, app: ScoringApp
) -> None:
    token = "voilà \u0085".encode()
    (tmp_path / "token").write_bytes(token + b"\n")
    monkeypatch.setitem(os.environb, b"TOKEN", b"\xff" + token)
    for config, sent in (
        (ServeConfig(token_file=str(tmp_path / "token")), b" "),
        (ServeConfig(token_env="TOKEN"), b"\xff"),
    ):
        app = make_app(MODEL, token_digest=config.token_digest())
        assert post(app, TEXT, headers={"authorization": b"Bearer " + sent + token}).status == 200
    # Ray Serve's proxies would keep it open, and parse the body as another request.
    offer = {"connection": "upgrade", "upgrade": "h2c"}
    assert post(app, TEXT, headers=offer).headers["connection"] == "close"
    assert ask(app, "GET", "/nowhere", headers=offer).headers["connection"] == "close"
    assert "connection" not in post(app, TEXT).headers
    app = make_app(MODEL, allowed_hosts=("api.example.org",))
    for path in (
        "/",
        "/readyz",
        "/openapi.json",
        "/metrics",
        "/v1/score",
        "/nowhere",
    ):
        assert (
            "evil.example"
            in error_of(ask(app, "GET", path, headers={"host": "evil.example"}), 421)["message"]
        )
    assert ask(app, "GET", "/openapi.json", headers={"host": "api.example.org"}).status == 200


# -- other paths
def test_paths_and_methods(app: ScoringApp) -> None:
    assert ask(app, "GET", "/healthz").json() == {"status": "alive", "model": MODEL.version}
    ready = ask(app, "GET", "/readyz").json()
    assert ready == {
        "status": "ready",
        "model": MODEL.version,
        "preprocessor": MODEL.preprocessor_hash,
    }
    assert ask(app, "HEAD", "/readyz").status == 200  # the HTTP server drops the body
    error_of(ask(app, "GET", "/nowhere"), 404)
    error_of(ask(app, "GET", "/v1/score"), 405)
    assert [ask(app, *one).headers["allow"] for one in (("GET", "/v1/score"), ("DELETE", "/"))] == [
        "POST",
        "GET, HEAD",
    ]
    page = ask(app, "GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert b"http" not in page.body.replace(b"http://www.w3.org", b"")  # nothing from outside
    for root, path in itertools.product(("/clicks", "/clicks/", "/"), ("", "/", "/healthz")):
        assert ask(app, "GET", root.rstrip("/") + path or "/", root_path=root).status == 200


@pytest.mark.parametrize("path", ["/v1/score", "/v1/recommend", "/openapi.json", "/readyz"])
def test_server_without_model_is_not_ready(path: str) -> None:
    models = ReplicaModels({}.__getitem__, Counters())
    empty = ScoringApp(models, Counters(), config=ServeConfig())
    method = "POST" if "v1" in path else "GET"
    reply = ask(empty, method, path, headers={"content-type": "application/json"})
    assert error_of(reply, 503)["message"] == "no model is loaded yet"


def test_openapi_has_columns_and_valid_example(app: ScoringApp) -> None:
    result = ask(app, "GET", "/openapi.json").json()
    assert set(result["components"]["schemas"]["Row"]["properties"]) == {
        "label",
        *SCHEMA.dense,
        *SCHEMA.sparse,
    }
    example = result["paths"]["/v1/score"]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    assert set(example["rows"][0]) == {*SCHEMA.dense, *SCHEMA.sparse}
    assert post(app, example).json()["unknown"] == [0]


def _samples(app: ScoringApp) -> dict[str, float]:
    text = ask(app, "GET", "/metrics").body.decode()
    result = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            result[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return result


def test_metrics_have_seconds_of_requests() -> None:
    app = make_app(MODEL)
    start_s = time.perf_counter()
    post(app, TEXT)
    post(app, TEXT)
    total_s = time.perf_counter() - start_s
    result = _samples(app)
    assert (
        0.0
        < result["rayrec_serve_forward_seconds_sum"]
        < result["rayrec_serve_request_seconds_sum"]
        < total_s
    )


def test_metrics_count_requests_and_failure_affects_one_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app(MODEL)
    post(app, TEXT)
    post(app, TEXT)
    post(app, b"x")
    result = _samples(app)
    assert result['rayrec_serve_requests_total{path="/v1/score",status="200"}'] == 2
    assert result['rayrec_serve_requests_total{path="/v1/score",status="400"}'] == 1
    assert result[f'rayrec_serve_rows_total{{model="{MODEL.version}"}}'] == 100
    assert result['rayrec_serve_batch_rows_bucket{le="16.0"}'] == 0
    assert result['rayrec_serve_batch_rows_bucket{le="64.0"}'] == 2
    assert (
        result['rayrec_serve_batch_rows_bucket{le="+Inf"}']
        == result["rayrec_serve_batch_rows_count"]
        == 2
    )
    assert (
        result["rayrec_serve_batch_rows_sum"],
        result["rayrec_serve_request_seconds_count"],
    ) == (100, 3)
    assert result["rayrec_serve_waiting_rows"] == 0
    labels = f'model="{MODEL.version}",preprocessor="{MODEL.preprocessor_hash}"'
    assert result[f"rayrec_serve_replicas{{{labels}}}"] == 1
    with monkeypatch.context() as patch:
        patch.setattr("rayrec.serve.replica_models.OOVCounter.count", lambda *_: 1 / 0)
        assert "division" not in json.dumps(error_of(post(app, TEXT), 500))
    assert post(app, TEXT).status == 200
