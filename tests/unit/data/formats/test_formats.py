"""Formats with names of columns, or indices, in each row."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import rejects
from builders.logs import open_index
from hypothesis import given
from hypothesis import strategies as st

from rayrec import storage
from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.impressions import Impressions
from rayrec.data.formats.jsonl import JsonLines
from rayrec.data.formats.libffm import LibFfm
from rayrec.data.formats.libsvm import LibSvm
from rayrec.data.formats.npz import Npz
from rayrec.data.formats.registry import FORMATS, find_format
from rayrec.data.formats.row_faults import FAULT, MALFORMED
from rayrec.data.formats.slot_value import SlotValue
from rayrec.data.formats.text_stream import line_blocks
from rayrec.data.formats.user_items import UserItems
from rayrec.data.formats.vowpal_wabbit import VowpalWabbit
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.schema import Feature, Schema

PLAIN = Schema(label=None, sparse=("user",))


def rows_of(
    file_format: LineFormat,
    text: str,
    columns: Sequence[str] | None = None,
    lists: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the valid rows, and {} for each malformed one."""
    rows = file_format.parse(text.encode(), columns, lists).to_pylist()
    return [{} if row.pop(FAULT) == MALFORMED else row for row in rows]


# -- libsvm
def test_libsvm_has_indices_and_their_values() -> None:
    assert rows_of(LibSvm(), "1 3:0.5  7:2\n\n-1\t2:1e-3\n0\n") == [
        {"label": "1", "index": ["3", "7"], "value": ["0.5", "2"]},
        {"label": "-1", "index": ["2"], "value": ["1e-3"]},
        {"label": "0", "index": [], "value": []},
    ]


def test_queries_of_libsvm_are_groups() -> None:
    assert rows_of(LibSvm(), "2 qid:7 1:0.5 # doc 3:4\n") == [
        {"label": "2", "index": ["1"], "value": ["0.5"], "group": "7"}
    ]
    assert rows_of(LibSvm(), "2 1:0.5\n", ["group", "label"]) == [{"group": None, "label": "2"}]


def test_file_of_queries_groups_rows(tmp_path: Path) -> None:
    for name, counts in (("a", "2\n1\n"), ("b", "1\n1\n1\n")):
        (tmp_path / name).write_text("2 1:0.5\n0 3:1\n1 1:2\n")
        (tmp_path / f"{name}.query").write_text(counts)
    schema = Schema(
        label="label",
        sparse=("group", "index"),
        lists=("index",),
        group="group",
    )
    files = LogSource.at(str(tmp_path)).raw_files(schema)
    assert [storage.name_of(file.path) for file in files] == ["a", "b"]
    groups = [
        group
        for file in files
        for table in LibSvm().tables(file.path, schema, ("label", "group"))
        for group in table.column("group").to_pylist()
    ]
    assert groups == ["a 0", "a 0", "a 1", "b 0", "b 1", "b 2"]
    assert LibSvm().columns(files[0].path, schema) == ("label", "index", "value", "group")
    key = LibSvm().cache_key(files[0])
    (tmp_path / "a.query").write_text("3\n3\n")
    assert LibSvm().cache_key(files[0]) != key
    rejects(
        "a.query: counts 6 rows, and .*/a has 3",
        lambda: list(LibSvm().tables(files[0].path, schema, None)),
    )
    (tmp_path / "a.query").write_text("two\n")
    rejects(
        "a.query: must have the number of rows",
        LibSvm().columns,
        files[0].path,
        schema,
    )


def test_libsvm_rows_without_pairs_are_malformed() -> None:
    assert rows_of(LibSvm(), "1 3\n0 1:2\n", ["label"]) == [{}, {"label": "0"}]


# -- libffm
def test_libffm_has_lists_for_each_field() -> None:
    assert rows_of(LibFfm(), "1 0:3:0.5 10:7:2 0:4:1\n0 2:1:1\n") == [
        {
            "label": "1",
            "field_0": ["3", "4"],
            "value_0": ["0.5", "1"],
            "field_2": [],
            "value_2": [],
            "field_10": ["7"],
            "value_10": ["2"],
        },
        {
            "label": "0",
            "field_0": [],
            "value_0": [],
            "field_2": ["1"],
            "value_2": ["1"],
            "field_10": [],
            "value_10": [],
        },
    ]


