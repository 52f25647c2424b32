"""Where a run's checkpoints lie, which of them are complete, and which one to resume from."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyarrow import fs as arrow_fs

from rayrec import storage
from rayrec.checkpoint.format import MANIFEST, DamagedError, UnreadableError, is_data_file, read_manifest
from rayrec.config import InputError
from rayrec.storage.stores import enduring

_PICKLE_NAMES: Final = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".metadata")
_PICKLE_START: Final = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
"""Of a pickle of protocol 2 to 5, and of a zip archive, as torch.save makes."""


SUMMARY = "summary.json"
"""In the folder of a finished run."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: str

    @property
    def step(self) -> int:
        return step_of(self.path)

    def manifest(self) -> dict[str, Any]:
        """Raises DamagedError where it is missing or damaged, InputError where it is of another version."""
        return read_manifest(self.path)


def folder_of(run_folder: str, step: int) -> str:
    return storage.join(run_folder, "checkpoints", f"step_{step:08d}")


def step_of(path: str) -> int:
    found = re.fullmatch(r"step_(\d+)", storage.name_of(path.rstrip("/")))
    if not found:
        raise InputError(f"{path}: not a checkpoint's folder; they are named step_00001000 and the like")
    return int(found.group(1))


def committed(run_folder: str) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first. Whether they are damaged is not looked at."""
    return [found for found in _step_folders(run_folder) if storage.exists(storage.join(found.path, MANIFEST))]


def torn(run_folder: str) -> list[str]:
    """The folders of saves that were never committed, or whose removal was cut short."""
    return [found.path for found in _step_folders(run_folder) if not storage.exists(storage.join(found.path, MANIFEST))]


def _step_folders(run_folder: str) -> list[Checkpoint]:
    folder = storage.join(run_folder, "checkpoints")
    names = [name for name in storage.list_folder(folder) if re.fullmatch(r"step_\d+", name)]
    found = [Checkpoint(storage.join(folder, name)) for name in names]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(run_folder: str) -> Checkpoint | None:
    """The newest complete checkpoint of a run, None where there is none."""
    found = committed(run_folder)
    return found[-1] if found else None


def open_checkpoint(path: str) -> Checkpoint:
    """A checkpoint by its folder; of a run's folder the one its summary names, else the newest.

    Raises InputError where there is none.
    """
    if storage.exists(storage.join(path, MANIFEST)):
        return Checkpoint(storage.absolute(path))
    summary = storage.join(path, SUMMARY)
    chosen = latest(path)
    if storage.exists(summary):
        found = storage.read_json(summary)
        step = found.get("chosen_step") if isinstance(found, dict) else None
        if type(step) is not int or step < 0:
            raise InputError(f"{summary}: damaged, chosen_step must be a step, got {step!r}; give a checkpoint's folder")
        chosen = Checkpoint(folder_of(path, step))
    if chosen is None:
        raise InputError(
            f"{path}: holds no complete checkpoint (no {MANIFEST}); give a folder such as RUN/checkpoints/step_00001000"
        )
    return Checkpoint(storage.absolute(chosen.path))


def newest_good(
    run_folder: str,
    *,
    log: Callable[[str, dict[str, Any]], None],
    exclude: Collection[str] = (),
    repair: Callable[[Checkpoint], bool] = lambda checkpoint: False,
) -> Checkpoint | None:
    """The newest checkpoint whose manifest is sound and whose files all have their size; collective, rank 0 looks.

    Others are passed over and told by `log`. `exclude` holds paths of those that a `restore` found damaged. `repair` is called
    on rank 0 with one that lacks files, and returns whether it wrote some of them again. Raises
    InputError for a checkpoint of another version, and where one cannot be read and there is no other: to pass over it would
    be to train again behind the user's back.
    """
    from rayrec.checkpoint.communicator import Ranks  # loads torch: other functions here are for commands without it

    return Ranks.all().from_first(lambda: _newest_good(run_folder, log, set(exclude), repair))


def _newest_good(
    run_folder: str, log: Callable[[str, dict[str, Any]], None], exclude: set[str], repair: Callable[[Checkpoint], bool]
) -> Checkpoint | None:
    # What is newer than an excluded one was looked at, and told, by the call that chose that one.
    oldest = min((step_of(path) for path in exclude), default=None)
    unreadable = None
    for checkpoint in reversed(committed(run_folder)):
        if checkpoint.path in exclude:
            continue
        try:
            _check_or_repair(checkpoint, repair)
        except DamagedError as error:
            if oldest is None or checkpoint.step < oldest:
                log("checkpoint_damaged", {"path": checkpoint.path, "cause": str(error)})
            unreadable = error if isinstance(error, UnreadableError) else unreadable
            continue
        return checkpoint
    if unreadable is not None:
        raise unreadable.without_another()
    return None


def _check_or_repair(checkpoint: Checkpoint, repair: Callable[[Checkpoint], bool]) -> None:
    manifest = checkpoint.manifest()
    try:
        check_files(checkpoint, manifest)
    except DamagedError:
        if not repair(checkpoint):
            raise
        check_files(checkpoint, manifest)


def check_files(checkpoint: Checkpoint, manifest: dict[str, Any]) -> None:
    """Raises DamagedError where a file is missing or has another size; reads none."""
    wrong = wrong_file(checkpoint.path, manifest["files"])
    if wrong is not None:
        path, what = wrong
        raise DamagedError(f"{path}: {what}; use an earlier checkpoint")


def wrong_file(folder: str, files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """The path of the first of `files` that is missing below a folder or has another size, and what is wrong with it; None if
    all are there. Lists the folder once, and reads no file."""
    sizes = file_sizes(folder)
    for name, file in files.items():
        if name not in sizes:
            return storage.join(folder, name), "missing"
        if sizes[name] != file["bytes"]:
            return storage.join(folder, name), f"damaged, has {sizes[name]} bytes instead of {file['bytes']}"
    return None


def refuse_pickles(folder: str, files: Collection[str]) -> None:
    """Raises InputError where a pickle, or an archive that may hold one, lies in a folder whose manifest names `files`, but not
    it. rayrec writes none, and opens none; but other tools run what they hold."""
    for name in sorted(file_sizes(folder).keys() - set(files)):
        path = storage.join(folder, name)
        head = np.zeros(4, np.uint8)
        if not is_data_file(name):  # such start with any bytes, and may be of an attempt that lost
            storage.read_into(path, 0, head)
        if name.endswith(_PICKLE_NAMES) or _PICKLE_START.match(head.tobytes()):
            raise InputError(f"{path}: is a pickle, which can run any code, and none of the files of {folder}; remove it")


def file_sizes(folder: str) -> dict[str, int]:
    """Bytes of every file below a folder, by its path from there."""

    def look(filesystem: arrow_fs.FileSystem, inner: str) -> dict[str, int]:
        inner = inner.rstrip("/")
        infos = filesystem.get_file_info(arrow_fs.FileSelector(inner, recursive=True, allow_not_found=True))
        return {info.path[len(inner) + 1 :]: info.size for info in infos if info.type == arrow_fs.FileType.File}

    return enduring(folder, look)
