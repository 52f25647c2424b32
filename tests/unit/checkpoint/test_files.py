"""Row ranges of any size, read from checkpoints in blocks."""

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import re
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders.faults import fails_with, flip, raising, rejects, unreadable, watched
from hypothesis import given
from hypothesis import strategies as st
from ranks.checkpoint import full, run_ranks, same, sharded, whole, writes
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rayrec import checkpoint, storage
from rayrec.checkpoint import (
    Checkpoint,
    CheckpointReader,
    CheckpointWriter,
    DamagedError,
    Retention,
    acquire_lease,
    writer,
)
from rayrec.checkpoint import reader as reader_module
from rayrec.checkpoint import state as state_module
from rayrec.checkpoint.format import UnreadableError, seal
from rayrec.checkpoint.plan import HostCopy, Part, Plan, check_covered
from rayrec.checkpoint.reader import TableReader
from rayrec.checkpoint.state import (
    RowMap,
    Targets,
    all_tensors,
    model_tensors,
    optimizer_tensors,
    restore_all,
    restore_rows,
)
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.config import InputError
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.optim.optimizer import data_parallel_optimizer
from rayrec.training.progress import Progress

Saved = tuple[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a tensor in one chunk whose rows (12 bytes) span its blocks (100 bytes)."""
    folder = str(tmp_path_factory.mktemp("run") / "step_00000001")
    values = torch.randn(83, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", 100)
        checkpoint.save(
            folder, {"first": torch.ones(5, dtype=torch.float64), "a": values}, state={}
        )
    return folder, values


def _read(
    folder: str, rows: tuple[int, int], columns: tuple[int, int], range_bytes: int
) -> torch.Tensor:
    (chunk,) = Checkpoint(folder).manifest()["tensors"]["a"]["chunks"]
    target = torch.zeros(rows[1], columns[1])
    reader = reader_module._Reader(folder, 100)
    reader.range_bytes = range_bytes
    reader_module._run(
        reader_module._copies(
            reader,
            reader_module._Rows("a", torch.float32, reader_module.Chunk(**chunk)),
            (rows, columns),
            target,
        )
    )
    return target


@given(
    first=st.integers(0, 82),
    count=st.integers(0, 83),
    columns=st.sampled_from([(0, 3), (1, 2), (2, 1)]),
    range_bytes=st.sampled_from([1, 12, 100, 300, 10_000]),
    scheme=st.sampled_from(["", "file://"]),
)
def test_reader_returns_any_rows(
    saved: Saved, first: int, count: int, columns: Any, range_bytes: int, scheme: str
) -> None:
    folder, values = saved
    count = min(count, 83 - first)
    got = _read(scheme + folder, (first, count), columns, range_bytes)
    assert torch.equal(got, values[first : first + count, columns[0] : sum(columns)])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_unread_damage_is_ignored(saved: Saved, scheme: str) -> None:
    folder, values = saved
    (chunk,) = Checkpoint(folder).manifest()["tensors"]["a"]["chunks"]
    assert len(chunk["xxh3_128"]) == 10
    place = f"{folder}/{chunk['file']}", chunk["start"] + 399  # the last byte of block 3: in row 33
    flip(*place)
    try:
        assert torch.equal(_read(scheme + folder, (0, 25), (0, 3), 100), values[:25])
        assert torch.equal(_read(scheme + folder, (34, 49), (0, 3), 100), values[34:])
        fails_with(
            DamagedError,
            "the checksum of a does not match",
            _read,
            scheme + folder,
            (32, 1),
            (0, 3),
            100,
        )
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
def test_unreadable_disk_sector_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """An earlier checkpoint is used for unreadable files, but not during an outage of a store."""
    first, second = (Checkpoint(checkpoint.step_folder(str(tmp_path), step)) for step in (1, 2))
    for saved in (first, second):
        checkpoint.save(
            saved.path,
            {"a": torch.ones(3)},
            state={},
            extra_files=ExtraFiles({"config.yaml": b"a: 1"}).write,
        )
    unreadable(monkeypatch, f"{second.path}/{name}", OSError(number, os.strerror(number)))
    target = {"a": torch.zeros(3)}
    reported = []
    fails_with(
        UnreadableError,
        rf"{name}: cannot be read \(.+\); use an earlier checkpoint",
        checkpoint.restore,
        second,
        target,
    )
    found = checkpoint.latest_valid_checkpoint(
        str(tmp_path), log=lambda kind, fields: reported.append((kind, fields["path"]))
    )
    if name == "manifest.json":
        assert (found, reported) == (first, [("checkpoint_damaged", second.path)])
    else:
        assert (found, reported) == (second, [])
    unreadable(monkeypatch, f"{second.path}/{name}", OSError("the store was out for 60 s"))
    fails_with(OSError, "the store was out", checkpoint.restore, second, target)


def test_unreadable_only_checkpoint_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(checkpoint.step_folder(str(tmp_path), 1), {"a": torch.ones(3)}, state={})
    monkeypatch.setattr(storage, "read_json", raising(OSError(errno.EIO, "Input/output error")))
    nothing = r"cannot be read .* there is no other checkpoint to resume from\. Fix the storage"
    rejects(nothing, checkpoint.latest_valid_checkpoint, str(tmp_path), log=lambda *_: None)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_truncated_file_raises_instead_of_crashing(tmp_path: Path, scheme: str) -> None:
    path = checkpoint.step_folder(f"{scheme}{tmp_path}", 1)
    checkpoint.save(path, {"a": torch.ones(100_000)}, state={})
    tensors = checkpoint.full_tensors(checkpoint.open_checkpoint(f"{scheme}{tmp_path}"))
    os.truncate(f"{path.removeprefix('file://')}/data_00000.safetensors", 1000)
    fails_with(DamagedError, "truncated", next, tensors)


# -- Stored rows under other numbers: each part in any plan equals the same rows in the full table
ROWS = 50
STORED = 40
COLUMNS = 12


def stored(folder: Path) -> tuple[Checkpoint, torch.Tensor]:
    table = torch.arange(STORED * COLUMNS, dtype=torch.float32).view(STORED, COLUMNS)
    checkpoint.save(
        str(folder / "step_00000001"),
        {"model.a": table, "optimizer.a.momentum1": table[:, 0]},
        state={},
    )
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
    sources = row_map.sources_between(0, ROWS)
    expected = start.clone()
    expected[sources >= 0] = table[sources[sources >= 0]]
    whole = start.clone()
    state = torch.zeros(ROWS)
    restore_rows(saved, {"model.a": (whole, row_map), "optimizer.a.momentum1": (state, row_map)})
    assert torch.equal(whole, expected)
    assert torch.equal(state, torch.where(torch.from_numpy(sources) >= 0, expected[:, 0], 0.0))
    # Row-wise parts of three workers, columns of two, and both.
    reader = TableReader(saved.path, saved.manifest())
    for rows, columns in itertools.product(
        [(0, 17), (17, 34), (34, ROWS)], [(0, 12), (0, 8), (8, 12)]
    ):
        part = start[slice(*rows), slice(*columns)].clone()
        state_module._fill(reader, "model.a", part, row_map.sources_between(*rows), columns[0])
        assert torch.equal(part, expected[slice(*rows), slice(*columns)])


def test_restore_rows_reads_needed_ranges_of_equal_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", 5 * COLUMNS * 4)
    saved, _ = stored(tmp_path)
    reads = watched(monkeypatch, TableReader, "rows")
    sources = np.full(ROWS, -1, np.int32)
    sources[[3, 40, 41]] = [12, 33, 31]
    restore_rows(saved, {"model.a": (torch.zeros(ROWS, COLUMNS), RowMap(ROWS, STORED, sources))})
    assert [(first, stop) for _, _, first, stop, _ in reads] == [(12, 13), (31, 34)]
    for name, message in (("a", r"must have shape \[40, 6\], got \[40, 12\]"), ("b", "not found")):
        rejects(
            rf"model\.{name} {message}",
            restore_rows,
            saved,
            {f"model.{name}": (torch.zeros(ROWS, 6), RowMap(ROWS, STORED))},
        )


# -- Checkpoints through torch.distributed.checkpoint, and its checkpoints in rayrec
def test_dcp_and_rayrec_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    ours = str(tmp_path / "ours")
    theirs = str(tmp_path / "theirs")
    checkpoint.save(ours, whole(), state={})
    dcp.save(whole(), storage_writer=CheckpointWriter(theirs, state={"step": 3}))
    assert checkpoint.weights_sha256(Checkpoint(theirs)) == checkpoint.weights_sha256(
        Checkpoint(ours)
    )
    assert Checkpoint(theirs).manifest()["state"] == {"step": 3}
    loaded = whole(0)
    restored = whole(0)
    dcp.load(loaded, storage_reader=CheckpointReader(ours))
    checkpoint.restore(Checkpoint(theirs), restored)
    assert same(loaded, whole())
    assert same(restored, whole())


def test_dcp_loads_nested_and_selected_names(tmp_path: Path) -> None:
    path = tmp_path / "nested"
    dcp.save(
        {"model": {"a": torch.arange(4.0), "b": torch.ones(2)}},
        storage_writer=CheckpointWriter(path),
    )
    assert set(Checkpoint(str(path)).manifest()["tensors"]) == {"model.a", "model.b"}
    found = {"model": {"a": torch.zeros(4)}}
    dcp.load(found, storage_reader=CheckpointReader(path))
    assert found["model"]["a"].tolist() == [0, 1, 2, 3]


def test_dcp_rejects_invalid_values_and_folders(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    plain = r"step: must be a tensor\. Put plain values into `state`"
    fails_with(
        CheckpointException,
        plain,
        dcp.save,
        {"step": "three"},
        storage_writer=CheckpointWriter(path),
    )
    assert not Path(path).exists()
    values = {"a": torch.ones(3)}
    dcp.save(values, storage_writer=CheckpointWriter(path))
    again = CheckpointWriter(path)
    nothing = CheckpointReader(str(tmp_path / "nothing"))
    fails_with(
        CheckpointException, "already contains a checkpoint", dcp.save, values, storage_writer=again
    )
    fails_with(
        CheckpointException, r"manifest\.json: missing", dcp.load, values, storage_reader=nothing
    )
    (data,) = Path(path).glob("data_*")
    flip(data, -1)
    damaged = "damaged, the checksum of a does not match"
    fails_with(
        CheckpointException, damaged, dcp.load, values, storage_reader=CheckpointReader(path)
    )


def ranks(folder: str, rank: int) -> None:
    path = f"{folder}/step"
    dcp.save(sharded(), storage_writer=CheckpointWriter(path))
    loaded = sharded(0)
    restored = sharded(0)
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    checkpoint.restore(Checkpoint(path), restored)
    assert same(loaded, sharded())
    assert same(restored, sharded())


@pytest.mark.slow
def test_dcp_loads_sharded_tensors_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(ranks, 2, str(tmp_path))
    plain = whole(0)
    checkpoint.restore(Checkpoint(str(tmp_path / "step")), plain)
    assert same(plain, whole())


# -- Row-wise optimizer state under other column splits; integration/test_resharding.py tests all
# plans
NAME = "optimizer.weight.momentum1"


def table(kind: Any = "rowwise_adagrad") -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(8, 3, bias=False)
    return model, data_parallel_optimizer(
        SparseOptimizerConfig(kind=kind), dict(model.named_parameters())
    )


def test_equal_columns_are_restored_and_parts_weighted_by_width() -> None:
    model, optimizer = table()
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, optimizer).items()}
    assert shapes == {"model.weight": (3, 8), NAME: (3,)}
    assert set(optimizer_tensors(table("sgd")[1])) == set()
    model, optimizer = table()
    targets = Targets(model, optimizer, stored=["model.weight", NAME, f"{NAME}.columns_0_4"])
    assert targets.tensors.keys() == {"model.weight", NAME}
    targets.tensors[NAME].fill_(5.0)
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.full((3,), 5.0))
    model, optimizer = table()
    parts = [f"{NAME}.columns_0_6", f"{NAME}.columns_6_8"]
    targets = Targets(
        model, optimizer, stored=["model.weight", *parts, "optimizer.weights.momentum1.columns_0_8"]
    )
    assert targets.tensors.keys() == {"model.weight", *parts}
    targets.tensors[parts[0]].copy_(torch.tensor([1.0, 0.1, 4.0]))
    targets.tensors[parts[1]].copy_(torch.tensor([5.0, 0.1, 0.0]))
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.tensor([2.0, 0.1, 3.0]))
    model, optimizer = table()
    for stored in (
        ["model.weight"],
        [f"{NAME}.columns_0_4"],
        [f"{NAME}.columns_0_2", f"{NAME}.columns_4_8"],
    ):
        assert Targets(model, optimizer, stored=stored).tensors.keys() == {"model.weight", NAME}


def test_restore_rejects_another_optimizer_and_makes_state_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 3)
    adam = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    state_module.make_state(adam)
    saved = Checkpoint(checkpoint.step_folder(str(tmp_path), 1))
    checkpoint.save(saved.path, all_tensors(model, adam), state={})
    restore_all(saved, model, adam)
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(model.named_parameters()))
    rejects(
        r"step_00000001: contains optimizer\.bias\.exp_avg, which the optimizer of this run",
        restore_all,
        saved,
        model,
        sgd,
    )
    smaller = torch.nn.Linear(8, 3, bias=False)
    checkpoint.save(saved.path, model_tensors(model), state={})
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(smaller.named_parameters()))
    rejects(
        r"step_00000001: contains model\.bias, which the model of this run",
        restore_all,
        saved,
        smaller,
        sgd,
    )
    optimizer = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    assert not optimizer_tensors(optimizer)
    state_module.make_state(optimizer)
    made = optimizer_tensors(optimizer)
    assert {name.rpartition(".")[2] for name in made} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(parameter.grad is None for parameter in model.parameters())
    before = {name: tensor.clone() for name, tensor in made.items()}
    state_module.make_state(optimizer)
    assert same(before, optimizer_tensors(optimizer))


def test_restore_clears_table_caches(tmp_path: Path) -> None:
    purged = []
    model, optimizer = table()
    checkpoint.save(str(tmp_path / "run"), all_tensors(model, optimizer), state={})
    lookup = SimpleNamespace(purge=lambda: purged.append(model.weight[0, 0].item()))
    model._lookups = [lookup, object()]  # type: ignore[assignment]
    stored = model.weight[0, 0].item()
    for again in (
        lambda at: restore_all(at, model, optimizer),
        lambda at: state_module.restore_model(at, model),
    ):
        with torch.no_grad():
            model.weight.fill_(7.0)
        again(Checkpoint(str(tmp_path / "run")))
    assert purged == [stored, stored]


# -- Checkpoint files: atomic saves, damage errors, no pickles, hashes, versions, URLs
def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3),
        "model.bias": torch.randn(7).to(torch.bfloat16),
        "model.mask": torch.tensor([True, False, True]),
        "model.half": torch.randn(3).half(),
        "optim.step": torch.tensor(2**40 + seed),
        "optim.ids": torch.arange(5, dtype=torch.int32) + seed,
        "optim.bytes": torch.arange(3, dtype=torch.uint8),
        # not contiguous
        "optim.double": torch.randn(2, 2, 2, dtype=torch.float64).permute(2, 0, 1),
        "optim.empty": torch.zeros(0, 4),
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def save_files(folder: Path, step: int = 1, **arguments: Any) -> Checkpoint:
    saved = Checkpoint(checkpoint.step_folder(str(folder), step))
    checkpoint.save(saved.path, **{"tensors": tensors(), "state": {"step": step}, **arguments})
    return saved


def test_restore_returns_saved_tensors(tmp_path: Path) -> None:
    saved = save_files(tmp_path, 12, state={"position": [1, None], "ä": 0.1})
    target = zeros()
    checkpoint.restore(saved, target)
    assert same(target, tensors())
    assert (saved.step, saved.manifest()["state"]) == (12, {"position": [1, None], "ä": 0.1})
    assert dict(checkpoint.full_tensors(saved)).keys() == tensors().keys()
    assert same(dict(checkpoint.full_tensors(saved)), tensors())
    part = torch.nn.Parameter(torch.zeros(5, 3))  # which is filled in place
    checkpoint.restore(saved, {"model.weight": part})
    assert torch.equal(part, tensors()["model.weight"])


def test_undefined_metric_keeps_checkpoint_valid(tmp_path: Path) -> None:
    progress = {"step": 12, "metrics": {"auroc": float("nan"), "logloss": 0.5}, "best_metrics": {}}
    saved = save_files(tmp_path, 12, state={"progress": progress})
    assert (
        checkpoint.latest_valid_checkpoint(
            str(tmp_path), log=lambda *_: pytest.fail("it is not damaged")
        )
        == saved
    )
    restored = Progress.from_state(saved.manifest()["state"]["progress"], rank=0)
    assert math.isnan(restored.metrics.pop("auroc"))
    assert (restored.step, restored.metrics) == (12, {"logloss": 0.5})


def test_files_are_safetensors_without_pickles(tmp_path: Path) -> None:
    saved = save_files(tmp_path, tensors={"a": torch.ones(4, 3), "b": torch.tensor(5)})
    assert sorted(os.listdir(saved.path)) == ["data_00000.safetensors", "manifest.json"]
    for name in os.listdir(saved.path):
        data = Path(saved.path, name).read_bytes()
        assert not any(b"\x80" + bytes([protocol]) in data for protocol in range(2, 6))
        assert b"PK\x03\x04" not in data
    data = Path(saved.path, "data_00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    described = {
        name.split("@")[0]: (entry["dtype"], entry["shape"]) for name, entry in header.items()
    }
    assert described == {"a": ("F32", [4, 3]), "b": ("I64", [])}
    (first, border), (second, end) = sorted(entry["data_offsets"] for entry in header.values())
    assert (first, border, end) == (0, second, len(body))
    start, stop = next(
        entry["data_offsets"] for name, entry in header.items() if name.startswith("a@")
    )
    assert body[start:stop] == torch.ones(4, 3).numpy().tobytes()


def test_save_returns_file_size(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    size = checkpoint.save(str(folder), tensors(), state={}, extra_files=extra)
    assert size == sum(
        file.stat().st_size for file in folder.rglob("*.*") if file.name != "manifest.json"
    )
    files = Checkpoint(str(folder)).manifest()["files"]
    assert files["config.yaml"] == {"bytes": 4, "sha256": hashlib.sha256(b"a: 1").hexdigest()}
    assert files.keys() == {"config.yaml", "more/words.txt", "data_00000.safetensors"}


def extra(folder: str) -> None:
    storage.write_bytes(storage.join(folder, "config.yaml"), b"a: 1")
    storage.write_bytes(storage.join(folder, "more", "words.txt"), b"x" * 100)


def test_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails at any point leaves no checkpoint, and the previous one stays the
    latest.
    """
    before = save_files(tmp_path, 1)
    dies = raising(KeyboardInterrupt())
    fails_with(KeyboardInterrupt, "", save_files, tmp_path, 2, extra_files=dies)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_json", dies)
        fails_with(KeyboardInterrupt, "", save_files, tmp_path, 3, extra_files=extra)
    torn = checkpoint.step_folder(str(tmp_path), 3)
    assert sorted(os.listdir(torn)) == ["config.yaml", "data_00000.safetensors", "more"]
    assert (checkpoint.committed(str(tmp_path)), checkpoint.latest(str(tmp_path))) == (
        [before],
        before,
    )
    rejects("contains no complete checkpoint", checkpoint.open_checkpoint, torn)
    # over the torn one
    assert save_files(tmp_path, 3, extra_files=extra) == checkpoint.latest(str(tmp_path))


def test_save_raises_failures_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writes(full):  # it is not retried
        fails_with(OSError, "No space left", save_files, tmp_path)
    assert os.listdir(checkpoint.step_folder(str(tmp_path), 1)) == []
    monkeypatch.setattr(storage, "write_json", raising(OSError(28, "No space left on device")))
    fails_with(OSError, "No space left", save_files, tmp_path)
    fails_with(
        TypeError, r"rates: must be a tensor", save_files, tmp_path, tensors={"rates": [1, 2]}
    )


def test_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    assert checkpoint.latest(str(tmp_path)) is None
    rejects(
        r"contains no complete checkpoint \(no manifest\.json\)",
        checkpoint.open_checkpoint,
        str(tmp_path),
    )
    for step in (200_000_000, 5, 40):
        save_files(tmp_path, step, tensors={"a": torch.zeros(1)})
    (tmp_path / "checkpoints" / "other").mkdir()
    (tmp_path / "checkpoints" / "step_00000099").mkdir()
    assert [found.step for found in checkpoint.committed(str(tmp_path))] == [5, 40, 200_000_000]
    assert checkpoint.open_checkpoint(str(tmp_path)).step == 200_000_000
    one = checkpoint.step_folder(str(tmp_path), 40)
    assert (checkpoint.open_checkpoint(one).path, checkpoint.parse_step(one + "/")) == (one, 40)
    rejects("must be a checkpoint folder", checkpoint.parse_step, str(tmp_path))


@dataclass(frozen=True)
class Damaged:
    """Checkpoint of zeros, and a later one of which a file is damaged."""

    good: Checkpoint
    saved: Checkpoint
    name: str
    how: str


@pytest.fixture(params=["flipped", "cut", "gone", "empty"])
def how(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["data_00000.safetensors", "config.yaml", "more/words.txt", "manifest.json"])
def damaged(request: pytest.FixtureRequest, how: str, tmp_path: Path) -> Damaged:
    good, saved = (
        save_files(tmp_path, step, tensors={"model.weight": values}, extra_files=extra)
        for step, values in ((1, torch.zeros(40, 10)), (2, torch.randn(40, 10)))
    )
    harm(Path(saved.path, request.param), how)
    return Damaged(good, saved, request.param, how)


def test_damage_error_names_file(damaged: Damaged) -> None:
    saved = damaged.saved
    path = re.escape(str(Path(saved.path, damaged.name)))
    name = re.escape(damaged.name)
    tensor = {"model.weight": torch.ones(40, 10)}
    reported = fails_with(
        DamagedError,
        rf"{path}: (damaged|truncated|missing).*use an earlier",
        checkpoint.restore,
        saved,
        tensor,
    )
    assert damaged.name != "data_00000.safetensors" or "model.weight" in reported
    fails_with(DamagedError, name, checkpoint.verify, saved)
    if damaged.name in {"data_00000.safetensors", "manifest.json"}:
        fails_with(DamagedError, name, checkpoint.weights_sha256, saved)


def test_start_goes_back_by_damaged_checkpoint(damaged: Damaged, tmp_path: Path) -> None:
    """It says so once, unless only reading shows the damage, or the manifest is gone."""
    newest = partial(checkpoint.latest_valid_checkpoint, str(tmp_path))
    reported: list[dict[str, Any]] = []
    found = newest(log=lambda kind, fields: reported.append({"kind": kind, **fields}))
    if damaged.how == "flipped" and damaged.name != "manifest.json":
        assert (found, reported) == (damaged.saved, [])
        found = newest(log=lambda *_: reported.append({}), exclude=[damaged.saved.path])
    if reported:
        (event,) = reported
        assert (event["kind"], event["path"]) == ("checkpoint_damaged", damaged.saved.path)
        assert str(Path(damaged.saved.path, damaged.name)) in event["cause"]
    is_silent = damaged.how == ("gone" if damaged.name == "manifest.json" else "flipped")
    assert (found, reported == []) == (damaged.good, is_silent)
    tensor = {"model.weight": torch.ones(40, 10)}
    checkpoint.restore(damaged.good, tensor)
    assert not tensor["model.weight"].any()


def harm(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "flipped":
        flip(path, bit=4)
    else:
        os.truncate(path, path.stat().st_size - 3 if how == "cut" else 0)


def test_manifest_checksum_detects_every_flipped_bit(tmp_path: Path) -> None:
    saved = save_files(tmp_path, tensors={"a": torch.zeros(1)})
    path = Path(saved.path, "manifest.json")
    parsed = json.loads(intact := path.read_bytes())
    for place in range(len(intact)):
        path.write_bytes(intact)
        flip(path, place)
        try:
            assert saved.manifest() == parsed, place  # a space within the white space, at most
        except DamagedError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_damage_is_logged_once(tmp_path: Path) -> None:
    """A second call, after a restore found more damage, does not log the first damage again."""
    for step in (1, 2, 3, 4):
        save_files(tmp_path, step, tensors={"a": torch.zeros(1)})
    folder = str(tmp_path)
    harm(Path(checkpoint.step_folder(folder, 4), "manifest.json"), "cut")
    harm(Path(checkpoint.step_folder(folder, 2), "manifest.json"), "cut")
    reported: list[int] = []

    def log(kind: str, fields: dict[str, Any]) -> None:
        reported.append(checkpoint.parse_step(fields["path"]))

    def newest(*exclude: str) -> int | None:
        found = checkpoint.latest_valid_checkpoint(folder, log=log, exclude=exclude)
        return found and found.step

    third = checkpoint.step_folder(folder, 3)
    assert (newest(), reported) == (3, [4])
    assert (newest(third), reported) == (1, [4, 2])
    harm(Path(checkpoint.step_folder(folder, 1), "manifest.json"), "cut")
    assert newest(third) is None
    assert checkpoint.latest_valid_checkpoint(str(tmp_path / "none"), log=lambda *_: None) is None


def test_restore_rejects_another_model(tmp_path: Path) -> None:
    saved = save_files(tmp_path)
    wrong = {
        "weight": "must have the model's shape [5, 4], got [5, 3]",
        "new": "not found. Use a checkpoint of the same",
    }
    for name, message in wrong.items():
        rejects(
            re.escape(f"model.{name} {message}"),
            checkpoint.restore,
            saved,
            {f"model.{name}": torch.zeros(5, 4)},
        )


@pytest.mark.parametrize("version", [1, 4])
def test_manifest_rejects_another_version(tmp_path: Path, version: int) -> None:
    saved = save_files(tmp_path)
    manifest = {**saved.manifest(), "version": version}
    sealed = (
        {key: manifest[key] for key in manifest if key != "checksum"}
        if version == 1
        else seal(manifest)
    )
    storage.write_json(storage.join(saved.path, "manifest.json"), sealed)
    for use in (
        lambda: checkpoint.restore(saved, zeros()),
        lambda: checkpoint.latest_valid_checkpoint(str(tmp_path), log=print),
    ):
        with pytest.raises(InputError, match=f"format version must be 3, got {version}") as caught:
            use()
        assert not isinstance(caught.value, DamagedError)


def test_version_2_is_restored_and_verified(tmp_path: Path) -> None:
    saved = save_files(tmp_path)
    manifest = saved.manifest()
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            del chunk["xxh3_128"]
            stop = chunk["start"] + chunk["bytes"]
            data = Path(saved.path, chunk["file"]).read_bytes()[chunk["start"] : stop]
            size = manifest["block_bytes"]
            blocks = [data[start : start + size] for start in range(0, len(data), size)]
            chunk["sha256"] = [hashlib.sha256(block).hexdigest() for block in blocks]
    path = storage.join(saved.path, "manifest.json")
    storage.write_json(path, seal({**manifest, "version": 2}))
    found = zeros()
    checkpoint.restore(saved, found)
    assert same(found, tensors())
    (chunk,) = manifest["tensors"]["model.weight"]["chunks"]
    flip(f"{saved.path}/{chunk['file']}", chunk["start"])
    damaged = "the checksum of model.weight does not match"
    fails_with(DamagedError, damaged, checkpoint.restore, saved, zeros())


def test_weights_hash_is_stable_and_reads_bounded_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {**tensors(), "model.large": torch.randn(1000, 7), "model.none": torch.zeros(0, 4)}
    weights["model.number"] = torch.tensor(7)
    saved = save_files(tmp_path, tensors=weights)
    expected = hashlib.sha256()
    dtypes = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.bool: "BOOL",
        torch.int64: "I64",
    }
    for name in sorted(name for name in weights if name.startswith("model.")):
        tensor = weights[name]
        expected.update(f"{name}\0{dtypes[tensor.dtype]}\0{list(tensor.shape)}\0".encode())
        expected.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    reads = watched(monkeypatch, TableReader, "rows")
    monkeypatch.setattr(reader_module, "_WINDOW_BYTES", 1000)
    assert checkpoint.weights_sha256(saved) == expected.hexdigest()
    sizes = [rows.nbytes for *_, rows in reads]
    assert max(sizes) <= 1000
    assert sum(sizes) == sum(weights[name].nbytes for name in weights if name.startswith("model."))


# -- Retention, save plans, leases and host memory copies
NAN = float("nan")
STEPS = [10, 20, 30, 40, 50]


def test_retention_removes_expected_steps() -> None:
    for scores, retention, in_use, removed in (
        ([None] * 5, Retention(), [], [10, 20, 30]),
        ([None] * 5, Retention(num_to_keep=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=9), [], []),
        ([None] * 5, Retention(num_to_keep=1), [20], [10, 30, 40]),
        ([0.9, 0.1, 0.2, 0.3, 0.4], Retention(), [], [20, 30]),
        ([0.1, 0.9, 0.9, 0.3, 0.4], Retention(), [], [10, 20]),  # of equal ones the later
        ([0.1, None, 0.0, NAN, None], Retention(num_to_keep=1), [], [20, 30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=2), [], [30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=0), [], [10, 20, 30, 40]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], Retention(num_to_keep=1, keep_best=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=20), [], [10, 30]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=100), [], [10, 20, 30, 40]),
    ):
        saved = list(zip(STEPS, scores, strict=True))
        assert checkpoint.to_remove(saved, retention, in_use=in_use) == removed
        assert checkpoint.to_remove(saved[::-1], retention, in_use=in_use) == removed
        assert checkpoint.to_remove([], retention, in_use=in_use) == []