def test_fields_that_a_block_lacks_are_empty() -> None:
    rows = rows_of(LibFfm(), "1 0:3:0.5\n1 0:3\n", ["field_9", "label"])
    assert rows == [{"field_9": [], "label": "1"}, {}]


# -- Vowpal Wabbit
def test_namespaces_are_lists() -> None:
    text = "1 2.0 'r7|user u:1 age:0.5 |item i3\n-1 |item i9 i3\n1 tag| x y\n|item i1\n"
    assert rows_of(VowpalWabbit(), text) == [
        {
            "label": label,
            "weight": weight,
            "user": user,
            "user_value": values,
            "item": item,
            "features": features,
        }
        for label, weight, user, values, item, features in [
            ("1", "2.0", ["u", "age"], ["1", "0.5"], ["i3"], []),
            ("-1", "1", [], [], ["i9", "i3"], []),
            ("1", "1", [], [], [], ["x", "y"]),
            (None, "1", [], [], ["i1"], []),
        ]
    ]


def test_values_of_namespaces_are_malformed() -> None:
    columns = ["label", "weight", "user", "user_value"]
    assert rows_of(VowpalWabbit(), "1 |user:2 a\n0 |user a\n", columns) == [
        {},
        {"label": "0", "weight": "1", "user": ["a"], "user_value": ["1"]},
    ]


# -- slot:value
def test_slots_that_recur_are_lists() -> None:
    assert rows_of(SlotValue(), "click:1 u:5 t:a t:b\nt:c click:0\n") == [
        {"click": "1", "u": "5", "t": ["a", "b"]},
        {"click": "0", "u": None, "t": ["c"]},
    ]


def test_slots_are_lists_as_the_schema_says() -> None:
    text = "u:5 t:a\nu:5 u:6\nu:7 x\n"
    assert rows_of(SlotValue(), text, ["t", "u"], {"t"}) == [{"t": ["a"], "u": "5"}, {}, {}]


# -- Lines of users
def test_lines_of_users_are_rows_of_items() -> None:
    text = "7 3 9 3\n\n8  9\n5\n"
    assert rows_of(UserItems(), text) == [
        {"user": "7", "item": "3"},
        {"user": "7", "item": "9"},
        {"user": "7", "item": "3"},
        {"user": "8", "item": "9"},
    ]
    assert rows_of(UserItems(), text, ["item"])[-1] == {"item": "9"}


def test_lines_of_one_length_are_no_lines_of_users() -> None:
    assert UserItems().recognizes(b"7 3 9\n8 \n9\n10 2\n")  # As in LightGCN's test sets
    assert not UserItems().recognizes(b"1 2 3\n4 5 6\n")
    assert not UserItems().recognizes(b"1 2 3\n4 b\n")
    assert not UserItems().recognizes(b"1 2 3\n")


# -- JSON lines
def test_impressions_are_rows_of_shown_items() -> None:
    text = "1\tu5\t3/9/2024 1:02:03 PM\ti4 i-7\ti-2-0 i9-1\n2\tu6\t\t\ti2-1\n"
    first = {"impression": "1", "user": "u5", "time": "3/9/2024 1:02:03 PM"}
    first["history"] = ["i4", "i-7"]
    last = {"impression": "2", "user": "u6", "time": "", "history": [], "item": "i2", "click": "1"}
    assert rows_of(Impressions(), text) == [
        {**first, "item": "i-2", "click": "0"},
        {**first, "item": "i9", "click": "1"},
        last,
    ]


def test_impressions_to_predict_have_no_clicks() -> None:
    text = "1\tu5\t\ti4\ti2 i-x\n"
    assert rows_of(Impressions(), text, ["item", "click"]) == [
        {"item": "i2", "click": ""},
        {"item": "i-x", "click": ""},
    ]


def test_lines_without_impressions_are_malformed() -> None:
    text = "1\tu5\ti2-1\n2\tu6\t\t\ti2-1\n"
    assert rows_of(Impressions(), text, ["item"]) == [{}, {"item": "i2"}]


def test_json_values_keep_their_types() -> None:
    text = '{"a": 1, "b": 0.5, "c": ["x"], "n": {"z": 1}, "d": true}\n\n{"b": null}\n'
    assert rows_of(JsonLines(), text) == [
        {"a": 1, "b": 0.5, "c": ["x"], "d": True},
        {"a": None, "b": None, "c": None, "d": None},
    ]


