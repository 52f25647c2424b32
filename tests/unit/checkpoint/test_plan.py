"""What the ranks of a run must hold together, so that a checkpoint is complete."""

from __future__ import annotations

import pytest

from rayrec.checkpoint.plan import Box, check_covered
from rayrec.config import InputError


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([((0, 0), (4, 3))], 12),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], 12),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], 12),
        ([], 0),
        ([((0, 0), (2, 3))], 6),
        ([((0, 0), (4, 3)), ((0, 0), (4, 3))], 24),
    ],
)
def test_the_parts_of_a_tensor_make_it_up_exactly_once(boxes: list[Box], covered: int) -> None:
    shapes = {"scalar": (), "empty": (0, 4), "table": (4, 3)}
    written = {"scalar": [((), ())], "table": boxes}
    if covered == 12:
        check_covered(shapes, written)
        return
    with pytest.raises(InputError, match=f"table: the workers hold {covered} of its 12 elements"):
        check_covered(shapes, written)


def test_a_tensor_that_nobody_writes_is_missed() -> None:
    with pytest.raises(InputError, match="scalar: the workers hold 0 of its 1 elements"):
        check_covered({"scalar": ()}, {})
