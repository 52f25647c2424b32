"""File format of a checkpoint: file names, sealed manifest, block checksums. Does not import
torch.
"""

import errno
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, NotRequired

import xxhash
from annotated_types import Ge, Le
from typing_extensions import Buffer, TypedDict

from rayrec import storage
from rayrec.config import InputError

# Folder of a checkpoint, and the order in which its files are written:
#
#   data_RANK-TAG.safetensors   weights and optimizer state of a rank: chunks of tensors
#   preprocessor/..., config    extra files, equal in all checkpoints of an attempt
#   manifest.json               last; a folder without it is no checkpoint
#
# The manifest has, for each tensor, the chunks of all ranks with their place in a file and a
# checksum per block of BLOCK_BYTES. Its own `checksum` covers the rest. TAG is unique per save, so
# that files of a save that was given up are never mistaken for those of the next one.
#
# Checksums of blocks find damage by disks and networks, not forgery: who can change a file can
# change the manifest. XXH3 does that ten times as fast as SHA-256, which version 2 had.
MANIFEST = "manifest.json"
EXPORT_FORMAT: Final = "rayrec-export"
"""Field `format` in the manifest of an export, which checkpoints do not have."""
VERSION = 3
_READ_VERSIONS: Final = (2, VERSION)
BLOCK_BYTES = 16 * 2**20
"""Chunk bytes covered by one checksum: the smallest unit that a rank reads."""
CHECKSUM = "checksum"
_UNREADABLE: Final = {errno.EIO, errno.ESTALE, errno.EBADMSG}
"""Errors of a bad disk sector, a file that an NFS server lost, and a file system checksum."""


# What a reader does about an error of a checkpoint:
#
#   DamagedError       the content is wrong: skip it, remove it after the next save
#   UnreadableError    the content may be right: skip it, but do not start over without it
#   InputError         another model or version: end the run, which the user has to decide
#   OSError            storage is unavailable: retry
class DamagedError(InputError):
    """Checkpoint file that is missing, truncated or changed; the message names it. An earlier
    checkpoint may be valid.
    """


class UnreadableError(DamagedError):
    """Checkpoint file that cannot be read, although its content may be intact."""

    def without_another(self) -> InputError:
        """Return the error to raise if this is the only checkpoint: restarting the training would
        silently abandon it.
        """
        problem = str(self).partition(";")[0]
        return InputError(
            f"{problem}, and there is no other checkpoint to resume from. Fix the storage or "
            "choose another --name"
        )


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert errors of a single file, which an earlier checkpoint can avoid, into UnreadableError.
    Other OSErrors pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise UnreadableError(
            f"{path}: cannot be read ({os.strerror(error.errno)}); use an earlier checkpoint"
        ) from None


def data_file(rank: int, tag: str) -> str:
    """Return the name of a rank's file. `tag` is unique per save attempt, or "", so that attempts
    at one step do not mix.
    """
    return f"data_{rank:05d}{tag and '-'}{tag}.safetensors"


def is_data_file(name: str) -> bool:
    """Return whether a file has the name of a data file, finished or not."""
    return re.match(r"data_\d{5,}[-.]", name) is not None


def compute_sha256(path: str) -> str:
    """Return the SHA-256 of a file. Raises InputError if it is missing, OSError if storage is
    unavailable.
    """
    digest = hashlib.sha256()
    with wrap_read_errors(path):
        for data in storage.read_stream(path):
            digest.update(data)
    return digest.hexdigest()


def block_checksum(data: Buffer) -> str:
    """Return the checksum of a block of tensor data, as 32 hex digits."""
    digest = block_digest()
    digest.update(data)  # Unlike the function that does both, it releases the GIL
    return digest.hexdigest()


