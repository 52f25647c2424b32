"""Types of formulas: the functions with their signatures, and the check of trees."""

from __future__ import annotations

import itertools
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rayrec.config import InputError, suggest
from rayrec.formula.tree import (
    COMPARISONS,
    Call,
    Column,
    Literal,
    Lookup,
    Node,
    Type,
)

NUMBER: Final = Type("number")
CATEGORY: Final = Type("category")
TEXT: Final = Type("text")
TIME: Final = Type("time")
CATEGORIES: Final = Type("category", is_list=True)
TEXTS: Final = Type("text", is_list=True)
NUMBERS: Final = Type("number", is_list=True)
_LISTS: Final = (CATEGORIES, NUMBERS)
_TEXT_LISTS: Final = (CATEGORIES, TEXTS)
_COMPARED: Final = (CATEGORY, NUMBER)
_TO_NUMBER: Final = (TEXT, CATEGORY, NUMBER)
"""Arguments of `number`. A lookup is a number then, of which tables have any type."""
_ANY: Final = (CATEGORY, NUMBER, TIME, CATEGORIES, NUMBERS)

MAX_ROWS: Final = 2**31
"""Maximum number of a hash's rows."""
MAX_EDGES: Final = 4096
"""Maximum number of a bucketize's edges."""
MAX_BINS: Final = 1000
"""Maximum number of a quantile's bins."""
MAX_NGRAM: Final = 32
"""Maximum length of an ngram, in characters."""
MAX_LAST: Final = 1_000_000
"""Maximum number of items that `last` keeps."""
MODES: Final = ("sum", "mean", "min", "max", "count")
"""Modes of `aggregate`."""

Types = tuple[Type, ...]


@dataclass(frozen=True)
class Signature:
    """Arguments, result and help of a function."""

    values: tuple[Types, ...]
    """Types that each argument may have, the preferred one first."""
    result: Type | None
    """Type of the result. None: the type of the arguments of the types `values[-1]`."""
    help: str
    """Help in one line."""
    constants: tuple[str, ...] = ()
    """Names of the constant arguments after the values, keys of _CONSTANTS."""
    num_optional: int = 0
    """Number of arguments at the end that may be left out."""
    has_more: bool = False
    """Whether more arguments like the last one may follow."""


_BINARY: Final = ((NUMBER,), (NUMBER,))
_SAME: Final = (_COMPARED, _COMPARED)

