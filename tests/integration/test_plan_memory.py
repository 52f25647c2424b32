"""The memory that `rayrec plan` forecasts for a CPU worker, against that of a process that trains and saves."""

import pytest
from hosts.planned_memory import SIZES, measured

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.exhaustive]


@pytest.mark.parametrize("rows", SIZES)
def test_the_forecast_is_within_15_percent_of_the_peak(rows: int) -> None:
    found = measured(rows)
    assert found["forecast"] == pytest.approx(found["peak"], rel=0.15)
