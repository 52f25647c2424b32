"""Functions of formulas whose constants come from the training rows, such as `quantile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rayrec.config import InputError
from rayrec.formula.tree import Call, Literal, Node

FITTED: Final = ("quantile", "zscore")
"""Names of the fitted functions. All have a number as their first argument."""

Constants = Mapping[int, tuple[float, ...]]
"""Constants by the number of a fitted call in its formula: those inside a call come first."""


@dataclass(frozen=True)
class Unfitted:
    """Call whose constants can be computed: all fitted functions inside have theirs."""

    feature: str
    """Name of the feature."""
    number: int
    """Number of the call in the feature's formula."""
    call: Call

    @property
    def argument(self) -> Node:
        """Number whose distribution the constants describe."""
        return self.call.arguments[0]

    @property
    def num_bins(self) -> int:
        """Number of a quantile's bins."""
        bins = self.call.arguments[1]
        assert isinstance(bins, Literal)
        assert isinstance(bins.value, float)
        return int(bins.value)


def calls_of(node: Node) -> Iterator[Call]:
    """Yield the fitted calls of a tree in the order of their numbers."""
    if not isinstance(node, Call):
        return
    for argument in node.arguments:
        yield from calls_of(argument)
    if node.function in FITTED:
        yield node


# A fitted function becomes plain ones, so that kernels and definitions know no fitted functions:
#
#   quantile(x, n)   bucketize(x, edges)
#   zscore(x)        (x - mean) / deviation
def with_constants(node: Node, constants: Constants) -> Node:
    """Return a checked tree in which the calls that have constants are plain functions. Raises
    InputError if the constants are not those of the calls.
    """
    numbers = {id(call): number for number, call in enumerate(calls_of(node))}
    if not all(number in range(len(numbers)) for number in constants):
        raise InputError("fitted constants do not belong to the formula")

    def plain(inner: Node) -> Node:
        if not isinstance(inner, Call):
            return inner
        arguments = tuple(plain(argument) for argument in inner.arguments)
        values = constants.get(numbers.get(id(inner), -1))
        if values is None:
            return replace(inner, arguments=arguments)
        if inner.function == "quantile":
            return Call("bucketize", (arguments[0], Literal(values)))
        if len(values) != 2:
            raise InputError("fitted constants of zscore must be a mean and a deviation")
        mean, deviation = values
        difference = Call("subtract", (arguments[0], Literal(mean)))
        return Call("divide", (difference, Literal(deviation)))

    return plain(node)