# -- What the ranks of a run must hold together, so that a checkpoint is complete
def test_parts_cover_each_tensor_exactly_once() -> None:
    whole = ((0, 0), (4, 3))
    half = ((0, 0), (2, 3))
    complete = [[whole], [half, ((2, 0), (2, 3))], [((0, 0), (4, 1)), ((0, 1), (4, 2))]]
    for boxes, covered in (
        *((each, 12) for each in complete),
        ([], 0),
        ([half], 6),
        ([whole, whole], 24),
    ):
        refused = pytest.raises(
            InputError, match=f"table: the workers have {covered} of its 12 elements"
        )
        with nullcontext() if covered == 12 else refused:
            check_covered(
                {"scalar": (), "empty": (0, 4), "table": (4, 3)},
                {"scalar": [((), ())], "table": boxes},
            )
    rejects("scalar: the workers have 0 of its 1 elements", check_covered, {"scalar": ()}, {})


# -- Who owns a run
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_latest_lease_is_valid(tmp_path: Path, scheme: str) -> None:
    run = f"{scheme}{tmp_path}"
    first = acquire_lease(run)
    assert first.valid()
    assert first.name.startswith("000001-")
    second = acquire_lease(run)
    assert (first.valid(), second.valid()) == (False, True)
    assert pickle.loads(pickle.dumps(second)).valid()
    second.check()
    rejects("another process acquired the lease of this run", first.check)