FUNCTIONS: Final[dict[str, Signature]] = {
    "number": Signature(
        (_TO_NUMBER,),
        NUMBER,
        "number(x): the decimal number in a text; other text is missing",
    ),
    "bucketize": Signature(
        ((NUMBER,),),
        CATEGORY,
        "bucketize(x, [e1, e2, ...]): the number of edges at or below x",
        constants=("edges",),
    ),
    "quantile": Signature(
        ((NUMBER,),),
        CATEGORY,
        "quantile(x, n): the bin of x among n that have equally many training rows",
        constants=("bins",),
    ),
    "zscore": Signature(
        ((NUMBER,),),
        NUMBER,
        "zscore(x): x minus the mean of the training rows, over their standard deviation",
    ),
    "log": Signature(
        ((NUMBER,),),
        NUMBER,
        "log(x): sign(x) ln(1 + |x|)",
    ),
    "clip": Signature(
        ((NUMBER,),),
        NUMBER,
        "clip(x, low, high): x within the bounds",
        constants=("low", "high"),
    ),
    "hash": Signature(
        ((CATEGORY, TEXT),),
        CATEGORY,
        "hash(x, rows): the row of a category in a hashed table of so many rows",
        constants=("rows",),
    ),
    "cross": Signature(
        ((CATEGORY,), (CATEGORY,), (CATEGORY,)),
        CATEGORY,
        "cross(a, b[, c][, rows]): the combination of categories, hashed if rows are given",
        constants=("rows",),
        num_optional=2,
    ),
    "concat": Signature(
        (_LISTS, _LISTS),
        None,
        "concat(list, list, ...): the items of all lists",
        has_more=True,
    ),
    "lower": Signature(
        ((TEXT,),),
        TEXT,
        "lower(text): A to Z as a to z",
    ),
    "split": Signature(
        ((TEXT,),),
        TEXTS,
        "split(text, 'mark'): the parts between marks without empty ones",
        constants=("separator",),
    ),
    "tokens": Signature(
        ((TEXT,),),
        TEXTS,
        "tokens(text): the runs of letters or digits",
    ),
    "ngrams": Signature(
        ((TEXT,),),
        TEXTS,
        "ngrams(text, n): all runs of n characters",
        constants=("n",),
    ),
    "hour": Signature(
        ((TIME,),),
        CATEGORY,
        "hour(time[, 'zone']): 0 to 23, in UTC without a zone",
        constants=("zone",),
        num_optional=1,
    ),
    "weekday": Signature(
        ((TIME,),),
        CATEGORY,
        "weekday(time[, 'zone']): 0 for Monday to 6, in UTC without a zone",
        constants=("zone",),
        num_optional=1,
    ),
    "age": Signature(
        ((TIME,), (TIME,)),
        NUMBER,
        "age(time, earlier): the seconds from earlier to time",
    ),
    "len": Signature(
        (_LISTS,),
        NUMBER,
        "len(list): the number of items, 0 of a missing list",
    ),
    "last": Signature(
        (_LISTS,),
        None,
        "last(list, n): the last n items",
        constants=("items",),
    ),
    "overlap": Signature(
        ((CATEGORIES,), (CATEGORIES,)),
        NUMBER,
        "overlap(list, list): the number of different items that both lists have",
    ),
    "count_in": Signature(
        ((CATEGORIES,), (CATEGORY,)),
        NUMBER,
        "count_in(list, x): the number of items that equal x",
    ),
    "lookup": Signature(
        ((CATEGORY, TEXT), (CATEGORY, TEXT)),
        None,
        "lookup(table, key[, key2], column): the column of a side table's row, missing without one",
    ),
    "coalesce": Signature(
        (_ANY, _ANY),
        None,
        "coalesce(a, b, ...): the first that is present",
        has_more=True,
    ),
    "when": Signature(
        (_ANY, _ANY),
        None,
        "when(a < b, x, y): x if the comparison holds, else y",
    ),
    "aggregate": Signature(
        ((NUMBERS,),),
        NUMBER,
        "aggregate(list, 'mode'): sum, mean, min, max or count of a list of numbers",
        constants=("mode",),
    ),
    "dot": Signature(
        (_TEXT_LISTS, _TEXT_LISTS),
        NUMBER,
        "dot(list, list): the products of values with equal keys, added up, of items as a:0.5",
    ),
    "add": Signature(
        _BINARY,
        NUMBER,
        "a + b",
    ),
    "subtract": Signature(
        _BINARY,
        NUMBER,
        "a - b",
    ),
    "multiply": Signature(
        _BINARY,
        NUMBER,
        "a * b",
    ),
    "divide": Signature(
        _BINARY,
        NUMBER,
        "a / b, missing if b is 0",
    ),
}
"""All functions by name."""

_COMPARISONS: Final[dict[str, Signature]] = {
    "equal": Signature(
        _SAME,
        None,
        "a == b",
    ),
    "differs": Signature(
        _SAME,
        None,
        "a != b",
    ),
    "less": Signature(
        _BINARY,
        NUMBER,
        "a < b",
    ),
    "at_most": Signature(
        _BINARY,
        NUMBER,
        "a <= b",
    ),
    "more": Signature(
        _BINARY,
        NUMBER,
        "a > b",
    ),
    "at_least": Signature(
        _BINARY,
        NUMBER,
        "a >= b",
    ),
}
_SIGNS: Final = {function: sign for sign, function in COMPARISONS.items()}
_SHOWN: Final = {
    **_SIGNS,
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
}
"""Signs of operators and comparisons by their functions, for messages."""


