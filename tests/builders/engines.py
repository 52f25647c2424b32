"""An engine for tests of preparation, which runs its tasks in this process and can be made to
die.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa


class Died(Exception):
    pass


class LoopEngine:
    """Runs the tasks in this process, in order, counts them, and dies in place of the task after
    some.
    """

    def __init__(self, dies_after: int | None = None) -> None:
        self.left = dies_after
        self.tasks = 0

    def run(
        self, name: str, function: Any, items: Sequence[Any], *, block_bytes: int = 0
    ) -> Iterator[pa.Table]:
        for item in items:
            if self.left is not None:
                if not self.left:
                    raise Died
                self.left -= 1
            self.tasks += 1
            yield function(item)
