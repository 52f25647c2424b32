"""Discovery of a run's checkpoints: complete ones, uncommitted ones, and the one to resume from."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rayrec import storage
from rayrec.checkpoint.format import (
    EXPORT_FORMAT,
    MANIFEST,
    DamagedError,
    UnreadableError,
    is_data_file,
    read_manifest,
)
from rayrec.config import InputError

_PICKLE_NAMES: Final = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".metadata")
_LISTED: Final = 20
"""Maximum entries of a folder that are searched for runs, to name them in an error."""
_PICKLE_START: Final = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
"""First bytes of a pickle (protocol 2 to 5), or of a zip archive written by torch.save."""


SUMMARY = "summary.json"
"""File name of the summary in the folder of a finished run."""


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint of a run, by its folder."""

    path: str

    @property
    def step(self) -> int:
        return parse_step(self.path)

    @property
    def is_committed(self) -> bool:
        return storage.exists(storage.join(self.path, MANIFEST))

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raises DamagedError if it is missing or damaged, InputError if it
        has another version.
        """
        return read_manifest(self.path)

    def has_only_weights(self) -> bool:
        """Return whether no run wrote it, so that it has no progress and no optimizer state. Raises
        the errors of `manifest`.
        """
        manifest = self.manifest()
        return not manifest["state"] and not any(
            name.startswith("optimizer.") for name in manifest["tensors"]
        )


def step_folder(run_folder: str, step: int) -> str:
    return storage.join(run_folder, "checkpoints", f"step_{step:08d}")


def parse_step(path: str) -> int:
    match = re.fullmatch(r"step_(\d+)", storage.name_of(path.rstrip("/")))
    if not match:
        raise InputError(f"{path}: must be a checkpoint folder, such as step_00001000")
    return int(match.group(1))


def committed(run_folder: str) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first. Does not check them for damage."""
    return [checkpoint for checkpoint in _step_folders(run_folder) if checkpoint.is_committed]


def uncommitted_folders(run_folder: str) -> list[str]:
    """Return the folders of saves that were never committed or only partly removed."""
    return [
        checkpoint.path for checkpoint in _step_folders(run_folder) if not checkpoint.is_committed
    ]


def _step_folders(run_folder: str) -> list[Checkpoint]:
    folder = storage.join(run_folder, "checkpoints")
    names = [name for name in storage.list_folder(folder) if re.fullmatch(r"step_\d+", name)]
    return sorted(
        [Checkpoint(storage.join(folder, name)) for name in names],
        key=lambda checkpoint: checkpoint.step,
    )