@dataclass(frozen=True)
class Checked:
    """Formula with the types that a check found."""

    node: Node
    """Tree to evaluate: each lookup is a `Lookup` with its type, and each constant category a
    text.
    """
    type: Type
    """Type of the result."""
    sources: dict[str, Type]
    """Types of the columns that were not known, from their use, in order of first use."""


def check(node: Node, column_types: Mapping[str, Type]) -> Checked:
    """Find the types of a formula whose columns have the types of `column_types`, the others
    the types that their functions take.

    Args:
        node: Tree of `rayrec.formula.tree.parse`.
        column_types: Types of the declared columns, and of features that the formula may read.

    Raises:
        InputError: For an unknown function, a wrong number of arguments, a wrong type, a constant
            out of range, a column with two types, and a formula that reads no column. The message
            names the function, the argument's number and the column, but not the formula.
    """
    checker = _Checker(column_types)
    checked, kind = checker.typed(node, _ANY, "the formula")
    if not checker.reads:
        raise InputError("the formula must read a column, got constants only")
    return Checked(checked, kind, checker.sources())


def describe(kind: Type) -> str:
    """Return a type in words, such as a list of numbers."""
    plural = {
        "number": "numbers",
        "category": "categories",
        "text": "texts",
        "time": "times",
    }
    return f"a list of {plural[kind.kind]}" if kind.is_list else f"a {kind.kind}"


