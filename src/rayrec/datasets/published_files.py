"""What is known of the files of published data sets, and which of them a folder holds."""

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
    """A published file, and what was published of it; None: nothing was."""

    name: str
    """In the folder it is fetched to."""
    url: str = ""
    """Published address; empty if it comes out of `archive`."""
    page: str = ""
    """Where a person finds it."""
    terms: str = ""
    """Under which it is published."""
    size_bytes: int | None = None
    about_bytes: int | None = None
    """Size to within a few percent (from disk usage or rounded), where no exact one is published."""
    sha256: str | None = None
    md5: str | None = None
    unpacked_md5: str | None = None
    """Of what a .gz file holds: a file compressed again has another checksum, and the same rows."""
    unpacked_about_bytes: int | None = None
    rows: int | None = None
    archive: RemoteFile | None = None
    """The tar file it is a member of."""

    @property
    def plain_name(self) -> str:
        """Without .gz."""
        return self.name.removesuffix(".gz")

    @property
    def expected_bytes(self) -> int | None:
        """As exactly as it is known."""
        return self.about_bytes if self.size_bytes is None else self.size_bytes

    @property
    def variants(self) -> tuple[str, ...]:
        """Names under which a folder may hold the same rows, the fastest to read first."""
        plain = self.plain_name
        parquet = dict.fromkeys((f"{plain}.parquet", f"{plain.removesuffix('.txt')}.parquet"))
        return (plain, f"{plain}.gz", *parquet)

    @property
    def published_at(self) -> str:
        return self.page or (self.archive.page if self.archive else "")

    def bytes_of(self, name: str) -> int | None:
        """About how large the variant `name` is."""
        if name == self.name:
            return self.expected_bytes
        return self.unpacked_about_bytes if name == self.plain_name else None


@dataclass(frozen=True)
class FolderReport:
    """Which of the wanted files are there."""

    present: dict[str, str]
    """Path by the wanted file's plain name, in the order wanted."""
    missing: tuple[RemoteFile, ...]
    repeated: tuple[tuple[str, ...], ...]
    """Paths that hold the same rows, a tuple for each wanted file that is there more than once."""
    unlike_published: tuple[str, ...]
    """A line for each file whose size is far from the published one: cut short, or a sample."""


def check_folder(paths_present: Iterable[storage.File], wanted: Sequence[RemoteFile]) -> FolderReport:
    """Finds wanted files among those that are there, plain, as .gz or as .parquet. Looks at names and sizes alone."""
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
    """The paths of the wanted files in a folder, one for each, in the order wanted.

    Files of an unlikely size are noted, not refused: they may be samples on purpose. Raises InputError where files are
    missing, with their sizes, where they are published and the `rayrec fetch FETCH_NAME` that fetches them; and where
    one is there twice, for both would be read.
    """
    # list_files refuses a folder that holds nothing; here that is a folder in which all files are missing.
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
    """What is missing, how large it is, and where it is published; each file by itself where they are few."""
    where = " and ".join(dict.fromkeys(page for file in files if (page := file.published_at)))
    if len(files) <= 5:
        what = ", ".join(f"{file.plain_name} ({_size_of((file,))})" for file in files)
    else:
        what = f"{names_text([file.plain_name for file in files])} ({len(files)} files, {_size_of(files)})"
    return f"missing {what}" + (f"; published at {where}" if where else "")


def _size_of(files: Sequence[RemoteFile]) -> str:
    """Sums over files; a sum of which a part is not published is not given."""
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
    """Names in one line, runs of numbers as `day_4 to day_22`."""
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
