"""Kernels of features against their definitions, and the definitions themselves."""

import struct
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.features.definitions import DEFINITIONS, bucketize, value_of
from rayrec.data.features.functions import KERNELS, evaluate
from rayrec.data.features.inputs import as_text
from rayrec.data.logs.column_values import text_tokens
from rayrec.formula.fitted import FITTED
from rayrec.formula.tree import Lookup, Type, parse, to_json
from rayrec.formula.types import FUNCTIONS, check

TYPES = {
    "x": Type("number"),
    "y": Type("number"),
    "c": Type("category"),
    "d": Type("text"),
    "t": Type("time"),
    "u": Type("time"),
    "l": Type("category", is_list=True),
    "k": Type("text", is_list=True),
    "m": Type("text", is_list=True),
    "v": Type("number", is_list=True),
}
ARROW = {
    "number": pa.float64(),
    "category": pa.large_string(),
    "text": pa.large_string(),
    "time": pa.int64(),
}
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 10.0, -3.5, 5e-324, 1.7e308, -1.7e308, 1e-17, 2.0**53]),
    st.integers(-20, 20).map(float),
)
WORDS = [
    *("a", "A", "b", "true", "False", "0", "-1", "007", "+5", "1e3", " 2.5\t", "5.0", "nan", "inf"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "1e999", "+1e-400"),
    *(
        "Straße, İstanbul ǅ",
        "a,b,,c",
        ",",
        " ",
        "東京、タワー",
        "x—y",
        "e\u0301🙂",
        "\x1f",
        "ß1 ½²",
    ),
    *("123456789012345678901234567890", "0.1", ".5", "5.", "-.5e+3", "1_000", "٣", "a\nb"),
]
TEXTS = st.one_of(
    st.sampled_from(WORDS),
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
        min_size=1,
        max_size=9,
    ),
)
CHANGES = [
    int(datetime(*day, 1, tzinfo=UTC).timestamp()) * 10**6
    for day in [(2024, 3, 31), (2024, 10, 27), (2024, 11, 3), (2024, 3, 10), (1945, 5, 24)]
]
"""Hours in which Berlin and New York change their clocks."""
TIMES = st.one_of(
    st.sampled_from(CHANGES).flatmap(lambda time: st.integers(time - 9 * 10**9, time + 22 * 10**9)),
    st.integers(-(2**51), 2**53),
    st.integers(-(2**62) + 1, 2**62 - 1),
    st.sampled_from([0, -1, -62_135_510_400_000_001, 253_402_214_399_999_999]),
)
ITEMS = st.sampled_from(["a", "b", "ü", "5", "7"])
PAIRS = ["a:0.5", "a:-2", "b:1e3", "a:", ":5", "x:y:.5", "c:1e999", "c:0", "b:nan", "ü:007"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "x": NUMBERS,
    "y": NUMBERS,
    "c": TEXTS,
    "d": TEXTS,
    "t": TIMES,
    "u": TIMES,
    "l": st.lists(ITEMS, max_size=5),
    "k": st.lists(ITEMS | st.sampled_from(PAIRS), max_size=5),
    "m": st.lists(st.sampled_from(PAIRS), max_size=5),
    "v": st.lists(NUMBERS, max_size=20),
}
ROWS = st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()})
DIGITS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)).map(str)
INTEGER_ROWS = st.fixed_dictionaries(
    {
        **{name: st.none() | values for name, values in VALUES.items()},
        **dict.fromkeys("cd", st.none() | DIGITS),
        **dict.fromkeys("lk", st.none() | st.lists(DIGITS, max_size=5)),
    }
)
FORMS = st.fixed_dictionaries(
    {
        **dict.fromkeys("cd", st.sampled_from(["text", "integers", "dictionary"])),
        **dict.fromkeys("lk", st.sampled_from(["text", "integers"])),
    }
)
"""Forms of columns of categories that are all integers."""
FORMULAS = [
    *(
        "number(d)",
        "bucketize(x, [-3.5, 0, 1, 10])",
        "log(x)",
        "clip(x, -3.5, 10)",
        "clip(x, 0, 0)",
    ),
    *("hash(c, 1000)", "hash(d, 1)", "hash(c, 2147483648)", "cross(c, d)", "cross(c, 'b', c)"),
    *("cross(c, d, 97)", "cross(c, d, c, 97)", "concat(l, k)", "concat(v, v)", "concat(l, k, l)"),
    *("lower(d)", "split(d, ',')", "split(d, 'a,')", "tokens(d)", "ngrams(d, 1)", "ngrams(d, 3)"),
    *("hour(t)", "hour(t, 'Europe/Berlin')", "hour(t, 'America/New_York')"),
    *("weekday(t)", "weekday(t, 'Europe/Berlin')", "weekday(t, 'Asia/Kolkata')"),
    *("age(t, u)", "len(l)", "len(v)", "last(l, 2)", "last(v, 3)", "overlap(l, k)"),
    *("dot(m, k)", "dot(l, m)", "dot(m, m)", "dot(concat(k, l), m)"),
    *("count_in(l, 'a')", "count_in(k, c)", "coalesce(x, y)", "coalesce(c, d, 'none')"),
    *("coalesce(l, k)", "coalesce(t, u)", "coalesce(v, v)", "when(x < y, x, y)"),
    *(
        "when(x == y, l, k)",
        "when(x <= 0, t, u)",
        "when(x != y, v, last(v, 1))",
        "when(x > 1, c, d)",
    ),
    *(
        "when(x >= y, 1, 0)",
        "when(c == d, 'same', d)",
        "when(c != 'a', x, 0)",
        "when(x in [0, 1], 1, 2)",
    ),
    *("when(c in ['a', '0'], x, y)", "when(c in [0, 7], 'yes', c)"),
    *(f"aggregate(v, '{mode}')" for mode in ("sum", "mean", "min", "max", "count")),
    *("x + y", "x - y", "x * y", "x / y", "-x", "x / 0"),
    "log(coalesce(number(d), x / y, 0)) * 2",
    "cross(bucketize(log(x), [-1, 0, 1]), hour(t, 'Europe/Berlin'), c, 1000)",
    "overlap(tokens(lower(d)), concat(last(l, 2), k))",
    "len(last(ngrams(coalesce(d, c), 2), 3)) - aggregate(concat(v, last(v, 2)), 'mean')",
    "hash(when(x < 0, weekday(t), coalesce(c, hour(u), 'late')), 50)",
    "aggregate(last(v, 2), 'sum')",
    "count_in(split(d, ','), lower(c)) + when(len(l) == 0, 1, age(t, u))",
]


