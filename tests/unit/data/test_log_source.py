"""Logs of many files: few calls to the store, many in parallel, none for unchanged files."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.digits import idx
from builders.faults import rejects
from builders.logs import open_index
from hosts.slow_store import SlowStore

from rayrec import cli, storage
from rayrec.data.log_source import LogSource
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.splits import Split, slices_of
from rayrec.data.logs.table_log import column_names
from rayrec.data.logs.text_parser import parse
from rayrec.data.numbered_rows import find, read_idx, read_images, read_labels, read_pair, read_part
from rayrec.datasets.criteo import SCHEMA
from rayrec.datasets.fetch import PUBLISHED
from rayrec.schema import Schema

CLICKS = Schema(
    label="clicked",
    dense=("price",),
    sparse=("shop",),
    tokens="any",
)
FILES = 300


def table(rows: int, first: int = 0) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"clicked": i % 2, "price": float(i), "shop": f"shop {i}"}
            for i in range(first, first + rows)
        ]
    )


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
    assert list(storage.find_files([f"slow://{tmp_path}/3", f"slow://{tmp_path}/99"])) == [
        f"slow://{tmp_path}/3"
    ]
    assert storage.find_files([]) == {}


def hive(folder: Path, *, csv: bool = False) -> None:
    for day in (2, 10, 1):
        place = folder / f"dt=2026-01-{day:02d}" / f"hour={day}"
        place.mkdir(parents=True)
        for part in range(2):
            rows = table(5, first=100 * day + 10 * part)
            (arrow_csv.write_csv if csv else pq.write_table)(
                rows,
                place / f"part-{part}.{'csv' if csv else 'parquet'}",
            )
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
    assert raw.numbers[:, 0].tolist() == [
        100.0 * day + 10 * part + i for day in (1, 2, 10) for part in (0, 1) for i in range(5)
    ]
    assert raw.numbers[:, 1].tolist() == [day for day in (1.0, 2.0, 10.0) for _ in range(10)]
    days = raw.categories[:, 1].tolist()
    assert days[0] == days[9] != days[10] == days[19] != days[20]


@pytest.mark.parametrize("csv", [False, True])
def test_files_of_partitions_are_slices(tmp_path: Path, csv: bool) -> None:
    hive(tmp_path / "log", csv=csv)
    index = open_index(f"{tmp_path}/log", CLICKS, cache=tmp_path / "cache")
    subject, slices = slices_of(index)
    assert subject == "file"
    parts = [
        f"dt=2026-01-{day:02d}/hour={day}/part-{part}" for day in (1, 2, 10) for part in (0, 1)
    ]
    assert [piece.name.partition(".")[0] for piece in slices] == parts


@pytest.mark.parametrize("csv", [False, True])
def test_partitions_are_split_and_give_columns(tmp_path: Path, csv: bool) -> None:
    hive(tmp_path / "log", csv=csv)
    schema = CLICKS.replace(dense=("price", "hour"), sparse=("shop", "dt"))
    index = open_index(f"{tmp_path}/log", schema, cache=tmp_path / "cache")
    assert Split(kind="last_partition").rows(index) == {
        "train": (0, 20),
        "validation": (20, 25),
        "test": (25, 30),
    }
    assert Split(kind="last_file").rows(index)["train"] == (0, 25)
    (file, *_) = storage.list_files(f"{tmp_path}/log")
    assert {"dt", "hour", "shop"} <= set(column_names(file, schema))


def test_partitions_reject_invalid_columns(tmp_path: Path) -> None:
    (tmp_path / "log" / "land=de").mkdir(parents=True)
    pq.write_table(table(5), tmp_path / "log" / "land=de" / "part.parquet")
    rejects(
        "column land is the partition land=de, which is not a number; add it to",
        open_index,
        f"{tmp_path}/log",
        CLICKS.replace(dense=("land",)),
    )
    pq.write_table(table(5), tmp_path / "flat.parquet")
    flat = open_index(f"{tmp_path}/flat.parquet", CLICKS, cache=tmp_path / "cache")
    rejects(
        r"split last_partition: .*flat.parquet must be in a folder named KEY=VALUE",
        Split(kind="last_partition").rows,
        flat,
    )


def test_edited_log_is_reported_and_old_caches_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cache = tmp_path / "cache"
    log.mkdir()
    notes: list[str] = []
    (log / "a.txt.gz").write_bytes(gzip.compress(line(0) * 50))
    (log / "b.txt").write_bytes(line(0) * 50)
    first = open_index(str(log), SCHEMA, cache=cache, note=notes.append)
    assert ["because packed files cannot be split" in note for note in notes] == [True]
    assert [note for note in notes if "changed" in note] == []
    (log / "b.txt").write_bytes(line(0) * 25 + line(1) * 25)
    assert open_index(str(log), SCHEMA, cache=cache, note=notes.append).rows == first.rows == 100
    reported = (
        f"{log}/b.txt: bytes 0-{len(line(0)) * 50} changed since the log was last indexed; runs "
        "on the old rows cannot resume"
    )
    assert [note for note in notes if "changed" in note] == [reported]
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
        (
            "day_0_sparse.npy",
            "has day_0_sparse.npy, an array of TorchRec's scripts; `rayrec adopt ",
        ),
        ("shard.00000.mds.zstd", "has shard.00000.mds.zstd, an MDS shard; click logs must be"),
    ],
)
def test_raw_files_reject_foreign_folders(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"\x93NUMPY")
    (tmp_path / "index.json").write_text("{}")
    rejects(message, open_index, str(tmp_path), SCHEMA, cache=tmp_path / "cache")


# -- Idx files: correct reading, and rejection of damaged or missing files in one line
IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
LABELS = np.array([3, 0, 9, 1, 1], np.uint8)
MANY_CLASSES = np.array([3, 0, 10, 1, 200], np.uint8)
IMAGE_FILE = "train-images-idx3-ubyte"
LABEL_FILE = "train-labels-idx1-ubyte"


def train_part(folder: Path) -> Any:
    return read_part(str(folder), "train", num_classes=10)


def test_read_idx_parses_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255]))
    array = read_idx(str(path))
    assert (array.dtype, array.tolist()) == (np.uint8, [[1, 2, 3], [4, 5, 255]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
def test_read_part_returns_pairs(tmp_path: Path, packed: bool, separator: str) -> None:
    pack = gzip.compress if packed else bytes
    end = ".gz" if packed else ""
    for part, rows in (("train", 5), ("t10k", 2)):
        (tmp_path / f"{part}-images{separator}idx3-ubyte{end}").write_bytes(
            pack(idx(IMAGES[:rows]))
        )
        (tmp_path / f"{part}-labels{separator}idx1-ubyte{end}").write_bytes(
            pack(idx(LABELS[:rows]))
        )
    for part, rows in (("train", 5), ("t10k", 2)):
        read = read_part(str(tmp_path), part, num_classes=10)
        assert (read["images"].tolist(), read["labels"].tolist()) == (
            IMAGES[:rows].tolist(),
            LABELS[:rows].tolist(),
        )
    assert read_part(f"file://{tmp_path}", "t10k", num_classes=10)["images"].shape == (2, 4, 3)


def test_idx_names_match_fetched_files(tmp_path: Path) -> None:
    for file in PUBLISHED["mnist"]:
        (tmp_path / file.name).touch()
    found = [
        find(str(tmp_path), part, subject)
        for part in ("train", "t10k")
        for subject in ("images", "labels")
    ]
    assert found == [str(tmp_path / file.name) for file in PUBLISHED["mnist"]]
    # unpacked beside its packed self: the same rows, faster to read
    plain = tmp_path / "t10k-labels-idx1-ubyte"
    plain.touch()
    assert find(str(tmp_path), "t10k", "labels") == str(plain)
    (tmp_path / "t10k-labels.idx1-ubyte").touch()
    rejects(
        r"t10k-labels-idx1-ubyte and t10k-labels\.idx1-ubyte; keep one",
        find,
        str(tmp_path),
        "t10k",
        "labels",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            b"",
            "not an idx file .it begins with nothing",
            id="not-an-idx-file-.it-begins-with",
        ),
        pytest.param(b"\0\0\x08", "not an idx file .it begins with 00 00 08", id="case-1"),
        pytest.param(
            b"<html>not found</html>",
            "not an idx file .it begins with 3c 68 74 6d",
            id="html-not-found-html",
        ),
        pytest.param(b"\1" + idx(LABELS)[1:], "not an idx file", id="b-x01-idx-LABELS-1"),
        pytest.param(bytes([0, 0, 8, 0]), "not an idx file", id="bytes-0-0-8-0"),
        pytest.param(
            b"\0\0\x0d" + idx(LABELS)[3:],
            "idx type of images and labels must be bytes, 0x08, got 0x0d",
            id="b-x00-x00-r-idx-LABELS-3",
        ),
        pytest.param(
            idx(IMAGES)[:10],
            "cut short within its header of 16 bytes",
            id="idx-IMAGES-10",
        ),
        pytest.param(
            idx(IMAGES)[:-1],
            "cut short, has 75 bytes, but its 5 x 4 x 3 values need 76",
            id="idx-IMAGES-1",
        ),
        pytest.param(
            idx(IMAGES) + b"\0",
            "too long, has 77 bytes, but its 5 x 4 x 3 values need 76",
            id="idx-IMAGES-b-x00",
        ),
        pytest.param(
            gzip.compress(idx(IMAGES), mtime=0)[:-9],
            "cut short, not a complete gzip file",
            id="gzip.compress-idx-IMAGES-mtime",
        ),
        pytest.param(
            gzip.compress(idx(IMAGES), mtime=0)[:-8] + bytes(8),
            "damaged, not a gzip file to its end",
            id="gzip.compress-idx-IMAGES-mtime-damaged-not-a-gzi",
        ),
        pytest.param(
            gzip.compress(b"", mtime=0)[:10] + b"\xff" * 30,
            "damaged, not a gzip file to its end",
            id="gzip.compress-b-mtime-0-10-b",
        ),
        pytest.param(
            gzip.compress(idx(IMAGES), mtime=0) + b"more",
            "damaged, not a gzip file to its end",
            id="case-12",
        ),
    ],
)
def test_damaged_files_are_rejected(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    line = rejects(message, read_idx, str(path))
    assert line.startswith(f"{path}: ")
    assert "idx type" in message or f"rayrec fetch mnist --out {tmp_path}" in line


@pytest.mark.parametrize(
    ("images", "labels", "message", "read"),
    [
        pytest.param(
            None,
            None,
            r"images-idx3-ubyte not found.* rayrec fetch mnist --out ",
            train_part,
            id="none",
        ),
        pytest.param(
            IMAGES,
            None,
            r"labels-idx1-ubyte not found.* rayrec fetch mnist --out ",
            train_part,
            id="no labels",
        ),
        pytest.param(
            None,
            None,
            r"nowhere: train-images-idx3-ubyte not found",
            lambda folder: train_part(folder / "nowhere"),
            id="no folder",
        ),
        pytest.param(
            None,
            None,
            r"nowhere: no such file; get it again .rayrec fetch mnist",
            lambda folder: read_images(str(folder / "nowhere")),
            id="no file",
        ),
        pytest.param(
            IMAGES,
            LABELS[:4],
            r"has 5 images, but .*train-labels-idx1-ubyte has 4 labels",
            lambda folder: read_pair(
                str(folder / IMAGE_FILE),
                str(folder / LABEL_FILE),
                num_classes=10,
            ),
            id="fewer labels",
        ),
        pytest.param(
            IMAGES,
            MANY_CLASSES,
            r"label of row 2 must be 0 to 9, got 10; set num_classes to 201",
            train_part,
            id="more classes",
        ),
        pytest.param(
            IMAGES,
            LABELS,
            r"must have shape \(rows, height, width\), got \(5,\); name the file of the images",
            lambda folder: read_images(str(folder / LABEL_FILE)),
            id="labels as images",
        ),
        pytest.param(
            IMAGES,
            LABELS,
            r"must have shape \(rows,\), got \(5, 4, 3\); name the file of the labels",
            lambda folder: read_labels(str(folder / IMAGE_FILE), num_classes=10),
            id="images as labels",
        ),
    ],
)
def test_read_idx_rejects_wrong_shapes(
    images: Any,
    labels: Any,
    message: str,
    read: Callable[[Path], Any],
    tmp_path: Path,
) -> None:
    for name, values in ((IMAGE_FILE, images), (LABEL_FILE, labels)):
        if values is not None:
            (tmp_path / name).write_bytes(idx(values))
    rejects(message, read, tmp_path)


def test_labels_reach_number_of_classes(tmp_path: Path) -> None:
    (tmp_path / LABEL_FILE).write_bytes(idx(MANY_CLASSES))
    assert read_labels(str(tmp_path / LABEL_FILE), num_classes=201).tolist() == [3, 0, 10, 1, 200]


# -- Labels other than 0 and 1: detected in the first scan, with the values and a fix
RATED = Schema(
    label="rating",
    sparse=("user",),
    tokens="any",
    delimiter=",",
)
FOUND: dict[str, tuple[list[Any], str]] = {
    "stars": (
        [1, 5, 3, 2, 4],
        "found 1, 2, 3, 4, 5 in column rating; derive one, such as rating >= 4",
    ),
    "signs": ([-1, -1, 1], "found -1, 1 in column rating; derive one, such as rating >= 1"),
    "one and two": ([2, 2, 1], "found 1, 2 in column rating; derive one, such as rating >= 2"),
    "halves": (
        [0.5, 0.25, 1.0],
        "found 0.25, 0.5, 1 in column rating; derive one, such as rating >= 0.5",
    ),
    "words": (["yes", "no"], "found no, yes in column rating; derive one, such as rating == 'yes'"),
    "unknown words": (["a", "b"], "found a, b in column rating; derive one, such as rating == 'b'"),
    "many": (
        list(range(10, 40)),
        "found 10, 11, 12, 13, 14, 15, 16, 17 and others in column rating; derive one",
    ),
}


def write(folder: Path, values: list[Any], kind: str, *, good: int = 0) -> Path:
    """Write a table whose labels repeat `values`, after some valid ones."""
    labels = [type(values[0])(1)] * good + [values[row % len(values)] for row in range(100)]
    table = pa.table({"rating": labels, "user": [f"u{row % 9}" for row in range(len(labels))]})
    if kind == "parquet":
        pq.write_table(table, folder / "log.parquet")
        return folder / "log.parquet"
    lines = [f"{label:g},u" if isinstance(label, float) else f"{label},u" for label in labels]
    (folder / "log.csv").write_text("rating,user\n" + "\n".join(lines) + "\n")
    return folder / "log.csv"


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("name", FOUND)
def test_check_head_rejects_wrong_labels(tmp_path: Path, name: str, kind: str) -> None:
    values, expected = FOUND[name]
    line = rejects("", LogSource.at(str(write(tmp_path, values, kind))).check_head, RATED)
    assert f"log.{kind}: labels must be 0 or 1, {expected}" in line


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        ["true", "False"],
        [0.0, 1.0],
        ["1", "0.0"],
    ],
)
def test_boolean_labels_are_accepted(tmp_path: Path, values: list[Any], kind: str) -> None:
    LogSource.at(str(write(tmp_path, values, kind))).check_head(RATED)


def test_allowed_fraction_of_wrong_labels_passes(tmp_path: Path) -> None:
    path = str(write(tmp_path, [1, 2, 3, 4, 5], "csv"))
    LogSource.at(path).check_head(RATED, max_bad_fraction=0.8)
    rejects("found 1, 2, 3, 4, 5", LogSource.at(path).check_head, RATED, max_bad_fraction=0.7)


@pytest.mark.parametrize("good", [0, 2000], ids=["from the start", "later"])
def test_commands_name_labels_and_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    good: int,
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "schema.yaml").write_text(
        "{label: rating, sparse: [user], tokens: any, delimiter: ','}"
    )
    write(tmp_path, [1, 2, 3, 4, 5], "csv", good=good)
    log = str(tmp_path / "log.csv")
    schema = ["--schema", str(tmp_path / "schema.yaml")]
    for command in (
        [
            "train",
            "clicks",
            "--train-data.path",
            log,
            "--storage-path",
            str(tmp_path / "runs"),
            *schema,
        ],
        ["vocabulary", log, "--out", str(tmp_path / "v"), *schema],
        ["preprocess", log, "--out", str(tmp_path / "p"), "--format", "parquet", *schema],
        ["split", log, "--out", str(tmp_path / "s"), "--by", "rows", *schema],
        ["validate", log, *schema],
    ):
        assert cli.run(command) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert (
            "labels must be 0 or 1, found 1, 2, 3, 4, 5 in column rating; derive one, such as "
            "rating >= 4" in line
        )
        # validate names another broken gate
        assert command[0] == "validate" or "max-bad-fraction" not in line


TEXT = Schema(
    tokens="hexadecimal",
    label="click",
    dense=("age",),
    sparse=("user",),
)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param(
            ["1", "2", "3"],
            "found 1, 2, 3 in column click; derive one, such as click >= 2",
            id="1-2-3",
        ),
        pytest.param(
            ["-1", "1"],
            "found -1, 1 in column click; derive one, such as click >= 1",
            id="1-1",
        ),
        pytest.param(
            ["0.0", "1.0"],
            "found 0.0, 1.0 in column click; write them as 0 and 1",
            id="0.0-1.0",
        ),
        pytest.param(
            ["no", "yes"],
            "found no, yes in column click; derive one, such as click == 'yes'",
            id="no-yes",
        ),
    ],
)
def test_labels_of_text_are_named(labels: list[Any], expected: str, tmp_path: Path) -> None:
    text = "".join(f"{labels[row % len(labels)]}\t3\t0000000a\n" for row in range(60)).encode()
    (tmp_path / "log.txt").write_bytes(text)
    faults = parse(TEXT, text, path=str(tmp_path / "log.txt"))[1]
    line = rejects(
        "labels must be 0 or 1, ",
        LogIndex((), Faults.from_dict(faults.to_dict())).check,
        0.001,
        "log",
    )
    assert line.endswith(expected)
    rejects("labels must be 0 or 1", LogSource.at(str(tmp_path / "log.txt")).check_head, TEXT)


def test_faults_of_several_tasks_name_all_labels() -> None:
    total = Faults()
    for label in (5, 10, 9, 5):
        total.add(parse(TEXT, f"{label}\t3\t0000000a\n".encode())[1])
    assert total.labels == {"click": ["5", "9", "10"]}
    total.add(Faults({"too few columns": 5}))  # most lines have another fault
    assert total.wrong_labels() is None
    # of an index of an earlier version
    assert Faults.from_dict({"counts": {}, "first": []}).labels == {}
