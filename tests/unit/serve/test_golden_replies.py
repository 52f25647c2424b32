"""Golden status and bytes of replies to many valid and invalid request bodies, sequential and
batched.
"""

import asyncio
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from builders.click_models import ANY, make_app, make_model, make_preprocessor
from builders.golden import check_golden
from builders.golden_outputs import (
    CRITEO,
    OWN,
    counted,
    scoring_app,
    write_criteo_log,
    write_own_log,
)
from builders.requests import Reply, post_async, sample_values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rayrec.schema import Schema
from rayrec.serve.counters import Counters

JSON = "application/json"
TSV = "text/tab-separated-values"
CSV = "text/csv"
Request = tuple[str, bytes, str]
"""Media type, body, query."""
NUMBERS = [
    *(
        "true",
        "false",
        "null",
        "0",
        "-1",
        "3.0",
        "3.5",
        "-0.0",
        "1e2",
        "1e18",
        "-1e18",
        "1e17",
        "1e400",
        "NaN",
        "1.5e-300",
    ),
    *(
        "999999999999999999",
        "1000000000000000000",
        "9007199254740993",
        "9007199254740993.0",
        "-9223372036854775809",
    ),
    *("9223372036854775808", "18446744073709551616", "1" + "0" * 40),
]
STRINGS = [
    *(
        '""',
        '" "',
        '"3"',
        '"03"',
        '" 3"',
        '"true"',
        '"nan"',
        '"0000000a"',
        '"0000000A"',
        '"g000000a"',
        '"+0000001"',
    ),
    *(
        '"1234567"',
        '"123456789"',
        '"é"',
        '"\\t"',
        '"a\\nb"',
        '"\\u0000"',
        '"2022-02-03"',
        '"' + "x" * 70 + '"',
        '"u1|u2"',
    ),
]
OTHERS = [
    "[]",
    "{}",
    "[1]",
    '["a"]',
    "[[1]]",
    "[null]",
    '[1, "1", true, 2.0]',
    '[1.5, ""]',
    "[1e400]",
]


def _json(*rows: str) -> bytes:
    return f'{{"rows": [{", ".join(rows)}]}}'.encode()


def _envelopes(good: str) -> Iterator[Request]:
    """Yield requests around rows. `good` is a valid row."""
    for body in (
        *(
            b"",
            b"{}",
            b"[]",
            b"null",
            b"{",
            b"\xff",
            b'{"rows": null}',
            b'{"rows": {}}',
            b'{"rows": []}',
        ),
        *(
            b'{"rows": [{}], "more": 1}',
            b'{"rows": [{}], "rows": [{}]}',
            b'\xef\xbb\xbf{"rows": [{}]}',
            b'{"rows": [{}]} x',
        ),
        *(
            _json("{}"),
            _json("1"),
            _json("{}", "null"),
            _json("[]"),
            _json('"row"'),
            _json("{}", "[1]", "2"),
        ),
        *(
            _json('{"owner": 1}'),
            _json('{"' + "o" * 80 + '": 1}'),
            _json('{"label": 1, "click": 1}'),
            _json('{"like": "x"}'),
        ),
        *(
            _json(good, good.replace(":", " :")),
            _json(*[good] * 20),
            _json(*[good] * 21),
            _json('{"a": 1, "a": 2}'),
        ),
        *(b'{"rows": [' + b"[" * 200 + b"]" * 200 + b"]}", _json(*["{}"] * 20) + b" " * 200_000),
    ):
        yield JSON, body, ""
    yield JSON, _json(good, "{}"), "columns=true"
    yield JSON, _json(good, '{"owner": 1}'), "columns=true"
    yield JSON, _json(good), "columns=maybe"
    yield JSON, _json(good), "column=true"
    for media_type in (
        "",
        "text/plain",
        "application/json; charset=latin-1",
        "application/JSON; charset=UTF-8",
    ):
        yield media_type, _json(good), ""


def _damaged(line: str, delimiter: str) -> Iterator[str]:
    """Yield variants of a valid line."""
    fields = line.split(delimiter)
    yield from (
        line,
        line + "\n",
        line + "\r\n",
        line + "\r" + line,
        "\n" + line,
        f"{line}\n\n{line}",
        f"{line}\n\n",
    )
    yield from (
        line + delimiter,
        delimiter.join(fields[:-1]),
        line + "\x00",
        f"{line}\n{line[:-3]}",
        "\n".join([line] * 21),
    )
    yield from (
        line.replace(fields[0], f" {fields[0]} ", 1),
        line.replace(fields[0], f'"{fields[0]}"', 1),
        f'"{line}',
        "",
    )
    yield from (
        "\ufeff" + line,
        delimiter.join(["1", *fields]),
        delimiter.join(["no label", "0.5", *fields]),
        " ",
        "x" * 300,
    )
    for value in (
        "+3",
        "3.0",
        "03",
        "1e3",
        "-",
        "nan",
        "true",
        "9" * 18,
        "9" * 19,
        "9" * 400,
        "é",
        "0x10",
    ):
        yield delimiter.join([value, *fields[1:]])