# A type is known from below, if a column, a function or a constant has one, or from above, if the
# function takes one only:
#
#   column in column_types     its type, which the function must take
#   other column, lookup       the first type that the function takes
#   coalesce, when, concat,    the first argument with a type of its own that the function around
#   last, ==, !=               takes, else the first type which that function takes
#   number as a constant       a category if one is taken, and a number is not
class _Checker:
    """Check of one formula.

    Each argument is checked against `options`, the types that its function takes, the preferred
    one first. `label` names the argument in messages.
    """

    def __init__(self, column_types: Mapping[str, Type]) -> None:
        self.column_types = column_types
        self.reads = False
        self._uses: dict[str, list[tuple[Type, str]]] = {}

    def sources(self) -> dict[str, Type]:
        """Return the types of the columns that are not known. A column that is used as a category
        and as a text is a category.
        """
        sources = {}
        for name, uses in self._uses.items():
            first, function = uses[0]
            for kind, other in uses[1:]:
                if not _converts(kind, first):
                    raise InputError(
                        f"column {_printable(name)}: must have one type, but {function} takes "
                        f"{describe(first)} and {other} {describe(kind)}; declare the column"
                    )
                first = kind if kind.kind == "category" else first
            sources[name] = first
        return sources

    def typed(self, node: Node, options: Types, label: str) -> tuple[Node, Type]:
        """Return a node of one of the types `options` as a checked tree, and its type."""
        if isinstance(node, Column):
            return node, self._column(node, options, label)
        if isinstance(node, Literal):
            return _literal(node, options, label)
        if node.function == "lookup":
            return self._lookup(node, options)
        signature = _signature(node)
        if signature.result is not None:
            kind = _matching(signature.result, options)
            if kind is None:
                raise _mismatch(label, options, _shown(node), signature.result)
            return self._call(node, signature), signature.result
        return self._generic(node, signature, options, label)

    def _column(self, node: Column, options: Types, label: str) -> Type:
        self.reads = True
        if node.name not in self.column_types:
            function, _, _ = label.partition(":")
            uses = self._uses.setdefault(node.name, [])
            uses.append((options[0], function))
            return options[0]
        kind = self.column_types[node.name]
        if _matching(kind, options) is None:
            raise _mismatch(
                label,
                options,
                f"column {_printable(node.name)}",
                kind,
            )
        return kind

    def _lookup(self, node: Call, options: Types) -> tuple[Node, Type]:
        self.reads = True
        count = len(node.arguments)
        if count not in (3, 4):
            raise InputError(
                f"lookup: must have 3 or 4 arguments (table, key[, key2], column), got {count}"
            )
        for number in (0, count - 1):
            if not isinstance(node.arguments[number], Column):
                subject = "column" if number else "side table"
                raise InputError(f"lookup: argument {number + 1} must be the name of a {subject}")
        keys = [
            self.typed(key, (CATEGORY, TEXT), _label("lookup", number))[0]
            for number, key in enumerate(node.arguments[1:-1], start=2)
        ]
        arguments = (node.arguments[0], *keys, node.arguments[-1])
        kind = NUMBER if options == _TO_NUMBER else options[0]
        return Lookup("lookup", arguments, kind), kind

    def _call(self, node: Call, signature: Signature) -> Call:
        """Check the arguments of a function whose arguments have types of their own."""
        values, constants = _split(node, signature)
        checked = [
            self.typed(value, types, _label(node.function, number))[0]
            for number, (value, types) in enumerate(
                zip(values, signature.values, strict=False), start=1
            )
        ]
        _check_constants(node.function, constants, signature, len(values))
        return replace(node, arguments=(*checked, *constants))

    def _generic(
        self,
        node: Call,
        signature: Signature,
        options: Types,
        label: str,
    ) -> tuple[Node, Type]:
        """Check a function whose arguments and result have one type."""
        values, constants = _split(node, signature)
        first: list[Node] = []
        if node.function == "when":
            first = [self._condition(values[0])]
            values = values[1:]
        # Of the types that the function can have, those that the function around it takes
        allowed = tuple(
            kind for kind in signature.values[0] if _matching(kind, options) is not None
        )
        if not allowed:
            raise _mismatch(label, options, _shown(node), signature.values[0][0])
        # In the order of the function around it, whose first type is the default
        allowed = tuple(kind for kind in options if _matching(kind, allowed) is not None)
        common = self._common(values, allowed)
        checked = []
        for number, value in enumerate(values, start=1 + len(first)):
            argument, _ = self.typed(value, (common,), _label(node.function, number))
            checked.append(argument)
        _check_constants(node.function, constants, signature, len(values))
        return replace(node, arguments=(*first, *checked, *constants)), common

    def _common(self, values: Sequence[Node], allowed: Types) -> Type:
        """Return the type that all of the values must have."""
        # Constants come last: an integer may be a category.
        kinds = [self._inherent_type(value) for value in values if not isinstance(value, Literal)]
        kinds += [self._inherent_type(value) for value in values if isinstance(value, Literal)]
        present = [kind for kind in kinds if kind is not None]
        if not present:
            return allowed[0]
        common = _matching(present[0], allowed)
        return allowed[0] if common is None else common

    def _inherent_type(self, node: Node) -> Type | None:
        """Return the type of a node without its context, None if it has none."""
        if isinstance(node, Column):
            return self.column_types.get(node.name)
        if isinstance(node, Literal):
            return NUMBER if isinstance(node.value, float) else CATEGORY
        if node.function == "lookup":
            return None
        signature = FUNCTIONS.get(node.function)
        if signature is None:
            return None
        if signature.result is not None:
            return signature.result
        values = node.arguments[1:] if node.function == "when" else node.arguments
        kinds = [self._inherent_type(value) for value in values if not isinstance(value, Literal)]
        return next((kind for kind in kinds if kind is not None), None)

    def _condition(self, node: Node) -> Node:
        """Check the comparison of `when`."""
        if not isinstance(node, Call) or node.function not in _SIGNS:
            raise InputError("when: argument 1 must be a comparison such as a < b or a in [1, 2]")
        if len(node.arguments) != 2:
            raise InputError(f"{node.function}: must have 2 arguments, got {len(node.arguments)}")
        left, right = node.arguments
        name = _SIGNS[node.function]
        if node.function == "is_in":
            return self._membership(node)
        if node.function not in ("equal", "differs"):
            return self._call(node, _COMPARISONS[node.function])
        kind = self._common([left, right], _COMPARED)
        checked = [
            self.typed(side, (kind,), _label(name, number))[0]
            for number, side in enumerate((left, right), start=1)
        ]
        return replace(node, arguments=tuple(checked))

    def _membership(self, node: Call) -> Node:
        """Check `x in [a, b]`: x has the items' type, except that a category may be in integers."""
        left, right = node.arguments
        if not isinstance(right, Literal) or not isinstance(right.value, tuple):
            raise InputError("in: argument 2 must be a list of constants such as [1, 2]")
        # All items have one type, so the first one stands for them.
        kind = self._common([left, Literal(right.value[0])], _COMPARED)
        checked, _ = self.typed(left, (kind,), _label("in", 1))
        items: list[float | str] = []
        for item in right.value:
            constant, _ = _literal(Literal(item), (kind,), _label("in", 2))
            assert not isinstance(constant.value, tuple)
            items.append(constant.value)
        return replace(node, arguments=(checked, Literal(tuple(items))))


