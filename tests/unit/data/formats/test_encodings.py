"""CSV files in other encodings and packings: the same rows as in plain UTF-8, else a loud count of
the rows left out.
"""

import gzip
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.runs import QUIET

import rayrec
from rayrec.data import table_ranges
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import TaskContext
from rayrec.data.formats.csv_reader import csv_columns, read_csv
from rayrec.data.log_source import LogSource
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.raw_block import RawBlock
from rayrec.observe.console import Console
from rayrec.schema import Schema

CLICKS = Schema(label="click", dense=("age",), sparse=("user", "café"))
PLAIN = Schema(label="click", dense=("age",), sparse=("user",))
TEXT = 'click,age,user,café\n1,30,"Zoë, ""x""",crème\n0,31,Noël,thé\n1,32,Zoe,\n'


def read(
    path: Path,
    schema: Schema,
    *,
    read_bytes: int = 1 << 20,
) -> tuple[RawBlock, dict[str, int]]:
    blocks = []
    counts = dict[str, int]()
    for table in read_csv(str(path), schema, read_bytes=read_bytes):
        block, faults = parse_table(table, schema)
        blocks.append(block)
        for kind, count in faults.counts.items():
            counts[kind] = counts.get(kind, 0) + count
    return RawBlock.concatenated(blocks), counts


def expected(tmp_path: Path) -> RawBlock:
    path = tmp_path / "expected.csv"
    path.write_text(TEXT, encoding="utf-8")
    return read(path, CLICKS)[0]


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("packed", [pytest.param(False, id="plain"), pytest.param(True, id="gzip")])
@pytest.mark.parametrize(
    "encoding",
    [
        "latin-1",
        "cp1252",
        "utf-16",
        "utf-16-le",
        "utf-8-sig",
        "utf8",
    ],
)
def test_rows_match_utf8(tmp_path: Path, encoding: str, packed: bool, read_bytes: int) -> None:
    content = TEXT.encode(encoding)
    path = tmp_path / ("log.csv.gz" if packed else "log.csv")
    path.write_bytes(gzip.compress(content) if packed else content)
    schema = CLICKS.replace(encoding=encoding)
    assert csv_columns(str(path), schema) == ("click", "age", "user", "café")
    raw, faults = read(path, schema, read_bytes=read_bytes)
    assert (faults, raw.categories.tolist()) == ({}, expected(tmp_path).categories.tolist())


def test_undefined_byte_is_fault(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"click,age,user\n1,30,a\x81\n0,31,\xe9\n")
    raw, faults = read(path, PLAIN.replace(encoding="cp1252"))
    assert (raw.rows, faults) == (1, {"not UTF-8": 1})


def test_other_text_than_encoding_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"click,age,user\n1,30,a\n0\n")
    rejects("log.csv: .*", list, read_csv(str(path), PLAIN.replace(encoding="utf-16")))


@pytest.mark.parametrize("zeros", [1, 512, 3 << 20])
def test_zeros_after_gzip_are_padding(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(TEXT.encode()) + bytes(zeros))
    assert read(path, CLICKS)[0].categories.tolist() == expected(tmp_path).categories.tolist()


def test_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(
        gzip.compress(TEXT[:30].encode()) + gzip.compress(TEXT[30:].encode()) + bytes(8)
    )
    assert (
        read(path, CLICKS, read_bytes=5)[0].categories.tolist()
        == expected(tmp_path).categories.tolist()
    )


def latin_log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    rows = [f"{row % 2},{20 + row},{'Zoë' if row == 30 else f'u{row % 5}'}" for row in range(200)]
    path.write_text("\n".join(["click,age,user", *rows]) + "\n", encoding="latin-1")
    return path


def test_rows_in_another_encoding_are_loud(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = latin_log(tmp_path)
    quiet = Console(quiet=True)
    context = TaskContext(
        LoopEngine(),
        str(tmp_path / "cache"),
        quiet.note,
        quiet.progress,
        quiet.warn,
    )
    index = LogSource.at(str(path)).index(
        PLAIN,
        segment_bytes=1 << 20,
        context=context,
        max_bad_fraction=0.01,
    )
    assert (index.rows, index.faults.counts) == (199, {"not UTF-8": 1})
    shown = capsys.readouterr().err
    assert shown.startswith(f"warning: {path}: skipping 1 invalid rows (1 x not UTF-8)")
    assert "name the file's encoding in the schema, such as `encoding: latin-1`" in shown


def test_vocabulary_counts_rows_of_encoding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    schema = PLAIN.replace(encoding="latin-1")
    out = str(tmp_path / "out")
    rayrec.vocabulary(
        str(latin_log(tmp_path)),
        out=out,
        schema=schema,
        min_count=1,
        engine="threads",
        console=QUIET,
    )
    preprocessor = Preprocessor.load(out)
    assert (preprocessor.schema.encoding, len(preprocessor.vocabulary(0))) == ("latin-1", 6)


def test_split_reads_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table_ranges, "_MIN_TASK_BYTES", 100)
    schema = PLAIN.replace(encoding="utf-16")
    out = tmp_path / "out"
    path = tmp_path / "log.csv"
    path.write_text(latin_log(tmp_path).read_text(encoding="latin-1"), encoding="utf-16")
    rayrec.split(
        str(path),
        out=str(out),
        by="rows",
        schema=schema,
        engine="threads",
        console=QUIET,
    )
    tables = [pq.read_table(file) for file in sorted(out.rglob("*.parquet"))]
    assert sum(table.num_rows for table in tables) == 200
    assert (
        sum(pc.sum(pc.equal(table["user"].cast("string"), "Zoë")).as_py() or 0 for table in tables)
        == 1
    )
