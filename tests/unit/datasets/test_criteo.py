"""The published files are described as they were published, and a folder is asked for them by name."""

import os
from pathlib import Path

import pytest
from builders.faults import rejects

from rayrec.datasets import criteo
from rayrec.datasets.fetch import PUBLISHED, files_of
from rayrec.datasets.published_files import RemoteFile, names_text, require_files
from rayrec.humanize import size_text


def test_row_counts_match_benchmarks() -> None:
    rows = [file.rows or 0 for file in criteo.FULL_DAYS]
    assert (len(rows), sum(rows[:23]), rows[23]) == (24, 4_195_197_692, 178_274_637)
    assert [file.rows for file in criteo.KAGGLE_FILES] == [45_840_617, 6_042_135]
    assert [file.plain_name for file in criteo.SMALL_DAYS] == ["day_0", "day_1", "day_2", "day_3", "day_23"]
    for file in criteo.FULL_DAYS:  # a slip in one of the tables would stand out
        assert 245 < file.unpacked_about_bytes / file.rows < 262
        assert 0.31 < file.about_bytes / file.unpacked_about_bytes < 0.345


def test_published_files_are_valid() -> None:
    for files in PUBLISHED.values():
        names = [file.name for file in files]
        assert len(set(names)) == len(names)
        for file in files:
            source = file.archive or file
            assert source.url.startswith("https://")
            assert file.published_at.startswith("https://")
            for checksum in (file.md5, file.unpacked_md5, source.md5):
                assert checksum is None or (len(checksum) == 32 and int(checksum, 16))
    assert len({file.md5 for files in PUBLISHED.values() for file in files}) == 2 + 24 + 4
    rejects("did you mean 'criteo_small'", files_of, "criteo_smal")
    rejects("there are criteo_kaggle, criteo_small, criteo_full, mnist", files_of, "zzz")


def test_require_files_accepts_plain_gz_and_parquet(tmp_path: Path) -> None:
    def found(names: list[str], wanted: tuple[RemoteFile, ...]) -> list[str]:
        for name in names:
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, 15_000_000_000)
        notes.clear()
        return [Path(path).name for path in require_files(str(tmp_path), wanted, fetch_name="x", note=notes.append)]

    notes: list[str] = []
    days = ["day_0", "day_1.gz", "day_2.parquet", "day_23.gz"]
    rejects(r"missing day_3 \(", found, [*days, "day_3.gz.old"], criteo.SMALL_DAYS)
    assert found([*days, "day_3.parquet"], criteo.SMALL_DAYS) == [*days[:3], "day_3.parquet", "day_23.gz"]
    assert notes == [f"{tmp_path}/day_0: 15 GB, but 49.8 GB are published"]
    assert found(["train.parquet", "test.txt.gz"], criteo.KAGGLE_FILES) == ["train.parquet", "test.txt.gz"]
    rejects(r"more than once \(test\.txt and test\.txt\.gz\)\. Keep one of each", found, ["test.txt"], criteo.KAGGLE_FILES)


def test_require_files_returns_all_paths(tmp_path: Path) -> None:
    for file in criteo.SMALL_DAYS:
        (tmp_path / file.plain_name).write_bytes(b"1\n")
    (tmp_path / "day_7").write_bytes(b"1\n")  # not wanted
    notes, wanted = [], files_of("criteo_small")
    expected = [str(tmp_path / f"day_{day}") for day in (0, 1, 2, 3, 23)]
    assert require_files(str(tmp_path), wanted, fetch_name="criteo_small", note=notes.append) == expected
    assert (notes[0], len(notes)) == (f"{tmp_path}/day_0: 2 B, but 49.8 GB are published", 5)
    (tmp_path / "day_3").rename(tmp_path / "day_3.gz.partial")
    assert rejects("", require_files, str(tmp_path), wanted, fetch_name="criteo_small") == (
        f"{tmp_path}: missing day_3 (181,115,208 rows, about 15.1 GB as .gz, 45.9 GB unpacked); published at "
        "https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset. "
        f"Run `rayrec fetch criteo_small --out {tmp_path}`."
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("criteo_full", r"day_0 to day_23 \(24 files, 4,373,472,329 rows, about 367 GB as \.gz, 1\.11 TB unpacked\)"),
        ("criteo_kaggle", r"train\.txt \(45,840,617 rows, about 11\.1 GB\)"),
        ("mnist", r".*train-images-idx3-ubyte \(60,000 rows, 9,912,422 bytes, 47 MB unpacked\)"),
        ("y", r"x \(number of rows not published, size not published\)\. Run `rayrec fetch y"),
    ],
)
def test_require_files_reports_missing_files(tmp_path: Path, name: str, why: str) -> None:
    files = [RemoteFile(name="x")] if name == "y" else files_of(name)
    for path in (tmp_path, tmp_path / "absent"):
        rejects(f"missing {why}", require_files, str(path), files, fetch_name=name)


def test_names_and_sizes_are_readable() -> None:
    assert names_text(["day_0", "day_1", "day_2", "day_5", "day_7", "day_8", "x"]) == ("day_0 to day_2, day_5, day_7, day_8, x")
    sizes = (4_542, 9_912_422, 16_300_000_000, 1.13e12)
    assert [size_text(int(size)) for size in sizes] == ["4.54 kB", "9.91 MB", "16.3 GB", "1.13 TB"]