def _criteo_requests() -> Iterator[Request]:
    line = "\t".join(
        ["3", "-1", "", "40"] + ["7"] * 9 + ["0000000a", "", "FFFFFFFF"] + ["05db9164"] * 23
    )
    yield from _envelopes(
        '{"int_0": 3, "int_2": -1, "cat_0": "05db9164", "cat_3": "0000000a", "cat_25": null}'
    )
    for value in (*NUMBERS, *STRINGS, *OTHERS):
        yield JSON, _json("{}", f'{{"int_3": {value}}}'), ""
        yield JSON, _json(f'{{"cat_7": {value}}}'), ""
    for text in _damaged(line, "\t"):
        yield TSV, text.encode(), ""
    last = line.rpartition("\t")[0]
    for value in (
        "0000000A",
        "000000a",
        "0000000aa",
        "g000000a",
        " 000000a",
        '"0000000a"',
        "é" * 4,
    ):
        yield TSV, f"{last}\t{value}\n".encode(), "columns=true"
    yield TSV, line.encode() + b"\xff", ""
    yield TSV, b"int_0\tint_1\n" + line.encode(), ""
    yield CSV, line.encode(), ""
    for label in ("present", "absent", "maybe"):
        for text in (line, f"1\t{line}", f"1\t{last}"):
            yield f"{TSV}; label={label}", text.encode(), ""


def _own_requests() -> Iterator[Request]:
    names = (*OWN.dense, *OWN.sparse, *OWN.list_weights)
    line = "3,1.5,7,u1,4,2022-02-03,true,1|-7|50|3,9|009|süd|true,tag 1|tag 2,0.5|2"
    good = (
        '{"age": 3, "price": 1.5, "user": "u1", "item": 4, "history": [1, -7, 50], "shops": ["9", '
        '"009", "true"], "tags": ["tag 1", "?"], "tag_weights": [0.5, 2], "flag": true, "day": '
        '"2022-02-03", "since": null}'
    )
    yield from _envelopes(good)
    for value in (*NUMBERS, *STRINGS, *OTHERS):
        for name in ("age", "item"):
            yield JSON, _json(f'{{"{name}": {value}}}'), ""
    for value in (*NUMBERS[::2], *STRINGS, *OTHERS):
        for name in ("user", "tags"):
            yield JSON, _json("{}", f'{{"{name}": {value}}}'), ""
    for value in (
        "[]",
        "[1]",
        '[1, null, "a", true]',
        "[1e19]",
        '["x"]',
        "null",
        "3",
        "[1, 2]",
        "[NaN]",
        "[null, null]",
    ):
        yield JSON, _json(f'{{"tag_weights": {value}, "tags": ["tag 1", "tag 2"]}}'), ""
        yield JSON, _json("{}", f'{{"shops": {value}, "history": [1, 2]}}'), "columns=true"
    for text in _damaged(line, ","):
        yield CSV, text.encode(), ""
    for folder, values in (
        (
            3,
            (
                '"u,1"',
                '"u""1"',
                '"u\n1"',
                '"open',
                " u1 ",
                "u\t1",
            ),
        ),
        (4, ("7.0", "07", "x", "1.5", "9" * 30)),
        (5, ("2022-02-30", "x", "2022-02-03 00:00:00")),
        (7, ("", "|", "1||2", "x|1", "1")),
        (9, ("tag 1", "tag 1|", "", "é|é")),
        (
            10,
            (
                "0.5",
                "x|1",
                "0.5|2|3",
                "",
                "nan|1",
                "1e400|1",
            ),
        ),
    ):
        fields = line.split(",")
        for value in values:
            yield (
                CSV,
                ",".join([*fields[:folder], value, *fields[folder + 1 :]]).encode(),
                "columns=true",
            )
    header = ",".join(names)
    for head in (
        header,
        header.upper(),
        header.replace("item", "itm"),
        ",".join(names[1:]),
        f"{header},age",
        f"{header},click",
    ):
        tail = ",0" if head.endswith(("age", "click")) else ""
        yield CSV, f"{head}\n{line}{tail}\n".encode(), ""
        yield f"{CSV}; header=present", f"{head}\r\n{line}{tail}\r\n{line}{tail}".encode(), ""
        yield f"{CSV}; header=absent", f"{head}\n{line}{tail}\n".encode(), ""
    yield CSV, b"age,user\n3,u1\n", ""
    yield CSV, f"{header}\n".encode(), ""
    yield CSV, f"\ufeff{header}\n{line}".encode("utf-16-le"), ""
    yield CSV, line.encode() + b"\xff", ""
    yield f"{CSV}; header=maybe", line.encode(), ""
    yield f"{CSV}; header=absent; label=present", line.encode(), ""
    for label in ("", "; label=present", "; label=absent"):
        yield (
            f"{CSV}; header=absent{label}",
            f"1,0.5,{line},0,3.5,1970-01-02\nx,,{line},?,,".encode(),
            "",
        )
    yield TSV, line.replace(",", "\t").encode(), ""
    yield TSV, f"{header}\n{line}".replace(",", "\t").encode(), ""