def test_mixed_json_columns_are_text() -> None:
    text = '{"a": 1, "b": [1, "x"]}\n{"a": "u", "b": [2.5]}\n{"a": true}\n'
    assert rows_of(JsonLines(), text) == [
        {"a": "1", "b": ["1", "x"]},
        {"a": "u", "b": ["2.5"]},
        {"a": "true", "b": None},
    ]


def test_lines_without_json_objects_are_malformed() -> None:
    assert rows_of(JsonLines(), '{"a": 1}\n[2]\n{"a": \n{"a": 3}\n', ["a"]) == [
        {"a": 1},
        {},
        {},
        {"a": 3},
    ]


def test_deeply_nested_json_is_malformed() -> None:
    deep = '{"click": ' + "[" * 100_000 + "]" * 100_000 + "}"
    text = f'{{"click": 1}}\n{deep}\n{{"click": "a"}}\n'
    assert rows_of(
        JsonLines(),
        text,
        ["click"],
    ) == [{"click": "1"}, {}, {"click": "a"}]


@pytest.mark.parametrize("integer", [2**53 + 1, 2**63 - 1, 2**64 - 1])
def test_large_json_integers_are_exact(integer: int) -> None:
    (first, _) = rows_of(JsonLines(), f'{{"a": {integer}}}\n{{"a": 2}}\n')
    assert int(first["a"]) == integer


def test_times_in_json_stay_text() -> None:
    text = '{"a": "2026-01-31 10:00:00", "b": ["2026-01-31"]}\n'
    assert rows_of(JsonLines(), text) == [{"a": "2026-01-31 10:00:00", "b": ["2026-01-31"]}]


# -- npz
def test_npz_has_columns_and_lists(tmp_path: Path) -> None:
    path = str(tmp_path / "log.npz")
    np.savez(
        path,
        y=np.array([1, 0]),
        user=np.array(["a", "b"]),
        v=np.arange(4).reshape(2, 2),
    )
    assert Npz().columns(path, PLAIN) == ("y", "user", "v")
    (table,) = Npz().tables(path, PLAIN, ("v", "user", "absent"))
    assert table.to_pylist() == [{"v": [0, 1], "user": "a"}, {"v": [2, 3], "user": "b"}]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.array([1, "a"], object)}, "array y has Python objects, which are never"),
        ({"y": np.zeros((1, 1, 1))}, "array y has 3 dimensions"),
        ({"y": np.zeros(2), "x": np.zeros(3)}, r"got y 2, x 3 values"),
    ],
)
def test_unusable_arrays_are_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log.npz")
    np.savez(path, **arrays)
    rejects(message, list, Npz().tables(path, PLAIN, None))


