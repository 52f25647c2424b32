"""What data tasks are given on their way; Ray runs none of them here."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import ray.data

from rayrec import storage
from rayrec.data.placement import TaskPlacement
from rayrec.data.ray_tasks import tasks_dataset


def patience_of(item: int) -> pa.Table:
    return pa.table({"item": [item], "outage_s": [storage.outage_s()]})


@pytest.mark.parametrize(("max_outage_s", "waits_s"), [(None, 30.0), (900.0, 900.0), (0.0, 0.0)])
def test_a_task_waits_for_a_store_as_long_as_its_placement_says(
    monkeypatch: pytest.MonkeyPatch, max_outage_s: float | None, waits_s: float
) -> None:
    monkeypatch.setenv("RAYREC_STORAGE_OUTAGE_S", "30")
    monkeypatch.setattr(ray.data, "read_datasource", lambda source, **_: source)
    source: Any = tasks_dataset("look", patience_of, [3, 4], placement=TaskPlacement(max_outage_s=max_outage_s))
    found = [table.to_pylist() for task in source.get_read_tasks(2) for table in task()]
    assert found == [[{"item": item, "outage_s": waits_s}] for item in (3, 4)]
