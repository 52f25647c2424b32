"""`rayrec split`: each row is in one part, unchanged and in order, for any engine, block size and
cut.
"""

import gzip
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.faults import fails_with, raising, rejects
from builders.logs import open_index
from builders.runs import files_in

import rayrec
from rayrec import storage
from rayrec.data import synthetic, table_ranges
from rayrec.data.arrow import parse_reply
from rayrec.data.engine import ThreadEngine
from rayrec.data.logs.splits import Split
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.observe.console import Console
from rayrec.prepare import split as splitting
from rayrec.prepare import split_tasks
from rayrec.schema import Schema

CONSOLE = Console(quiet=True)
SCHEMA = Schema(
    label="click",
    dense=("price",),
    sparse=("user", "item"),
    delimiter=",",
    group="user",
    timestamp="at",
)


@pytest.fixture(autouse=True)
def small_tasks(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_ranges, "_MIN_TASK_BYTES", 1 << 14)
    monkeypatch.setattr(splitting, "_PARTITION_BYTES", 1 << 13)
    monkeypatch.setattr(split_tasks, "GROUP_BYTES", 1 << 14)
    monkeypatch.setattr(table_ranges, "BATCH_ROWS", 64)
    monkeypatch.setattr(split_tasks, "CHUNK_ROWS", 100)


def one_thread(*_: Any, **__: Any) -> nullcontext[ThreadEngine]:
    return nullcontext(ThreadEngine(1))