def arrow(rows: list[dict[str, Any]], forms: dict[str, str]) -> dict[str, pa.Array]:
    """Return canonical columns as slices, since files' columns are slices too."""
    columns = {}
    for name, kind in TYPES.items():
        inner = ARROW[kind.kind]
        values = [row[name] for row in rows]
        filler = values[:1] or [None]
        array = pa.array([*filler, *values], pa.large_list(inner) if kind.is_list else inner)
        columns[name] = in_form(array, forms.get(name, "text"))[1:]
    return columns


def in_form(array: pa.Array, form: str) -> pa.Array:
    if form == "dictionary":
        return array.dictionary_encode()
    is_list = pa.types.is_large_list(array.type)
    integers = pa.large_list(pa.int64()) if is_list else pa.int64()
    return array.cast(integers) if form == "integers" else array


def no_tables(*_: Any) -> Any:
    raise AssertionError


def bits(value: Any) -> Any:
    """Return a value in which 0.0 and -0.0 differ."""
    if isinstance(value, list):
        return [bits(item) for item in value]
    return struct.pack("<d", value) if isinstance(value, float) else value


def results(
    formula: str,
    rows: list[dict[str, Any]],
    forms: dict[str, str] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Return what the kernels, of columns in `forms`, and what the definitions make of rows."""
    checked = check(parse(formula), TYPES)
    array = evaluate(checked.node, arrow(rows, forms or {}), len(rows), no_tables)
    array.validate(full=True)
    inner = ARROW[checked.type.kind]
    if inner == pa.large_string():
        array = as_text(array)
    assert array.type == (pa.large_list(inner) if checked.type.is_list else inner)
    node = to_json(checked.node)
    return array.to_pylist(), [value_of(node, row, no_tables) for row in rows]


def value(formula: str, **row: Any) -> Any:
    """Return a kernel's value, which its definition must have too."""
    kernel, definition = results(formula, [{**dict.fromkeys(TYPES), **row}])
    assert bits(kernel) == bits(definition)
    return kernel[0]


@pytest.mark.parametrize("formula", FORMULAS)
@given(rows=st.lists(ROWS, max_size=6))
@settings(max_examples=15, deadline=None)
def test_kernel_equals_definition(formula: str, rows: list[dict[str, Any]]) -> None:
    kernel, definition = results(formula, rows)
    assert bits(kernel) == bits(definition)


@pytest.mark.parametrize("formula", FORMULAS)
@given(rows=st.lists(INTEGER_ROWS, max_size=6), forms=FORMS)
@settings(max_examples=15, deadline=None)
def test_kernel_of_integers_equals_definition(
    formula: str,
    rows: list[dict[str, Any]],
    forms: dict[str, str],
) -> None:
    kernel, definition = results(formula, rows, forms)
    assert bits(kernel) == bits(definition)


@pytest.mark.parametrize("form", ["text", "integers"])
@pytest.mark.parametrize("formula", ["overlap(l, k)", "count_in(l, c)"])
def test_items_of_long_lists_are_counted(form: str, formula: str) -> None:
    random = np.random.default_rng(0)
    rows = []
    for length in range(80):
        lists = random.integers(-40, 40, (2, length)).astype(str).tolist()
        rows.append({**dict.fromkeys(TYPES), "l": lists[0], "k": lists[1], "c": "7"})
    kernel, definition = results(formula, rows, dict.fromkeys("lkc", form))
    assert kernel == definition
    assert max(kernel) > 2


@pytest.mark.parametrize("num_edges", [1, 2, 3, 4, 7, 19, 64, 4096])
def test_value_is_in_bucket_of_definition(num_edges: int) -> None:
    edges = [float(edge) for edge in range(num_edges)]
    near = [value for edge in edges[-9:] for value in (edge, np.nextafter(edge, -1), edge + 0.5)]
    values = [-0.0, -1.0, 5e-324, 1e300, *map(float, near), None]
    buckets = KERNELS["bucketize"](pa.array([7.0, *values])[1:], edges)
    expected = [None if value is None else int(bucketize(value, edges)) for value in values]
    assert buckets.to_pylist() == expected


def test_null_list_of_integers_with_items_has_none() -> None:
    items = pa.array([1, 2, 3])
    offsets = pa.array([0, 2, 3], pa.int64())
    lists = pa.LargeListArray.from_arrays(offsets, items, mask=pa.array([True, False]))
    node = check(parse("len(last(l, 1))"), TYPES).node
    assert evaluate(node, {"l": lists}, 2, no_tables).to_pylist() == [0.0, 1.0]


def test_hash_ignores_form_of_integer() -> None:
    row = {**dict.fromkeys(TYPES), "c": "-9223372036854775808"}
    in_text, _ = results("hash(c, 1000)", [row])
    in_integers, _ = results("hash(c, 1000)", [row], {"c": "integers"})
    assert in_integers == in_text


def call(form: str, *arguments: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return formulas of a form, with an argument at each pair of braces."""
    return st.tuples(*arguments).map(lambda texts: form.format(*texts))


def nested(leaf: str, *calls: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    # A column is the first choice, at which a formula ends.
    return st.one_of(st.sampled_from(leaf.split()), *calls)


NUMBER: st.SearchStrategy[str] = st.deferred(
    lambda: nested(
        "x y",
        call("({} {} {})", NUMBER, st.sampled_from("+-*/"), NUMBER),
        call("log(number({}))", CATEGORY),
        call("clip({}, -5, 1e3)", NUMBER),
        call("coalesce({}, {}, 0)", NUMBER, NUMBER),
        call("when({} < {}, {}, -1)", NUMBER, NUMBER, NUMBER),
        call("aggregate({}, '{}')", SCORES, st.sampled_from(["sum", "mean", "min", "max"])),
        call("overlap({}, {})", ITEM_LISTS, ITEM_LISTS),
        call("count_in({}, {})", ITEM_LISTS, CATEGORY),
        call("dot({}, {})", ITEM_LISTS, ITEM_LISTS),
        call("len({})", st.one_of(ITEM_LISTS, SCORES)),
    )
)
CATEGORY: st.SearchStrategy[str] = st.deferred(
    lambda: nested(
        "c d hour(t) weekday(u,'America/New_York')",
        call("lower({})", CATEGORY),
        call("bucketize({}, [-1, 0, 1, 1e9])", NUMBER),
        call("hash({}, 7)", CATEGORY),
        call("cross({}, {})", CATEGORY, CATEGORY),
        call("coalesce({}, {}, 'none')", CATEGORY, CATEGORY),
        call("when({} == {}, {}, {})", CATEGORY, CATEGORY, CATEGORY, CATEGORY),
        call("when({} in ['0', '1', 'a'], 'yes', {})", CATEGORY, CATEGORY),
    )
)
ITEM_LISTS: st.SearchStrategy[str] = st.deferred(
    lambda: nested(
        "l k m",
        call("tokens({})", CATEGORY),
        call("split({}, ',')", CATEGORY),
        call("ngrams({}, 2)", CATEGORY),
        call("last({}, 2)", ITEM_LISTS),
        call("concat({}, {})", ITEM_LISTS, ITEM_LISTS),
        call("coalesce({}, {})", ITEM_LISTS, ITEM_LISTS),
        call("when({} != {}, {}, {})", NUMBER, NUMBER, ITEM_LISTS, ITEM_LISTS),
    )
)
SCORES: st.SearchStrategy[str] = st.deferred(
    lambda: nested("v", call("last({}, 3)", SCORES), call("concat({}, {})", SCORES, SCORES))
)


@given(formula=st.one_of(NUMBER, CATEGORY, ITEM_LISTS), rows=st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_kernels_of_random_formula_equal_definitions(
    formula: str,
    rows: list[dict[str, Any]],
) -> None:
    kernel, definition = results(formula, rows)
    assert bits(kernel) == bits(definition)


def test_functions_have_tested_kernels() -> None:
    used = " ".join(FORMULAS)
    operators = {"add", "subtract", "multiply", "divide"}
    # A lookup has a table, and fitted functions become others.
    plain = set(FUNCTIONS) - {"lookup", *FITTED}
    assert plain <= set(KERNELS)
    assert set(KERNELS) - {"len", "coalesce", "when"} == set(DEFINITIONS)
    assert not [name for name in plain - operators if f"{name}(" not in used]


@pytest.mark.parametrize(
    ("formula", "row", "expected"),
    [
        ("number(d)", {"d": " -1.5e3\t"}, -1500.0),
        ("dot(k, m)", {"k": ["a:2", "b", "c:9"], "m": ["a:.5", "b:3", "a:1"]}, 6.0),
        ("dot(k, m)", {"k": ["a:b", "a:x"], "m": ["a:b:4"]}, 4.0),
        ("dot(k, m)", {"k": [], "m": ["a:1"]}, 0.0),
        ("dot(k, m)", {"k": ["a"], "m": None}, None),
        ("number(d)", {"d": "true"}, 1.0),
        ("number(d)", {"d": "12 EUR"}, None),
        ("number(d)", {"d": "NaN"}, None),
        ("number(d)", {"d": "1e999"}, None),
        ("bucketize(x, [0, 10])", {"x": -1.0}, "0"),
        ("bucketize(x, [0, 10])", {"x": 0.0}, "1"),
        ("bucketize(x, [0, 10])", {"x": 10.0}, "2"),
        ("log(x)", {"x": -(np.e - 1)}, -1.0),
        ("log(x)", {"x": None}, None),
        ("clip(x, 0, 1)", {"x": 7.0}, 1.0),
        ("cross(c, d)", {"c": "a", "d": "b"}, "a\x1fb"),
        ("cross(c, d, 10)", {"c": "a", "d": None}, None),
        ("concat(l, k, l)", {"l": ["a"], "k": ["b", "b"]}, ["a", "b", "b", "a"]),
        ("concat(l, k)", {"l": ["a"], "k": None}, None),
        ("lower(d)", {"d": "ÄBC İ"}, "Äbc İ"),
        ("split(d, ', ')", {"d": "a, b, , c,"}, ["a", "b", "c,"]),
        ("split(d, ',')", {"d": ","}, []),
        ("tokens(d)", {"d": "L'été 2024—東京、x_y"}, ["L", "été", "2024", "東京", "x", "y"]),
        ("ngrams(d, 2)", {"d": "aé東"}, ["aé", "é東"]),
        ("ngrams(d, 3)", {"d": "ab"}, []),
        ("hour(t)", {"t": -1}, "23"),
        ("weekday(t)", {"t": 0}, "3"),
        ("weekday(t)", {"t": -3 * 24 * 3600 * 10**6 - 1}, "6"),
        ("hour(t)", {"t": 2**61}, None),
        ("hour(t)", {"t": 253_402_214_400_000_000}, None),
        ("hour(t)", {"t": -62_135_510_400_000_000}, "0"),
        ("age(t, u)", {"t": 1_500_000, "u": -1_000_000}, 2.5),
        ("len(l)", {"l": None}, 0.0),
        ("len(l)", {"l": ["a", "a"]}, 2.0),
        ("last(l, 2)", {"l": ["a", "b", "5"]}, ["b", "5"]),
        ("overlap(l, k)", {"l": ["a", "a", "b"], "k": ["a", "5", "a"]}, 1.0),
        ("overlap(l, k)", {"l": [], "k": ["a"]}, 0.0),
        ("count_in(l, c)", {"l": ["a", "b", "a"], "c": "a"}, 2.0),
        ("coalesce(x, y, 7)", {"x": None, "y": None}, 7.0),
        ("when(x < 1, 'low', c)", {"x": 0.0, "c": None}, "low"),
        ("when(x < 1, 'low', 'high')", {"x": None}, None),
        ("when(c in ['a', '5'], 1, 0)", {"c": "5"}, 1.0),
        ("aggregate(v, 'sum')", {"v": [1e16, 1.0, 1.0, -1e16]}, 0.0),
        ("aggregate(v, 'sum')", {"v": []}, 0.0),
        ("aggregate(v, 'mean')", {"v": [1.0, 2.0]}, 1.5),
        ("aggregate(v, 'mean')", {"v": []}, None),
        ("aggregate(v, 'max')", {"v": [-3.0, -2.0]}, -2.0),
        ("aggregate(v, 'count')", {"v": []}, 0.0),
        ("aggregate(v, 'count')", {"v": None}, None),
        ("x / y", {"x": 1.0, "y": 0.0}, None),
        ("x / y", {"x": 1e308, "y": 1e-308}, None),
        ("x - 2 * y", {"x": 1.0, "y": 3.0}, -5.0),
    ],
)
def test_function_returns_value(formula: str, row: dict[str, Any], expected: Any) -> None:
    assert bits(value(formula, **row)) == bits(expected)


@pytest.mark.parametrize(
    ("zone", "time", "hour"),
    [
        pytest.param("Europe/Berlin", "2024-03-31T00:59:59", "1", id="before a gap"),
        pytest.param("Europe/Berlin", "2024-03-31T01:00:00", "3", id="after a gap"),
        pytest.param("Europe/Berlin", "2024-10-27T00:30:00", "2", id="first of a fold"),
        pytest.param("Europe/Berlin", "2024-10-27T01:30:00", "2", id="second of a fold"),
        pytest.param("America/New_York", "2024-03-10T07:00:00", "3", id="New York"),
        pytest.param("Europe/Berlin", "1945-06-01T12:00:00", "15", id="double summer time"),
        pytest.param("Europe/Berlin", "1800-01-01T00:10:00", "1", id="local mean time"),
        pytest.param("Europe/Berlin", "2050-07-01T12:00:00", "14", id="after the listed years"),
        pytest.param("Asia/Kolkata", "2024-01-01T18:29:59", "23", id="half an hour"),
    ],
)
def test_hour_follows_clocks_of_zone(zone: str, time: str, hour: str) -> None:
    moment = datetime.fromisoformat(time).replace(tzinfo=UTC)
    micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert value(f"hour(t, '{zone}')", t=micros) == hour


def test_changes_within_many_spans_match_definition() -> None:
    times = np.random.default_rng(0).integers(-(2**51), 2**52, 3000).tolist()
    rows = [{**dict.fromkeys(TYPES), "t": time} for time in times]
    kernel, definition = results("hour(t, 'Australia/Lord_Howe')", rows)
    assert kernel == definition


@pytest.mark.parametrize("text", ["a", "7", "-1", "007", "true", "9223372036854775808"])
def test_hash_is_row_of_mixed_token(text: str) -> None:
    token = np.zeros(1, np.uint64)
    text_tokens(pa.array([text], pa.large_string()), token)
    column = SparseColumn(1000, None, first_id=0, mixed=True)
    row = column.encode(token, None, lambda tokens: tokens, np.dtype(np.int64))
    assert value("hash(c, 1000)", c=text) == str(row[0])


def test_cross_hashes_joined_text() -> None:
    assert value("cross(c, d, 1000)", c="a", d="b") == value("hash(c, 1000)", c="a\x1fb")


def test_lookup_gets_keys_and_type() -> None:
    node = check(parse("log(lookup(items, lower(c), 'x', price))"), TYPES).node
    calls = []

    def look_up(call: Lookup, keys: list[pa.Array], kind: Type) -> pa.Array:
        calls.append((call.table, call.column, [key.to_pylist() for key in keys], kind))
        return pa.array([None, 0.0])

    array = evaluate(node, {"c": pa.array(["A", None], pa.large_string())}, 2, look_up)
    assert array.to_pylist() == [None, 0.0]
    assert calls == [("items", "price", [["a", None], ["x", "x"]], Type("number"))]


def test_definition_of_lookup_gets_keys_and_type() -> None:
    node = to_json(check(parse("len(lookup(items, lower(c), 'x', tags))"), TYPES).node)
    calls = []

    def look_up(*arguments: Any) -> list[str]:
        calls.append(arguments)
        return ["a", "b"]

    assert value_of(node, {"c": "A"}, look_up) == 2.0
    assert calls == [("items", ["a", "x"], "tags", {"kind": "category", "is_list": True})]


@pytest.mark.parametrize(
    "formula",
    ["tokens(d)", "split(d, ',')", "overlap(l, k)", "hour(t)", "cross(c, d)"],
)
@pytest.mark.parametrize("form", ["text", "integers"])
def test_no_rows_give_empty_array(formula: str, form: str) -> None:
    assert results(formula, [], dict.fromkeys("cdlk", form)) == ([], [])
