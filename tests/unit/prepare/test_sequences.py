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


def test_ages_are_seconds_before_newest_item(tmp_path: Path) -> None:
    times = [START, START + 5, START + 65, START + 70, START + 100]
    events = pd.DataFrame({"user": "u", "item": [*"abcde"], "time": times, "action": "x"})
    out = tmp_path / "out"
    built(written(events, tmp_path / "log"), out)
    ages = [rows_of(out, part)["u"]["age"] for part in ("train", "test", "histories")]
    assert ages == [[65, 60, 0], [70, 65, 5, 0], [100, 95, 35, 30, 0]]


def test_split_by_time_evaluates_users_without_history(tmp_path: Path) -> None:
    events = events_of()
    late = events.tail(1).assign(user=999, time=events["time"].max())
    schema = SCHEMA.replace(split=SequenceSplit(kind="time", validation="40s", test="40s"))
    out = tmp_path / "out"
    built(written(pd.concat([events, late]), tmp_path / "log"), out, schema=schema)
    row = rows_of(out, "test")[999]
    assert (row["item"], row["seen"], row["age"]) == ([], [], [])
    assert row["target"] == late["item"].tolist()


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
def test_events_sort_by_user_and_time() -> None:
    keys = np.array([9, 2, 9, 2, 1 << 63], np.uint64)
    times = np.array([1 << 40, -5, 7, -5, 0])
    assert sort_events(keys, times).tolist() == [1, 3, 2, 0, 4]
    assert sort_events(keys, None).tolist() == [1, 3, 0, 2, 4]


def test_many_users_sort_as_by_numpy() -> None:
    chance = np.random.default_rng(0)
    keys = chance.integers(0, 1 << 63, 80_000).astype(np.uint64)
    keys[40_000:] = keys[:40_000]
    times = chance.integers(-(1 << 50), 1 << 50, 80_000)
    np.testing.assert_array_equal(sort_events(keys, times), np.lexsort((times, keys)))


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
