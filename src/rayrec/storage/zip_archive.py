"""Zip archives that hold one file, read like a gzip file (PKWARE, "APPNOTE.TXT", section 4.3).

    first bytes    a member's header, its name, its packed bytes
    last bytes     the directory: names and places of all members

So the format of the packed file is found in the first bytes, as for any other file (`unzip_head`),
and only reading it needs the directory (`unzip`).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Final

from rayrec.config import InputError, first_of
from rayrec.storage.filesystems import resolve

ZIP_MAGIC: Final = b"PK\x03\x04"
_HEADER: Final = struct.Struct("<4s2xHH16xHH")
"""Header of a member: magic, flags, method, and the lengths of name and extra field behind it."""
_ENCRYPTED: Final = 1
"""Flag of an encrypted member."""
_CONTAINER_MEMBERS: Final = (b"[Content_Types].xml", b".npy")
"""Ends of the first member's name in zip files that are formats of their own: Office, NumPy."""
_READ_BYTES: Final = 8 << 20
_SHOWN_NAMES: Final = 3


def unzip_head(head: bytes, max_bytes: int) -> bytes | None:
    """Return the start of the first member, up to `max_bytes`, of an archive that begins with
    `head`. None if it is no archive of text, or is packed in a way that `unzip` does not read.
    """
    if len(head) < _HEADER.size or not head.startswith(ZIP_MAGIC):
        return None
    _, flags, method, name_length, extra_length = _HEADER.unpack_from(head)
    start = _HEADER.size + name_length + extra_length
    name = head[_HEADER.size : _HEADER.size + name_length]
    if flags & _ENCRYPTED or name.endswith(_CONTAINER_MEMBERS):
        return None
    if method == zipfile.ZIP_STORED:
        return head[start : start + max_bytes]
    if method != zipfile.ZIP_DEFLATED:
        return None
    try:
        return zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress(head[start:], max_bytes)
    except zlib.error:  # Reported when the file is read
        return b""


def unzip(path: str) -> Iterator[bytes]:
    """Yield the bytes of an archive's only file. Raises InputError if the archive is damaged,
    encrypted, or holds several files.
    """
    filesystem, inner = resolve(path)
    try:
        with (
            filesystem.open_input_file(inner) as file,
            zipfile.ZipFile(file) as archive,
            archive.open(_only_member(archive, path)) as member,
        ):
            while data := member.read(_READ_BYTES):
                yield data
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{path}: damaged zip file ({error or 'it is cut'}). Download it again"
        ) from None
    except (RuntimeError, NotImplementedError) as error:  # Encrypted, or an unknown method
        raise InputError(f"{path}: cannot be unpacked ({error}). Unpack it") from None


def _only_member(archive: zipfile.ZipFile, path: str) -> zipfile.ZipInfo:
    members = [
        member
        for member in archive.infolist()
        # macOS adds a description of each file
        if not member.is_dir() and not member.filename.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        names = first_of([member.filename for member in members], _SHOWN_NAMES)
        raise InputError(
            f"{path}: holds {len(members)} files ({names}); unpack it, and pass the folder or one "
            "file"
        )
    return members[0]
