"""Types of feature formulas."""

import re
from collections.abc import Mapping

import pytest
from builders.faults import rejects

from rayrec.formula.tree import Call, Literal, Lookup, Node, Type, parse
from rayrec.formula.types import FUNCTIONS, Checked, check

NUMBER = Type("number")
CATEGORY = Type("category")
TEXT = Type("text")
TIME = Type("time")
CATEGORIES = Type("category", is_list=True)
TEXTS = Type("text", is_list=True)
NUMBERS = Type("number", is_list=True)
KNOWN = {
    "price": NUMBER,
    "city": CATEGORY,
    "title": TEXT,
    "at": TIME,
    "tags": CATEGORIES,
    "scores": NUMBERS,
}


def checked(text: str, known: Mapping[str, Type] = KNOWN) -> Checked:
    return check(parse(text), known)


def find_lookup(node: Node) -> Lookup:
    """Return the first lookup of a tree."""
    if isinstance(node, Lookup):
        return node
    assert isinstance(node, Call)
    return find_lookup(next(inner for inner in node.arguments if isinstance(inner, Call)))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("price", NUMBER),
        ("tags", CATEGORIES),
        ("number(title)", NUMBER),
        ("number(city)", NUMBER),
        ("bucketize(price, [0, 10])", CATEGORY),
        ("log(price)", NUMBER),
        ("clip(price, 0, 0)", NUMBER),
        ("hash(city, 10)", CATEGORY),
        ("hash(title, 10)", CATEGORY),
        ("cross(city, title)", CATEGORY),
        ("cross(city, city, title, 10)", CATEGORY),
        ("concat(tags, tags, tags)", CATEGORIES),
        ("concat(scores, scores)", NUMBERS),
        ("lower(city)", TEXT),
        ("split(title, ',')", TEXTS),
        ("tokens(title)", TEXTS),
        ("ngrams(title, 3)", TEXTS),
        ("hour(at)", CATEGORY),
        ("weekday(at, 'Europe/Berlin')", CATEGORY),
        ("age(at, at)", NUMBER),
        ("len(scores)", NUMBER),
        ("last(tags, 3)", CATEGORIES),
        ("last(scores, 3)", NUMBERS),
        ("overlap(tags, tokens(title))", NUMBER),
        ("count_in(tags, city)", NUMBER),
        ("coalesce(price, 0)", NUMBER),
        ("coalesce(at, at)", TIME),
        ("coalesce('none', city)", CATEGORY),
        ("when(price < 1, tags, tags)", CATEGORIES),
        ("when(city == title, price, 0)", NUMBER),
        ("aggregate(scores, 'mean')", NUMBER),
        ("price / -price + 1", NUMBER),
        ("lookup(items, city, tags)", CATEGORY),
    ],
)
def test_check_finds_type_of_result(text: str, kind: Type) -> None:
    result = checked(text)
    assert (result.type, result.sources) == (kind, {})


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("a", {"a": CATEGORY}),
        ("log(a) + price", {"a": NUMBER}),
        ("hash(a, 5)", {"a": CATEGORY}),
        ("number(a)", {"a": TEXT}),
        ("cross(lower(a), a)", {"a": CATEGORY}),
        ("lower(hash(a, 5))", {"a": CATEGORY}),
        ("hour(a)", {"a": TIME}),
        ("overlap(a, split(b, ','))", {"a": CATEGORIES, "b": TEXT}),
        ("aggregate(last(a, 5), 'sum')", {"a": NUMBERS}),
        ("log(coalesce(a, b))", {"a": NUMBER, "b": NUMBER}),
        ("coalesce(a, at)", {"a": TIME}),
        ("coalesce(a, last(scores, 1))", {"a": NUMBERS}),
        ("when(a < 1, b, 0)", {"a": NUMBER, "b": NUMBER}),
        ("when(a in [1, 2], b, c)", {"a": NUMBER, "b": CATEGORY, "c": CATEGORY}),
        ("when(a == 'x', 1, 0)", {"a": CATEGORY}),
        ("when(a == b, 1, 0)", {"a": CATEGORY, "b": CATEGORY}),
        ("lookup(items, a, b, price)", {"a": CATEGORY, "b": CATEGORY}),
    ],
)
def test_unknown_column_takes_type_from_use(text: str, sources: dict[str, Type]) -> None:
    assert checked(text).sources == sources


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("lookup(items, city, x)", CATEGORY),
        ("log(lookup(items, city, x))", NUMBER),
        ("overlap(tags, lookup(items, city, x))", CATEGORIES),
        ("tokens(lookup(items, city, x))", TEXT),
        ("hour(lookup(items, city, x))", TIME),
        ("aggregate(lookup(items, city, x), 'max')", NUMBERS),
        ("log(coalesce(lookup(items, city, x), 0))", NUMBER),
        ("coalesce(lookup(items, city, x), price)", NUMBER),
        ("len(lookup(items, city, x))", CATEGORIES),
    ],
)
def test_lookup_takes_type_from_context(text: str, kind: Type) -> None:
    assert find_lookup(checked(text).node).type == kind


@pytest.mark.parametrize("text", ["coalesce(city, 7)", "count_in(tags, 7)", "cross(city, -7, 5)"])
def test_integer_constant_counts_as_category(text: str) -> None:
    node = checked(text).node
    assert isinstance(node, Call)
    assert node.arguments[1] in (Literal("7"), Literal("-7"))