def table_of(rows: int = 3000, *, users: int = 200) -> pa.Table:
    chance = np.random.default_rng(0)
    return pa.table(
        {
            "note": [f"row {number}" for number in range(rows)],
            "click": chance.integers(0, 2, rows),
            "at": pa.array(chance.integers(0, rows // 3, rows) * 1_000_000, pa.timestamp("us")),
            "price": chance.random(rows),
            "user": [
                None if user == 0 else f"u{user}"
                for user in chance.integers(0, users, rows).tolist()
            ],
            "item": chance.integers(0, 50, rows),
        }
    )


def written(table: pa.Table, folder: Path, *, files: int = 3, group_rows: int = 200) -> str:
    folder.mkdir()
    size = -(-len(table) // files)
    for number in range(files):
        pq.write_table(
            table.slice(number * size, size),
            folder / f"day_{number}.parquet",
            row_group_size=group_rows,
        )
    return str(folder)


def split(
    path: str,
    out: Path,
    by: Any,
    *,
    schema: Schema = SCHEMA,
    **options: Any,
) -> dict[str, Any]:
    return rayrec.split(
        path,
        out=str(out),
        by=by,
        console=CONSOLE,
        schema=schema,
        **options,
    )


def split_parts(out: Path) -> dict[str, pa.Table]:
    files = {
        name: sorted(out.glob(f"{name}-*.parquet")) for name in ("train", "validation", "test")
    }
    return {
        name: pa.concat_tables([*map(pq.read_table, part_rows)])
        for name, part_rows in files.items()
        if part_rows
    }


def numbers(table: pa.Table) -> list[int]:
    return [int(note.removeprefix("row ")) for note in table.column("note").to_pylist()]


def check_whole(parts: dict[str, pa.Table], table: pa.Table) -> None:
    """Check that each row exists once, unchanged, and in order within its part."""
    found = {name: numbers(part) for name, part in parts.items()}
    assert sorted(number for part_rows in found.values() for number in part_rows) == list(
        range(len(table))
    )
    for name, part in parts.items():
        assert found[name] == sorted(found[name])
        assert part.equals(table.take(found[name]))


@pytest.fixture
def table_and_path(tmp_path: Path) -> tuple[pa.Table, str]:
    table = table_of()
    return table, written(table, tmp_path / "log")


def test_split_by_rows_writes_fractions(
    table_and_path: tuple[pa.Table, str],
    tmp_path: Path,
) -> None:
    table, path = table_and_path
    found = split(path, tmp_path / "out", "rows", validation=0.2, test=0.1)
    parts = split_parts(tmp_path / "out")
    check_whole(parts, table)
    sizes = {name: len(part) for name, part in parts.items()}
    assert {name: part["rows"] for name, part in found["parts"].items()} == sizes
    shares = [found["parts"][name]["share"] for name in ("train", "validation", "test")]
    assert (found["rows"], shares) == (3000, pytest.approx([0.7, 0.2, 0.1], abs=0.03))
    assert json.loads((tmp_path / "out" / "split.json").read_text())["options"]["seed"] == 0
    assert {file.name.partition("-")[0] for file in (tmp_path / "out").iterdir()} == {
        "split.json",
        *sizes,
    }
    # What is trained on: the files by their names.
    ranges = Split(kind="named_files").rows(open_index(tmp_path / "out", SCHEMA))
    assert {name: stop - start for name, (start, stop) in ranges.items()} == sizes


def test_split_by_rows_depends_on_row_numbers_and_seed(
    table_and_path: tuple[pa.Table, str],
    tmp_path: Path,
) -> None:
    """The parts do not depend on files, row groups or tasks."""
    table, path = table_and_path
    first = split(path, tmp_path / "out", "rows", validation=0.2, test=0.1)
    parts = split_parts(tmp_path / "out")
    again = split(
        written(table, tmp_path / "one", files=1),
        tmp_path / "again",
        "rows",
        validation=0.2,
    )
    assert again["parts"]["validation"]["rows"] == first["parts"]["validation"]["rows"]
    assert all(
        numbers(part) == numbers(parts[name])
        for name, part in split_parts(tmp_path / "again").items()
    )
    other = split(path, tmp_path / "other", "rows", seed=1)
    assert numbers(split_parts(tmp_path / "other")["test"]) != numbers(parts["test"])
    assert other["parts"].keys() == first["parts"].keys()


def test_split_by_group_keeps_groups_together(tmp_path: Path) -> None:
    table = table_of()
    found = split(
        written(table, tmp_path / "log"),
        tmp_path / "out",
        "group",
        test=0.0,
        validation=0.3,
    )
    parts = split_parts(tmp_path / "out")
    check_whole(parts, table)
    users = {name: set(part["user"].to_pylist()) for name, part in parts.items()}
    assert users.keys() == {"train", "validation"}
    assert not users["train"] & users["validation"]
    assert None in users["train"]
    assert found["rows_without_group"] == table["user"].null_count > 0
    assert len(users["validation"]) == pytest.approx(60, abs=20)
    split(str(tmp_path / "log"), tmp_path / "items", "group", group="item")
    items = {
        name: set(part.column("item").to_pylist())
        for name, part in split_parts(tmp_path / "items").items()
    }
    assert not items["train"] & items["test"]


def test_split_by_time_holds_out_latest_rows(tmp_path: Path) -> None:
    table = table_of()
    path = written(table, tmp_path / "log")
    split(path, tmp_path / "out", "time", validation=0.25, test=0.1)
    parts = split_parts(tmp_path / "out")
    check_whole(parts, table)
    times = {name: part.column("at").cast(pa.int64()).to_numpy() for name, part in parts.items()}
    in_order = np.sort(table.column("at").cast(pa.int64()).to_numpy())
    assert times["train"].max() < times["validation"].min() == in_order[3000 - 1050]
    assert times["validation"].max() < times["test"].min() == in_order[2700]
    split(
        path,
        tmp_path / "dates",
        "time",
        validation_from="1970-01-01T00:05:00",
        test_from="1970-01-01T00:10:00+00:00",
    )
    dated = {
        name: part.column("at").cast(pa.int64()).to_numpy()
        for name, part in split_parts(tmp_path / "dates").items()
    }
    check_whole(split_parts(tmp_path / "dates"), table)
    assert [times.min() // 1_000_000 for times in dated.values()] == [0, 300, 600]


def test_split_last_out_holds_out_last_rows_of_users(tmp_path: Path) -> None:
    table = table_of(users=1500)  # of which many have one row or two, some at the same time
    table = table.set_column(
        2,
        "at",
        [pa.array(np.arange(3000) % 7 * 1_000_000, pa.timestamp("us"))],
    )
    found = split(written(table, tmp_path / "log"), tmp_path / "out", "last-out")
    parts = split_parts(tmp_path / "out")
    check_whole(parts, table)
    rows = table.append_column("row", pa.array(range(3000))).to_pandas().dropna(subset="user")
    rows_by_user = [
        group["row"].tolist() for _, group in rows.sort_values(["at", "row"]).groupby("user")
    ]
    assert set(numbers(parts["test"])) == {
        user_rows[-1] for user_rows in rows_by_user if len(user_rows) >= 2
    }
    assert set(numbers(parts["validation"])) == {
        user_rows[-2] for user_rows in rows_by_user if len(user_rows) >= 3
    }
    assert found["rows_without_group"] == table.column("user").null_count


@dataclass(frozen=True)
class TextLog:
    """Log of 800 valid and two invalid lines."""

    path: Path
    lines: list[bytes]


ALLOWING: dict[str, Any] = {"schema": CRITEO, "max_bad_fraction": 0.1}


@pytest.fixture
def text_log(tmp_path: Path) -> TextLog:
    synthetic.generate(
        str(tmp_path / "made"),
        rows=800,
        dialect="kaggle",
        days=1,
        seed=0,
    )
    lines = (tmp_path / "made" / "train.txt").read_bytes().splitlines(keepends=True)
    log = tmp_path / "log"
    log.mkdir()
    (log / "a.txt").write_bytes(b"".join([*lines[:300], b"x\ty\n", b"\n", *lines[300:500]]))
    # no end of the last line
    (log / "b.txt.gz").write_bytes(gzip.compress(b"".join(lines[500:]).rstrip(b"\n")))
    return TextLog(log, lines)


def lines_of(out: Path) -> dict[str, list[bytes]]:
    return {
        name: [line for file in sorted(out.glob(f"{name}-*.txt")) for line in file.open("rb")]
        for name in ("train", "validation", "test")
    }


def test_split_keeps_line_bytes_and_skips_invalid_lines(text_log: TextLog, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = split(str(text_log.path), out, "rows", **ALLOWING, block_bytes=1 << 16)
    assert (found["rows"], found["bad_rows"]) == (800, 2)
    parts = lines_of(out)
    place = {line: number for number, line in enumerate(text_log.lines)}
    for part_rows in parts.values():
        assert [place[line] for line in part_rows] == sorted(place[line] for line in part_rows)
    assert sorted(itertools.chain(*parts.values())) == sorted(text_log.lines)
    # Bytes do not depend on blocks.
    split(str(text_log.path), tmp_path / "again", "rows", **ALLOWING, block_bytes=1 << 17)
    assert lines_of(tmp_path / "again") == parts


def test_split_rejects_too_many_invalid_lines(text_log: TextLog, tmp_path: Path) -> None:
    rejects(
        "more than max_bad_fraction",
        split,
        str(text_log.path),
        tmp_path / "strict",
        "rows",
        schema=CRITEO,
    )


def test_split_of_text_keeps_groups_together(text_log: TextLog, tmp_path: Path) -> None:
    split(str(text_log.path), tmp_path / "out", "group", group="cat_5", **ALLOWING)
    column = CRITEO.columns.index("cat_5")
    parts = lines_of(tmp_path / "out")
    train, test = (
        {line.split(b"\t")[column] for line in parts[name]} for name in ("train", "test")
    )
    assert train
    assert not train & test


def test_split_writes_csv_as_parquet_text(tmp_path: Path) -> None:
    table = table_of(400)
    (tmp_path / "log").mkdir()
    arrow_csv.write_csv(table, tmp_path / "log" / "day.csv")
    with (tmp_path / "log" / "day.csv").open("a") as file:
        file.write("row 400,7,,,,\n")  # no label
    found = split(str(tmp_path / "log"), tmp_path / "out", "time", max_bad_fraction=0.01)
    assert (found["rows"], found["bad_rows"]) == (400, 1)
    parts = split_parts(tmp_path / "out")
    assert parts["train"].column_names == table.column_names
    assert sorted(number for part in parts.values() for number in numbers(part)) == list(range(400))
    row = parts["test"].slice(0, 1).to_pylist()[0]
    assert row["price"] == str(table["price"][int(row["note"].removeprefix("row "))])
    assert parts["test"].schema.field("price").type == pa.large_string()


def write_quoted_csv(folder: Path) -> None:
    """Write 2,000 rows with line breaks inside quotes. Rows 900 and 1500 have invalid labels."""
    lines = ["note,click,at,price,user,item"]
    for number in range(2000):
        note = '"' + f"a line\n{number % 2},1,2,3,4,5\n" * (number % 7) + f'row {number}"'
        label = 7 if number in (900, 1500) else number % 2
        lines.append(f"{note},{label},{number},0.5,u{number % 40},{number % 9}")
    folder.mkdir()
    (folder / "day.csv").write_text("\r\n".join(lines) + "\r\n")


def test_split_cuts_large_csv_between_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted fields contain line breaks, where the file is often cut first. Rows, parts and faults
    match those of one task.
    """
    write_quoted_csv(tmp_path / "log")
    examined = []
    examine = split_tasks.examine
    monkeypatch.setattr(
        split_tasks,
        "examine",
        lambda task, *, job: examined.append(task) or examine(task, job=job),
    )
    monkeypatch.setattr(splitting, "engine", one_thread)
    notes = list[str]()
    monkeypatch.setattr(CONSOLE, "note", notes.append)
    found: dict[str, Any] = {}
    for name, size in (("cut", 1 << 12), ("whole", 1 << 20)):
        monkeypatch.setattr(table_ranges, "_MIN_TASK_BYTES", size)
        for by in ("rows", "last-out"):
            examined.clear()
            split(str(tmp_path / "log"), tmp_path / f"{name}-{by}", by, max_bad_fraction=0.01)
            parts = {
                part: table["note"].to_pylist()
                for part, table in split_parts(tmp_path / f"{name}-{by}").items()
            }
            assert found.setdefault(by, parts) == parts
            again = len(examined) - len({task.number for task in examined})
            assert (len(examined) > 20, again > 0) == (name == "cut", name == "cut")
    assert sum(map(len, found["rows"].values())) == 1998
    notes = [note for note in notes if "left out" in note]
    assert len(notes) == 4
    assert all("at row 900: label is not 0 or 1" in note for note in notes)
    assert not list((tmp_path / "cut-rows").glob("_job*"))


def test_split_opens_store_files_in_parallel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = written(table_of(160), tmp_path / "log", files=8, group_rows=10)
    files = [storage.File(file.path, 1000, 0) for file in storage.list_files(log)]
    barrier = threading.Barrier(8, timeout=30)
    opened = table_ranges.open_parquet

    @contextmanager
    def together(path: str) -> Iterator[pq.ParquetFile]:
        barrier.wait()
        with opened(path) as file:
            yield file

    monkeypatch.setattr("rayrec.storage.range_reader.is_url", lambda _: True)
    monkeypatch.setattr(table_ranges, "open_parquet", together)
    assert (
        parse_reply(table_ranges.cut_files(files, task_bytes=1, schema=Schema(sparse=("user",))))
        == [[[0, 1], [1, 2]]] * 8
    )


def test_resumed_split_reads_no_footer_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = written(table_of(), tmp_path / "log")
    groups = list[int]()
    write = split_tasks.write
    cut = table_ranges.cut_files
    monkeypatch.setattr(table_ranges, "_CUT_FILES", 2)
    monkeypatch.setattr(
        table_ranges,
        "cut_files",
        lambda files, **by: groups.append(len(files)) or cut(files, **by),
    )
    monkeypatch.setattr(split_tasks, "write", raising(OSError("killed")))
    fails_with(OSError, "killed", split, path, tmp_path / "out", "rows")
    assert groups == [2, 1]
    monkeypatch.setattr(split_tasks, "write", write)
    split(path, tmp_path / "out", "rows")
    assert groups == [2, 1]


def test_interrupted_split_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(table_of(), tmp_path / "log")
    whole = split(path, tmp_path / "whole", "last-out")
    write = split_tasks.write
    calls = []

    def failing(task: Any, *, job: Any) -> pa.Table:
        calls.append(task.number)
        if len(calls) == 3:
            raise OSError("killed")
        return write(task, job=job)

    monkeypatch.setattr(split_tasks, "write", failing)
    monkeypatch.setattr(splitting, "engine", one_thread)
    fails_with(OSError, "killed", split, path, tmp_path / "out", "last-out")
    assert not (tmp_path / "out").exists()
    rejects(
        r"incomplete output of a call with a different .*by",
        split,
        path,
        tmp_path / "out",
        "rows",
    )
    assert {**split(path, tmp_path / "out", "last-out"), "out": whole["out"]} == whole
    assert len(calls) < 3 + len(set(calls))
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"by": "rows", "validation": 0.0},
            "validation: must be above 0 .*, got 0.0",
            id="by-rows-validation-0.0",
        ),
        pytest.param(
            {"by": "rows", "group": "user"},
            "split by rows: must not be used with group",
            id="by-rows-group-user",
        ),
        pytest.param(
            {"by": "last-out", "validation": 0.2},
            "split by last-out: must not be used with validation",
            id="by-last-out-validation-0.2",
        ),
        pytest.param(
            {"by": "time", "test_from": "2026-01-01"},
            "test_from must be used with validation_from",
            id="by-time-test_from-2026-01-01",
        ),
        pytest.param(
            {"by": "time", "validation_from": "soon"},
            "validation_from: must be an ISO 8601 date or time, .*, got soon",
            id="by-time-validation_from-soon",
        ),
        pytest.param(
            {"by": "time", "validation_from": "2026-02-01", "test_from": "2026-01-01"},
            "test_from must be after validation_from",
            id="by-time-validation_from-2026-02",
        ),
    ],
)
def test_split_rejects_conflicting_options(options: dict[str, Any], message: str) -> None:
    rejects(message, splitting.RowSplit, **options)


def test_split_rejects_unsuitable_logs(tmp_path: Path) -> None:
    path = written(table_of(60), tmp_path / "log")
    plain = SCHEMA.replace(group=None, timestamp=None)
    for by, options, message in (
        ("group", {}, "split by group: column not specified"),
        ("time", {}, "split by time: column of the time not specified"),
        ("time", {"timestamp": "when"}, "no column named when"),
        ("rows", {"test": 0.00001}, "leaves no rows for test"),
        ("rows", {"preset": "nvt"}, "--preset: not an option of a split"),
    ):
        rejects(message, split, path, tmp_path / "out", by, schema=plain, **options)
        assert not (tmp_path / "out").exists()
    (tmp_path / "text").write_text("")
    rejects(
        "log must have a time column",
        split,
        str(tmp_path / "text"),
        tmp_path / "out",
        "time",
        timestamp="at",
        schema=CRITEO,
    )
    (tmp_path / "out").mkdir()
    rejects("exists already", split, path, tmp_path / "out", "rows", schema=plain)


@pytest.mark.parametrize("field", ["dense", "sparse"])
def test_split_time_may_be_model_input(field: str, tmp_path: Path) -> None:
    times = list(range(1000, 1060))
    pq.write_table(
        pa.table({"click": [0, 1] * 30, "at": times, "user": ["a", "b"] * 30}),
        tmp_path / "log.parquet",
    )
    schema = Schema(label="click", sparse=("user",)).replace(
        **{field: ("at", "user") if field == "sparse" else ("at",)}
    )
    split(str(tmp_path / "log.parquet"), tmp_path / "out", "time", timestamp="at", schema=schema)
    parts = [
        pq.read_table(sorted((tmp_path / "out").glob(f"{name}-*"))[0])
        for name in ("train", "validation", "test")
    ]
    assert [part.column("at").to_pylist() for part in parts] == [
        times[:48],
        times[48:54],
        times[54:],
    ]
