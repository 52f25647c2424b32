"""Folders by path or URL: listing, creating, copying, atomic writing and removing."""

import glob as local_glob
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.files import Scratch, copy_file, exists, missing, partial_path, read_info, sync
from rayrec.storage.filesystems import resolve, with_retries
from rayrec.storage.lakehouse import reject_enclosing_tables, reject_listed_tables
from rayrec.storage.range_reader import in_order, in_parallel
from rayrec.storage.urls import (
    bucket_url,
    in_object_store,
    is_url,
    join,
    local_path,
    name_of,
    parent_folder,
    split_options,
    to_url,
)

_GLOB: Final = re.compile(r"[*?\[]")
PARTITION: Final = re.compile(r"[^=/]+=[^/]*")
"""Hive partition: a folder KEY=VALUE, whose rows all have that value in column KEY."""
JOB_FOLDER: Final = "_job"
"""Name of a job's own folder in its output. Also marks the folders beside it as a job's."""
_RAYREC_NAME: Final = re.compile(
    rf".+\.partial|step_\d+|checkpoint-\d+|{JOB_FOLDER}|offline-run-.+|[0-9a-f]{{16}}(-.*)?"
)
"""Names of folders that only rayrec writes. Others need a marker to be removed."""
_MARKER: Final = re.compile(
    rf"{JOB_FOLDER}|(manifest|preprocessor|written|unfinished)\.json|part-\d{{6}}\.parquet"
    r"|.*tokens\.npy.*|data_\d{5,}[-.].*|.+-\d{6}\.jsonl|events\.jsonl|encode\.py"
    r"|(tables|dense)\.safetensors|dense\.pt2"
)
"""Names in rayrec's folders: jobs, data, Preprocessors, checkpoints, event parts, runs and exports,
finished or not.
"""
_LISTED_FILES: Final = 8
"""Number of files in one folder from which a listing is cheaper than single requests."""
_NUM_COPIES: Final = 8
"""Number of parallel copies: stores answer slowly, but many requests at once."""


@dataclass(frozen=True)
class File:
    """File with its size and modification time, which identify its version."""

    path: str
    size_bytes: int
    modified_ns: int


def _file(info: arrow_fs.FileInfo, path: str) -> File:
    """Convert a file found below `path`, which supplies the scheme and options of a URL."""
    return File(to_url(info.path, path), info.size or 0, info.mtime_ns or 0)


def list_files(path: str, *, names: Sequence[str] = ()) -> list[File]:
    """Return the files of a path, glob or folder, in natural order (day_2 before day_10). If the
    path is a folder, `names` selects files, in that order, with or without an extension such as
    .gz. Lists the first level of a folder, and folders named KEY=VALUE (Hive partitions) below it.
    In a glob, local or URL, `*`, `?` and `[...]` match within one name and `**` matches any number
    of folders; matching folders named KEY=VALUE are replaced by their files. Skips names that start
    with `.` or `_` or end in `.json` or `.partial`. Raises InputError if no file is found, if one
    of `names` is missing or ambiguous, and for Delta, Iceberg and Hudi tables, and paths inside
    them.
    """
    info = read_info(path)
    files = _list_files(path, info)
    reject_enclosing_tables(path, [file.path for file in files])
    if not names or info.type != arrow_fs.FileType.Directory:
        return files
    selected = []
    for name in names:
        pattern = re.compile(re.escape(name) + r"(\.(txt|tsv|csv))?(\.parquet)?(\.gz)?")
        matching = [file for file in files if pattern.fullmatch(name_of(file.path))]
        if len(matching) != 1:
            duplicates = " and ".join(name_of(file.path) for file in matching)
            problem = (
                f"contains {duplicates}. Keep one of them"
                if matching
                else f"{name}, {name}.gz or {name}.parquet not found"
            )
            raise InputError(f"{path}: {problem}")
        selected += matching
    return selected


def _infos(path: str, *, recursive: bool = False) -> list[arrow_fs.FileInfo]:
    """List a folder, or return [] if it does not exist."""

    def listed(filesystem: arrow_fs.FileSystem, inner: str) -> list[arrow_fs.FileInfo]:
        infos: list[arrow_fs.FileInfo] = filesystem.get_file_info(
            arrow_fs.FileSelector(inner, recursive=recursive, allow_not_found=True)
        )
        return infos

    return with_retries(path, listed)


