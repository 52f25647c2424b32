"""Metadata of published dataset files, and checks of which ones a folder contains."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rayrec import storage
from rayrec.config import Config, InputError, packaged_json
from rayrec.humanize import size_text


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
    """Approximate size to within a few percent (disk usage or rounded), if no exact size is
    published.
    """
    sha256: str | None = None
    md5: str | None = None
    unpacked_about_bytes: int | None = None
    rows: int | None = None
    archive: RemoteFile | None = None
    """Tar or zip file that contains this file."""

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


def _published() -> dict[str, tuple[RemoteFile, ...]]:
    """Read published_files.json, where the files of a dataset have one archive, or one folder, page
    and terms.
    """
    stored = packaged_json(__package__, "published_files.json")
    files: dict[str, tuple[RemoteFile, ...]] = {}
    for dataset, entry in stored.items():
        archive = RemoteFile(**entry["archive"]) if "archive" in entry else None
        common = {
            "archive": archive,
            "page": entry.get("page", ""),
            "terms": entry.get("terms", ""),
        }
        url = f"{entry['folder']}/{{}}" if "folder" in entry else ""
        files[dataset] = tuple(
            RemoteFile(**file, **common, url=url.format(file["name"])) for file in entry["files"]
        )
    days = files["criteo_full"]
    return {"criteo_kaggle": files["criteo_kaggle"], "criteo_small": (*days[:4], days[23]), **files}


PUBLISHED: Final = _published()
"""Files of every dataset that can be fetched."""


def require_files(
    path: str,
    requested: Sequence[RemoteFile],
    *,
    fetch_name: str,
    note: Callable[[str], None] | None = None,
) -> list[str]:
    """Return one path per wanted file in a folder, plain, .gz or .parquet, in the wanted order.
    Notes files of an unlikely size, which may be truncated, or intentional samples. Raises
    InputError if files are missing, with their sizes, pages and the `rayrec fetch FETCH_NAME`
    command, or if a file is present twice, because both would be read.
    """
    by_name: dict[str, storage.File] = {}
    if storage.exists(path):
        with contextlib.suppress(InputError):  # An empty folder lacks all files.
            by_name = {storage.name_of(file.path): file for file in storage.list_files(path)}
    present_files = {
        file: [by_name[name] for name in file.variants if name in by_name] for file in requested
    }
    if missing := [file for file, present in present_files.items() if not present]:
        raise InputError(
            f"{path}: {missing_text(missing)}. Run `rayrec fetch {fetch_name} --out {path}`."
        )
    repeated = [present for present in present_files.values() if len(present) > 1]
    if repeated:
        same = "; ".join(
            " and ".join(storage.name_of(file.path) for file in present) for present in repeated
        )
        raise InputError(f"{path}: found the same rows more than once ({same}). Keep one of each.")
    files = {file: present for file, (present,) in present_files.items()}
    if note:
        _note_unlikely_sizes(files, note)
    return [present.path for present in files.values()]


def _note_unlikely_sizes(
    files: Mapping[RemoteFile, storage.File],
    note: Callable[[str], None],
) -> None:
    for file, present in files.items():
        sizes = {file.plain_name: file.unpacked_about_bytes, file.name: file.expected_bytes}
        expected = sizes.get(storage.name_of(present.path))
        if expected and not 0.75 < present.size_bytes / expected < 1.25:
            note(
                f"{present.path}: {size_text(present.size_bytes)}, but {size_text(expected)} are "
                "published"
            )


def missing_text(files: Sequence[RemoteFile]) -> str:
    """Describe missing files with sizes and pages, individually if there are few."""
    pages = " and ".join(dict.fromkeys(page for file in files if (page := file.published_at)))
    if len(files) <= 5:
        names = ", ".join(f"{file.plain_name} ({_describe_size((file,))})" for file in files)
    else:
        names = (
            f"{names_text([file.plain_name for file in files])} ({len(files)} files, "
            f"{_describe_size(files)})"
        )
    return f"missing {names}" + (f"; published at {pages}" if pages else "")


def _describe_size(files: Sequence[RemoteFile]) -> str:
    """Describe the total rows and sizes of files. Omits totals with unpublished parts."""
    rows = _sum([file.rows for file in files])
    texts = [f"{rows:,} rows" if rows is not None else "number of rows not published"]
    packed = _sum([file.expected_bytes for file in files])
    if packed is None:
        texts.append("size not published")
    elif all(file.size_bytes is not None for file in files):
        texts.append(f"{packed:,} bytes")
    else:
        texts.append(
            f"about {size_text(packed)}"
            + (" as .gz" if all(file.name.endswith(".gz") for file in files) else "")
        )
    unpacked = _sum([file.unpacked_about_bytes for file in files])
    if unpacked is not None:
        texts.append(f"{size_text(unpacked)} unpacked")
    return ", ".join(texts)


def _sum(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


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