def _label(function: str, number: int) -> str:
    """Return the place of an argument for messages."""
    return f"{_SHOWN.get(function, function)}: argument {number}"


def _shown(node: Call) -> str:
    """Return the name of a call's function, and the sign of an operator."""
    return _SHOWN.get(node.function, node.function)


def _printable(name: str) -> str:
    """Return a name in one line."""
    return name if name.isprintable() else repr(name)


def _converts(kind: Type, other: Type) -> bool:
    """Return whether values of one type count as values of the other."""
    texts = {"category", "text"}
    same = kind.kind == other.kind or {kind.kind, other.kind} <= texts
    return same and kind.is_list == other.is_list


def _matching(kind: Type, options: Types) -> Type | None:
    """Return the first of the types that a type counts as, itself if it is one of them."""
    if kind in options:
        return kind
    return next((other for other in options if _converts(kind, other)), None)


def _mismatch(label: str, options: Types, subject: str, kind: Type) -> InputError:
    names = " or ".join(dict.fromkeys(describe(other) for other in options))
    return InputError(f"{label} must be {names}, but {subject} is {describe(kind)}")


def _literal(node: Literal, options: Types, label: str) -> tuple[Literal, Type]:
    """Return a constant of one of the types `options`. An integer may be a category."""
    if isinstance(node.value, float):
        if NUMBER in options:
            return node, NUMBER
        kind = _matching(CATEGORY, options)
        if kind is not None and node.value.is_integer() and abs(node.value) < 2.0**53:
            return Literal(str(int(node.value))), kind
        raise _mismatch(label, options, f"{node.value:g}", NUMBER)
    if isinstance(node.value, tuple):
        raise InputError(f"{label} must not be a list of constants")
    kind = _matching(CATEGORY, options)
    if kind is None:
        raise _mismatch(label, options, f"{node.value!r}", TEXT)
    if not node.value:
        raise InputError(f"{label} must not be an empty text, which means a missing value")
    return node, kind


def _signature(node: Call) -> Signature:
    """Return the signature of a call's function."""
    name = node.function
    if name in _SIGNS:
        raise InputError(f"{_SIGNS[name]}: comparisons must be the first argument of when")
    if name not in FUNCTIONS:
        hint = suggest(
            name,
            FUNCTIONS,
            otherwise=f"choose from {', '.join(FUNCTIONS)}",
        )
        raise InputError(f"function {name} not found; {hint}")
    return FUNCTIONS[name]


def _split(node: Call, signature: Signature) -> tuple[list[Node], list[Node]]:
    """Return the values and the constants among the arguments."""
    count = len(node.arguments)
    max_count = len(signature.values) + len(signature.constants)
    # The comparison has no type of its own.
    if node.function == "when":
        max_count += 1
    min_count = max_count - signature.num_optional
    if count < min_count or (count > max_count and not signature.has_more):
        needed = f"{min_count} to {max_count}" if min_count < max_count else str(max_count)
        needed = f"{min_count} or more" if signature.has_more else needed
        noun = "argument" if needed == "1" else "arguments"
        raise InputError(
            f"{_shown(node)}: must have {needed} {noun}, got {count}: {signature.help}"
        )
    # A number is no category here: the last one gives the rows.
    if node.function == "cross":
        has_rows = _is_number(node.arguments[-1])
        num_values = count - has_rows
        if not 2 <= num_values <= 3:
            raise InputError(f"cross: must have 2 or 3 categories, got {num_values}")
    elif not signature.constants:
        num_values = count
    else:
        num_values = len(signature.values)
    return list(node.arguments[:num_values]), list(node.arguments[num_values:])


