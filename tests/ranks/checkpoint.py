"""Functions of ranks in checkpoint tests, each in a separate process, started by `run_ranks`."""

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from builders.faults import watched
from builders.savers import Run
from builders.savers import save as save_now
from ranks import server
from torch import distributed
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rayrec import checkpoint, storage
from rayrec.checkpoint import (
    Checkpoint,
    acquire_lease,
    check_shared,
    lease,
    step_folder,
    write_token,
    writer,
)
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.saver import Saver
from rayrec.config import InputError


def run_ranks(
    case: str | Callable[[str, int], None],
    size: int,
    folder: str,
    *,
    killed: int | None = None,
    grouped: bool = True,
) -> list[str]:
    """Run a function, or one of this module by name, on each rank with the folder and its rank.
    Returns the outputs. All must exit with 0, except a rank that kills itself. `grouped`: they
    begin as one process group.
    """
    with tempfile.TemporaryDirectory() as meeting:
        places = [(case, rank, size, folder, meeting, grouped) for rank in range(size)]
        exit_codes = server.call_each(_be_rank, places)
        outputs = [Path(meeting, f"output_{rank}").read_text() for rank in range(size)]
    expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(size)]
    assert exit_codes == expected, "\n".join(outputs)
    return outputs


def _be_rank(
    case: str | Callable[[str, int], None],
    rank: int,
    size: int,
    folder: str,
    meeting: str,
    grouped: bool,
) -> None:
    with open(f"{meeting}/output_{rank}", "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(1)
        function = globals()[case] if isinstance(case, str) else case
        if not grouped:
            return function(folder, rank)
        distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}/point", rank=rank, world_size=size
        )
        function(folder, rank)
        distributed.barrier()  # a rank that goes first would abort the other while it still works
        distributed.destroy_process_group()
        return None


def whole(factor: float = 1) -> dict[str, torch.Tensor]:
    return {
        "model.rows": torch.arange(30.0).reshape(10, 3) * factor,
        "model.columns": torch.arange(30.0).reshape(3, 10) * factor,
        "model.table": torch.arange(28.0).reshape(7, 4) * factor,
        "model.same": (torch.arange(5.0) * factor).to(torch.bfloat16),
        "model.plain": torch.arange(6.0) * factor,
        "optimizer.plain.step": torch.tensor(3.0) * factor,
    }


