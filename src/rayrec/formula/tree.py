"""Trees of formulas such as `log(lookup(items, item, price))`, and their parser."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Final
from typing import Literal as OneOf

from rayrec.config import InputError

MAX_LENGTH: Final = 4096
"""Maximum length of a formula, in characters."""
MAX_DEPTH: Final = 64
"""Maximum number of calls, operators, parentheses and lists inside each other."""

Kind = OneOf["number", "category", "text", "time"]


@dataclass(frozen=True)
class Type:
    """Type of a column, an argument or a result."""

    kind: Kind
    """Kind of the values, or of a list's items."""
    is_list: bool = False
    """Whether each row has a list."""


@dataclass(frozen=True)
class Column:
    """Column of the rows, or a name in a lookup."""

    name: str


@dataclass(frozen=True)
class Literal:
    """Constant number, text, or list of either."""

    value: float | str | tuple[float | str, ...]


@dataclass(frozen=True)
class Call:
    """Function with its arguments; operators and comparisons are functions too."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Lookup(Call):
    """Call of `lookup` with the type that `rayrec.formula.types.check` found for it."""

    type: Type

    @property
    def table(self) -> str:
        """Name of the side table."""
        return _name_of(self.arguments[0])

    @property
    def keys(self) -> tuple[Node, ...]:
        """One or two keys."""
        return self.arguments[1:-1]

    @property
    def column(self) -> str:
        """Name of the table's column."""
        return _name_of(self.arguments[-1])


Node = Column | Literal | Call

COMPARISONS: Final = {
    "==": "equal",
    "!=": "differs",
    "<": "less",
    "<=": "at_most",
    ">": "more",
    ">=": "at_least",
    "in": "is_in",
}
"""Functions of comparisons by their signs."""
_SUMS: Final = {
    "+": "add",
    "-": "subtract",
    "−": "subtract",
}
_PRODUCTS: Final = {
    "*": "multiply",
    "/": "divide",
    "×": "multiply",
    "÷": "divide",
}
_MINUS: Final = ("-", "−")
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_QUOTE: Final = 60
_SHOWN: Final = 40
_TOKEN: Final = re.compile(
    r"""(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"""
    r"""|(?P<name>[^\W\d]\w*)"""
    r"""|`(?P<quoted>[^`]+)`"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<sign>==|!=|<=|>=|[-+*/<>()\[\],×÷−])""",
    re.DOTALL,
)
_SPACE: Final = re.compile(r"\s*")


def parse(text: str) -> Node:
    """Parse a formula. Operators and comparisons become calls, `-x` becomes `multiply(-1, x)`.
    Names of functions and numbers of arguments are left to `rayrec.formula.types.check`.

    Args:
        text: Formula such as `cross(city, bucketize(price, [0, 10]))`. Column names with other
            characters than letters, digits and _ stand in back quotes, texts in single or double
            quotes. A backslash escapes a quote, a backslash, and n, t and r in texts.

    Raises:
        InputError: Quotes the formula and the position, from 1 on, of what is wrong; also for more
            than MAX_LENGTH characters or MAX_DEPTH operations inside each other.
    """
    if len(text) > MAX_LENGTH:
        raise InputError(
            f"formula '{text[:_SHOWN]}...': must have at most {MAX_LENGTH} characters, "
            f"got {len(text)}"
        )
    parser = _Parser(text)
    node = parser.expression(0)
    parser.end()
    if _depth(node) > MAX_DEPTH:
        raise parser.error(f"must have at most {MAX_DEPTH} operations inside each other", 0)
    return node


def columns_of(node: Node) -> tuple[str, ...]:
    """Return the names of the columns that a formula reads, in order of first use. Of a lookup,
    only its keys count.
    """
    return tuple(dict.fromkeys(_columns(node)))


