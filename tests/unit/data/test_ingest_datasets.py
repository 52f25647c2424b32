"""Streams of many pieces: a bounded number of tasks a Dataset, the next of which starts before the one before is read."""

from collections.abc import Generator, Iterator, Sequence

import pyarrow as pa
import pytest

from rayrec.ingest import ray_engine


class Datasets:
    """Stand-ins that note what is opened, read and closed, a table an item."""

    def __init__(self) -> None:
        self.opened: list[Sequence[int]] = []
        self.closed: list[Sequence[int]] = []

    def tables_of(self, group: Sequence[int]) -> Generator[pa.Table, None, None]:
        self.opened.append(group)
        try:
            for item in group:
                if item < 0:
                    raise ValueError("broken")
                yield pa.table({"item": [item]})
        finally:
            self.closed.append(group)


def items(tables: Iterator[pa.Table]) -> Iterator[int]:
    return (table["item"][0].as_py() for table in tables)


def test_datasets_start_early_close_and_raise_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_EARLY_START_ITEMS", 2)
    datasets, groups = Datasets(), [range(0, 5), range(5, 10), range(10, 12)]
    found = items(ray_engine._chain_groups(groups, datasets.tables_of))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    assert datasets.opened == [range(0, 5)]
    assert next(found) == 3
    assert (next(found), next(found)) == (4, 5)
    assert (datasets.opened, datasets.closed) == ([range(0, 5), range(5, 10)], [range(0, 5)])
    assert list(found) == [*range(6, 12)]
    assert datasets.opened == datasets.closed == groups
    datasets = Datasets()
    found = ray_engine._chain_groups([range(0, 2), range(2, 4)], datasets.tables_of)
    next(found)
    found.close()
    assert sorted(datasets.closed, key=min) == sorted(datasets.opened, key=min) == [range(0, 2), range(2, 4)]
    found = items(ray_engine._chain_groups([[0, 1, 2], [-1, 3]], Datasets().tables_of))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(found)
    assert list(ray_engine._chain_groups([], Datasets().tables_of)) == []


def test_first_datasets_are_small() -> None:
    groups = list(ray_engine._groups(range(4000)))
    assert [len(group) for group in groups] == [64, 256, 1024, 1024, 1024, 608]
    assert [item for group in groups for item in group] == list(range(4000))


@pytest.mark.parametrize(
    ("count", "first", "tasks"),
    [(1, 4, [[0]]), (3, 0, [[0, 1], [2]]), (5, 2, [[0], [1], [2, 3], [4]]), (4, 4, [[0], [1], [2], [3]])],
)
def test_first_tasks_have_one_item(count: int, first: int, tasks: list[list[int]]) -> None:
    assert [list(each) for each in ray_engine.group_items(range(count), first=first, size=2)] == tasks


@pytest.mark.parametrize("rows", [(3,), (2, 0, 1), (0, 0)])
def test_merged_task_returns_table_per_item(rows: tuple[int, ...]) -> None:
    def table_of(item: int) -> pa.Table:
        values = [item * 10 + row for row in range(rows[item])]
        return pa.table({"value": pa.array(values, pa.int64())}, metadata={"made": f"by {item}"} if item else None)

    expected = [table_of(item) for item in range(len(rows))]
    found = list(ray_engine.split_table(ray_engine.merge_tables(table_of, range(len(rows)))))
    assert found == expected
    assert [table.schema.metadata for table in found] == [table.schema.metadata for table in expected]
