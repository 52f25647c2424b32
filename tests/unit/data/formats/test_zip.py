"""Logs in zip archives with one file."""

import zipfile
from pathlib import Path

import pytest
from builders.faults import rejects
from builders.logs import open_index

from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema, load_schema

SCHEMA = Schema(label="click", dense=("age",), sparse=("city",))
CSV = "click,age,city\n" + "".join(f"{n % 2},{n}.5,c{n % 7}\n" for n in range(400))
JSON = "".join(f'{{"click": {n % 2}, "age": {n}.5, "city": "c{n % 7}"}}\n' for n in range(400))


def zipped(path: Path, members: dict[str, str], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("text", [CSV, JSON])
def test_zip_is_unpacked(tmp_path: Path, text: str, method: int) -> None:
    members = {"__MACOSX/._log.csv": "\0", "log.csv": text}
    (tmp_path / "plain.csv").write_text(text)
    archive = zipped(tmp_path / "log.zip", dict(reversed(members.items())), method)
    rows = [
        read_raw(open_index(path, SCHEMA, cache=tmp_path / "cache").segments, SCHEMA)
        for path in (tmp_path / "plain.csv", archive)
    ]
    assert rows[0].rows == 400
    assert rows[0].categories.tolist() == rows[1].categories.tolist()
    assert rows[0].numbers.tolist() == rows[1].numbers.tolist()
    assert load_schema(draft(str(archive)), "draft").sparse == ("city",)


def test_zip_of_criteo_lines_is_unpacked(tmp_path: Path) -> None:
    line = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))]) + "\n"
    archive = zipped(tmp_path / "day_0.zip", {"day_0": line * 30})
    schema = LogSource.at(str(archive)).schema(CRITEO)
    assert schema.tokens == "hexadecimal"
    index = open_index(archive, schema, cache=tmp_path / "cache")
    assert index.rows == 30
    assert index.segments[0].path.endswith("-day_0")


def test_zip_with_several_files_is_rejected(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "log.zip", {"a.csv": CSV, "b.csv": CSV})
    rejects(
        r"log\.zip: holds 2 files \(a\.csv, b\.csv\); unpack it",
        LogSource.at(str(archive)).check_head,
        SCHEMA,
    )


@pytest.mark.parametrize(("start", "message"), [(60, "damaged zip file"), (-400, "damaged zip")])
def test_damaged_zip_is_rejected(tmp_path: Path, start: int, message: str) -> None:
    archive = zipped(tmp_path / "log.zip", {"log.csv": CSV})
    content = bytearray(archive.read_bytes())
    content[start : start + 4] = b"\xff\xff\xff\xff"
    archive.write_bytes(content)
    rejects(message, open_index, archive, SCHEMA, cache=tmp_path / "cache")


def test_encrypted_zip_is_rejected(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "log.zip", {"log.csv": CSV})
    content = archive.read_bytes()
    for magic, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(magic) + place
        content = content[:at] + b"\x01" + content[at + 1 :]
    archive.write_bytes(content)
    rejects("is a zip archive; unpack it", LogSource.at(str(archive)).check_head, SCHEMA)
