"""What the files of a checkpoint look like: their names, the sealed manifest, checksums by block. Loads no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rayrec import storage
from rayrec.config import InputError

MANIFEST = "manifest.json"
VERSION = 2
BLOCK_BYTES = 16 * 2**20
"""Piece of a chunk that has a checksum of its own: what a rank reads at least of a chunk it needs a part of."""
CHECKSUM = "checksum"
_UNREADABLE: Final = {errno.EIO, errno.ESTALE, errno.EBADMSG}
"""Of a place on a disk that gives nothing any more, a file that an NFS server has lost, and a file system's own checksum."""


class DamagedError(InputError):
    """A file of a checkpoint is torn, cut short, changed or gone; the message names it. An earlier checkpoint may do."""


class UnreadableError(DamagedError):
    """A file of a checkpoint cannot be read; what it holds may be whole all the same."""

    def without_another(self) -> InputError:
        """What to raise where there is no other checkpoint: to train again would give up this one behind the user's back."""
        what = str(self).partition(";")[0]
        return InputError(
            f"{what}, and there is no other checkpoint to resume from; fix the storage or choose another --name"
        )


@contextmanager
def told_unreadable(path: str) -> Iterator[None]:
    """Turns an error of the file itself, against which an earlier checkpoint helps, into UnreadableError; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise UnreadableError(
            f"{path}: cannot be read ({os.strerror(error.errno)}); use an earlier checkpoint"
        ) from None


def data_file(rank: int, tag: str) -> str:
    """Name of a rank's file. `tag` is "" or of one attempt to save alone, so that two attempts at a step do not mix."""
    return f"data_{rank:05d}{tag and '-'}{tag}.safetensors"


def is_data_file(name: str) -> bool:
    """Also of an unfinished one."""
    return re.match(r"data_\d{5,}[-.]", name) is not None


def sha256_of(path: str) -> str:
    """Of a whole file, read piece by piece. Raises InputError where it is missing, OSError where storage is unavailable."""
    digest = hashlib.sha256()
    with told_unreadable(path):
        for piece in storage.read_stream(path):
            digest.update(piece)
    return digest.hexdigest()


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as it is written, NaN and infinities being null, with a checksum over the rest of it."""
    plain = json.loads(storage.json_text({key: value for key, value in manifest.items() if key != CHECKSUM}))
    return {**plain, CHECKSUM: _checksum(plain)}


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a checkpoint's folder. Raises DamagedError where it is missing or not as it was written, InputError
    where another version of the format wrote it, OSError where storage is unavailable."""
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        raise DamagedError(f"{path}: missing; use an earlier checkpoint")
    try:
        with told_unreadable(path):
            manifest = json.loads(storage.read_bytes(path))
    except ValueError as error:  # JSON's and Unicode's
        if isinstance(error, InputError):
            raise
        raise DamagedError(f"{path}: damaged, not JSON ({error}); use an earlier checkpoint") from None
    # The first version had no checksum; all later ones have this one, so that damage is not taken for another version.
    first = isinstance(manifest, dict) and manifest.get("version") == 1
    if not first and (
        not isinstance(manifest, dict)
        or _checksum({key: value for key, value in manifest.items() if key != CHECKSUM}) != manifest.get(CHECKSUM)
    ):
        raise DamagedError(f"{path}: damaged, its checksum does not fit; use an earlier checkpoint")
    if "format" in manifest:
        raise InputError(
            f"{folder}: no checkpoint, but an export; give the checkpoint that it was made of (an export is for `rayrec serve`)"
        )
    if manifest["version"] != VERSION:
        raise InputError(f"{folder}: format version {manifest['version']}, this rayrec reads {VERSION}")
    return manifest