def _list_files(path: str, info: arrow_fs.FileInfo) -> list[File]:
    is_data: Callable[[arrow_fs.FileInfo], bool] = _is_data
    if info.type == arrow_fs.FileType.File:
        return [_file(info, path)]
    if info.type == arrow_fs.FileType.Directory:
        infos = _in_partitions(info.path, path)
    elif _GLOB.search(info.path):
        infos = _matching(info.path, path)
        # JSON files beside a log describe it, unless they are asked for.
        if info.path.endswith(".json"):
            is_data = partial(_is_data, with_json=True)
        if not any(map(is_data, infos)):
            folders = [info.path for info in infos if _is_partition(info)]
            inside = in_parallel(lambda inner: _in_partitions(inner, path), folders, path=path)
            infos = [info for folder_infos in inside for info in folder_infos]
    else:
        raise missing(path, "no such file or folder")
    files = [_file(info, path) for info in infos if is_data(info)]
    if not files:
        is_json = any(info.base_name.endswith(".json") for info in infos)
        fix = (
            f"; its JSON files may describe a log: select JSON lines by {path}/*.json"
            if is_json
            else ""
        )
        raise InputError(f"{path}: contains no data files{fix}")
    return natural_order(files)


def natural_order(files: Iterable[File]) -> list[File]:
    """Return files by path, numbers in it by value."""
    return sorted(
        files,
        key=lambda file: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.path)
        ],
    )


def _is_data(info: arrow_fs.FileInfo, *, with_json: bool = False) -> bool:
    hidden = (".partial",) if with_json else (".json", ".partial")
    return (
        info.type == arrow_fs.FileType.File
        and not info.base_name.startswith((".", "_"))
        and not info.base_name.endswith(hidden)
    )


def _is_partition(info: arrow_fs.FileInfo) -> bool:
    return (
        info.type == arrow_fs.FileType.Directory and PARTITION.fullmatch(info.base_name) is not None
    )


def _in_partitions(inner: str, path: str) -> list[arrow_fs.FileInfo]:
    """List the first level of a folder, and the folders named KEY=VALUE below it, in at most two
    requests.
    """
    infos = _infos(to_url(inner, path))
    reject_listed_tables(path, inner, infos)
    if not any(map(_is_partition, infos)):
        return infos
    infos = _infos(to_url(inner, path), recursive=True)
    reject_listed_tables(path, inner, infos)
    return [
        info
        for info in infos
        if all(map(PARTITION.fullmatch, posixpath.relpath(info.path, inner).split("/")[:-1]))
    ]