def to_json(node: Node) -> dict[str, Any]:
    """Return a tree, with the types of its lookups, as an object of JSON."""
    if isinstance(node, Column):
        return {"column": node.name}
    if isinstance(node, Literal):
        value = list(node.value) if isinstance(node.value, tuple) else node.value
        return {"value": value}
    stored: dict[str, Any] = {
        "function": node.function,
        "arguments": [to_json(argument) for argument in node.arguments],
    }
    if isinstance(node, Lookup):
        stored["type"] = {"kind": node.type.kind, "is_list": node.type.is_list}
    return stored


def _columns(node: Node) -> Iterator[str]:
    if isinstance(node, Column):
        yield node.name
    elif isinstance(node, Call):
        arguments = node.arguments[1:-1] if node.function == "lookup" else node.arguments
        for argument in arguments:
            yield from _columns(argument)


def _name_of(node: Node) -> str:
    assert isinstance(node, Column)
    return node.name


def _depth(node: Node) -> int:
    """Return the depth of a tree. A long sum has a deep tree without parentheses, which recursion
    could not walk.
    """
    depth = 0
    level: list[Node] = [node]
    while level:
        depth += 1
        calls = [inner for inner in level if isinstance(inner, Call)]
        level = [argument for call in calls for argument in call.arguments]
    return depth


@dataclass(frozen=True)
class _Token:
    kind: str
    """Name of the group in _TOKEN, or end."""
    text: str
    start: int
    stop: int


