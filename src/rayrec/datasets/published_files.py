"""Metadata of published dataset files, and checks of which ones a folder contains."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayrec import storage
from rayrec.config import Config, InputError
from rayrec.quantities import size_text


@dataclass(frozen=True, kw_only=True)
class RemoteFile(Config):
    """Published file and its metadata. None means not published."""

    name: str
    """File name in the target folder."""
    url: str = ""
    """Published URL. Empty for a member of `archive`."""
    page: str = ""
    """Web page that describes the file."""
    terms: str = ""
    """License terms."""
    size_bytes: int | None = None
    about_bytes: int | None = None
    """Approximate size to within a few percent (disk usage or rounded), if no exact size is published."""
    sha256: str | None = None
    md5: str | None = None
    unpacked_md5: str | None = None
    """Checksum of a .gz file's content, which stays equal if the file is compressed again."""
    unpacked_about_bytes: int | None = None
    rows: int | None = None
    archive: RemoteFile | None = None
    """Tar file that contains this file."""

    @property
    def plain_name(self) -> str:
        """Name without .gz."""
        return self.name.removesuffix(".gz")

    @property
    def expected_bytes(self) -> int | None:
        """Best known size."""
        return self.about_bytes if self.size_bytes is None else self.size_bytes

    @property
    def variants(self) -> tuple[str, ...]:
        """File names that may contain the same rows, fastest to read first."""
        plain = self.plain_name
        parquet = dict.fromkeys((f"{plain}.parquet", f"{plain.removesuffix('.txt')}.parquet"))
        return (plain, f"{plain}.gz", *parquet)

    @property
    def published_at(self) -> str:
        return self.page or (self.archive.page if self.archive else "")

    def bytes_of(self, name: str) -> int | None:
        """Return the approximate size of the variant `name`. None if unknown."""
        if name == self.name:
            return self.expected_bytes
        return self.unpacked_about_bytes if name == self.plain_name else None


@dataclass(frozen=True)
class FolderReport:
    """Wanted files found in a folder."""

    present: dict[str, str]
    """Paths by plain name, in the wanted order."""
    missing: tuple[RemoteFile, ...]
    repeated: tuple[tuple[str, ...], ...]
    """Paths with the same rows, one tuple per file that is present more than once."""
    unlike_published: tuple[str, ...]
    """Message for each file whose size differs widely from the published one: truncated, or a sample."""


def check_folder(paths_present: Iterable[storage.File], wanted: Sequence[RemoteFile]) -> FolderReport:
    """Find wanted files, plain, as .gz or as .parquet, by name and size only."""
    by_name = {posixpath.basename(file.path): file for file in paths_present}
    present: dict[str, str] = {}
    repeated, unlike = [], []
    for file in wanted:
        found = [by_name[name] for name in file.variants if name in by_name]
        if not found:
            continue
        present[file.plain_name] = found[0].path
        if len(found) > 1:
            repeated.append(tuple(other.path for other in found))
        expected = file.bytes_of(posixpath.basename(found[0].path))
        if expected and not 0.75 < found[0].size_bytes / expected < 1.25:
            unlike.append(f"{found[0].path}: {size_text(found[0].size_bytes)}, but {size_text(expected)} are published")
    missing = tuple(file for file in wanted if file.plain_name not in present)
    return FolderReport(present, missing, tuple(repeated), tuple(unlike))


def require_files(
    path: str, wanted: Sequence[RemoteFile], *, fetch_name: str, note: Callable[[str], None] | None = None
) -> list[str]:
    """Return one path per wanted file in a folder, in the wanted order.

    Notes files of an unlikely size, which may be intentional samples. Raises InputError if files are missing, with their sizes,
    pages and the `rayrec fetch FETCH_NAME` command, or if a file is present twice, because both would be read.
    """
    # list_files raises for an empty folder. Here, all files are missing from it.
    there: list[storage.File] = []
    if storage.exists(path):
        try:
            there = storage.list_files(path)
        except InputError:
            there = []
    report = check_folder(there, wanted)
    if report.missing:
        raise InputError(f"{path}: {missing_text(report.missing)}; rayrec fetch {fetch_name} --out {path} fetches them")
    if report.repeated:
        same = "; ".join(" and ".join(posixpath.basename(one) for one in paths) for paths in report.repeated)
        raise InputError(f"{path}: the same rows are there more than once ({same}); keep one of each")
    for line in report.unlike_published:
        if note:
            note(line)
    return list(report.present.values())


def missing_text(files: Sequence[RemoteFile]) -> str:
    """Describe missing files with sizes and pages, individually if there are few."""
    where = " and ".join(dict.fromkeys(page for file in files if (page := file.published_at)))
    if len(files) <= 5:
        what = ", ".join(f"{file.plain_name} ({_size_of((file,))})" for file in files)
    else:
        what = f"{names_text([file.plain_name for file in files])} ({len(files)} files, {_size_of(files)})"
    return f"missing {what}" + (f"; published at {where}" if where else "")


def _size_of(files: Sequence[RemoteFile]) -> str:
    """Describe the total rows and sizes of files. Omits totals with unpublished parts."""
    rows = _sum([file.rows for file in files])
    texts = [f"{rows:,} rows" if rows is not None else "number of rows not published"]
    packed = _sum([file.expected_bytes for file in files])
    if packed is None:
        texts.append("size not published")
    elif all(file.size_bytes is not None for file in files):
        texts.append(f"{packed:,} bytes")
    else:
        texts.append(f"about {size_text(packed)}" + (" as .gz" if all(file.name.endswith(".gz") for file in files) else ""))
    unpacked = _sum([file.unpacked_about_bytes for file in files])
    if unpacked is not None:
        texts.append(f"{size_text(unpacked)} unpacked")
    return ", ".join(texts)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def names_text(names: Sequence[str]) -> str:
    """Join names in one line, with consecutive numbers as `day_4 to day_22`."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _numbered(name) == _numbered(runs[-1][-1], step=1):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _numbered(name: str, *, step: int = 0) -> tuple[str, int] | None:
    match = re.search(r"\d+$", name)
    return (name[: match.start()], int(match.group()) + step) if match else None
