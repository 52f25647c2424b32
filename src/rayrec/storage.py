"""Reads and writes files by path or URL (local, s3:// and whatever else pyarrow knows), whole or not at all."""

from __future__ import annotations

import glob as local_glob
import json
import os
import posixpath
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyarrow import fs as arrow_fs

from rayrec.config import InputError

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class File:
    """A file and what identifies this version of it."""

    path: str
    size_bytes: int
    modified_ns: int


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def absolute(path: str) -> str:
    """The path as any process of this machine (or, for a URL, of any machine) can use it."""
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def resolve(path: str) -> tuple[arrow_fs.FileSystem, str]:
    """The filesystem a path belongs to, and the path within it. Raises InputError for a URL nobody can serve."""
    if not is_url(path):
        return arrow_fs.LocalFileSystem(), absolute(path)
    try:
        return arrow_fs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path}: cannot be opened ({error}); give a local path or a URL such as s3://bucket/key"
        ) from None


def join(folder: str, *names: str) -> str:
    return posixpath.join(folder, *names)


def exists(path: str) -> bool:
    filesystem, inner = resolve(path)
    return filesystem.get_file_info(inner).type != arrow_fs.FileType.NotFound


def _info_file(info: arrow_fs.FileInfo, prefix: str) -> File:
    return File(prefix + info.path, info.size or 0, info.mtime_ns or 0)


def list_files(path: str, *, names: Sequence[str] = ()) -> list[File]:
    """The files a path, glob or folder names, sorted with numbers in numeric order (day_2 before day_10), or those of
    `names` in that order where the path is a folder, each as it is or with an ending such as .gz or .parquet.

    Folders are not searched below their first level; names that start with `.` or `_` or end in `.json` or `.partial`
    (left behind by a killed writer) are left out.
    Raises InputError where nothing is there, where a name is not, and where one is there twice.
    """
    files = _list_files(path)
    filesystem, inner = resolve(path)
    if not names or filesystem.get_file_info(inner).type != arrow_fs.FileType.Directory:
        return files
    chosen = []
    for name in names:
        matching = [file for file in files if _is_named(posixpath.basename(file.path), name)]
        if len(matching) != 1:
            found = " and ".join(posixpath.basename(file.path) for file in matching)
            what = (
                f"holds {found}; keep one of them" if matching else f"holds no {name}, nor {name}.gz or {name}.parquet"
            )
            raise InputError(f"{path}: {what}")
        chosen += matching
    return chosen


def _is_named(base_name: str, name: str) -> bool:
    return (
        base_name == name
        or re.fullmatch(re.escape(name) + r"(\.(txt|tsv|csv))?(\.parquet)?(\.gz)?", base_name) is not None
    )


def _list_files(path: str) -> list[File]:
    filesystem, inner = resolve(path)
    prefix = path[: path.index("://") + 3] if is_url(path) else ""
    info = filesystem.get_file_info(inner)
    if info.type == arrow_fs.FileType.File:
        return [_info_file(info, prefix)]
    if info.type == arrow_fs.FileType.Directory:
        infos = filesystem.get_file_info(arrow_fs.FileSelector(inner))
    elif _GLOB.search(inner):
        if prefix:
            import fnmatch

            folder = posixpath.dirname(_GLOB.split(inner)[0] + "x")
            infos = [
                found
                for found in filesystem.get_file_info(
                    arrow_fs.FileSelector(folder, recursive=True, allow_not_found=True)
                )
                if fnmatch.fnmatch(found.path, inner)
            ]
        else:
            infos = [filesystem.get_file_info(found) for found in local_glob.glob(inner)]
    else:
        raise InputError(f"{path}: no such file or folder")
    files = [
        _info_file(found, prefix)
        for found in infos
        if found.type == arrow_fs.FileType.File
        and not found.base_name.startswith((".", "_"))
        and not found.base_name.endswith((".json", ".partial"))
    ]
    if not files:
        raise InputError(f"{path}: holds no data files")
    return sorted(
        files, key=lambda file: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.path)]
    )


def read_into(path: str, start: int, buffer: np.ndarray) -> int:
    """Reads bytes from `start` on into a uint8 array and returns how many there were. Raises InputError where the file
    is gone."""
    filesystem, inner = resolve(path)
    try:
        opened = filesystem.open_input_file(inner)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    with opened as file:
        file.seek(start)
        view, done = memoryview(buffer.data), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                break
            done += count
        return done


def read_bytes(path: str) -> bytes:
    filesystem, inner = resolve(path)
    try:
        with filesystem.open_input_stream(inner, compression=None) as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None


def read_json(path: str) -> Any:
    data = read_bytes(path)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None


def make_folder(path: str) -> None:
    filesystem, inner = resolve(path)
    filesystem.create_dir(inner, recursive=True)


def remove_folder(path: str) -> None:
    filesystem, inner = resolve(path)
    if filesystem.get_file_info(inner).type == arrow_fs.FileType.Directory:
        filesystem.delete_dir(inner)


def copy_files(source: str, target: str) -> None:
    """Copies all files of a folder into another one, which is made where it is missing."""
    (source_filesystem, source_inner), (target_filesystem, target_inner) = resolve(source), resolve(target)
    target_filesystem.create_dir(target_inner, recursive=True)
    arrow_fs.copy_files(
        source_inner, target_inner, source_filesystem=source_filesystem, destination_filesystem=target_filesystem
    )


def write_bytes(path: str, data: bytes | memoryview) -> None:
    """Writes a file that appears complete or not at all."""
    with writing(path) as local, open(local, "wb") as file:
        file.write(data)


def write_json(path: str, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def writing(path: str) -> Iterator[str]:
    """A local path to write to; on leaving it without an error the file appears at `path`, complete."""
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "file")
            yield local
            filesystem, inner = resolve(path)
            arrow_fs.copy_files(
                local, inner, source_filesystem=arrow_fs.LocalFileSystem(), destination_filesystem=filesystem
            )
        return
    target = absolute(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{uuid.uuid4().hex}.partial"
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


@contextmanager
def writing_folder(path: str) -> Iterator[str]:
    """A local folder to fill; on leaving it without an error it appears at `path`, complete.

    Raises InputError where `path` already exists.
    """
    if exists(path):
        raise InputError(f"{path}: exists already; remove it or choose another place")
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            yield folder
            copy_files(folder, path)
        return
    target = absolute(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{uuid.uuid4().hex}.partial"
    os.makedirs(temporary)
    try:
        yield temporary
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
