"""Row ranges of any size, read from checkpoints in blocks."""

import errno
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import fails_with, flip, raising, rejects, unreadable, watched
from hypothesis import given
from hypothesis import strategies as st
from ranks.checkpoint import run_ranks, same, sharded, whole
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rayrec import checkpoint, storage
from rayrec.checkpoint import (
    Checkpoint,
    CheckpointReader,
    CheckpointWriter,
    DamagedError,
    folder_of,
    restore,
    save,
    weights_sha256,
    writer,
)
from rayrec.checkpoint import reader as reader_module
from rayrec.checkpoint import state as state_module
from rayrec.checkpoint.format import UnreadableError
from rayrec.checkpoint.reader import TableReader
from rayrec.checkpoint.state import (
    RowMap,
    Targets,
    all_tensors,
    make_state,
    model_tensors,
    optimizer_tensors,
    restore_all,
    restore_model,
    restore_rows,
)
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.optim.optimizer import data_parallel_optimizer

Saved = tuple[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a tensor in one chunk whose rows (12 bytes) span its blocks (100 bytes)."""
    folder = str(tmp_path_factory.mktemp("run") / "step_00000001")
    values = torch.randn(83, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", 100)
        checkpoint.save(folder, {"first": torch.ones(5, dtype=torch.float64), "a": values}, state={})
    return folder, values


def _read(folder: str, rows: tuple[int, int], columns: tuple[int, int], range_bytes: int) -> torch.Tensor:
    (chunk,) = Checkpoint(folder).manifest()["tensors"]["a"]["chunks"]
    target = torch.zeros(rows[1], columns[1])
    reader = reader_module._Reader(folder, 100)
    reader.range_bytes = range_bytes
    reader_module._run(reader_module._copies(reader, reader_module._Rows("a", torch.float32, chunk), (rows, columns), target))
    return target


@given(
    first=st.integers(0, 82),
    count=st.integers(0, 83),
    columns=st.sampled_from([(0, 3), (1, 2), (2, 1)]),
    range_bytes=st.sampled_from([1, 12, 100, 300, 10_000]),
    scheme=st.sampled_from(["", "file://"]),
)
def test_reader_returns_any_rows(
    saved: Saved, first: int, count: int, columns: tuple[int, int], range_bytes: int, scheme: str
) -> None:
    folder, values = saved
    count = min(count, 83 - first)
    got = _read(scheme + folder, (first, count), columns, range_bytes)
    assert torch.equal(got, values[first : first + count, columns[0] : sum(columns)])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_unread_damage_is_ignored(saved: Saved, scheme: str) -> None:
    folder, values = saved
    (chunk,) = Checkpoint(folder).manifest()["tensors"]["a"]["chunks"]
    assert len(chunk["sha256"]) == 10
    place = f"{folder}/{chunk['file']}", chunk["start"] + 399  # the last byte of block 3: in row 33
    flip(*place)
    try:
        assert torch.equal(_read(scheme + folder, (0, 25), (0, 3), 100), values[:25])
        assert torch.equal(_read(scheme + folder, (34, 49), (0, 3), 100), values[34:])
        fails_with(DamagedError, "the checksum of a does not match", _read, scheme + folder, (32, 1), (0, 3), 100)
    finally:
        flip(*place)


def test_aligned_blocks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(reader_module, "_RANGE_BYTES", 4096)
    values = torch.randn(512, 8)  # 16 KiB
    path = f"file://{tmp_path}/step_00000001"
    checkpoint.save(path, {"a": values}, state={})
    reads = watched(monkeypatch, storage, "read_into")
    target: dict[str, Any] = {"a": torch.zeros(512, 8)}
    checkpoint.restore(Checkpoint(path), target)
    assert torch.equal(target["a"], values)
    assert [len(buffer) for _, _, buffer, _ in reads] == [4096] * 4


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["data_00000.safetensors", "config.yaml", "manifest.json"])
def test_unreadable_disk_sector_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """An earlier checkpoint is used for unreadable files, but not during an outage of a store."""
    first, second = (Checkpoint(checkpoint.folder_of(str(tmp_path), step)) for step in (1, 2))
    for saved in (first, second):
        checkpoint.save(saved.path, {"a": torch.ones(3)}, state={}, extra_files=ExtraFiles({"config.yaml": b"a: 1"}).write)
    unreadable(monkeypatch, f"{second.path}/{name}", OSError(number, os.strerror(number)))
    target, told = {"a": torch.zeros(3)}, []
    fails_with(UnreadableError, rf"{name}: cannot be read \(.+\); use an earlier checkpoint", checkpoint.restore, second, target)
    found = checkpoint.latest_valid_checkpoint(str(tmp_path), log=lambda kind, fields: told.append((kind, fields["path"])))
    if name == "manifest.json":
        assert (found, told) == (first, [("checkpoint_damaged", second.path)])
    else:
        assert (found, told) == (second, [])
    unreadable(monkeypatch, f"{second.path}/{name}", OSError("the store was out for 60 s"))
    fails_with(OSError, "the store was out", checkpoint.restore, second, target)


def test_unreadable_only_checkpoint_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(checkpoint.folder_of(str(tmp_path), 1), {"a": torch.ones(3)}, state={})
    monkeypatch.setattr(storage, "read_json", raising(OSError(errno.EIO, "Input/output error")))
    nothing = r"cannot be read .* there is no other checkpoint to resume from\. Fix the storage"
    rejects(nothing, checkpoint.latest_valid_checkpoint, str(tmp_path), log=lambda *_: None)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_truncated_file_raises_instead_of_crashing(tmp_path: Path, scheme: str) -> None:
    """Truncated during the read, which would raise SIGBUS in a memory map."""
    path = checkpoint.folder_of(f"{scheme}{tmp_path}", 1)
    checkpoint.save(path, {"a": torch.ones(100_000)}, state={})
    tensors = checkpoint.full_tensors(checkpoint.open_checkpoint(f"{scheme}{tmp_path}"))
    os.truncate(f"{path.removeprefix('file://')}/data_00000.safetensors", 1000)
    fails_with(DamagedError, "truncated", next, tensors)


# Stored rows under other numbers: each part in any plan equals the same rows in the full table ------------------------
ROWS, STORED, COLUMNS = 50, 40, 12


def stored(folder: Path) -> tuple[Checkpoint, torch.Tensor]:
    table = torch.arange(STORED * COLUMNS, dtype=torch.float32).view(STORED, COLUMNS)
    checkpoint.save(str(folder / "step_00000001"), {"model.a": table, "optimizer.a.momentum1": table[:, 0]}, state={})
    return Checkpoint(str(folder / "step_00000001")), table


def permuted() -> RowMap:
    rng = np.random.default_rng(1)
    sources = np.full(ROWS, -1, np.int32)
    sources[rng.permutation(ROWS)[:30]] = rng.permutation(STORED)[:30]
    sources[1] = sources[0] = 7  # an empty field and an unknown category that had one row
    return RowMap(ROWS, STORED, sources)


@pytest.mark.parametrize("row_map", [permuted(), RowMap(ROWS, STORED)])
@pytest.mark.parametrize("window_bytes", [1 << 20, 5 * COLUMNS * 4])
def test_restore_rows_matches_full_table_under_any_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_map: RowMap, window_bytes: int
) -> None:
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", window_bytes)
    saved, table = stored(tmp_path)
    start = -torch.arange(1, ROWS * COLUMNS + 1, dtype=torch.float32).view(ROWS, COLUMNS)
    sources = row_map.of(0, ROWS)
    expected = start.clone()
    expected[sources >= 0] = table[sources[sources >= 0]]
    whole, state = start.clone(), torch.zeros(ROWS)
    restore_rows(saved, {"model.a": (whole, row_map), "optimizer.a.momentum1": (state, row_map)})
    assert torch.equal(whole, expected)
    assert torch.equal(state, torch.where(torch.from_numpy(sources) >= 0, expected[:, 0], 0.0))
    # Row-wise parts of three workers, columns of two, and both.
    reader = TableReader(saved.path, saved.manifest())
    for rows, columns in itertools.product([(0, 17), (17, 34), (34, ROWS)], [(0, 12), (0, 8), (8, 12)]):
        part = start[slice(*rows), slice(*columns)].clone()
        state_module._fill(reader, "model.a", part, row_map.of(*rows), columns[0])
        assert torch.equal(part, expected[slice(*rows), slice(*columns)])


def test_restore_rows_reads_needed_ranges_and_rejects_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", 5 * COLUMNS * 4)
    saved, _ = stored(tmp_path)
    reads = watched(monkeypatch, TableReader, "rows")
    sources = np.full(ROWS, -1, np.int32)
    sources[[3, 40, 41]] = [12, 33, 31]
    restore_rows(saved, {"model.a": (torch.zeros(ROWS, COLUMNS), RowMap(ROWS, STORED, sources))})
    assert [(first, stop) for _, _, first, stop, _ in reads] == [(12, 13), (31, 34)]
    for name, message in (("a", r"must have shape \[40, 6\], got \[40, 12\]"), ("b", "not found")):
        rejects(rf"model\.{name} {message}", restore_rows, saved, {f"model.{name}": (torch.zeros(ROWS, 6), RowMap(ROWS, STORED))})


# Checkpoints through torch.distributed.checkpoint, and its checkpoints in rayrec --------------------------------------
def _zeros() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in whole().items()}


def test_dcp_and_rayrec_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    checkpoint.save(ours, whole(), state={})
    dcp.save(whole(), storage_writer=CheckpointWriter(theirs, state={"step": 3}))
    assert weights_sha256(Checkpoint(theirs)) == weights_sha256(Checkpoint(ours))
    assert Checkpoint(theirs).manifest()["state"] == {"step": 3}
    loaded, restored = _zeros(), _zeros()
    dcp.load(loaded, storage_reader=CheckpointReader(ours))
    restore(Checkpoint(theirs), restored)
    assert same(loaded, whole())
    assert same(restored, whole())


def test_dcp_loads_nested_and_selected_names(tmp_path: Path) -> None:
    path = tmp_path / "nested"
    dcp.save({"model": {"a": torch.arange(4.0), "b": torch.ones(2)}}, storage_writer=CheckpointWriter(path))
    assert set(Checkpoint(str(path)).manifest()["tensors"]) == {"model.a", "model.b"}
    found = {"model": {"a": torch.zeros(4)}}
    dcp.load(found, storage_reader=CheckpointReader(path))
    assert found["model"]["a"].tolist() == [0, 1, 2, 3]


def test_dcp_rejects_invalid_values_and_folders(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    with pytest.raises(CheckpointException, match=r"step: must be a tensor\. Put plain values into `state`"):
        dcp.save({"step": "three"}, storage_writer=CheckpointWriter(path))
    assert not Path(path).exists()
    dcp.save({"a": torch.ones(3)}, storage_writer=CheckpointWriter(path))
    with pytest.raises(CheckpointException, match="already contains a checkpoint"):
        dcp.save({"a": torch.ones(3)}, storage_writer=CheckpointWriter(path))
    with pytest.raises(CheckpointException, match=r"manifest\.json: missing"):
        dcp.load({"a": torch.ones(3)}, storage_reader=CheckpointReader(str(tmp_path / "nothing")))
    (data,) = Path(path).glob("data_*")
    flip(data, -1)
    with pytest.raises(CheckpointException, match="damaged, the checksum of a does not match"):
        dcp.load({"a": torch.ones(3)}, storage_reader=CheckpointReader(path))


def ranks(folder: str, rank: int) -> None:
    path = f"{folder}/step"
    dcp.save(sharded(), storage_writer=CheckpointWriter(path))
    loaded, restored = sharded(0), sharded(0)
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    restore(Checkpoint(path), restored)
    assert same(loaded, sharded())
    assert same(restored, sharded())


@pytest.mark.slow
def test_dcp_loads_sharded_tensors_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(ranks, 2, str(tmp_path))
    plain = _zeros()
    restore(Checkpoint(str(tmp_path / "step")), plain)
    assert same(plain, whole())


# Row-wise optimizer state under other column splits; integration/test_resharding.py tests all plans -------------------
NAME = "optimizer.weight.momentum1"


def table(kind: Any = "rowwise_adagrad") -> tuple[torch.nn.Module, Any]:
    """Weights of 3 rows by 8 columns."""
    model = torch.nn.Linear(8, 3, bias=False)
    return model, data_parallel_optimizer(SparseOptimizerConfig(kind=kind), dict(model.named_parameters()))


def test_state_names_have_parameter_and_state() -> None:
    model, optimizer = table()
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, optimizer).items()}
    assert shapes == {"model.weight": (3, 8), NAME: (3,)}
    assert set(optimizer_tensors(table("sgd")[1])) == set()


def test_equal_columns_are_restored_directly() -> None:
    model, optimizer = table()
    targets = Targets(model, optimizer, stored=["model.weight", NAME, f"{NAME}.columns_0_4"])
    assert targets.tensors.keys() == {"model.weight", NAME}
    targets.tensors[NAME].fill_(5.0)
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.full((3,), 5.0))


def test_parts_are_weighted_by_width() -> None:
    model, optimizer = table()
    parts = [f"{NAME}.columns_0_6", f"{NAME}.columns_6_8"]
    targets = Targets(model, optimizer, stored=["model.weight", *parts, "optimizer.weights.momentum1.columns_0_8"])
    assert targets.tensors.keys() == {"model.weight", *parts}
    targets.tensors[parts[0]].copy_(torch.tensor([1.0, 0.1, 4.0]))
    targets.tensors[parts[1]].copy_(torch.tensor([5.0, 0.1, 0.0]))
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.tensor([2.0, 0.1, 3.0]))


def test_missing_state_is_requested_by_name() -> None:
    model, optimizer = table()
    for stored in (["model.weight"], [f"{NAME}.columns_0_4"], [f"{NAME}.columns_0_2", f"{NAME}.columns_4_8"]):
        assert Targets(model, optimizer, stored=stored).tensors.keys() == {"model.weight", NAME}


def test_restore_rejects_another_optimizer(tmp_path: Path) -> None:
    """Restoring only the rest would drop it silently."""
    model = torch.nn.Linear(8, 3)
    adam = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    make_state(adam)
    saved = Checkpoint(folder_of(str(tmp_path), 1))
    save(saved.path, all_tensors(model, adam), state={})
    restore_all(saved, model, adam)
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(model.named_parameters()))
    rejects(r"step_00000001: contains optimizer\.bias\.exp_avg, which the optimizer of this run", restore_all, saved, model, sgd)
    smaller = torch.nn.Linear(8, 3, bias=False)
    save(saved.path, model_tensors(model), state={})
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(smaller.named_parameters()))
    rejects(r"step_00000001: contains model\.bias, which the model of this run", restore_all, saved, smaller, sgd)


def test_make_state_runs_once() -> None:
    model = torch.nn.Linear(8, 3)
    optimizer = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    assert not optimizer_tensors(optimizer)
    make_state(optimizer)
    made = optimizer_tensors(optimizer)
    assert {name.rpartition(".")[2] for name in made} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(parameter.grad is None for parameter in model.parameters())
    before = {name: tensor.clone() for name, tensor in made.items()}
    make_state(optimizer)
    assert same(before, optimizer_tensors(optimizer))


def test_restore_clears_table_caches(tmp_path: Path) -> None:
    purged = []

    model, optimizer = table()
    save(str(tmp_path / "run"), all_tensors(model, optimizer), state={})
    lookup = SimpleNamespace(purge=lambda: purged.append(model.weight[0, 0].item()))
    model._lookups = [lookup, object()]  # type: ignore[assignment]
    stored = model.weight[0, 0].item()
    for again in (lambda at: restore_all(at, model, optimizer), lambda at: restore_model(at, model)):
        with torch.no_grad():
            model.weight.fill_(7.0)
        again(Checkpoint(str(tmp_path / "run")))
    assert purged == [stored, stored]