def _matching(inner: str, path: str) -> list[arrow_fs.FileInfo]:
    """Expand a glob. `inner` is the path within the filesystem of `path`."""
    if not is_url(path):
        return [
            arrow_fs.LocalFileSystem().get_file_info(match)
            for match in local_glob.glob(inner, recursive=True)
        ]
    names = inner.split("/")
    first = next(number for number, name in enumerate(names) if _GLOB.search(name))
    folders = ["/".join(names[:first])]
    if "**" in names:
        infos = _infos(to_url(folders[0], path), recursive=True)
        return [info for info in infos if _matches(info.path.split("/"), names)]
    for number in range(first, len(names)):  # one request per folder, parallel on each level
        listed = in_parallel(lambda folder: _infos(to_url(folder, path)), folders, path=path)
        infos = [
            info
            for folder_infos in listed
            for info in folder_infos
            if _matches([info.base_name], [names[number]])
        ]
        folders = [info.path for info in infos if info.type == arrow_fs.FileType.Directory]
    return infos


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a path, split at its slashes, matches a glob. Wildcards do not match a dot at
    the start of a name.
    """
    if not parts or not names:
        return not parts and not names
    rest = parts[1:]
    part = parts[0]
    name = names[0]
    hidden = part.startswith(".") and name[:1] in ("*", "?", "[")
    if name == "**":
        return _matches(parts, names[1:]) or (
            not hidden and (_matches(rest, names) or _matches(rest, names[1:]))
        )
    return not hidden and fnmatchcase(part, name) and _matches(rest, names[1:])


def find_files(paths: Sequence[str]) -> dict[str, File]:
    """Return the existing files among `paths`, by path. Lists folders with many of them once, with
    parallel requests.
    """
    by_folder: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        by_folder.setdefault(parent_folder(path), []).append(path)

    def find_in(folder: str) -> list[File]:
        if len(by_folder[folder]) < _LISTED_FILES:
            infos = {path: read_info(path) for path in by_folder[folder]}
        else:
            listed = {info.base_name: info for info in _infos(folder)}
            infos = {
                path: listed[name]
                for path in by_folder[folder]
                if (name := name_of(path)) in listed
            }
        return [
            File(path, info.size or 0, info.mtime_ns or 0)
            for path, info in infos.items()
            if info.type == arrow_fs.FileType.File
        ]

    if not by_folder:
        return {}
    return {
        file.path: file
        for files in in_parallel(find_in, list(by_folder), path=paths[0])
        for file in files
    }


def list_folder(path: str) -> list[str]:
    """Return the sorted names in a folder, or [] if it does not exist."""
    local = local_path(path)
    if local is None:
        return sorted(info.base_name for info in _infos(path))
    with suppress(FileNotFoundError):
        return sorted(os.listdir(local))
    return []


def files_in(path: str, *, recursive: bool = False) -> list[File]:
    """Return all files in a folder, or also in its subfolders, sorted by path, or [] if it does not
    exist.
    """
    infos = _infos(path, recursive=recursive)
    return sorted(
        (_file(info, path) for info in infos if info.type == arrow_fs.FileType.File),
        key=lambda file: file.path,
    )


def files_below(path: str) -> dict[str, File]:
    """Return all files of a folder and its subfolders by relative path, or {} if it does not
    exist.
    """
    _, inner = resolve(path)
    return {
        posixpath.relpath(info.path, inner): _file(info, path)
        for info in _infos(path, recursive=True)
        if info.type == arrow_fs.FileType.File
    }


def make_folder(path: str) -> None:
    """Create a folder and its parents. Does nothing in an object store, where folders exist through
    their files.
    """
    if not in_object_store(path):
        with_retries(path, lambda filesystem, inner: filesystem.create_dir(inner, recursive=True))


def remove_folder(path: str) -> None:
    """Remove a folder of rayrec recursively if it exists. Raises InputError for file system roots,
    buckets, the home and working directories, and their parents, and for a folder whose name and
    contents are not rayrec's.
    """
    if read_info(path).type == arrow_fs.FileType.Directory:
        _check_removable(path)
        _remove(path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        with_retries(path, lambda filesystem, inner: filesystem.delete_dir(inner))


def _check_removable(path: str) -> None:
    """Check that a folder may be removed. A wrong path from a bug must not remove the files of
    users or of the system.
    """
    local = local_path(path)
    fix = "Remove it yourself if it is not needed, or choose another place"
    if local is None:
        is_protected = not posixpath.basename(split_options(path)[0].rstrip("/")) or path.rstrip(
            "/"
        ) == bucket_url(path)
    else:
        resolved = os.path.realpath(local)
        used = [os.path.realpath(folder) for folder in (os.path.expanduser("~"), os.getcwd())]
        is_protected = any(os.path.commonpath([resolved, folder]) == resolved for folder in used)
    if is_protected:
        raise InputError(
            f"{path}: not removed, because it is or contains the home or working directory, or is "
            f"a root. {fix}"
        )
    body = split_options(path)[0].rstrip("/")
    if (
        _RAYREC_NAME.fullmatch(posixpath.basename(body))
        or posixpath.basename(posixpath.dirname(body)) == JOB_FOLDER
    ):
        return
    names = list_folder(path)
    if (
        names
        and not any(map(_MARKER.fullmatch, names))
        and JOB_FOLDER not in list_folder(parent_folder(path))
    ):
        raise InputError(
            f"{path}: not removed, because rayrec did not write it: it contains {names[0]}. {fix}"
        )


def copy_files(source: str, target: str) -> None:
    """Copy files of a folder and its subfolders into another, made if missing. Raises InputError if
    it does not exist.
    """
    info = read_info(source)
    if info.type != arrow_fs.FileType.Directory:
        raise missing(source, "no such folder")
    make_folder(target)
    infos = _infos(source, recursive=True)
    names = {item.path: posixpath.relpath(item.path, info.path) for item in infos}
    for item in infos:
        if item.type == arrow_fs.FileType.Directory:
            make_folder(join(target, names[item.path]))
    _copy(
        source, target, [names[item.path] for item in infos if item.type == arrow_fs.FileType.File]
    )


def _copy(source: str, target: str, names: Sequence[str]) -> None:
    def copy(name: str) -> None:
        copy_file(join(source, name), join(target, name))

    for _ in in_order(copy, names, name="copy", num_threads=_NUM_COPIES, prefetch=0):
        pass


@contextmanager
def writing_folder(path: str) -> Iterator[str]:
    """Yield a local folder to fill, then move or upload it to `path` if there was no error. Atomic
    for a local path. URLs have no rename: files appear one by one, each atomically, with top-level
    *.json (manifests) last. After an error all are removed, but a killed process leaves some.
    Raises InputError if `path` already exists.
    """
    if exists(path):
        raise InputError(f"{path}: exists already; remove it or choose another place")
    target = local_path(path)
    if target is None:
        with Scratch("upload") as folder:
            yield folder
            _send(folder, path)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = partial_path(target)
    os.makedirs(temporary)
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(os.path.join(folder, name))
            sync(folder)
        os.rename(temporary, target)
        sync(os.path.dirname(target))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _send(folder: str, target: str) -> None:
    names = sorted(
        os.path.relpath(os.path.join(inside, name), folder)
        for inside, _, names in os.walk(folder)
        for name in names
    )
    is_last = [posixpath.dirname(name) == "" and name.endswith(".json") for name in names]
    try:
        _copy(folder, target, [name for name, last in zip(names, is_last, strict=True) if not last])
        _copy(folder, target, [name for name, last in zip(names, is_last, strict=True) if last])
    except BaseException:
        with suppress(OSError, InputError):
            _remove(target)  # New: `writing_folder` rejects an existing one
        raise
