"""Checkpoints of HuggingFace's Trainer in any store, for a Trainer script of one's own: upload,
retention, restore. rayrec copies bytes and reads JSON. Trainer itself opens `optimizer.pt`,
`scheduler.pt` and `rng_state*.pth`, with torch's `weights_only`.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import TypedDict

from rayrec import storage
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.discovery import file_sizes, wrong_file
from rayrec.checkpoint.format import (
    MANIFEST,
    DamagedError,
    DataFile,
    check_manifest,
    load_manifest,
    seal,
)
from rayrec.checkpoint.lease import Lease, acquire_lease
from rayrec.checkpoint.save_retry import log_cleanup_errors
from rayrec.checkpoint.writer import Described, has_content
from rayrec.config import InputError
from rayrec.storage.range_reader import in_order

_logger = logging.getLogger(__name__)
_FIX: Final = "use an earlier checkpoint"
_NUM_THREADS: Final = 8
"""Number of files copied in parallel by a rank."""


class _Manifest(TypedDict):
    format: Literal["huggingface-trainer"]
    version: Literal[1]
    best: str | None
    files: dict[str, DataFile]


@final
class SyncCheckpoints(TrainerCallback):
    """Callback that uploads each checkpoint of a Trainer to a folder in a store, and prunes old
    ones. `fetch` gets the newest.

    Every rank uploads the files that it alone has (random states, shards). Rank 0 then writes
    manifest.json with the SHA-256 of all. A half-written or damaged checkpoint is never resumed
    from. Of several trainings with one folder, only the one that began last can upload. An upload
    blocks the training, and fails it if the store is unavailable for minutes (see
    `rayrec.storage.outage_s`). Methods are collective.

    Args:
        folder: Folder of this training, local or a URL, such as s3://bucket/runs/gpt2.
        num_to_keep: Maximum number of checkpoints in the folder, in addition to Trainer's best one.
            None keeps all.
    """

    def __init__(self, folder: str, *, num_to_keep: int | None = None) -> None:
        if num_to_keep is not None and num_to_keep < 1:
            raise InputError(
                f"num_to_keep: must be at least 1, or None to keep all, got {num_to_keep}"
            )
        self._folder = storage.absolute(folder).rstrip("/")
        self._num_to_keep = num_to_keep
        self._lease: Lease | None = None

    def fetch(self, args: TrainingArguments) -> str | None:
        """Copy the newest intact checkpoint into `args.output_dir` and return its path for
        `Trainer.train(resume_from_checkpoint=...)`, or None if there is none yet. Logs damaged
        ones. Also copies Trainer's best checkpoint. Raises InputError if all are damaged, OSError
        if the store is unavailable.
        """
        assert args.output_dir is not None, "TrainingArguments sets it"
        complete = self._begin().run_on_rank0(self._complete)
        for name in reversed(complete):
            manifest = self._fetched(name, args.output_dir)
            if manifest is not None:
                if manifest["best"] in complete:
                    self._fetched(manifest["best"], args.output_dir)
                return os.path.join(args.output_dir, name)
        if complete:
            raise InputError(
                f"{self._folder}: all checkpoints are damaged. Restore one, or remove the folder "
                "to start over"
            )
        return None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise InputError if the folder has checkpoints that were not fetched, or if Trainer does
        not see all workers.
        """
        if args.world_size != (size := Communicator.all().size):
            raise InputError(
                f"TrainingArguments: Trainer sees {args.world_size} of {size} workers. On CPU, "
                "set use_cpu=True"
            )
        if self._lease is None and self._begin().run_on_rank0(self._complete):
            raise InputError(
                f"{self._folder}: has checkpoints. Resume with "
                "train(resume_from_checkpoint=callback.fetch(args)), or use "
                "another folder"
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Upload the checkpoint that Trainer has just written."""
        assert args.output_dir is not None, "TrainingArguments sets it"
        ranks = self._begin()
        name = f"checkpoint-{state.global_step}"
        local = storage.absolute(os.path.join(args.output_dir, name))
        target = storage.join(self._folder, name)
        listed = ranks.each(lambda: file_sizes(local).keys() - {MANIFEST})
        # ranks of a node share the folder
        local_names = sorted(listed[ranks.rank].difference(*listed[: ranks.rank]))
        # A save of Trainer, in four steps that all ranks take together:
        #
        #   1. rank 0 removes the manifest of an earlier save of this step
        #   2. each rank uploads its files; of ranks that share a folder, the first one takes a file
        #   3. all entries are gathered
        #   4. rank 0 checks the lease and writes the manifest
        ranks.run_on_rank0(lambda: self._prepare(target))
        uploaded = ranks.each(lambda: _copied(local, target, local_names))
        files = {file: entry for rank_files in uploaded for file, entry in rank_files.items()}
        best = (
            os.path.basename(state.best_model_checkpoint) if state.best_model_checkpoint else None
        )
        ranks.run_on_rank0(lambda: self._commit(name, best, files))

    def _begin(self) -> Communicator:
        """Acquire the lease before anything is read, once."""
        ranks = Communicator.all()
        if self._lease is None:
            self._lease = ranks.run_on_rank0(lambda: acquire_lease(self._folder))
        return ranks

    def _check_lease(self) -> None:
        assert self._lease is not None
        self._lease.check()

    def _complete(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        return [
            name
            for name in self._names()
            if storage.exists(storage.join(self._folder, name, MANIFEST))
        ]

    def _names(self) -> list[str]:
        return sorted(
            filter(re.compile(r"checkpoint-\d+").fullmatch, storage.list_folder(self._folder)),
            key=_step,
        )

    def _fetched(self, name: str, output_dir: str) -> dict[str, Any] | None:
        """Copy a checkpoint on all ranks and return its manifest, or None if it is damaged."""
        try:
            return Communicator.all().run_on_all_ranks(lambda: self._download(name, output_dir))
        except DamagedError as error:
            _logger.warning("Skipping damaged checkpoint: %s", error)
            return None

    def _download(self, name: str, output_dir: str) -> dict[str, Any]:
        source = storage.join(self._folder, name)
        target = os.path.join(output_dir, name)
        manifest = load_manifest(source, fix=_FIX)
        check_manifest(source, manifest, _Manifest, fix=_FIX)
        files = manifest["files"]
        if wrong := wrong_file(source, files):
            raise DamagedError(f"{wrong[0]}: {wrong[1]}; {_FIX}")
        os.makedirs(output_dir, exist_ok=True)
        # ranks of a node share the folder
        with storage.locked(os.path.join(output_dir, ".fetch.lock")):
            if not all(
                has_content(os.path.join(target, file), entry) for file, entry in files.items()
            ):
                shutil.rmtree(target, ignore_errors=True)
                with storage.writing_folder(target) as folder:
                    for file, entry in _copied(source, folder, list(files)).items():
                        if entry != files[file]:
                            raise DamagedError(
                                f"{storage.join(source, file)}: damaged, its SHA-256 does not "
                                f"match; {_FIX}"
                            )
        return manifest

    def _prepare(self, target: str) -> None:
        """Make an existing checkpoint of this step incomplete, before its files are replaced."""
        self._check_lease()
        storage.remove_file(storage.join(target, MANIFEST))

    def _commit(self, name: str, best: str | None, files: Described) -> None:
        self._check_lease()  # as late as possible, because uploads can take long
        manifest = {"format": "huggingface-trainer", "version": 1, "best": best, "files": files}
        storage.write_json(storage.join(self._folder, name, MANIFEST), seal(manifest))
        with log_cleanup_errors(f"Cannot remove old checkpoints in {self._folder}"):
            complete = [other for other in self._complete() if _step(other) <= _step(name)]
            keep = {best, *(complete[-self._num_to_keep :] if self._num_to_keep else complete)}
            for other in self._names():
                if _step(other) < _step(name) and other not in keep:  # also a half-written one
                    storage.remove_file(storage.join(self._folder, other, MANIFEST))
                    storage.remove_folder(storage.join(self._folder, other))


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _copied(source: str, target: str, names: Sequence[str]) -> Described:
    """Copy files from folder to folder. Return the sizes and hashes of the bytes read, by name."""

    def copy(name: str) -> dict[str, Any]:
        digest = hashlib.sha256()

        def chunks() -> Iterator[bytes]:
            for data in storage.read_stream(storage.join(source, name)):
                digest.update(data)
                yield data

        size_bytes = storage.write_stream(storage.join(target, name), chunks())
        return {"bytes": size_bytes, "sha256": digest.hexdigest()}

    results = in_order(copy, names, name="checkpoint-files", num_threads=_NUM_THREADS, prefetch=0)
    return dict(zip(names, results, strict=True))
