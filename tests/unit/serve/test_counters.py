"""Values that a histogram takes at once."""

from __future__ import annotations

import math

import numpy as np

from rayrec.serve.counters import Counters

NAME = "rayrec_serve_shadow_score_difference"


def test_a_difference_that_is_no_number_is_counted_and_spoils_no_sum() -> None:
    counters = Counters()
    counters.shadow_score_difference.observe(np.array([[0.25, math.nan], [1e-6, 0.0]]))
    values = counters.snapshot().values()
    assert values[f"{NAME}_bucket", (("le", "1e-06"),)] == 2
    assert values[f"{NAME}_bucket", (("le", "0.1"),)] == 2
    assert values[f"{NAME}_bucket", (("le", "+Inf"),)] == values[f"{NAME}_count", ()] == 4
    assert values[f"{NAME}_sum", ()] == 0.250001
