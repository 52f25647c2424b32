"""Files under any name: read by their content, or rejected with what they are and the way out."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.logs import open_index
from hosts.slow_store import SlowStore

from rayrec import storage
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.prepare.schema_draft import draft
from rayrec.prepare.split_tasks import table_tasks
from rayrec.schema import Schema

SCHEMA = Schema(label="click", dense=("price",), sparse=("user",))
TABLE = pa.table(
    {
        "click": [0, 1] * 30,
        "price": [row / 4 for row in range(60)],
        "user": [f"u{row % 7}" for row in range(60)],
    }
)


def csv_of(table: pa.Table, delimiter: str = ",") -> bytes:
    out = pa.BufferOutputStream()
    arrow_csv.write_csv(table, out, arrow_csv.WriteOptions(delimiter=delimiter))
    return out.getvalue().to_pybytes()


def parquet_of(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    return out.getvalue().to_pybytes()


def npz_of(table: pa.Table) -> bytes:
    out = io.BytesIO()
    np.savez(out, **{name: np.array(table.column(name).to_pylist()) for name in table.column_names})
    return out.getvalue()


LINES = b"".join(json.dumps(row).encode() + b"\n" for row in TABLE.to_pylist())
CONTENTS = {
    "csv": csv_of(TABLE),
    "tsv": csv_of(TABLE, "\t"),
    "gzip": gzip.compress(csv_of(TABLE)),
    "parquet": parquet_of(TABLE),
    "jsonl": LINES,
    "packed jsonl": gzip.compress(LINES),
    "npz": npz_of(TABLE),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    "name",
    [
        "log.txt",
        "log.data",
        "log.dat",
        "log.inter",
        "part-00000",
        "log.csv",
        "log.tsv",
        "log.csv.gz",
    ],
)
def test_names_do_not_decide_formats(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[content])
    source = LogSource.at(str(path))
    assert source.schema(SCHEMA) == SCHEMA
    source.check_head(SCHEMA)
    assert source.is_labelled(SCHEMA)
    index = open_index(path, SCHEMA, cache=tmp_path / "cache")
    raw = read_raw(index.segments, SCHEMA)
    assert raw.numbers[:, 0].tolist() == TABLE.column("price").to_pylist()
    assert raw.labels["click"].tolist() == TABLE.column("click").to_pylist()


@pytest.mark.parametrize("name", ["day_0", "day_0.txt", "day_0.dat"])
def test_tables_without_extension_are_recognized(tmp_path: Path, name: str) -> None:
    schema = Schema(
        label="click",
        dense=("price",),
        sparse=("user",),
        tokens="hexadecimal",
    )
    table = pa.table({"click": [0, 1], "price": [3, 4], "user": ["0000000a", "0000000b"]})
    for content in (parquet_of(table), csv_of(table)):
        (tmp_path / name).write_bytes(content)
        assert open_index(tmp_path / name, schema, cache=tmp_path / "cache").format == "table"
    (tmp_path / name).write_bytes(b"0\t3\t0000000a\n1\t4\t0000000b\n")
    assert open_index(tmp_path / name, schema, cache=tmp_path / "cache").format == "text"


@pytest.mark.parametrize("scheme", ["", "slow://"])
def test_headerless_text_is_recognized_in_stores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
) -> None:
    SlowStore(latency_s=0).installed(monkeypatch)
    line = b"1\t" + b"\t".join([b"5"] * 13 + [b"0000000a"] * 26) + b"\n"
    names = CRITEO.replace(tokens="any")
    for content, tokens in (
        (line, "hexadecimal"),
        (line[2:], "hexadecimal"),
        (gzip.compress(line), "hexadecimal"),
        (CONTENTS["tsv"], "any"),
    ):
        (tmp_path / "log").write_bytes(content)
        assert LogSource.at(f"{scheme}{tmp_path}/log").schema(names).tokens == tokens


def zip_of(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"x")
    return out.getvalue()


def written_by(write: object) -> bytes:
    out = pa.BufferOutputStream()
    write(TABLE, out)  # type: ignore[operator]
    return out.getvalue().to_pybytes()


ROWS = [json.dumps(row).encode() for row in TABLE.slice(0, 4).to_pylist()]
FOREIGN = {
    "JSON array": (
        b"[\n  " + b",\n".join(ROWS) + b"]",
        "is a JSON array; write an object in each line",
    ),
    "ORC": (written_by(pyarrow.orc.write_table), "is ORC; write it as Parquet"),
    "Feather": (written_by(pyarrow.feather.write_feather), "is an Arrow file; write it as Parquet"),
    "Avro": (b"Obj\x01\x04\x14", "is Avro; write it as Parquet"),
    "Excel": (zip_of("[Content_Types].xml"), "is an Office file; save its sheet as CSV"),
    "pickle": (b"\x80\x04\x95", "is a pickle, which can run code when it is opened"),
    "zstd": (b"\x28\xb5\x2f\xfd00", "is compressed with zstd; unpack it"),
}


@pytest.mark.parametrize("name", ["log.txt", "log", "log.csv", "log.json"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_other_formats_are_named_with_fix(tmp_path: Path, kind: str, name: str) -> None:
    content, message = FOREIGN[kind]
    (tmp_path / name).write_bytes(content)
    rejects(message, LogSource.at(str(tmp_path / name)).check_head, SCHEMA)
    rejects(message, open_index, tmp_path / name, SCHEMA, cache=tmp_path / "cache")
    rejects(message, draft, str(tmp_path / name))


def test_folders_of_json_name_fix(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(ROWS[0])
    (tmp_path / "_hidden.json").write_bytes(ROWS[0])
    (tmp_path / "folder.json").mkdir()
    rejects(
        r"contains no data files; its JSON .*: select JSON lines by .*/\*\.json",
        storage.list_files,
        str(tmp_path),
    )
    assert [file.path for file in storage.list_files(f"{tmp_path}/*.json")] == [
        str(tmp_path / "rows.json")
    ]


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b'"{user}",click,price', id="user-click-price"),
        pytest.param(b"user,click,price", id="case-1"),
    ],
)
def test_headers_with_braces_are_accepted(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(header + b"\n1,0,3\n2,1,4\n")
    LogSource.at(str(tmp_path / "log.csv")).raw_files()


def test_table_tasks_need_no_file_reads() -> None:
    files = [
        storage.File("a.dat", 100, 0),
        storage.File("b.dat", 100, 0),
        storage.File("c.csv", 9, 0),
    ]
    tasks = table_tasks(
        files,
        [
            [(0, 50), (50, 100)],
            [(0, 2), (2, 3)],
            [(0, 0)],
        ],
    )
    assert [task.is_row_start for task in tasks] == [True, False, True, True, True]
