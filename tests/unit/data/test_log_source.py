"""Logs of many files: few calls to the store, many in parallel, none for unchanged files."""

import gzip
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.logs import open_index
from hosts.slow_store import SlowStore

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.splits import Split, slices_of
from rayrec.data.logs.table_log import column_names
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema

CLICKS = Schema(label="clicked", dense=("price",), sparse=("shop",), tokens="any")
FILES = 300


def table(rows: int, first: int = 0) -> pa.Table:
    return pa.Table.from_pylist([{"clicked": i % 2, "price": float(i), "shop": f"shop {i}"} for i in range(first, first + rows)])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    return SlowStore(latency_s=0.004).installed(monkeypatch)


def line(label: int) -> bytes:
    return b"\t".join([str(label).encode(), *[b"1"] * 13, *[b"deadbeef"] * 26]) + b"\n"


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_many_store_files_need_few_requests(tmp_path: Path, store: SlowStore, kind: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    if kind == "parquet":
        pq.write_table(table(3), tmp_path / "one")
    else:
        (tmp_path / "one").write_bytes(line(1) * 3)
    content = (tmp_path / "one").read_bytes()
    for number in range(FILES):
        (log / f"part-{number}{'.parquet' if kind == 'parquet' else ''}").write_bytes(content)
    schema = CLICKS if kind == "parquet" else SCHEMA
    index = open_index(f"slow://{log}", schema, cache=f"slow://{tmp_path}/cache")
    assert index.rows == 3 * FILES
    # For each file: a footer and its rows, or its first bytes and its lines.
    assert store.calls.total() <= 3 * FILES + 30, store.calls
    assert store.calls["info"] + store.calls["list"] < 30, store.calls
    assert store.most_at_once >= 8
    store.reset()
    assert open_index(f"slow://{log}", schema, cache=f"slow://{tmp_path}/cache") == index
    assert store.calls.total() < 12, store.calls  # a resumed run: a listing, and the index
    store.reset()
    read_raw(index.segments[:48], schema)
    assert store.most_at_once >= 8
    assert store.calls.total() <= 2 * 48


def test_cached_index_lists_folders_once(tmp_path: Path, store: SlowStore) -> None:
    for number in range(50):
        (tmp_path / f"{number}").write_bytes(b"x")
    paths = [f"slow://{tmp_path}/{number}" for number in range(60)]
    assert list(storage.find_files(paths)) == paths[:50]
    assert store.calls.total() == 1
    assert list(storage.find_files([f"slow://{tmp_path}/3", f"slow://{tmp_path}/99"])) == [f"slow://{tmp_path}/3"]
    assert storage.find_files([]) == {}


def hive(folder: Path, *, csv: bool = False) -> None:
    for day in (2, 10, 1):
        place = folder / f"dt=2026-01-{day:02d}" / f"hour={day}"
        place.mkdir(parents=True)
        for part in range(2):
            rows = table(5, first=100 * day + 10 * part)
            (arrow_csv.write_csv if csv else pq.write_table)(rows, place / f"part-{part}.{'csv' if csv else 'parquet'}")
    (folder / "_temporary" / "dt=2026-01-03").mkdir(parents=True)
    (folder / "_temporary" / "dt=2026-01-03" / "part-0.parquet").write_bytes(b"half")
    (folder / "_SUCCESS").touch()


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("glob", ["", "/dt=*", "/dt=*/hour=*/*", "/**/part-*"])
def test_folders_of_partitions_are_one_log(tmp_path: Path, glob: str, csv: bool) -> None:
    hive(tmp_path / "log", csv=csv)
    if glob.startswith("/**"):
        shutil.rmtree(tmp_path / "log" / "_temporary")
    if glob in ("/dt=*", ""):
        assert len(storage.list_files(f"{tmp_path}/log{glob}")) == 6
    schema = CLICKS.replace(dense=("price", "hour"), sparse=("shop", "dt"))
    index = open_index(f"{tmp_path}/log{glob}", schema, cache=tmp_path / "cache")
    raw = read_raw(index.segments, schema)
    assert raw.numbers[:, 0].tolist() == [100.0 * day + 10 * part + i for day in (1, 2, 10) for part in (0, 1) for i in range(5)]
    assert raw.numbers[:, 1].tolist() == [day for day in (1.0, 2.0, 10.0) for _ in range(10)]
    days = raw.categories[:, 1].tolist()
    assert days[0] == days[9] != days[10] == days[19] != days[20]
    what, slices = slices_of(index)
    assert what == "file"
    assert [piece.name.partition(".")[0] for piece in slices] == [
        f"dt=2026-01-{day:02d}/hour={day}/part-{part}" for day in (1, 2, 10) for part in (0, 1)
    ]
    assert Split(kind="last_partition").rows(index) == {"train": (0, 20), "validation": (20, 25), "test": (25, 30)}
    assert Split(kind="last_file").rows(index)["train"] == (0, 25)
    (file, *_) = storage.list_files(f"{tmp_path}/log")
    assert {"dt", "hour", "shop"} <= set(column_names(file, schema))


def test_partitions_reject_invalid_columns(tmp_path: Path) -> None:
    hive(tmp_path / "log")
    with pytest.raises(InputError, match=r"column dt is the partition dt=2026-01-01, which is not a number; add it to"):
        open_index(f"{tmp_path}/log", CLICKS.replace(dense=("dt",)))
    pq.write_table(table(5), tmp_path / "flat.parquet")
    flat = open_index(f"{tmp_path}/flat.parquet", CLICKS, cache=tmp_path / "cache")
    rejects(r"split last_partition: .*flat.parquet must be in a folder named KEY=VALUE", Split(kind="last_partition").rows, flat)


def test_edited_log_is_reported_and_old_caches_removed(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    log.mkdir()
    notes: list[str] = []
    (log / "a.txt.gz").write_bytes(gzip.compress(line(0) * 50))
    (log / "b.txt").write_bytes(line(0) * 50)
    first = open_index(str(log), SCHEMA, cache=cache, note=notes.append)
    assert [note for note in notes if "changed" in note] == []
    (log / "b.txt").write_bytes(line(0) * 25 + line(1) * 25)
    assert open_index(str(log), SCHEMA, cache=cache, note=notes.append).rows == first.rows == 100
    assert [note for note in notes if "changed" in note] == [
        f"{log}/b.txt: bytes 0-{(len(line(0)) * 50)} changed since the log was last indexed; runs on the old rows cannot resume"
    ]
    (log / "a.txt.gz").write_bytes(gzip.compress(line(1) * 51))
    assert open_index(str(log), SCHEMA, cache=cache).rows == 101
    assert len(list((cache / "unpacked").iterdir())) == 1
    assert open_index(str(log), SCHEMA, cache=cache).rows == 101
    for unpacked in (cache / "unpacked").iterdir():
        unpacked.unlink()
    assert open_index(str(log), SCHEMA, cache=cache).rows == 101  # made again


def test_old_rewritten_tables_are_removed(tmp_path: Path) -> None:
    for rows in (40, 30):
        pq.write_table(table(rows), tmp_path / "a.csv")  # any bytes
        (tmp_path / "a.csv").write_text("clicked,price,shop\n" + "1,2.5,x\n" * rows)
        assert open_index(f"{tmp_path}/a.csv", CLICKS, cache=tmp_path / "cache").rows == rows
    assert len(list((tmp_path / "cache" / "tables").iterdir())) == 1
    assert len(list((tmp_path / "cache").glob("index-*"))) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("day_0_sparse.npy", "has day_0_sparse.npy, an array of TorchRec's scripts; `rayrec adopt "),
        ("shard.00000.mds.zstd", "has shard.00000.mds.zstd, an MDS shard; click logs must be"),
    ],
)
def test_raw_files_reject_foreign_folders(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"\x93NUMPY")
    (tmp_path / "index.json").write_text("{}")
    rejects(message, open_index, str(tmp_path), SCHEMA, cache=tmp_path / "cache")