def sharded(factor: float = 1) -> dict[str, Any]:
    """Return the same tensors, sharded over the process group."""
    values = whole(factor)
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for name, placement in (
        ("rows", Shard(0)),
        ("columns", Shard(1)),
        ("same", Replicate()),
    ):
        values[f"model.{name}"] = distribute_tensor(values[f"model.{name}"], mesh, [placement])
    table = sharded_tensor.zeros(
        ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(size)]), 7, 4
    )
    for shard in table.local_shards():
        (row, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(values["model.table"][row : row + rows])
    return {**values, "model.table": table}


def local(value: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    return value.to_local() if hasattr(value, "to_local") else value


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(local(one[name]), local(other[name])) for name in one
    )


def save(folder: str, rank: int) -> None:
    checkpoint.save(step_folder(folder, 1), sharded(), state={"rank": rank})


def reshard(folder: str, rank: int) -> None:
    """Restore step 2 and save it as step 3."""
    target = sharded(0)
    checkpoint.restore(Checkpoint(step_folder(folder, 2)), target)
    assert same(target, sharded())
    checkpoint.save(step_folder(folder, 3), target, state={})


def restore(folder: str, rank: int) -> None:
    """Restore step 3 and report the damage of step 4."""
    target = sharded(0)
    checkpoint.restore(Checkpoint(step_folder(folder, 3)), target)
    assert same(target, sharded())
    print(raised(lambda: checkpoint.restore(Checkpoint(step_folder(folder, 4)), target)))
    # The step after is short of a file, so that all ranks go back to the third.
    reported: list[str] = []
    newest = partial(
        checkpoint.latest_valid_checkpoint,
        folder,
        log=lambda kind, fields: reported.append(fields["path"]),
    )
    assert newest(exclude={step_folder(folder, 4)}) == Checkpoint(step_folder(folder, 3))
    assert newest() == Checkpoint(step_folder(folder, 4))
    assert reported == ([step_folder(folder, 5)] if rank == 0 else [])


def read_some(folder: str, rank: int) -> None:
    """Check that each rank reads only the blocks of its rows."""
    values = torch.arange(4096.0).reshape(512, 8)  # 16 KiB
    path = f"file://{step_folder(folder, 1)}"
    if rank == 0:  # one chunk with blocks of 1 KiB, as one process saves it
        with (
            mock.patch.object(writer, "BLOCK_BYTES", 1024),
            mock.patch.object(distributed, "is_initialized", bool),
        ):
            checkpoint.save(path, {"a": values}, state={})
    distributed.barrier()
    (chunk,) = Checkpoint(path).manifest()["tensors"]["a"]["chunks"]
    assert (chunk["bytes"], len(chunk["xxh3_128"])) == (16384, 16)

    # 6,400 bytes on rank 0: its last block is rank 1's first
    local_rows = torch.zeros(200 if rank == 0 else 312, 8)
    target = DTensor.from_local(
        local_rows,
        init_device_mesh("cpu", (2,)),
        [Shard(0)],
        shape=torch.Size([512, 8]),
        stride=(8, 1),
        run_check=False,
    )
    # unlike DTensor's, so that the border is within a block
    offsets = ((200, 8), (0, 0)) if rank == 0 else ((312, 8), (200, 0))
    function = "torch.distributed.checkpoint.planner_helpers.compute_local_shape_and_global_offset"
    with pytest.MonkeyPatch.context() as patch:
        reads = watched(patch, storage, "read_into")
        patch.setattr(function, lambda *_, **__: offsets)
        checkpoint.restore(Checkpoint(path), {"a": target})
    assert torch.equal(local_rows, values[:200] if rank == 0 else values[200:])
    first, last = (0, 7168) if rank == 0 else (6144, 16384)
    assert [(start, start + len(buffer)) for _, start, buffer, _ in reads] == [
        (chunk["start"] + first, chunk["start"] + last)
    ]


def read_once(folder: str, rank: int) -> None:
    """Check that ranks share the reads of replicated tensors, and read their own tensors alone."""
    values = {f"model.{size}": torch.arange(float(size)) for size in (100, 200, 300, 400)} | {
        "own": torch.ones(50)
    }
    path = f"file://{step_folder(folder, 1)}"
    checkpoint.save(path, values, state={})
    names = [name for name in values if name != "own" or rank == 1]
    target = {name: torch.nn.Parameter(torch.zeros_like(values[name])) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        reads = watched(patch, storage, "read_into")
        checkpoint.restore(Checkpoint(path), target)
    assert all(torch.equal(target[name], values[name]) for name in names)
    assert sum(len(buffer) for _, _, buffer, _ in reads) == 4 * (500 if rank == 0 else 550)
    # then each reads its own, and is told
    target["model.100"] = torch.nn.Parameter(torch.zeros(99 if rank else 100))
    assert "must have the model's shape [99], got [100]" in raised(
        lambda: checkpoint.restore(Checkpoint(path), target)
    )


def lease_of(rank: int, folder: str) -> dict[str, Any]:
    return {} if rank == 0 else {"lease": None}


def fail_on_one_rank(saver: Saver, values: dict[str, Any], rank: int) -> None:
    """Check that the ranks raise the error of one of them."""
    faulty = {**values, **({"rates": 1} if rank else {})}
    state = {} if rank else {"a": object()}
    assert "rates: must be a tensor" in raised(lambda: saver.begin(4, faulty, state={}, score=None))
    assert "not JSON serializable" in raised(
        lambda: saver.begin(4, values, state=state, score=None)
    )


def lose_lease(saver: Saver, values: dict[str, Any], folder: str, rank: int) -> None:
    """Check that all ranks end after another process acquired the lease."""
    if rank == 0:
        acquire_lease(folder)
    distributed.barrier()
    assert saver.begin(4, values, state={}, score=None)
    distributed.barrier()
    assert "another process acquired the lease of this run" in raised(saver.wait)
    saver.close()


def hold_save(run: Run, saver: Saver, values: dict[str, Any], rank: int) -> None:
    """Check that a late save keeps its values and that no other save begins until it ends."""
    state = {"rank": [rank]}
    gate = threading.Event()
    with writes(gate.wait if rank == 1 else None):
        assert saver.begin(1, values, state=state, score=0.5)
        state["rank"].append(2)  # a checkpoint has what was when its save began
        for value in values.values():
            local(value).zero_()
        for _ in range(3):
            assert not saver.begin(2, values, state={}, score=None)
        assert (saver.last, run.steps()) == (None, [])
        distributed.barrier()  # rank 0 does not ask while the gate opens
        gate.set()
        saver.wait()


def save_in_background(folder: str, rank: int) -> None:
    """Check that all ranks see late saves, errors of one rank and a lost lease alike."""
    run = Run(folder)
    saver = run.saver(
        **lease_of(rank, folder), extra_files={"config.yaml": b"a: 1"}, max_outage_s=0.3
    )
    values = sharded()
    hold_save(run, saver, values, rank)
    assert saver.last == run.newest() == run.at(1)
    assert (saver.last.manifest()["state"], saver.last.manifest()["score"]) == ({"rank": [0]}, 0.5)
    checkpoint.restore(saver.last, values)
    assert same(values, sharded())

    with writes(full if rank == 1 else None):
        assert saver.begin(2, values, state={}, score=None)
        assert "step_00000002: no space left. Free some or choose another --storage-path" in raised(
            saver.wait
        )
    save_now(saver, 3, values)  # space is there again
    fail_on_one_rank(saver, values, rank)
    lose_lease(saver, values, folder, rank)
    if rank == 0:
        reported = [(kind, fields["step"]) for kind, fields in run.events]
        assert reported == [
            ("checkpoint", 1),
            ("checkpoint_late", 2),
            ("checkpoint", 3),
        ]
        assert os.listdir(run.path(2)) == []
        assert run.steps() == [1, 3]


def save_apart(folder: str, rank: int) -> None:
    """Use a separate folder on each rank, like local disks, then different sharding plans. Neither
    makes a checkpoint.
    """
    own = f"{folder}/{rank}"
    name = Communicator.all().broadcast(os.path.basename(write_token(own, max_outage_s=1.0)))
    with mock.patch.object(lease, "_APPEARS_S", 0.1):
        reported = raised(lambda: check_shared(f"{own}/{name}", Communicator.all()))
    host = socket.gethostname()
    assert f"/{rank} must be shared by all nodes, but worker 1 on {host} does not see" in reported
    shared_token = Communicator.all().broadcast(
        write_token(folder, max_outage_s=1.0) if rank == 0 else ""
    )
    assert os.path.exists(shared_token)
    check_shared(shared_token, Communicator.all())
    distributed.barrier()
    assert not os.path.exists(shared_token)

    saver = Run(own).saver(**lease_of(rank, own), max_outage_s=0.3)
    assert saver.begin(1, sharded(), state={}, score=None)
    assert "data_00001-000001-" in (reported := raised(saver.wait))
    assert "missing after it was written. storage_path must be shared by all workers" in reported
    assert checkpoint.latest(own) is None
    # nobody holds the table; both hold its first rows
    for local_rows, elements in (([], 0), ([rank], 14)):
        reported = raised(
            partial(
                saver.begin, 2, {"model.table": claimed_table(local_rows)}, state={}, score=None
            )
        )
        assert f"model.table: the workers have {elements} of its 7 elements" in reported
    saver.close()


def claimed_table(held_by: list[int]) -> Any:
    """Return a table of 7 rows that this rank assigns to `held_by`, or if empty, to the next
    rank.
    """
    owner = held_by[0] if held_by else 1 - distributed.get_rank()
    metadata = sharded_tensor.ShardMetadata([0, 0], [7, 1], f"rank:{owner}/cpu")
    shards = [sharded_tensor.Shard(torch.zeros(7, 1), metadata)] if held_by else []
    properties = sharded_tensor.TensorProperties(dtype=torch.float32)
    table = sharded_tensor.ShardedTensorMetadata([metadata], torch.Size([7, 1]), properties)
    return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(shards, table)


def die_saving(folder: str, rank: int) -> None:
    """Kill rank 1 during its second save; rank 0 notices and exits."""
    saver = Run(folder).saver(**lease_of(rank, folder), max_outage_s=60)
    save_now(saver, 1, sharded())
    with writes((lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else None):
        assert saver.begin(2, sharded(2), state={}, score=None)
        print(raised(saver.wait))
    saver.close()
    os._exit(0)  # the process group is broken


def writes(before_the_last_piece: Callable[[], Any] | None) -> Any:
    """Patch storage.write_stream to act before the last piece of a rank's file is written."""
    write_stream = storage.write_stream

    def disturbed(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        last = None
        for piece in pieces:
            if last is not None:
                yield last
            last = piece
        assert before_the_last_piece is not None
        before_the_last_piece()
        assert last is not None
        yield last

    def write(path: str, pieces: Iterable[bytes | memoryview]) -> int:
        is_data = before_the_last_piece is not None and path.endswith(".safetensors")
        return write_stream(path, disturbed(pieces) if is_data else pieces)

    return mock.patch.object(storage, "write_stream", write)


def full() -> None:
    raise OSError(28, "No space left on device")


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except checkpoint.DamagedError as error:
        return f"damaged: {error}"
    except (InputError, RuntimeError, TypeError) as error:
        return str(error)
    raise AssertionError("nothing was raised")
