"""Rows of a stored table under other numbers: every part that a worker of any plan holds gets those of the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, row_reading
from rayrec.checkpoint import reader as reader_module
from rayrec.checkpoint.reader import TableReader
from rayrec.checkpoint.row_map import RowMap
from rayrec.checkpoint.row_reading import restore_rows
from rayrec.config import InputError

ROWS, STORED, COLUMNS = 50, 40, 12


def stored(folder: Path) -> tuple[Checkpoint, torch.Tensor]:
    table = torch.arange(STORED * COLUMNS, dtype=torch.float32).view(STORED, COLUMNS)
    checkpoint.save(str(folder / "step_00000001"), {"model.a": table, "optimizer.a.momentum1": table[:, 0]}, state={})
    return Checkpoint(str(folder / "step_00000001")), table


def permuted() -> RowMap:
    rng = np.random.default_rng(1)
    sources = np.full(ROWS, -1, np.int32)
    places = rng.permutation(ROWS)[:30]
    sources[places] = rng.permutation(STORED)[:30]
    sources[1] = sources[0] = 7  # an empty field and an unknown category that had one row
    return RowMap(ROWS, STORED, sources)


@pytest.mark.parametrize("row_map", [permuted(), RowMap(ROWS, STORED)])
@pytest.mark.parametrize("window_bytes", [1 << 20, 5 * COLUMNS * 4])
def test_parts_of_any_plan_get_the_rows_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_map: RowMap, window_bytes: int
) -> None:
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", window_bytes)
    saved, table = stored(tmp_path)
    start = -torch.arange(1, ROWS * COLUMNS + 1, dtype=torch.float32).view(ROWS, COLUMNS)
    sources = row_map.of(0, ROWS)
    expected = start.clone()
    for row, source in enumerate(sources.tolist()):
        if source >= 0:
            expected[row] = table[source]
    whole, state = start.clone(), torch.zeros(ROWS)
    restore_rows(saved, {"model.a": (whole, row_map), "optimizer.a.momentum1": (state, row_map)})
    assert torch.equal(whole, expected)
    assert torch.equal(state, torch.where(torch.from_numpy(sources) >= 0, expected[:, 0], 0.0))
    # Row-wise parts of three workers, columns of two, and both.
    reader = TableReader(saved.path, saved.manifest())
    for rows, columns in itertools.product([(0, 17), (17, 34), (34, ROWS)], [(0, 12), (0, 8), (8, 12)]):
        part = start[slice(*rows), slice(*columns)].clone()
        row_reading._fill(reader, "model.a", part, row_map.of(*rows), columns[0])
        assert torch.equal(part, expected[slice(*rows), slice(*columns)])


def test_only_ranges_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", 5 * COLUMNS * 4)
    saved, _ = stored(tmp_path)
    read: list[tuple[int, int]] = []
    rows = TableReader.rows

    def noted(
        self: TableReader, name: str, first: int, stop: int, *, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        read.append((first, stop))
        return rows(self, name, first, stop, columns=columns)

    monkeypatch.setattr(TableReader, "rows", noted)
    sources = np.full(ROWS, -1, np.int32)
    sources[[3, 40, 41]] = [12, 33, 31]
    restore_rows(saved, {"model.a": (torch.zeros(ROWS, COLUMNS), RowMap(ROWS, STORED, sources))})
    assert read == [(12, 13), (31, 34)]


def test_another_shape_is_refused(tmp_path: Path) -> None:
    saved, _ = stored(tmp_path)
    with pytest.raises(InputError, match=r"model\.a has shape \[40, 12\], expected is \[40, 6\]"):
        restore_rows(saved, {"model.a": (torch.zeros(ROWS, 6), RowMap(ROWS, STORED))})
    with pytest.raises(InputError, match=r"has no model\.b"):
        restore_rows(saved, {"model.b": (torch.zeros(ROWS, 6), RowMap(ROWS, STORED))})
