"""`rayrec sequences`: the lists of pandas, for events in any order and form, any engine, and after
a kill in any phase.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import fails_with, raising, rejects
from builders.runs import QUIET, files_in

import rayrec
from rayrec.data import table_ranges
from rayrec.data.engine import ThreadEngine
from rayrec.data.sequences import build as building
from rayrec.data.sequences import lists, spills
from rayrec.data.sequences.lists import divide_by_items, divide_by_time, group_ends, sort_events
from rayrec.data.sequences.spills import user_tokens
from rayrec.hashing import mix64
from rayrec.schema import Schema, SequenceColumns, SequenceSplit

COLUMNS = SequenceColumns(user="user", item="item", time="time", with_columns=("action",))
SCHEMA = Schema(label=None, sequence=COLUMNS)
PARTS = {"train": "train", "validation": "valid", "test": "test"}
START = 1_700_000_000


@pytest.fixture(autouse=True)
def small_tasks(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tasks, chunks and partitions of few rows."""
    monkeypatch.setattr(table_ranges, "_MIN_TASK_BYTES", 1 << 13)
    monkeypatch.setattr(table_ranges, "BATCH_ROWS", 64)
    monkeypatch.setattr(building, "_PARTITION_BYTES", 1 << 13)
    monkeypatch.setattr(spills, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(lists, "GROUP_BYTES", 1 << 12)


def events_of(rows: int = 2000, *, users: int = 150) -> pd.DataFrame:
    """Return events of which most have the time of others."""
    chance = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "note": [f"event {number}" for number in range(rows)],
            "user": chance.zipf(1.4, rows) % users,
            "item": chance.integers(0, 90, rows),
            "time": START + chance.integers(0, rows // 6, rows),
            "action": chance.choice(["view", "buy"], rows),
        }
    )


