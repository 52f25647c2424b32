"""Checkpoints as torch.distributed.checkpoint (DCP) storage, for any model or training loop.

dcp.save(state_dict, storage_writer=CheckpointWriter("runs/mine/checkpoints/step_00000100",
state={"step": 100})) dcp.load(state_dict,
storage_reader=CheckpointReader("runs/demo/checkpoints/step_00000628"))
"""

import os
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import distributed
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rayrec import storage
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.format import MANIFEST
from rayrec.checkpoint.plan import HostCopy, Part, Plan, lay_out
from rayrec.checkpoint.reader import make_metadata, read_items
from rayrec.checkpoint.writer import WrittenFile, commit, write_rank
from rayrec.config import InputError

CheckpointId = str | os.PathLike[str]


@final
class CheckpointReader(StorageReader):
    """DCP reader for a checkpoint path or URL, on any number of ranks. Each rank reads and verifies
    only its part, and nothing is unpickled. Tensor names are those in the manifest: `model.NAME`,
    `optimizer.PARAMETER.STATE`. `dcp.load` raises InputError, within its CheckpointException, for a
    folder without a manifest and for a damaged file.
    """

    def __init__(self, path: CheckpointId) -> None:
        self._path = os.fspath(path)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return make_metadata(Checkpoint(self._path).manifest())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        targets = [
            (item, planner.resolve_tensor(item))
            for item in plan.items
            if item.type == LoadItemType.TENSOR
        ]
        read_items(
            self._path,
            Checkpoint(self._path).manifest(),
            [(item, target.detach()) for item, target in targets],
        )
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the folder is a complete checkpoint."""
        return storage.exists(storage.join(os.fspath(checkpoint_id), MANIFEST))


@final
class CheckpointWriter(StorageWriter):
    """DCP writer for a checkpoint path or URL that rayrec's commands and `CheckpointReader` can
    read. Copies the rank's data. `dcp.save` raises TypeError, within its CheckpointException, for a
    value that is not a tensor (`state` is for plain JSON values), and InputError if `path` already
    contains a checkpoint.
    """

    def __init__(self, path: CheckpointId, *, state: Mapping[str, Any] | None = None) -> None:
        self._path = os.fspath(path)
        self._state = dict(state or {})

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and storage.exists(storage.join(self._path, MANIFEST)):
            raise InputError(f"{self._path}: already contains a checkpoint. Choose another folder")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        lay_out(plan.items)  # checks all items before anything is written
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def values(part: Part) -> torch.Tensor:
            data = planner.resolve_data(part.item)
            assert isinstance(data, torch.Tensor)
            return data.detach()

        copy = HostCopy(Plan(lay_out(plan.items), {}), values)
        try:
            copy.fill(values)
            file = write_rank(
                self._path,
                copy,
                rank=distributed.get_rank() if distributed.is_initialized() else 0,
                tag="",
            )
        finally:
            parts = copy.plan.parts
            copy.free()
        done: Future[list[WriteResult]] = Future()
        # The first result carries the rank's file, for `finish` on rank 0.
        done.set_result(
            [
                WriteResult(part.item.index, part.size_bytes, None if number else file)
                for number, part in enumerate(parts)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [result.storage_data for rank_results in results for result in rank_results]
        commit(
            self._path,
            [file for file in files if isinstance(file, WrittenFile)],
            shapes={
                name: tuple(entry.size)
                for name, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            },
            state=self._state,
            score=None,
            extra_files=None,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the folder does not contain a checkpoint yet."""
        return not storage.exists(storage.join(os.fspath(checkpoint_id), MANIFEST))