def latest(run_folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None."""
    checkpoints = committed(run_folder)
    return checkpoints[-1] if checkpoints else None


def open_checkpoint(path: str) -> Checkpoint:
    """Open a checkpoint by its folder or its run's: the summary's step, else the newest. Raises
    InputError without a complete one.
    """
    if storage.exists(storage.join(path, MANIFEST)):
        return Checkpoint(storage.absolute(path))
    summary = storage.join(path, SUMMARY)
    checkpoint = latest(path)
    if storage.exists(summary):
        content = storage.read_json(summary)
        step = content.get("chosen_step") if isinstance(content, dict) else None
        if type(step) is not int or step < 0:
            raise InputError(
                f"{summary}: damaged, chosen_step must be a step, got {step!r}. Use a checkpoint "
                "folder"
            )
        checkpoint = Checkpoint(step_folder(path, step))
    if checkpoint is None:
        problem = (
            f"contains no complete checkpoint (no {MANIFEST})"
            if storage.exists(path)
            else "no such folder"
        )
        raise InputError(
            f"{path}: {problem}. Pass a run, or RUN/checkpoints/step_N. {runs_beside(path)}"
        )
    return Checkpoint(storage.absolute(checkpoint.path))


def runs_beside(path: str) -> str:
    """Return a sentence with the runs in the folder of a path, as a hint for a wrong path."""
    folder = storage.parent_folder(storage.absolute(path.rstrip("/")))
    runs = [
        name
        for name in storage.list_folder(folder)[:_LISTED]
        if storage.exists(storage.join(folder, name, "checkpoints"))
    ]
    return f"Runs in {folder}: {', '.join(runs) or 'none'}"


def latest_valid_checkpoint(
    run_folder: str,
    *,
    log: Callable[[str, dict[str, Any]], None],
    exclude: Collection[str] = (),
    repair: Callable[[Checkpoint], bool] = lambda checkpoint: False,
) -> Checkpoint | None:
    """Return the newest checkpoint with a valid manifest and files of the right size, or None.
    Collective, only rank 0 reads. Calls `log` for each damaged checkpoint that is skipped.
    `exclude` has the paths of checkpoints that a `restore` found damaged. Calls `repair` on rank 0
    for a checkpoint with missing files; it returns whether it restored any of them. Raises
    InputError for another version, and if the only checkpoint is unreadable: training would restart
    silently.
    """
    # imports torch, which callers of the other functions here avoid
    from rayrec.checkpoint.communicator import Communicator

    # On rank 0 alone: ranks that listed a folder at different moments would choose different
    # checkpoints.
    def find() -> Checkpoint | None:
        # The call that chose an excluded checkpoint has logged all newer ones.
        oldest = min((parse_step(path) for path in exclude), default=None)
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

    return Communicator.all().run_on_rank0(find)


def _check_or_repair(checkpoint: Checkpoint, repair: Callable[[Checkpoint], bool]) -> None:
    manifest = checkpoint.manifest()
    try:
        check_files(checkpoint, manifest)
    except DamagedError:
        if not repair(checkpoint):
            raise
        check_files(checkpoint, manifest)


def check_files(checkpoint: Checkpoint, manifest: dict[str, Any]) -> None:
    """Check that all files exist and have the right size, without reading them. Raises
    DamagedError.
    """
    wrong = wrong_file(checkpoint.path, manifest["files"])
    if wrong is not None:
        path, problem = wrong
        raise DamagedError(f"{path}: {problem}; use an earlier checkpoint")


def wrong_file(folder: str, files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return path and problem of the first of `files` that is missing or has the wrong size, or
    None. Lists the folder once.
    """
    sizes = file_sizes(folder)
    for name, file in files.items():
        if name not in sizes:
            return storage.join(folder, name), "missing"
        if sizes[name] != file["bytes"]:
            return storage.join(
                folder, name
            ), f"damaged, has {sizes[name]} bytes instead of {file['bytes']}"
    return None


def reject_pickles(folder: str, files: Collection[str]) -> None:
    """Reject a folder with a pickle, or an archive that may contain one, in addition to `files` of
    its manifest. rayrec never writes or opens pickles, but other tools execute them. Raises
    InputError.
    """
    for name in sorted(file_sizes(folder).keys() - set(files)):
        path = storage.join(folder, name)
        head = np.zeros(4, np.uint8)
        # data files can start with any bytes, and may be left over from another attempt
        if not is_data_file(name):
            storage.read_into(path, 0, head)
        if name.endswith(_PICKLE_NAMES) or _PICKLE_START.match(head.tobytes()):
            raise InputError(
                f"{path}: must not be a pickle, which can run code, and is not in {folder}'s "
                "manifest. Remove it"
            )


def file_sizes(folder: str) -> dict[str, int]:
    """Return the size of every file in a folder, in bytes, by relative path."""
    return {name: file.size_bytes for name, file in storage.files_below(folder).items()}


def is_export(path: str) -> bool:
    """Return whether a folder has the manifest of an export. Checks nothing else."""
    manifest_path = storage.join(path, MANIFEST)
    if not storage.exists(manifest_path):
        return False
    try:
        manifest = storage.read_json(manifest_path)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == EXPORT_FORMAT


def resolve_source(path: str) -> str:
    """Resolve a checkpoint, run or export to its folder, absolute or a URL. Raises InputError if a
    run has no checkpoint.
    """
    return storage.absolute(path) if is_export(path) else open_checkpoint(path).path
