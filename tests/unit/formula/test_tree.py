"""Parser of feature formulas."""

import json
import re
from typing import Any

import pytest
from builders.faults import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.config import InputError
from rayrec.formula.program import Program
from rayrec.formula.tree import (
    Call,
    Column,
    Literal,
    Lookup,
    Node,
    Type,
    columns_of,
    parse,
    to_json,
)

X = Column("x")
Y = Column("y")
ONE = Literal(1.0)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("x", X),
        (" `my column` ", Column("my column")),
        ("größe_2", Column("größe_2")),
        ("1.5e3", Literal(1500.0)),
        (".5", Literal(0.5)),
        ("'it'", Literal("it")),
        ('"a\\tb"', Literal("a\tb")),
        (r"'\\ \''", Literal("\\ '")),
        ("[0, -10.5, −2]", Literal((0.0, -10.5, -2.0))),
        ("['a', \"b\"]", Literal(("a", "b"))),
        ("f()", Call("f", ())),
        ("f(x, g(1))", Call("f", (X, Call("g", (ONE,))))),
        ("`f`", Column("f")),
        ("x + y * 1", Call("add", (X, Call("multiply", (Y, ONE))))),
        ("(x + y) * 1", Call("multiply", (Call("add", (X, Y)), ONE))),
        ("x - y - 1", Call("subtract", (Call("subtract", (X, Y)), ONE))),
        ("x × y ÷ 1 − 1", Call("subtract", (parse("x * y / 1"), ONE))),
        ("-2 * x", Call("multiply", (Literal(-2.0), X))),
        ("-x", Call("multiply", (Literal(-1.0), X))),
        ("--1", ONE),
        ("when(x == 1, x, y)", Call("when", (Call("equal", (X, ONE)), X, Y))),
        ("when(x + 1 <= y, x, y)", Call("when", (Call("at_most", (parse("x+1"), Y)), X, Y))),
        ("when(x in [1], x, y)", Call("when", (Call("is_in", (X, Literal((1.0,)))), X, Y))),
        ("in + 1", Call("add", (Column("in"), ONE))),
    ],
)
def test_parse_returns_tree(text: str, node: Node) -> None:
    assert parse(text) == node


@pytest.mark.parametrize(
    ("sign", "function"),
    [("==", "equal"), ("!=", "differs"), ("<", "less"), (">", "more"), (">=", "at_least")],
)
def test_comparison_becomes_call(sign: str, function: str) -> None:
    assert parse(f"when(x{sign}y,1,1)") == Call("when", (Call(function, (X, Y)), ONE, ONE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "formula '': expected a column, a constant or a function, at position 1"),
        ("log(x", "formula 'log(x': expected ',', at position 6"),
        ("x y", "formula 'x y': expected an operator or the end, at position 3"),
        ("x = 1", "formula 'x = 1': expected '==' for a comparison, at position 3"),
        ("x == 1", "comparisons must be the first argument of when, at position 3"),
        ("f(x < 1)", "comparisons must be the first argument of when, at position 5"),
        ("when(1, x < 1, 2)", "comparisons must be the first argument of when, at position 11"),
        ("when(x < y < 1, 1, 2)", "comparisons must be the first argument of when, at position 12"),
        ("f('a)", "the quote ' has no end, at position 3"),
        ("x ; y", "unexpected character ';', at position 3"),
        ("[1, 'a']", "a list must have numbers only or texts only, at position 1"),
        ("[x]", "expected a number or a text in quotes, at position 2"),
        ("[]", "expected a number or a text in quotes, at position 2"),
        ("1e999", "the number is too large, at position 1"),
        (r"'\q'", r"escape '\\q' not found, at position 1"),
        ("'\\\n'", r"escape '\\\n' not found, at position 1"),
        ("'\ud800'", "the text is not valid Unicode, at position 1"),
        ("x +\n* y", r"formula 'x +\n* y': expected a column"),
        ("f(" * 65 + "x" + ")" * 65, "must have at most 64 operations inside each other"),
        ("+".join(["x"] * 65), "must have at most 64 operations inside each other"),
        ("-" * 70 + "x", "must have at most 64 operations inside each other"),
        ("x" * 4097, "must have at most 4096 characters, got 4097"),
        ("a" * 100 + " $", f"formula '...{'a' * 39} $': unexpected character '$', at position 102"),
    ],
)
def test_parse_rejects_with_position(text: str, message: str) -> None:
    rejects(re.escape(message), parse, text)


def test_columns_are_in_order_of_first_use() -> None:
    assert columns_of(parse("b + f(a, b, 'c') * [1]")) == ("b", "a")


def test_lookup_reads_keys_only() -> None:
    node = parse("lookup(items, lookup(users, user, item), shop, price) + x")
    assert columns_of(node) == ("user", "shop", "x")


def test_program_lists_columns_of_each_table() -> None:
    formula = "cross(lookup(b, lookup(a, x, y), z), lookup(b, x, w))"
    program = Program.from_columns(
        {"f": formula}, dense=(), sparse=(), lists=(), vectors={}, timestamp=None, constants={}
    )
    assert program.lookups == {"a": ("y",), "b": ("w", "z")}
    assert list(program.inputs) == ["x"]


def test_lookup_returns_table_keys_and_column() -> None:
    lookup = Lookup("lookup", (Column("items"), X, Y, Column("price")), Type("number"))
    assert (lookup.table, lookup.keys, lookup.column) == ("items", (X, Y), "price")


def from_json(stored: dict[str, Any]) -> Node:
    """Return the tree of an object of `to_json`."""
    if "column" in stored:
        return Column(stored["column"])
    if "value" in stored:
        value = stored["value"]
        return Literal(tuple(value) if isinstance(value, list) else value)
    arguments = tuple(from_json(argument) for argument in stored["arguments"])
    if "type" in stored:
        return Lookup(stored["function"], arguments, Type(**stored["type"]))
    return Call(stored["function"], arguments)


def test_json_restores_tree() -> None:
    lookup = Lookup("lookup", (Column("items"), X, Column("tags")), Type("text", is_list=True))
    node = Call("f", (lookup, parse("g([0, 1], ['a'], 'b', -x)")))
    assert from_json(json.loads(json.dumps(to_json(node)))) == node


PIECES = st.sampled_from(
    [
        *"()[],+-*/<>='\"`\\ \n.eE0",
        "==",
        "in",
        "when(",
        "log(",
        "x",
        "1.5",
        "'a'",
        "`b c`",
        "−",
        "\0",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=30).map("".join)))
@settings(max_examples=1000, deadline=None)
def test_random_text_is_parsed_or_rejected_in_one_line(text: str) -> None:
    try:
        node = parse(text)
    except InputError as error:
        message = str(error)
        restored = node = None
    else:
        message = "none"
        restored = from_json(to_json(node))
    assert restored == node
    assert len(message.splitlines()) == 1