@pytest.mark.parametrize(
    "removed", [pytest.param("", id="run"), pytest.param("claims", id="leases")]
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_lease_reports_removed_storage(tmp_path: Path, scheme: str, removed: str) -> None:
    lease = acquire_lease(f"{scheme}{tmp_path}/run")
    shutil.rmtree(tmp_path / "run" / removed)
    line = rejects(
        "run/claims: not found, .* The storage was removed, emptied or unmounted while training",
        lease.check,
    )
    assert "another process" not in line
    assert not lease.valid()


def test_other_files_are_no_leases_and_one_of_two_is_valid(tmp_path: Path) -> None:
    first_lease = acquire_lease(str(tmp_path / "two"))
    (tmp_path / "two" / "claims" / ("000001-" + "f" * 32)).touch()
    assert not first_lease.valid()
    first_lease = acquire_lease(str(tmp_path))
    for name in ("zzz", "000009-" + "f" * 32 + ".abc.partial", "9-x"):
        (tmp_path / "claims" / name).touch()
    assert first_lease.valid()
    assert acquire_lease(str(tmp_path)).name.startswith("000002-")


def test_old_leases_are_removed_and_numbering_continues(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / ("999999-" + "f" * 32)).touch()
    names = [acquire_lease(str(tmp_path)).name for _ in range(12)]
    assert [name.split("-")[0] for name in names] == [
        str(1_000_000 + number) for number in range(12)
    ]
    assert sorted(os.listdir(tmp_path / "claims")) == names[-5:]


# -- Host memory of a checkpoint's copy next to a GPU: pinned, or not if the system refuses
@pytest.mark.parametrize(("code", "unpinned"), [(0, 1), (2, 0)])
def test_unpinnable_memory_is_logged_and_used(
    code: int, unpinned: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    # an error of the device, which is reported elsewhere
    register = Mock(return_value=code)
    unregister = Mock(return_value=700)
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    with caplog.at_level(logging.WARNING):
        item: Any = None
        part = Part(item, "model.weight", torch.float32, (4,), (0,), (4,), 0, 16)
        source: Any = SimpleNamespace(device=torch.device("cuda", 3))
        copy = HostCopy(Plan((part,), {"model.weight": (4,)}), lambda _: source)
    assert [call.args[1] for call in register.call_args_list] == [16]
    assert (
        "of host memory for checkpoints (CUDA error 2). Saves stall training for longer"
        in caplog.text
    ) == bool(code)
    assert len(copy.body()) == 16
    copy.free()
    copy.free()
    assert unregister.call_count == unpinned