def _is_number(node: Node) -> bool:
    """Return whether a node is a constant number."""
    return isinstance(node, Literal) and isinstance(node.value, float)


def _check_constants(
    function: str,
    constants: Sequence[Node],
    signature: Signature,
    num_values: int,
) -> None:
    for number, (node, name) in enumerate(
        zip(constants, signature.constants, strict=False),
        start=num_values + 1,
    ):
        label = _label(function, number)
        if not isinstance(node, Literal):
            raise InputError(f"{label} ({name}) must be a constant")
        _CONSTANTS[name](node, label)
    if function == "clip":
        low, high = map(_check_number, constants, ("clip: low", "clip: high"))
        if low > high:
            raise InputError(f"clip: low must be at most high, got {low:g} > {high:g}")


def _check_edges(node: Literal, label: str) -> None:
    """Check that edges are increasing numbers."""
    edges = node.value
    if not isinstance(edges, tuple):
        raise InputError(f"{label} (edges) must be a list of numbers such as [0, 10]")
    if len(edges) > MAX_EDGES:
        raise InputError(f"{label} (edges) must have at most {MAX_EDGES} numbers, got {len(edges)}")
    numbers = [edge for edge in edges if isinstance(edge, float)]
    if len(numbers) < len(edges):
        raise InputError(f"{label} (edges) must be a list of numbers such as [0, 10]")
    for low, high in itertools.pairwise(numbers):
        if low >= high:
            raise InputError(f"{label} (edges) must increase, got {low:g} before {high:g}")


def _integer_check(name: str, limit: int) -> Callable[[Literal, str], None]:
    def check_integer(node: Literal, label: str) -> None:
        value = node.value
        if not isinstance(value, float) or not value.is_integer() or not 1 <= value <= limit:
            raise InputError(
                f"{label} ({name}) must be an integer from 1 to {limit}, got {value!r}"
            )

    return check_integer


def _check_number(node: Node, label: str) -> float:
    """Return the value of a constant number."""
    if not isinstance(node, Literal) or not isinstance(node.value, float):
        raise InputError(f"{label} must be a constant number")
    return node.value


def _check_separator(node: Literal, label: str) -> None:
    """Check that a separator is not empty."""
    if not isinstance(node.value, str) or not node.value:
        raise InputError(f"{label} (separator) must be a text such as ',', got {node.value!r}")


def _check_zone(node: Literal, label: str) -> None:
    """Check that a zone is in this machine's time zones."""
    zone = node.value
    if not isinstance(zone, str) or not zone:
        raise InputError(f"{label} (zone) must be a text such as 'Europe/Berlin', got {zone!r}")
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        zones = zoneinfo.available_timezones()
        hint = suggest(
            zone,
            zones,
            otherwise="take a name such as 'Europe/Berlin'",
        )
        raise InputError(f"{label}: zone {zone!r} not found; {hint}") from None


def _check_mode(node: Literal, label: str) -> None:
    """Check that a mode is one of MODES."""
    if node.value not in MODES:
        modes = ", ".join(MODES)
        raise InputError(f"{label} (mode) must be one of {modes}, got {node.value!r}")


_CONSTANTS: Final[dict[str, Callable[[Literal, str], object]]] = {
    "edges": _check_edges,
    "bins": _integer_check("bins", MAX_BINS),
    "low": _check_number,
    "high": _check_number,
    "rows": _integer_check("rows", MAX_ROWS),
    "separator": _check_separator,
    "n": _integer_check("n", MAX_NGRAM),
    "items": _integer_check("n", MAX_LAST),
    "zone": _check_zone,
    "mode": _check_mode,
}
