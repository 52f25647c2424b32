"""Rows are dealt out as DistributedSampler does, each once an epoch, from any position, to any number of workers."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows
from rayrec.ingest.batches import ArrayBatches
from rayrec.ingest.loader import Loader
from rayrec.ingest.order import BatchSharding
from rayrec.ingest.row_order import RowOrder


class Shards(ArrayRows):  # type: ignore[misc]  # final for others
    """Numbers 0, 1, 2, ... in chunks, with a note of what was announced."""

    def __init__(self, *chunks: int) -> None:
        super().__init__({"number": np.arange(sum(chunks))})
        self._chunks = chunks
        self.announced: list[np.ndarray] = []
        self.closed = False

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return self._chunks

    def will_read(self, indices: np.ndarray) -> None:
        self.announced.append(indices)

    def close(self) -> None:
        self.closed = True


def _order(source: ArrayRows, shuffle: str = "full", *, seed: int = 0, chunks_per_window: int = 2, **options: Any) -> RowOrder:
    return RowOrder(tuple(source.chunk_rows), shuffle, seed, chunks_per_window, **options)  # type: ignore[arg-type]


def _loader(source: ArrayRows, *, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any) -> Loader:
    arguments = {"epochs": 1, **options}
    order = arguments.pop("order", None) or _order(source)
    return Loader(order, ArrayBatches(source), BatchSharding(rank, world_size, batch_size), **arguments)


def _numbers(batches: list[Batch]) -> list[list[int]]:
    """Of each batch, without fillers."""
    return [batch.tensors["number"].tolist() if batch.loss_weight else [] for batch in batches]


def _all_workers(source: ArrayRows, world_size: int, **options: object) -> list[list[int]]:
    """Each step's rows over all workers, in the order of the epoch."""
    loaders = [_loader(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    shares = [_numbers(list(loader)) for loader in loaders]
    steps = []
    for parts in zip(*shares, strict=True):
        merged = [0] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            merged[rank::world_size] = part
        steps.append(merged)
    return steps


def test_full_shuffle_matches_distributed_sampler() -> None:
    source = Shards(24)
    for epoch in range(2):
        for rank in range(2):
            sampler = DistributedSampler(range(24), num_replicas=2, rank=rank, seed=7)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            loader = _loader(source, rank=rank, world_size=2, batch_size=3, epochs=2, order=_order(source, seed=7))
            mine = _numbers(list(loader))[4 * epoch : 4 * epoch + 4]
            assert [number for batch in mine for number in batch] == list(sampler)


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    shuffle=st.sampled_from(["none", "files", "window", "full"]),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_trains_once_across_reshards(
    chunks: list[int], shuffle: str, worlds: list[int], batch_size: int, data: st.DataObject
) -> None:
    """Stopped again and again, and dealt out to other numbers of workers: the sequence of rows stays the same."""
    source, epochs = Shards(*chunks), 2
    order = _order(source, shuffle)
    whole = [number for epoch in range(epochs) for piece in order.numbers(epoch, 0) for number in piece.tolist()]
    assert sorted(whole) == sorted(list(range(len(source))) * epochs)
    seen: list[int] = []
    state = None
    for place, world_size in enumerate(worlds):
        options = {"batch_size": batch_size, "epochs": epochs, "state": state, "order": order}
        steps = _loader(source, world_size=world_size, **options).steps
        taken = steps if place == len(worlds) - 1 else data.draw(st.integers(0, steps))
        rows = [number for step in _all_workers(source, world_size, **{**options, "max_steps": taken}) for number in step]
        loader = _loader(source, world_size=world_size, **options)
        assert loader.rows(taken) == len(rows)
        for _ in range(taken):
            next(loader)
        seen += rows
        assert loader.trained_rows().rows == len(seen)
        state = loader.state()
        loader.close()
    assert seen == whole


def test_short_rest_joins_previous_batch_or_leaves_filler() -> None:
    source = Shards(17)
    for small_steps, sizes in ((False, [8, 9]), (True, [8, 8, 1])):
        assert list(map(len, _all_workers(source, 2, batch_size=4, order=_order(source, small_steps=small_steps)))) == sizes
    source = Shards(5)
    order = _order(source, small_steps=True)
    batches = [list(_loader(source, rank=rank, world_size=2, batch_size=2, order=order)) for rank in range(2)]
    assert [len(batch) for batch in batches[0]] == [2, 1]
    assert [batch.loss_weight for batch in batches[0]] == [0.5, 2.0]
    assert (batches[1][1].loss_weight, len(batches[1][1])) == (0.0, 1)


def test_windows_are_announced_before_reading() -> None:
    source = Shards(4, 4, 4, 4)
    order = _order(source, "window", chunks_per_window=2)
    windows = list(order.numbers(0, 0))
    assert [len(set((window // 4).tolist())) for window in windows] == [2, 2]
    assert list(map(len, order.numbers(0, 10))) == [6]
    list(_loader(source, order=order, epochs=1))
    assert [sorted(window.tolist()) for window in source.announced] == [sorted(window.tolist()) for window in windows]
    assert not any(np.array_equal(window, np.sort(window)) for window in windows)


FOURS = (4, 4, 4, 4)


@pytest.mark.parametrize(
    ("chunks", "options", "others", "changes", "why"),
    [
        ((10,), {}, (11,), {}, "rows changed from 10 to 11"),
        ((10,), {}, (10,), {"seed": 3}, "seed changed from 0 to 3"),
        ((10,), {"data_hash": "0a"}, (10,), {"data_hash": "0b"}, "data_hash changed from 0a to 0b"),
        ((10,), {"data_hash": "0a"}, (10,), {}, None),
        (FOURS, {"shuffle": "window"}, (3, 5, 4, 4), {}, "because chunk_rows"),
        (FOURS, {"shuffle": "window"}, FOURS, {"chunks_per_window": 3}, r"window changed from 2 to 3[^\n]* another --name\.$"),
        # A window that holds all chunks is one order, however large; elsewhere its size decides nothing.
        (FOURS, {"shuffle": "window", "chunks_per_window": 4}, FOURS, {"chunks_per_window": 9}, None),
        (FOURS, {}, FOURS, {"chunks_per_window": 3}, None),
    ],
)
def test_position_rejects_other_order(
    chunks: tuple[int, ...], options: dict[str, Any], others: tuple[int, ...], changes: dict[str, Any], why: str | None
) -> None:
    source, other = Shards(*chunks), Shards(*others)
    state = _loader(source, order=_order(source, **options)).state()
    order = _order(other, **{**options, **changes})
    if why is None:
        assert _loader(other, order=order, state=state).state()["offset"] == state["offset"]
    else:
        rejects(f"^train_data: .*{why}", _loader, other, order=order, state=state)


def test_old_position_without_hashes_resumes() -> None:
    source = Shards(4, 4, 4, 4)
    order = _order(source, "window", data_hash="0a")
    stored = {"epoch": 0, "offset": 8, "rows": 16, "chunks": 4, "shuffle": "window", "seed": 0}
    loader = _loader(source, state=stored, order=order)
    assert _numbers(list(loader)) == _numbers(list(_loader(source, order=order)))[2:]
    assert loader.state()["data_hash"] == "0a"


def test_loader_raises_row_errors_and_rejects_empty_data() -> None:
    class Damaged(Shards):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            if 9 in indices:
                raise InputError("shard 2: damaged")
            return super().read(indices)

    loader = _loader(Damaged(12), order=_order(Shards(12), "none"))
    assert len(next(loader)) == 4
    next(loader)
    rejects("damaged", next, loader)
    rejects("no rows", _loader, Shards(0))


def test_close_stops_thread_and_rows() -> None:
    source = Shards(1000)
    threads = threading.active_count()
    loader = _loader(source, batch_size=1)
    next(loader)
    assert threading.active_count() == threads + 1
    loader.close()
    assert source.closed
    assert threading.active_count() == threads
    assert next(loader, None) is None


@pytest.mark.parametrize(("rows", "count", "sizes"), [(5, 2, [3, 2]), (2, 3, [1, 1, 1]), (4, 1, [4])])
def test_split_batch_has_exact_size(rows: int, count: int, sizes: list[int]) -> None:
    parts = Batch({"x": torch.arange(rows)}, 0.5).parts(count)
    assert [len(part) for part in parts] == sizes
    assert sum(len(part) for part in parts if part.loss_weight) == rows