def block_digest() -> xxhash.xxh3_128:
    """Return the digest of a block of tensor data, XXH3-128, to which its bytes are added."""
    return xxhash.xxh3_128()


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest to be written: NaN and infinities become null, and a checksum of the rest
    is added.
    """
    plain = json.loads(
        storage.json_text({key: value for key, value in manifest.items() if key != CHECKSUM})
    )
    return {**plain, CHECKSUM: _checksum(plain)}


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


Size = Annotated[int, Ge(0), Le(2**63 - 1)]


class DataFile(TypedDict):
    """File entry in a manifest."""

    bytes: Size
    sha256: NotRequired[str]


class _ChunkBox(TypedDict):
    offsets: list[Size]
    sizes: list[Size]
    file: str
    start: Size
    bytes: Size


class _Chunk(_ChunkBox):
    xxh3_128: list[str]


class _ChunkOfVersion2(_ChunkBox):
    sha256: list[str]


class _Tensor(TypedDict):
    dtype: Literal["F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: list[Size]
    chunks: list[_Chunk | _ChunkOfVersion2]


class _Manifest(TypedDict):
    state: dict[str, Any]
    score: float | None
    block_bytes: Annotated[int, Ge(1)]
    files: dict[str, DataFile]
    tensors: dict[str, _Tensor]


def load_manifest(folder: str, *, fix: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint or export after verifying its checksum. Raises
    DamagedError that ends with `fix`.
    """
    path = storage.join(folder, MANIFEST)
    try:
        with wrap_read_errors(path):
            manifest = storage.read_json(path)
        # Version 1 had no checksum, and all later versions have this one, so that damage is never
        # mistaken for another version.
        sound = isinstance(manifest, dict) and (
            (manifest.get("version") == 1 and "format" not in manifest)
            or _checksum({key: value for key, value in manifest.items() if key != CHECKSUM})
            == manifest.get(CHECKSUM)
        )
    except DamagedError:
        raise
    except InputError as error:
        raise DamagedError(f"{error}; {fix}") from None
    if not sound:
        raise DamagedError(f"{path}: damaged, its checksum does not match; {fix}")
    return manifest


def check_manifest(folder: str, manifest: dict[str, Any], fields: Any, *, fix: str) -> None:
    """Check that the manifest has the fields of a TypedDict and that all its files are regular
    files inside the folder, not links to outside. The DamagedError it raises ends with `fix`.
    """
    import pydantic

    path = storage.join(folder, MANIFEST)
    try:
        pydantic.TypeAdapter(fields).validate_python(manifest, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DamagedError(
            f"{path}: damaged, field {field} is invalid ({first['msg']}); {fix}"
        ) from None
    names = {MANIFEST, *manifest["files"]}
    for tensor in manifest.get("tensors", {}).values():
        names.update(chunk["file"] for chunk in tensor["chunks"])
    real = functools.cache(os.path.realpath)
    root = None if storage.is_url(folder) else real(folder)
    for name in sorted(names):
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise DamagedError(f"{path}: damaged, {name!r} is outside of the folder; {fix}")
        if root is None:
            continue
        inside, base = os.path.split(name)
        target = os.path.join(real(os.path.join(root, inside)), base)
        if os.path.islink(target):
            target = os.path.realpath(target)
        if not target.startswith(root + os.sep):
            raise DamagedError(
                f"{os.path.join(folder, name)}: links to {target}, outside of the folder; copy "
                f"the file, or {fix}"
            )
        if not os.path.isfile(target) and os.path.exists(target):
            raise DamagedError(f"{os.path.join(folder, name)}: damaged, not a regular file; {fix}")


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder. Raises DamagedError if it is missing or damaged,
    InputError if it has another format version, OSError if storage is unavailable.
    """
    path = storage.join(folder, MANIFEST)
    fix = "use an earlier checkpoint"
    if not storage.exists(path):
        raise DamagedError(f"{path}: missing; {fix}")
    manifest = load_manifest(folder, fix=fix)
    if "format" in manifest:
        raise InputError(
            f"{folder}: must be a checkpoint, got an export (for `rayrec serve`). Use the "
            "exported checkpoint"
        )
    if manifest.get("version") not in _READ_VERSIONS:
        raise InputError(
            f"{folder}: format version must be {VERSION}, got {manifest.get('version')}. Use the "
            "version of rayrec that wrote it"
        )
    check_manifest(folder, manifest, _Manifest, fix=fix)
    return manifest