def written(events: pd.DataFrame, folder: Path, *, files: int = 3) -> str:
    folder.mkdir()
    size = -(-len(events) // files)
    for number in range(files):
        part = events.iloc[number * size : (number + 1) * size]
        part.to_parquet(folder / f"day_{number}.parquet", index=False, row_group_size=200)
    return str(folder)


def built(path: str, out: Path, *, schema: Schema = SCHEMA, **options: Any) -> dict[str, Any]:
    return rayrec.sequences(path, out=str(out), schema=schema, console=QUIET, **options)


def rows_of(out: Path, part: str) -> dict[Any, dict[str, Any]]:
    """Return the rows of a part by user."""
    kind = "histories/part" if part == "histories" else f"log/{PARTS[part]}"
    files = sorted(out.glob(f"{kind}-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    by_user = {row["user"]: row for row in rows}
    assert len(by_user) == len(rows)
    return by_user


def expected_rows(events: pd.DataFrame, split: SequenceSplit) -> dict[str, dict[Any, Any]]:
    """Return the history and the held-out items of each user by part, as pandas sorts them."""
    ordered = events.sort_values(["user", "time"], kind="stable")
    latest = events["time"].max()
    validation, test = split.sizes
    parts: dict[str, dict[Any, Any]] = {name: {} for name in (*PARTS, "histories")}
    for user, own in ordered.groupby("user"):
        items = own["item"].tolist()
        if split.kind == "time":
            first_test = latest - test // 10**6
            first = int((own["time"] < first_test - validation // 10**6).sum())
            second = int((own["time"] < first_test).sum())
        else:
            is_enough = len(items) >= validation + test + 2
            second = len(items) - test * is_enough
            first = second - validation * is_enough
        parts["histories"][user] = (items, None)
        if first >= 2:
            parts["train"][user] = (items[:first], None)
        if second > first:
            parts["validation"][user] = (items[:first], items[first:second])
        if len(items) > second:
            parts["test"][user] = (items[:second], items[second:])
    return parts


SPLITS = [
    pytest.param(SequenceSplit(), id="last items"),
    pytest.param(SequenceSplit(validation=2, test=3), id="several"),
    pytest.param(SequenceSplit(validation=1, test=0), id="no test"),
    pytest.param(SequenceSplit(kind="time", validation="40s", test="1m"), id="time"),
]


@pytest.mark.parametrize("split", SPLITS)
def test_lists_match_pandas(split: SequenceSplit, tmp_path: Path) -> None:
    events = events_of()
    out = tmp_path / "out"
    schema = SCHEMA.replace(split=split)
    result = built(written(events, tmp_path / "log"), out, schema=schema)
    expected = expected_rows(events, split)
    for part, by_user in expected.items():
        check_rows(rows_of(out, part), by_user, is_cut=part in ("validation", "test"))
    assert result["rows"] == {part: len(expected[part]) for part in PARTS if expected[part]}
    assert result["users"] == events["user"].nunique()
    assert result["items"] == events["item"].nunique()
    assert result["events"] == len(events)


def check_rows(rows: dict[Any, dict[str, Any]], expected: dict[Any, Any], *, is_cut: bool) -> None:
    """Check the rows of a part. Held-out ones have the newest items only."""
    assert rows.keys() == expected.keys()
    for user, (history, target) in expected.items():
        row = rows[user]
        items = history[-51:] if is_cut else history
        assert row["item"] == items
        assert row.get("target") == target
        assert row.get("seen") == (None if target is None else history)
        assert len(row["action"]) == len(row["age"]) == len(items)


@pytest.mark.parametrize("split", SPLITS)
def test_cold_targets_match_pandas(split: SequenceSplit, tmp_path: Path) -> None:
    events = events_of().assign(item=np.arange(2000) % 1100)
    path = written(events, tmp_path / "log")
    result = built(path, tmp_path / "out", schema=SCHEMA.replace(split=split))
    expected = expected_rows(events, split)
    trained = {item for items, _ in expected["train"].values() for item in items[-51:]}
    assert {*result["cold_targets"]} == {"validation", "test"} & {*result["rows"]}
    for part, cold in result["cold_targets"].items():
        items = [item for _, target in expected[part].values() for item in target]
        assert result["targets"][part] == len(items)
        assert cold == sum(item not in trained for item in items) > 0


def test_equal_times_keep_order_of_files_and_rows(tmp_path: Path) -> None:
    events = events_of()
    events["time"] = START
    out = tmp_path / "out"
    built(written(events, tmp_path / "log"), out)
    for user, row in rows_of(out, "histories").items():
        own = events[events["user"] == user]
        assert (row["item"], row["action"]) == (own["item"].tolist(), own["action"].tolist())


def test_events_without_time_are_in_order_of_files(tmp_path: Path) -> None:
    events = events_of()
    schema = Schema(label=None, sequence=SequenceColumns(user="user", item="item"))
    out = tmp_path / "out"
    built(written(events, tmp_path / "log"), out, schema=schema)
    rows = rows_of(out, "test")
    assert {*rows[1]} == {"user", "item", "target", "seen"}
    own = events[events["user"] == 1]["item"].tolist()
    assert rows[1]["item"] + rows[1]["target"] == own[-52:]


def test_ages_count_from_time_of_row(tmp_path: Path) -> None:
    """It is the newest item's in training, the held-out item's, or the latest event's."""
    times = [START, START + 5, START + 65, START + 70, START + 100, START + 160.25]
    users = [*"uuuuu", "v"]
    events = pd.DataFrame({"user": users, "item": [*"abcdea"], "time": times, "action": "x"})
    out = tmp_path / "out"
    built(written(events, tmp_path / "log"), out)
    parts = ("train", "validation", "test", "histories")
    ages = {part: rows_of(out, part)["u"]["age"] for part in parts}
    assert ages == {
        "train": [65, 60, 0],
        "validation": [70, 65, 5],
        "test": [100, 95, 35, 30],
        "histories": [160.25, 155.25, 95.25, 90.25, 60.25],
    }
    latest = pd.Timestamp(START + 160.25, unit="s", tz="UTC")
    assert {row["time"] for row in rows_of(out, "histories").values()} == {latest}
    assert "time" not in rows_of(out, "train")["u"]


def test_split_by_time_evaluates_users_without_history(tmp_path: Path) -> None:
    events = events_of()
    late = events.tail(1).assign(user=999, time=events["time"].max())
    schema = SCHEMA.replace(split=SequenceSplit(kind="time", validation="40s", test="40s"))
    out = tmp_path / "out"
    built(written(pd.concat([events, late]), tmp_path / "log"), out, schema=schema)
    row = rows_of(out, "test")[999]
    assert (row["item"], row["seen"], row["age"]) == ([], [], [])
    assert row["target"] == late["item"].tolist()


PAIRS = SequenceColumns(user="user", item="item")


def pairs_of(rows: int, seed: int) -> pd.DataFrame:
    """Return distinct pairs of users and items in random order."""
    chance = np.random.default_rng(seed)
    pairs = chance.permutation(40 * 60)[:rows]
    return pd.DataFrame({"user": pairs % 40, "item": pairs // 40})


def items_of(pairs: pd.DataFrame, user: int) -> list[int]:
    return pairs.loc[pairs["user"] == user, "item"].tolist()


def test_split_by_files_matches_files(tmp_path: Path) -> None:
    parts = {name: pairs_of(600, seed) for seed, name in enumerate(("Train", "valid", "test"))}
    log = tmp_path / "log"
    log.mkdir()
    for name, pairs in parts.items():
        pairs.to_parquet(log / f"{name}_1.parquet")
    schema = Schema(
        label=None,
        sequence=PAIRS.replace(max_length=5, user_input=True),
        split=SequenceSplit(kind="files", validation=0),
    )
    out = tmp_path / "out"
    result = built(str(log), out, schema=schema)
    assert result["targets"] == {"validation": 600, "test": 600}
    train, valid, test = (rows_of(out, part) for part in PARTS)
    whole = rows_of(out, "histories")
    for user in range(40):
        own = [items_of(pairs, user) for pairs in parts.values()]
        assert train[user]["item"] == own[0]
        assert (valid[user]["seen"], valid[user]["target"]) == (own[0], own[1])
        assert valid[user]["item"] == own[0][-6:]
        assert (test[user]["seen"], test[user]["target"]) == (own[0] + own[1], own[2])
        assert whole[user]["item"] == own[0] + own[1] + own[2]


def test_validation_of_files_depends_on_user_and_item(tmp_path: Path) -> None:
    split = SequenceSplit(kind="files", validation="12.5%")
    schema = Schema(label=None, sequence=PAIRS, split=split)
    pairs = pairs_of(2000, 5)
    found = []
    for number, order in enumerate((pairs, pairs.iloc[::-1])):
        log = tmp_path / f"log_{number}"
        log.mkdir()
        cut = 900 * (number + 1)
        order[:cut].to_parquet(log / "a.parquet")
        order[cut:].to_parquet(log / "train.parquet")
        pairs_of(80, 7).to_parquet(log / "test.parquet")
        out = tmp_path / f"out_{number}"
        built(str(log), out, schema=schema)
        train, valid = (rows_of(out, part) for part in ("train", "validation"))
        drawn = {(user, item) for user, row in valid.items() for item in row["target"]}
        kept = {(user, item) for user, row in train.items() for item in row["item"]}
        assert not drawn & kept
        assert drawn | kept == {*zip(pairs["user"], pairs["item"], strict=True)}
        found.append(drawn)
    assert found[0] == found[1]
    assert 200 < len(found[0]) < 300


def test_split_by_files_without_test_file_is_rejected(tmp_path: Path) -> None:
    schema = Schema(
        label=None,
        sequence=PAIRS,
        split=SequenceSplit(kind="files", validation="20%"),
    )
    path = written(events_of(), tmp_path / "log")
    rejects(
        "no user has a list for test, .* give files whose names begin with train, valid and test",
        built,
        path,
        tmp_path / "out",
        schema=schema,
    )
    without = schema.replace(split=SequenceSplit(kind="files", validation="20%", test=0))
    assert {*built(path, tmp_path / "out", schema=without)["rows"]} == {"train", "validation"}


TIMES = {
    "seconds": lambda times: times.astype(int),
    "decimals": lambda times: times.astype(float),
    "ISO 8601": lambda times: pd.to_datetime(times, unit="s").dt.strftime("%Y-%m-%dT%H:%M:%S"),
    "dates and times": lambda times: pd.to_datetime(times, unit="s"),
    "text": lambda times: pd.to_datetime(times, unit="s").dt.strftime("%d.%m.%Y %H:%M:%S"),
}


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
@pytest.mark.parametrize("time", TIMES)
def test_times_of_any_form_sort_alike(time: str, form: str, tmp_path: Path) -> None:
    events = events_of(600)
    log = events.assign(time=TIMES[time](events["time"]))
    folder = tmp_path / "log"
    folder.mkdir()
    if form == "parquet":
        log.to_parquet(folder / "log.parquet", index=False)
    elif form == "csv":
        log.to_csv(folder / "log.csv", index=False)
    else:
        log.to_json(folder / "log.jsonl", orient="records", lines=True, date_format="iso")
    built(str(folder), tmp_path / "out")
    found = {
        int(user): [*map(int, row["item"])]
        for user, row in rows_of(tmp_path / "out", "histories").items()
    }
    expected = expected_rows(events, SequenceSplit())["histories"]
    assert found == {user: items for user, (items, _) in expected.items()}


def test_text_and_integers_keep_their_types(tmp_path: Path) -> None:
    events = events_of().assign(item=lambda rows: "i" + rows["item"].astype(str))
    out = tmp_path / "out"
    built(written(events, tmp_path / "log"), out)
    schema = pq.read_schema(next(out.glob("log/train-*")))
    assert schema.field("user").type == pa.int64()
    assert schema.field("item").type.value_type == pa.large_string()


def test_integers_in_one_file_and_text_in_another_are_one_user(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    events = pd.DataFrame({"user": 5, "item": [1, 2, 3], "time": [1, 2, 3], "action": "x"})
    written(events, folder, files=1)
    events.assign(user="5", item=["a", "2", "b"], time=[4, 5, 6]).to_parquet(
        folder / "text.parquet"
    )
    built(str(folder), tmp_path / "out")
    rows = rows_of(tmp_path / "out", "histories")
    assert rows["5"]["item"] == ["1", "2", "3", "a", "2", "b"]


def text_events(rows: int = 2000) -> pd.DataFrame:
    """Return events whose users and items are repeated texts, some missing or marked as such."""
    events = events_of(rows).astype({"user": str, "item": object})
    items = "film " + events["item"].astype(str)
    return events.assign(user="u" + events["user"], item=items.mask(events.index % 500 == 7))


def test_repeated_texts_match_pandas(tmp_path: Path) -> None:
    """Parquet has them as dictionaries, which are read as such."""
    events = text_events()
    path = str(tmp_path / "log.parquet")
    events.to_parquet(path)
    schema = SCHEMA.replace(missing=("film 3",))
    out = tmp_path / "out"
    result = built(path, out, schema=schema, max_bad_fraction=0.1)
    valid = events[events["item"].notna() & (events["item"] != "film 3")]
    assert result["bad_rows"] == len(events) - len(valid) > 20
    expected = expected_rows(valid, SequenceSplit())["histories"]
    check_rows(rows_of(out, "histories"), expected, is_cut=False)


def test_only_repeated_texts_are_dictionaries(tmp_path: Path) -> None:
    path = str(tmp_path / "log.parquet")
    text_events().to_parquet(path)
    columns = ("note", "user", "item", "time")
    tables = table_ranges.RangeTables(
        table_ranges.TableRange(0, path, 0, 1),
        Schema(label=None, sparse=columns[:3], timestamp="time"),
        columns=columns,
        dictionaries=True,
    )
    for table in tables:
        coded = [name for name in columns if pa.types.is_dictionary(table.schema.field(name).type)]
        assert coded == ["user", "item"]


def test_small_integers_and_ages_are_int32(tmp_path: Path) -> None:
    """They are in all files if they are in the log."""
    events = events_of()
    path = written(events, tmp_path / "log")
    built(path, tmp_path / "small")
    events.assign(item=events["item"] + (events.index == 5) * 2**40).to_parquet(
        f"{path}/day_0.parquet"
    )
    built(path, tmp_path / "wide")
    events.assign(time=events["time"] + (events.index == 5) * 0.5).to_parquet(
        f"{path}/day_0.parquet"
    )
    built(path, tmp_path / "fraction")
    types = {}
    for out in ("small", "wide", "fraction"):
        files = (tmp_path / out).glob("*/*.parquet")
        types[out] = {
            tuple(str(pq.read_schema(file).field(name).type.value_type) for name in ("item", "age"))
            for file in files
        }
    assert types == {
        "small": {("int32", "int32")},
        "wide": {("int64", "int32")},
        "fraction": {("int32", "double")},
    }


@pytest.mark.parametrize(
    ("items", "ages", "size_bytes"),
    [
        pytest.param(pa.int64(), pa.float64(), 8 * 8, id="wide"),
        pytest.param(pa.int32(), pa.int32(), 8 * 8, id="small"),
        pytest.param(pa.large_string(), pa.int32(), 8 * 8 + 8 + 1, id="texts"),
    ],
)
def test_row_groups_end_as_of_first_version(
    items: pa.DataType,
    ages: pa.DataType,
    size_bytes: int,
) -> None:
    """The order of training rows depends on them."""
    offsets = pa.array([0, 3, 8], pa.int32())
    lists_of = {
        name: pa.ListArray.from_arrays(offsets, pa.array(range(8), pa.int64()).cast(kind))
        for name, kind in (("item", items), ("age", ages))
    }
    table = pa.table({"user": [1, 2], **lists_of})
    assert lists.shuffled_bytes(table) == 2 * (8 + 4 + 4) + size_bytes + 8 * 4


def group_rows(out: Path) -> dict[str, list[int]]:
    """Return the rows of each row group by file."""
    rows = {}
    for path in out.glob("*/*.parquet"):
        metadata = pq.read_metadata(path)
        groups = range(metadata.num_row_groups)
        rows[path.name] = [metadata.row_group(number).num_rows for number in groups]
    return rows


def test_integers_of_csv_are_integers_in_lists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Users stay text. Row groups end as those of text."""
    monkeypatch.setattr(building, "_PARTITION_BYTES", 1 << 30)
    events = events_of().assign(item=lambda rows: rows["item"] ** 3 - 9)
    texts = events.astype({"user": str, "item": str})
    for name in ("csv", "mixed"):
        (tmp_path / name).mkdir()
        events.to_csv(tmp_path / name / "log.csv", index=False)
    texts.tail(1).assign(item="a").to_csv(tmp_path / "mixed" / "more.csv", index=False)
    logs = {
        "csv": str(tmp_path / "csv"),
        "text": written(texts, tmp_path / "text"),
        "mixed": str(tmp_path / "mixed"),
    }
    rows = {}
    types = {}
    for name, path in logs.items():
        out = tmp_path / f"{name}_lists"
        built(path, out)
        rows[name] = rows_of(out, "histories")
        types[name] = pq.read_schema(out / "log" / "train-00000.parquet").field("item").type
    assert group_rows(tmp_path / "csv_lists") == group_rows(tmp_path / "text_lists")
    assert [kind.value_type for kind in types.values()] == [
        pa.int32(),
        pa.large_string(),
        pa.large_string(),
    ]
    for user, row in rows["csv"].items():
        items = [*map(str, row["item"])]
        assert items == rows["text"][user]["item"]
        assert items == [item for item in rows["mixed"][user]["item"] if item != "a"]


def test_schema_of_integers_makes_integers_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    rows = [f"{user:02},{item}.0,{START + item},x" for user in range(9) for item in range(5)]
    (folder / "log.csv").write_text("\n".join(["user,item,time,action", *rows]))
    out = tmp_path / "out"
    built(str(folder), out, schema=SCHEMA.replace(integers=("user", "item")))
    assert rows_of(out, "test")[7]["target"] == [4]


def test_row_groups_are_small_and_ordered_by_hash(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "GROUP_BYTES", 1 << 9)
    out = tmp_path / "out"
    built(written(events_of(), tmp_path / "log"), out)
    files = sorted(out.glob("log/train-*"))
    assert len(files) > 4
    users = [user for file in files for user in pq.read_table(file)["user"].to_pylist()]
    assert users != sorted(users)
    assert max(pq.ParquetFile(file).num_row_groups for file in files) > 1


def test_engines_write_equal_bytes(
    tmp_path: Path,
    local_ray: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "GROUP_BYTES", 1 << 20)  # As in Ray's processes
    path = written(events_of(), tmp_path / "log")
    for engine in ("threads", "ray"):
        built(path, tmp_path / engine, engine=engine)
    assert files_in(tmp_path / "ray") == files_in(tmp_path / "threads")


def one_thread(*_: Any, **__: Any) -> nullcontext[ThreadEngine]:
    return nullcontext(ThreadEngine(1))


@pytest.mark.parametrize("phase", ["spill_events", "write_lists", "count_items"])
def test_killed_build_resumes_with_same_bytes(
    phase: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = written(events_of(), tmp_path / "log")
    built(path, tmp_path / "whole")
    task = getattr(building, phase)
    done = []

    def failing(item: Any, *, job: Any) -> pa.Table:
        if len(done) == 2:
            raise OSError("killed")
        done.append(item.number)
        return task(item, job=job)

    monkeypatch.setattr(building, phase, failing)
    monkeypatch.setattr("rayrec.prepare.sequences.engine", one_thread)
    fails_with(OSError, "killed", built, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    calls = []

    def counting(item: Any, *, job: Any) -> pa.Table:
        calls.append(item.number)
        return task(item, job=job)

    monkeypatch.setattr(building, phase, counting)
    built(path, tmp_path / "out")
    assert not {*done} & {*calls}
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_disk_errors_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(events_of(), tmp_path / "log")
    monkeypatch.setattr(lists, "_write_groups", raising(OSError(28, "No space left on device")))
    rejects("make room there and run the same command again", built, path, tmp_path / "out")


def test_invalid_events_are_counted_and_left_out(tmp_path: Path) -> None:
    events = events_of()
    whole = expected_rows(events.iloc[3:], SequenceSplit())["histories"]
    events["user"] = events["user"].astype("Int64")
    events["time"] = events["time"].astype(str)
    events.loc[0, "user"] = pd.NA
    events.loc[1, "time"] = "yesterday"
    events.loc[2, "action"] = None
    path = written(events, tmp_path / "log")
    rejects(
        "0.15% of its lines are invalid.*2 x a value is missing, 1 x not a time.*day_0.parquet at "
        "row 0: a value is missing in column user",
        built,
        path,
        tmp_path / "few",
    )
    assert built(path, tmp_path / "out", max_bad_fraction=0.01)["bad_rows"] == 3
    rows = rows_of(tmp_path / "out", "histories")
    assert {user: row["item"] for user, row in rows.items()} == {
        user: items for user, (items, _) in whole.items()
    }


def test_quoted_line_breaks_at_cuts_are_read_once(tmp_path: Path) -> None:
    events = events_of().assign(action=[f'a "b"\n{n % 3},c,d\n{"x" * 40}' for n in range(2000)])
    folder = tmp_path / "log"
    folder.mkdir()
    events.to_csv(folder / "log.csv", index=False)
    result = built(str(folder), tmp_path / "out")
    assert (result["events"], result["bad_rows"]) == (2000, 0)
    first = rows_of(tmp_path / "out", "histories")["1"]["action"][0]
    assert first in {*events["action"]}


def test_too_few_events_are_rejected(tmp_path: Path) -> None:
    events = pd.DataFrame({"user": range(30), "item": 1, "time": START, "action": "x"})
    path = written(events, tmp_path / "log")
    rejects(
        "no user has a list for train and validation and test, with split last_items.*min_length "
        "2. Lower min_length, or hold out fewer items",
        built,
        path,
        tmp_path / "out",
    )
    assert [*tmp_path.glob("out*")] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        pytest.param(
            Schema(label=None, sparse=("user",)),
            "must have sequence.*Pass --schema",
            id="pairs",
        ),
        pytest.param(
            SCHEMA.replace(sequence={"item": "film"}),
            "film.*day_0.parquet|day_0.*film",
            id="column",
        ),
    ],
)
def test_unusable_schemas_are_rejected(schema: Schema, message: str, tmp_path: Path) -> None:
    path = written(events_of(), tmp_path / "log")
    rejects(message, built, path, tmp_path / "out", schema=schema)


def test_options_of_other_commands_are_rejected(tmp_path: Path) -> None:
    path = written(events_of(), tmp_path / "log")
    rejects("--min-count: not an option", built, path, tmp_path / "out", min_count=3)


def test_manifest_describes_lists(tmp_path: Path) -> None:
    built(written(events_of(), tmp_path / "log"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "sequences.json").read_text())
    assert manifest["sequence"] == COLUMNS.to_dict()
    assert manifest["split"] == {"kind": "last_items", "validation": 1, "test": 1}
    assert manifest["events"] == 2000


# -- pure parts
def rows_with(keys: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return events whose third value is their number."""
    return np.stack([keys.view(np.int64), times, np.arange(len(keys))], axis=1)


def test_events_sort_by_user_and_time() -> None:
    keys = np.array([9, 2, 9, 2, 1 << 63], np.uint64)
    times = np.array([1 << 40, -5, 7, -5, 0])
    assert sort_events(rows_with(keys, times), keys=2)[2].tolist() == [1, 3, 2, 0, 4]
    assert sort_events(rows_with(keys, times), keys=1)[2].tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("users", [7, 30_000])
def test_events_of_partition_sort_as_by_numpy(users: int) -> None:
    chance = np.random.default_rng(0)
    hashes = chance.integers(3 << 61, 4 << 61, users, np.uint64)  # The last of four
    keys = hashes[chance.integers(0, users, 80_000)]
    times = chance.integers(-(1 << 50), 1 << 50, 80_000)
    times[: len(times) // 2] = 5
    rows = rows_with(keys, times)
    order = np.lexsort((times, keys))
    found = sort_events(rows.copy(), keys=2, partition=3, partitions=4)
    np.testing.assert_array_equal(found, rows[order].T)


def test_user_tokens_invert_hashes() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 64, 1000, np.uint64)
    np.testing.assert_array_equal(user_tokens(mix64(tokens)), tokens)


def test_short_users_keep_last_items_for_training() -> None:
    ranges = divide_by_items(np.array([0, 3]), np.array([3, 8]), sizes=(2, 1), min_length=2)
    assert ranges.valid.tolist() == [3, 5]
    assert ranges.test.tolist() == [3, 7]


def test_split_by_time_starts_at_cut() -> None:
    times = np.array([1, 5, 9, 2, 5])
    ranges = divide_by_time(np.array([0, 3]), np.array([3, 5]), times, (5, 9))
    assert (ranges.valid.tolist(), ranges.test.tolist()) == ([1, 4], [2, 5])


def test_row_groups_end_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "GROUP_BYTES", 100)
    assert group_ends(np.array([50, 1, 1, 1, 1, 46]), 200) == [1, 6]
    assert group_ends(np.array([3, 3]), 10) == [2]