# One method for each rule of the grammar, with one token of lookahead:
#
#   expression  = product (("+" | "-") product)*
#   product     = factor (("*" | "/") factor)*
#   factor      = "-" factor | number | text | name | call | "(" expression ")" | list
#   call        = name "(" argument ("," argument)* ")"
#   argument    = expression, or as the first one of `when` also a comparison
#   comparison  = expression ("==" | "!=" | "<" | "<=" | ">" | ">=" | "in") expression
#   list        = "[" constant ("," constant)* "]"
class _Parser:
    """Recursive-descent parser of one formula."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.token = self._scan(0)

    def expression(self, depth: int) -> Node:
        """Parse an expression within `depth` calls, signs and parentheses."""
        node = self._product(depth)
        while self._is_sign(_SUMS):
            function = _SUMS[self._advance().text]
            node = Call(function, (node, self._product(depth)))
        return node

    def end(self) -> None:
        """Raise InputError if text is left."""
        if self.token.kind == "end":
            return
        if self.token.text in COMPARISONS:
            raise self.error("comparisons must be the first argument of when")
        raise self.error("expected an operator or the end")

    def error(self, problem: str, start: int | None = None) -> InputError:
        """Return the error of a problem at a token's start, by default the current one's."""
        start = self.token.start if start is None else start
        text = self.text
        if len(text) > _QUOTE:
            first = max(0, start - _SHOWN)
            last = start + _SHOWN
            before = "..." if first else ""
            after = "..." if last < len(text) else ""
            text = f"{before}{text[first:last]}{after}"
        return InputError(f"formula {text!r}: {problem}, at position {start + 1}")

    def _product(self, depth: int) -> Node:
        """Parse products and quotients of factors."""
        node = self._factor(depth)
        while self._is_sign(_PRODUCTS):
            function = _PRODUCTS[self._advance().text]
            node = Call(function, (node, self._factor(depth)))
        return node

    def _factor(self, depth: int) -> Node:
        """Parse a factor, the part between two operators."""
        if depth > MAX_DEPTH:
            raise self.error(f"must have at most {MAX_DEPTH} operations inside each other")
        if self._is_sign(_MINUS):
            return self._negative(depth)
        if self._is_sign(("(",)):
            self._advance()
            node = self.expression(depth + 1)
            self._expect(")")
            return node
        if self._is_sign(("[",)):
            return self._list()
        if self.token.kind in ("number", "text"):
            return Literal(self._constant())
        if self.token.kind not in ("name", "quoted"):
            raise self.error("expected a column, a constant or a function")
        name = self._advance()
        if name.kind == "name" and self._is_sign(("(",)):
            return self._call(name.text, depth + 1)
        return Column(name.text)

    def _negative(self, depth: int) -> Node:
        """Parse a factor after a minus sign, which becomes part of a number."""
        self._advance()
        inner = self._factor(depth + 1)
        if isinstance(inner, Literal) and isinstance(inner.value, float):
            return Literal(-inner.value)
        return Call("multiply", (Literal(-1.0), inner))

    def _call(self, function: str, depth: int) -> Node:
        """Parse the arguments of a function."""
        self._expect("(")
        arguments: list[Node] = []
        while not self._is_sign((")",)):
            if arguments:
                self._expect(",")
            argument = self.expression(depth)
            if function == "when" and not arguments:
                argument = self._comparison(argument, depth)
            arguments.append(argument)
            if self.token.text in COMPARISONS and self.token.kind != "quoted":
                raise self.error("comparisons must be the first argument of when")
        self._expect(")")
        return Call(function, tuple(arguments))

    def _comparison(self, left: Node, depth: int) -> Node:
        """Parse the rest of a comparison. Without its sign, return the left side."""
        if self.token.kind not in ("sign", "name") or self.token.text not in COMPARISONS:
            return left
        function = COMPARISONS[self._advance().text]
        return Call(function, (left, self.expression(depth)))

    def _list(self) -> Node:
        """Parse a list of constants of one type."""
        start = self._advance().start
        values = [self._signed_constant()]
        while self._is_sign((",",)):
            self._advance()
            values.append(self._signed_constant())
        self._expect("]")
        if len({type(value) for value in values}) > 1:
            raise self.error("a list must have numbers only or texts only", start)
        return Literal(tuple(values))

    def _signed_constant(self) -> float | str:
        """Parse a constant of a list, which may have a minus sign."""
        if not self._is_sign(_MINUS):
            return self._constant()
        self._advance()
        value = self._constant(text=False)
        assert isinstance(value, float)
        return -value

    def _constant(self, *, text: bool = True) -> float | str:
        """Parse a number, or with `text` also a text in quotes."""
        if self.token.kind == "text" and text:
            return self._unquoted(self._advance())
        if self.token.kind != "number":
            raise self.error(
                "expected a number or a text in quotes" if text else "expected a number"
            )
        value = float(self.token.text)
        if not math.isfinite(value):
            raise self.error("the number is too large")
        self._advance()
        return value

    def _unquoted(self, token: _Token) -> str:
        """Return the value of a text in quotes."""

        def plain(match: re.Match[str]) -> str:
            if match[1] not in _ESCAPES:
                raise self.error(f"escape {match[0]!r} not found", token.start)
            return _ESCAPES[match[1]]

        value = re.sub(r"(?s)\\(.)", plain, token.text[1:-1])
        # Texts are compared as UTF-8, which has no form of half a character.
        if not _is_unicode(value):
            raise self.error("the text is not valid Unicode", token.start)
        return value

    def _is_sign(self, signs: Container[str]) -> bool:
        """Return whether the current token is one of the signs."""
        return self.token.kind == "sign" and self.token.text in signs

    def _expect(self, sign: str) -> None:
        """Go beyond a sign. Raises InputError if the current token is another."""
        if not self._is_sign((sign,)):
            raise self.error(f"expected '{sign}'")
        self._advance()

    def _advance(self) -> _Token:
        """Return the current token and go to the next one."""
        token = self.token
        self.token = self._scan(token.stop)
        return token

    def _scan(self, position: int) -> _Token:
        """Return the first token from a position on."""
        space = _SPACE.match(self.text, position)
        start = position if space is None else space.end()
        if start == len(self.text):
            return _Token("end", "", start, start)
        match = _TOKEN.match(self.text, start)
        if match is None:
            raise self.error(_scan_problem(self.text[start]), start)
        assert match.lastgroup is not None
        return _Token(match.lastgroup, match[match.lastgroup], start, match.end())


def _scan_problem(character: str) -> str:
    if character in "\"'`":
        return f"the quote {character} has no end"
    if character == "=":
        return "expected '==' for a comparison"
    return f"unexpected character {character!r}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
