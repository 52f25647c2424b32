"""An engine for tests of preparation, which runs its tasks in this process and can be made to die."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa


class Died(Exception):
    pass


class HereEngine:
    """Runs the tasks in this process, and dies after some."""

    def __init__(self, tasks: int = 10**9) -> None:
        self.left, self.ran = tasks, 0

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 0
    ) -> Iterator[pa.Table]:
        for item in items:
            if not self.left:
                raise Died
            self.left -= 1
            self.ran += 1
            yield function(item)
