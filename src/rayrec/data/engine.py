"""What runs data tasks: the same functions over the same items, whoever distributes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa


class Engine(Protocol):
    """Runs one function over many items in parallel. Since all engines run the same functions and hand on their results in
    the items' order, whatever is made with one is byte for byte what another makes."""

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        """The results, in the order of the items. `function` and items are pickled; `block_bytes` is the expected size of
        a result. Raises the InputError of a task as it was raised there."""
        ...
