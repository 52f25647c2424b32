"""Formulas of a schema's features in the order in which they can be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from rayrec.config import InputError
from rayrec.formula.fitted import Constants, Unfitted, calls_of, with_constants
from rayrec.formula.tree import (
    Call,
    Column,
    Literal,
    Lookup,
    Node,
    columns_of,
    parse,
    to_json,
)
from rayrec.formula.types import NUMBER, NUMBERS, Type, check

Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """Column that a formula computes."""

    name: str
    node: Node
    type: Type


@dataclass(frozen=True)
class Program:
    """Formulas of a schema, checked."""

    steps: tuple[Step, ...]
    """Columns to compute; each needs earlier ones only."""
    inputs: Mapping[str, Type]
    """Columns of the log that formulas read, in order of use, with their types."""
    sources: Mapping[str, Type]
    """Columns of `inputs` that are no inputs of a model, with the types that their use implies."""
    unfitted: tuple[Unfitted, ...] = ()
    """Calls to fit next. Others may need their constants. Empty if all have constants."""

    def describe(self) -> dict[str, Any]:
        """Return the inputs with their types, and the steps with their trees, as JSON values."""
        return {
            "inputs": {name: asdict(kind) for name, kind in self.inputs.items()},
            "steps": [
                {"name": step.name, "node": node}
                for step, node in zip(self.steps, self.nodes, strict=True)
            ],
        }

    @cached_property
    def nodes(self) -> tuple[dict[str, Any], ...]:
        """Tree of each step as JSON."""
        return tuple(to_json(step.node) for step in self.steps)

    def needed(self, nodes: Sequence[Node]) -> set[str]:
        """Return the columns, of the log or computed, that parts of formulas depend on."""
        names = {name for node in nodes for name in columns_of(node)}
        for step in reversed(self.steps):
            if step.name in names:
                names |= {*columns_of(step.node)}
        return names

    @cached_property
    def names_by_type(self) -> Mapping[Type, tuple[str, ...]]:
        """Columns of the steps by their type."""
        names: dict[Type, list[str]] = {}
        for step in self.steps:
            names.setdefault(step.type, []).append(step.name)
        return {kind: tuple(each) for kind, each in names.items()}

    @cached_property
    def lookup_nodes(self) -> tuple[Lookup, ...]:
        """All lookups, each once."""
        nodes = (node for step in self.steps for node in lookups_of(step.node))
        return tuple(dict.fromkeys(nodes))

    @cached_property
    def lookups(self) -> Mapping[str, tuple[str, ...]]:
        """Columns that are looked up, sorted, by side table."""
        columns: dict[str, set[str]] = {}
        for node in self.lookup_nodes:
            columns.setdefault(node.table, set()).add(node.column)
        return {table: tuple(sorted(names)) for table, names in columns.items()}

    @cached_property
    def tables(self) -> Mapping[str, frozenset[str]]:
        """Side tables that each computed column depends on, also through other columns."""
        tables: dict[str, frozenset[str]] = {}
        for step in self.steps:
            looked_up = {node.table for node in lookups_of(step.node)}
            for name in columns_of(step.node):
                looked_up |= tables.get(name, frozenset())
            tables[step.name] = frozenset(looked_up)
        return tables

    @classmethod
    def from_columns(
        cls,
        formulas: Mapping[str, str],
        *,
        dense: Sequence[str],
        sparse: Sequence[str],
        lists: Sequence[str],
        vectors: Mapping[str, Sequence[str]],
        timestamp: str | None,
        constants: Mapping[str, Constants],
    ) -> Program:
        """Check and order the formulas of a schema.

        Args:
            formulas: Text of each formula, by the name of the column that it computes.
            dense: Columns of numbers, of the log or computed.
            sparse: Columns of categories, of the log or computed.
            lists: Columns of `sparse` that are lists.
            vectors: Columns of the numbers of each vector, by its name.
            timestamp: Column with the time of each row.
            constants: Constants of fitted functions, as far as known, by the name of the column.

        Raises InputError for an invalid formula, and for formulas that need each other.
        """
        if not formulas and not vectors:
            return cls((), {}, {})
        elements = {name for names in vectors.values() for name in names}
        column_types = {name: Type("number") for name in dense if name not in elements}
        column_types |= {name: Type("category", is_list=name in lists) for name in sparse}
        repeated = [name for name in vectors if name in column_types or name in formulas]
        if repeated:
            raise InputError(f"schema: vectors names {repeated[0]}, which has another use too")
        if timestamp is not None:
            column_types.setdefault(timestamp, Type("time"))
        types_in_log = {name: kind for name, kind in column_types.items() if name not in formulas}
        return _compiled(
            tuple(formulas.items()),
            tuple(types_in_log.items()),
            tuple((name, tuple(columns)) for name, columns in vectors.items()),
            tuple((name, tuple(values.items())) for name, values in constants.items()),
        )


@lru_cache(maxsize=64)
def _compiled(
    formulas: tuple[tuple[str, str], ...],
    column_types: tuple[tuple[str, Type], ...],
    vectors: tuple[tuple[str, tuple[str, ...]], ...],
    constants: tuple[tuple[str, tuple[tuple[int, tuple[float, ...]], ...]], ...],
) -> Program:
    nodes = {name: _in_feature(name, parse, text) for name, text in formulas}
    types = dict(column_types)
    steps: list[Step] = []
    sources: dict[str, Type] = dict.fromkeys((name for name, _ in vectors), NUMBERS)
    inputs = dict(sources)
    for vector, columns in vectors:
        for index, name in enumerate(columns):
            element = Call("element", (Column(vector), Literal(float(index))))
            steps.append(Step(name, element, NUMBER))
            types[name] = NUMBER
    fitted = {name: dict(values) for name, values in constants}
    unfitted: list[Unfitted] = []
    incomplete: set[str] = set()
    for name in _ordered(nodes):
        checked = _in_feature(name, check, nodes[name], types | sources)
        values = fitted.get(name, {})
        node = _in_feature(name, with_constants, checked.node, values)
        if any(calls_of(node)) or _reads(node, incomplete):
            incomplete.add(name)
        numbered = enumerate(calls_of(checked.node))
        waiting = [number for number, _ in numbered if number not in values]
        for number, call in zip(waiting, calls_of(node), strict=True):
            if not any(calls_of(call.arguments[0])) and not _reads(call, incomplete):
                unfitted.append(Unfitted(name, number, call))
        sources |= checked.sources
        read = [each for each in columns_of(nodes[name]) if each not in nodes]
        inputs |= {each: (types | sources)[each] for each in read}
        types[name] = checked.type
        steps.append(Step(name, node, checked.type))
    return Program(tuple(steps), inputs, sources, tuple(unfitted))


def _reads(node: Node, names: set[str]) -> bool:
    return not names.isdisjoint(columns_of(node))


def _in_feature(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function whose errors get the feature's name."""
    try:
        return function(*arguments)
    except InputError as error:
        raise InputError(f"schema: feature {name}: {error}") from None


def _ordered(nodes: Mapping[str, Node]) -> list[str]:
    """Return the names in an order in which each needs earlier ones only, else as given. Raises
    InputError if there is none.
    """
    needs = {
        name: [each for each in columns_of(node) if each in nodes] for name, node in nodes.items()
    }
    ordered: list[str] = []
    while len(ordered) < len(needs):
        ready = [
            name
            for name, needed in needs.items()
            if name not in ordered and set(needed) <= set(ordered)
        ]
        if not ready:
            left = [name for name in needs if name not in ordered]
            raise InputError(
                f"schema: the formulas of {', '.join(left)} need each other; remove a reference"
            )
        ordered.append(ready[0])
    return ordered


def lookups_of(node: Node) -> Iterator[Lookup]:
    """Yield the lookups of a checked tree."""
    if isinstance(node, Lookup):
        yield node
    if isinstance(node, Call):
        for argument in node.arguments:
            yield from lookups_of(argument)