def _plain(reply: Reply, preprocessor: str) -> list[Any]:
    """Return status and body, with the scores separate. The hash of the Preprocessor is left out:
    logarithms in its means differ in the last bit between processors.
    """
    body = reply.body.decode().replace(preprocessor, "hash")
    if reply.status != 200:
        return [reply.status, body]
    scores, mark, rest = body.partition(',"unknown":')
    number = re.compile(r"(?<=[\[,])-?\d[-+.\de]*")
    return [
        reply.status,
        number.sub("~", scores) + mark + rest,
        [float(found) for found in number.findall(scores)],
    ]


@pytest.mark.parametrize("name", ["criteo", "own"])
def test_replies_are_golden(name: str, own_cache: None, tmp_path: Path) -> None:
    if name == "criteo":
        schema = CRITEO
        log = write_criteo_log(tmp_path, rows=400)
        requests = list(_criteo_requests())
    else:
        schema = OWN
        log = write_own_log(tmp_path / "own", rows=400)
        requests = list(_own_requests())
        schema = schema.replace(header=schema.columns)  # The order of the requests' lines
    preprocessor = counted(schema, log, tmp_path / "preprocessor")
    app = scoring_app(preprocessor)

    async def submit(*, together: bool) -> list[Reply]:
        posts = [
            post_async(app, body, media_type=media_type, query=query)
            for media_type, body, query in requests
        ]
        return await asyncio.gather(*posts) if together else [await post for post in posts]

    keys = [
        f"{n} {media_type}{query and '?' + query} {body[:90]!r}"
        for n, (media_type, body, query) in enumerate(requests)
    ]
    for together in (False, True):
        replies = asyncio.run(submit(together=together))
        plain = [_plain(reply, preprocessor.hash()) for reply in replies]
        check_golden(f"replies_of_{name}", dict(zip(keys, plain, strict=True)), tolerance=1e-4)


# -- The OpenAPI document, held against a fuzzer, and counters
TOKEN = "open sesame"
FEW = Schema(
    tokens="hexadecimal", label="label", dense=("int_0", "int_1"), sparse=("cat_0", "cat_1")
)
"""Of the kind of Criteo's, with fewer columns, which a fuzzer tries more of."""
REFUSED = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 413, 415, 422]}}}
)
"""Too many rows are 413, which is none of the fuzzer's own."""
LAX = settings(
    max_examples=100,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)
TEXTS = ("text/tab-separated-values", "text/csv", "text/plain", "application/x-ndjson")


@schemathesis.serializer(*TEXTS)
def _as_text(context: Any, value: Any) -> bytes | Any:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("schema", "with_token"), [(FEW, False), (ANY, True)], ids=["hexadecimal", "any"]
)
def test_fuzzer_passes(schema: Schema, with_token: bool) -> None:
    line = st.tuples(*[st.sampled_from(["", "3", "-7", "7e0ccccf"])] * len(schema.columns)).map(
        "\t".join
    )
    for media_type in TEXTS:
        schemathesis.openapi.media_type(media_type, line)
    digest = hashlib.sha256(TOKEN.encode()).digest() if with_token else None
    app = make_app(
        make_model(make_preprocessor(schema)),
        token_digest=digest,
        max_rows=5,
        allowed_hosts=("testserver",),
    )
    headers = {"authorization": f"Bearer {TOKEN}"} if with_token else {}
    fuzzed = schemathesis.openapi.from_asgi("/openapi.json", app, config=REFUSED, headers=headers)
    seen: set[tuple[str, int]] = set()

    def check(case: schemathesis.Case) -> None:
        response = case.call(headers=headers)
        # Lines of text have a grammar that a JSON schema does not tell; there only the answer is
        # looked at.
        left_out = (
            [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
            if case.media_type in TEXTS
            else []
        )
        case.validate_response(response, headers=headers, excluded_checks=left_out)
        seen.add((case.path, response.status_code))

    for result in fuzzed.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode.is_positive or operation.body:  # nothing of the others can be wrong
                LAX(given(operation.as_strategy(generation_mode=mode))(check))()
    assert {status for path, status in seen if path == "/v1/score"} >= {200, 400}


def test_nan_difference_is_counted_but_not_summed() -> None:
    counters = Counters()
    name = "rayrec_serve_shadow_score_difference"
    counters.shadow_score_difference.observe(np.array([[0.25, math.nan], [1e-6, 0.0]]))
    values = sample_values(counters.snapshot())
    assert [values[f"{name}_bucket", (("le", bound),)] for bound in ("1e-06", "0.1", "+Inf")] == [
        2,
        2,
        4,
    ]
    assert (values[f"{name}_count", ()], values[f"{name}_sum", ()]) == (4, 0.250001)