# -- Choice of a format
EXAMPLES = {
    "jsonl": '{"a": 1}\n{"a": 2}\n',
    "libsvm": "1 3:0.5 7:1\n-1 2:1e-3\n",
    "libffm": "1 0:3:1 1:7:0.5\n0 0:2:1\n",
    "vw": "1 1.0 'tag|user age:3 u1 |item i5\n-1 |user u2 |item i7\n",
    "slot_value": "click:1 user:7 item:5\nclick:0 item:5 item:7\n",
    "impressions": "1\tu5\t\ti4 i7\ti2-0 i9-1\n",
    "user_items": "7 3 9 4\n8 9 3\n",
    "criteo": "\t".join(["1", *["7"] * 13, *["0123abcd"] * 26]) + "\n",
    "csv": "click,user\n1,7\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_formats_are_found_by_content(name: str, ends: str, tmp_path: Path) -> None:
    path = tmp_path / "log.data"
    path.write_bytes(EXAMPLES[name].replace("\n", ends).encode())
    assert find_format(str(path), PLAIN).name == name


@pytest.mark.parametrize(
    "text",
    [
        "user item\n1 2\n",
        "a|b|c\n1|2|3\n",
        "time,price\n10:00,3\n11:30,4\n",
        "1\t3:05\n0\t4:10\n",
        "",
        "{x},y\n1,2\n",
    ],
)
def test_other_text_is_csv(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.data"
    path.write_text(text)
    assert find_format(str(path), PLAIN).name == "csv"


def test_schemas_override_content(tmp_path: Path) -> None:
    path = tmp_path / "log.data"
    path.write_text(EXAMPLES["slot_value"])
    for file_format in FORMATS:
        assert find_format(str(path), PLAIN.replace(format=file_format.name)) is file_format
    rejects(
        "format must be one of parquet, npz, .*, or FILE.py:CLASS, got 'tsv2'",
        find_format,
        str(path),
        PLAIN.replace(format="tsv2"),
    )


OWN = '''
import pyarrow as pa
from rayrec import storage
from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.row_faults import FAULT


class Pairs(LineFormat):
    """`click user` in one word: 1u7."""

    name = "pairs"

    def recognizes(self, start):
        return False

    def parse(self, text, columns, lists):
        lines = text.decode().split()
        found = {"click": [line[0] for line in lines], "user": [line[1:] for line in lines]}
        kept = {name: found[name] for name in columns or found}
        return pa.table({**kept, FAULT: pa.array([0] * len(lines), pa.uint8())})
'''


def test_own_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "own_pairs.py").write_text(OWN)
    (tmp_path / "log.data").write_text("1u7\n0u8\n1u7\n")
    schema = Schema(label="click", sparse=("user",), format=f"{tmp_path}/own_pairs.py:Pairs")
    index = open_index(tmp_path / "log.data", schema, cache=tmp_path / "cache")
    raw = read_raw(index.segments, schema)
    assert raw.labels["click"].tolist() == [1, 0, 1]
    assert raw.categories[0, 0] == raw.categories[2, 0] != raw.categories[1, 0]


def test_foreign_content_needs_format(tmp_path: Path) -> None:
    (tmp_path / "own_pairs.py").write_text(OWN)
    (tmp_path / "log.data").write_bytes(b"\x80\x0417\n")
    schema = Schema(label="click", sparse=("user",))
    source = LogSource.at(str(tmp_path / "log.data"))
    rejects("is a pickle", source.raw_files, schema)
    assert source.raw_files(schema.replace(format=f"{tmp_path}/own_pairs.py:Pairs"))


# -- Blocks
@given(
    lines=st.lists(st.text("ab\u00e9", max_size=5), max_size=20),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
    block_bytes=st.integers(1, 40),
    is_ended=st.booleans(),
)
def test_blocks_have_all_lines(
    lines: list[str],
    ends: str,
    block_bytes: int,
    is_ended: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    text = ends.join(lines) + (ends if is_ended else "")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    blocks = list(line_blocks(str(path), PLAIN, block_bytes=max(block_bytes, 4)))
    assert all(block.endswith(b"\n") for block in blocks)
    joined = b"".join(blocks).decode().split("\n")
    expected = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert [line for line in joined if line] == [line for line in expected if line]


def test_types_may_change_between_blocks(tmp_path: Path) -> None:
    """Numbers of users become text in a later block; equal users stay equal."""
    users: list[Any] = [7] * 200_000 + ["u8", "7"] * 10
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(
            json.dumps({"click": row % 2, "user": user}) + "\n" for row, user in enumerate(users)
        )
    )
    schema = Schema(label="click", sparse=("user",))
    index = open_index(path, schema, cache=tmp_path / "cache")
    raw = read_raw(index.segments, schema)
    assert raw.rows == len(users)
    first = raw.categories[0, 0]
    assert (raw.categories[:, 0] == first).tolist() == [str(user) == "7" for user in users]


@pytest.mark.parametrize("ranked", [False, True])
def test_weights_of_lists_are_read(ranked: bool, tmp_path: Path) -> None:
    query = " qid:3" if ranked else ""
    path = tmp_path / "log.txt"
    path.write_text(f"1{query} 3:0.5 7:2\n0{query} 7:1.5\n1{query} 3:x\n")
    schema = Schema(
        label="label",
        sparse=("index", *(["group"] if ranked else [])),
        lists=("index",),
        features=(Feature(name="index", weights="value"),),
        format="libsvm",
    )
    index = open_index(path, schema, cache=tmp_path / "cache")
    raw = read_raw(index.segments, schema)
    assert index.faults.counts == {"weights are not as many numbers as categories": 1}
    assert raw.lists[0].lengths.tolist() == [2, 1]
    weights: Callable[[], Any] = raw.lists[0].weights.tolist  # type: ignore[union-attr]
    assert weights() == [0.5, 2.0, 1.5]