def test_category_is_compared_with_integers_as_text() -> None:
    node = checked("when(hour(at) in [22, 23], 1, 0)").node
    assert isinstance(node, Call)
    assert isinstance(node.arguments[0], Call)
    assert node.arguments[0].arguments[1] == Literal(("22", "23"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lgo(price)", "function lgo not found; did you mean 'log'?"),
        ("zscore(price, 2)", "zscore: must have 1 argument"),
        ("quantile(price, 0)", "quantile: argument 2 (bins) must be an integer from 1 to 1000"),
        ("log(city)", "log: argument 1 must be a number, but column city is a category"),
        ("age(at, price)", "age: argument 2 must be a time, but column price is a number"),
        ("log(hour(at))", "log: argument 1 must be a number, but hour is a category"),
        ("price + tags", "+: argument 2 must be a number, but column tags is a list of categories"),
        ("hash(price + 1, 5)", "hash: argument 1 must be a category or a text, but + is a number"),
        ("log('a')", "log: argument 1 must be a number, but 'a' is a text"),
        ("coalesce(city, 0.5)", "coalesce: argument 2 must be a category, but 0.5 is a number"),
        ("coalesce(price, city)", "argument 2 must be a number, but column city is a category"),
        ("coalesce(city, '')", "coalesce: argument 2 must not be an empty text"),
        ("log([1, 2])", "log: argument 1 must not be a list of constants"),
        ("concat(tags, scores)", "concat: argument 2 must be a list of categories, but column"),
        ("log()", "log: must have 1 argument, got 0: log(x): sign(x) ln(1 + |x|)"),
        ("log(price, 2)", "log: must have 1 argument, got 2"),
        ("coalesce(price)", "coalesce: must have 2 or more arguments, got 1"),
        ("cross(city, 5)", "cross: must have 2 or 3 categories, got 1"),
        ("cross(city, city, city, city)", "cross: must have 2 or 3 categories, got 4"),
        ("hour(at, city)", "hour: argument 2 (zone) must be a constant"),
        ("hour(at, 5)", "hour: argument 2 (zone) must be a text such as 'Europe/Berlin', got 5.0"),
        (
            "hour(at, 'Europe/Berln')",
            "zone 'Europe/Berln' not found; did you mean 'Europe/Berlin'?",
        ),
        ("hour(at, '../x')", "hour: argument 2: zone '../x' not found"),
        ("hour(at, 'Europe')", "hour: argument 2: zone 'Europe' not found"),
        ("bucketize(price, 5)", "argument 2 (edges) must be a list of numbers such as [0, 10]"),
        ("bucketize(price, ['a'])", "argument 2 (edges) must be a list of numbers"),
        ("bucketize(price, [0, 5, 5])", "argument 2 (edges) must increase, got 5 before 5"),
        ("clip(price, 2, 1)", "clip: low must be at most high, got 2 > 1"),
        ("clip(price, 2, 'a')", "clip: argument 3 must be a constant number"),
        ("hash(city, 0)", "hash: argument 2 (rows) must be an integer from 1 to 2147483648, got 0"),
        ("hash(city, 1.5)", "hash: argument 2 (rows) must be an integer"),
        ("cross(city, city, 0)", "cross: argument 3 (rows) must be an integer"),
        ("split(title, '')", "split: argument 2 (separator) must be a text such as ',', got ''"),
        ("ngrams(title, 33)", "ngrams: argument 2 (n) must be an integer from 1 to 32, got 33"),
        ("last(tags, 0)", "last: argument 2 (n) must be an integer from 1 to 1000000"),
        ("aggregate(scores, 'median')", "argument 2 (mode) must be one of sum, mean, min, max"),
        ("when(price, 1, 0)", "when: argument 1 must be a comparison such as a < b"),
        ("when(city < 'b', 1, 0)", "<: argument 1 must be a number, but column city is a category"),
        ("when(city == price, 1, 0)", "==: argument 2 must be a category, but column price is a"),
        ("when(at == at, 1, 0)", "==: argument 1 must be a category, but column at is a time"),
        ("when(price in tags, 1, 0)", "in: argument 2 must be a list of constants such as [1, 2]"),
        ("when(hour(at) in [1.5], 1, 0)", "in: argument 2 must be a category, but 1.5 is a number"),
        ("equal(price, 1)", "==: comparisons must be the first argument of when"),
        ("log(lookup(items, city))", "lookup: must have 3 or 4 arguments (table, key[, key2], col"),
        ("lookup('items', city, x)", "lookup: argument 1 must be the name of a side table"),
        ("lookup(items, city, 5)", "lookup: argument 3 must be the name of a column"),
        ("lookup(items, price, x)", "lookup: argument 2 must be a category or a text, but column"),
        ("log(`a\nb` + city)", "+: argument 2 must be a number, but column city is a category"),
        ("1 + 2", "the formula must read a column, got constants only"),
    ],
)
def test_check_rejects(text: str, message: str) -> None:
    rejects(re.escape(message), checked, text)


def test_column_of_two_types_is_rejected() -> None:
    message = "column a: must have one type, but log takes a number and hash a category"
    rejects(message, checked, "cross(bucketize(log(a), [1]), hash(a, 5))")


def test_name_with_line_break_is_escaped() -> None:
    rejects(r"but column 'a\\nb' is a category", check, parse("log(`a\nb`)"), {"a\nb": CATEGORY})


def test_functions_have_one_line_help() -> None:
    assert all(signature.help and "\n" not in signature.help for signature in FUNCTIONS.values())
