"""Data reports of small logs compared with manual results. Finds all injected faults; all gates
pass and fail.
"""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.logs import learn, open_index
from builders.raw_blocks import find_block
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, numbered
from rayrec.data.logs.splits import MAX_SLICES, slices_of
from rayrec.data.raw_block import RawBlock
from rayrec.data.synthetic import generate
from rayrec.hashing import murmur3
from rayrec.observe.console import Console
from rayrec.prepare import data_report
from rayrec.prepare import validate as module
from rayrec.prepare.config import PreparationConfig
from rayrec.prepare.data_report import Gates, Report
from rayrec.prepare.log_statistics import TOP, quantile_edges, row_hashes
from rayrec.schema import Feature, NamedTable, Schema

SCHEMA = Schema(
    tokens="hexadecimal",
    label="click",
    dense=("a", "b"),
    sparse=("s", "t"),
)
CONFIG = PreparationConfig(schema=SCHEMA, max_bad_fraction=0.0)
ALLOWED = Gates(max_bad_fraction=1.0, min_rows=0, allow_constant_columns=True)
Line = tuple[int, int | None, int | None, int | None, int | None]
"""Label, a, b, s, t."""


@pytest.fixture(autouse=True)
def _here(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "engine", lambda *_, paths: nullcontext(LoopEngine()))


def text_of(lines: Sequence[Line]) -> bytes:
    formats = ("d", "d", "d", "08x", "08x")
    rows = [
        ["" if x is None else format(x, spec) for x, spec in zip(line, formats, strict=True)]
        for line in lines
    ]
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def validate(
    path: Path,
    gates: Gates = ALLOWED,
    *,
    config: PreparationConfig = CONFIG,
    **given: Path,
) -> Report:
    folders = {name: str(folder) for name, folder in given.items()}
    return module.validate(
        str(path),
        config=config,
        gates=gates,
        console=Console(quiet=True),
        **folders,
    )


def found_in(path: Path, **options: Any) -> dict[str, Any]:
    return validate(path, **options).to_dict()


def log_of(folder: Path, **files: Sequence[Line] | bytes) -> Path:
    folder = folder / "log"
    folder.mkdir()
    for name, lines in files.items():
        (folder / name).write_bytes(lines if isinstance(lines, bytes) else text_of(lines))
    return folder


def failed(report: Report) -> list[str]:
    return [failure.gate for failure in report.failed]


def varied(rows: int, seed: int = 0) -> list[Line]:
    rng = np.random.default_rng(seed)
    columns = [
        rng.integers(0, 2, rows),
        rng.integers(-5, 50, rows),
        rng.integers(0, 9, rows),
        rng.integers(0, 30, rows),
        rng.integers(0, 4, rows),
    ]
    return [tuple(row) for row in np.array(columns).T.tolist()]


# -- what a report says
SMALL: dict[str, list[Line]] = {
    "day_0": [
        (1, 0, 1, 7, 1),
        (0, -2, 1, 7, 1),
        (0, 5, 1, 8, None),
        (0, 5, 1, 7, 2),
    ],
    "day_1": [
        (1, None, 1, 7, 3),
        (0, 5, 1, 9, None),
        (0, 5, 1, 8, 1),
        (1, None, 1, 7, 1),
        (0, 5, 1, 8, 1),
        (1, 0, 1, 7, 1),
    ],
}


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    return found_in(log_of(tmp_path, **SMALL))


def test_report_counts_rows_and_labels(small: dict[str, Any]) -> None:
    low = pytest.approx(0.1682, abs=1e-4)
    high = pytest.approx(0.6873, abs=1e-4)
    assert small["label"] == {
        "name": "click",
        "clicks": 4,
        "rate": 0.4,
        "low": low,
        "high": high,
    }
    assert (small["rows"], small["slices_by"]) == (10, "file")
    slices = [(piece["name"], piece["rows"], piece["label_rate"]) for piece in small["slices"]]
    assert slices == [("day_0", 4, 0.25), ("day_1", 6, 0.5)]
    assert small["slices"][1]["missing_rate"] == {"a": 2 / 6, "b": 0, "s": 0, "t": 1 / 6}


def test_report_describes_dense_columns(small: dict[str, Any]) -> None:
    logs = np.log1p([0, 2, 5, 5, 5, 5, 5, 0]) * [1, -1, 1, 1, 1, 1, 1, 1]
    expected = {
        "missing_rate": 0.2,
        "min": -2,
        "max": 5,
        "negative_rate": 1 / 8,
        "zero_rate": 2 / 8,
        "log_mean": pytest.approx(logs.mean(), abs=1e-6),
        "log_deviation": pytest.approx(logs.std(), abs=1e-6),
    }
    assert expected.items() <= small["dense"]["a"].items()
    assert json.loads(json.dumps(small["dense"]["b"]))["log_deviation"] == 0
    # a: three deciles of day_0 hold -2 (1 of 4), 0 (1), 5 (2); day_1 has 0 (1 of 6), 5 (3), missing
    # (2)
    assert small["dense"]["a"]["drift"] == pytest.approx((1 / 4 + 1 / 12 + 0 + 1 / 3) / 2)
    assert small["dense"]["b"]["drift"] == 0


def test_report_describes_sparse_columns(small: dict[str, Any]) -> None:
    s = small["sparse"]["s"]
    t = small["sparse"]["t"]
    assert (s["values"], s["distinct"], s["missing_rate"]) == (10, 3, 0)
    assert (s["top_1_rate"], s["top_10_rate"], s["once_rate"]) == (0.6, 1, 0.1)
    assert (t["values"], t["distinct"], t["missing_rate"]) == (8, 3, 0.2)
    assert (t["top_1_rate"], t["once_rate"]) == (6 / 8, 2 / 8)
    # Known before day_1 at min_count 2: 7 of s (9, 8, 8 are not), 1 of t (3 is not).
    assert (s["unknown_rate"], t["unknown_rate"]) == (3 / 6, 1 / 5)
    assert "day_1" in small["unknown_to"]
    # s: 7, 8 and the rest, which comes once: 3/4, 1/4, 0 and 3/6, 2/6, 1/6
    assert s["drift"] == pytest.approx((1 / 4 + 1 / 12 + 1 / 6) / 2)
    assert (small["slices"][1]["drift"]["s"], small["slices"][1]["drift"]["click"]) == (
        s["drift"],
        0.25,
    )
    assert small["slices"][0]["drift"] == {}


def test_report_finds_duplicates_and_compares_sevenths(
    small: dict[str, Any],
    tmp_path: Path,
) -> None:
    assert small["duplicates"] == {"rate": 0.2, "rows": 10, "sampled": 1}  # 0 5 1 8 1 and 1 0 1 7 1
    assert [text.split()[1] for text in small["warnings"]] == ["b"]
    assert small["passed"]
    json.dumps(small, allow_nan=False)
    for name in "ab":
        (tmp_path / name).mkdir()
    report = found_in(log_of(tmp_path / "a", only=varied(25)))
    assert report["slices_by"] == "seventh"
    assert [piece["rows"] for piece in report["slices"]] == [4, 4, 4, 4, 3, 3, 3]
    assert "seventh 7" in report["unknown_to"]
    report = found_in(log_of(tmp_path / "b", only=varied(1)))
    assert [piece["rows"] for piece in report["slices"]] == [1]
    assert (report["unknown_to"], report["sparse"]["s"]["unknown_rate"]) == (None, None)


def test_many_and_converted_files_are_grouped_into_slices(tmp_path: Path) -> None:
    report = found_in(log_of(tmp_path, **{f"f{i}": varied(2, i) for i in range(MAX_SLICES + 6)}))
    assert (report["slices_by"], len(report["slices"])) == ("files", MAX_SLICES)
    assert (
        sum(piece["rows"] for piece in report["slices"]) == report["rows"] == 2 * (MAX_SLICES + 6)
    )
    assert report["slices"][-1]["name"].endswith(f"f{MAX_SLICES + 5}")
    folder = "/c/tables/0123456789abcdef"
    paths = [f"{folder}/00000/d.csv.parquet", f"{folder}/00001/d.csv.parquet", "/log/e.parquet"]
    index = LogIndex(numbered(((path, 0, 5, 5) for path in paths), "table"), Faults())
    assert [(piece.name, piece.start, piece.stop) for piece in slices_of(index)[1]] == [
        ("d.csv", 0, 10),
        ("e.parquet", 10, 15),
    ]


def test_decompressed_files_keep_names(tmp_path: Path) -> None:
    packed = {f"day_{day}.gz": gzip.compress(text_of(varied(5, day))) for day in range(2)}
    assert [piece["name"] for piece in found_in(log_of(tmp_path, **packed))["slices"]] == [
        "day_0",
        "day_1",
    ]


def test_unlabelled_log_is_validated(tmp_path: Path) -> None:
    text = text_of(varied(30)).replace(b"\n1\t", b"\n").replace(b"\n0\t", b"\n")[2:]
    report = found_in(
        log_of(tmp_path, only=text),
        config=CONFIG.replace(schema=SCHEMA.replace(label=None)),
    )
    assert (report["rows"], report["label"], report["slices"][0]["label_rate"]) == (30, None, None)
    assert report["dense"]["a"]["auroc"] is None
    assert "click" not in report["slices"][6]["drift"]


def test_empty_log_fails_gates(tmp_path: Path) -> None:
    report = validate(log_of(tmp_path, only=b""), Gates())
    assert failed(report) == ["min_rows"]
    content = report.content
    assert (content["rows"], content["dense"]["a"]["min"], content["sparse"]["s"]["distinct"]) == (
        0,
        None,
        0,
    )
    json.dumps(report.to_dict(), allow_nan=False)
    assert report.lines()[-1].startswith("failed: ")


def test_invalid_log_fails_gates(tmp_path: Path) -> None:
    report = validate(log_of(tmp_path, day_0=b"junk\n" * 30, day_1=b"\n"), Gates())
    assert failed(report) == ["max_bad_fraction", "min_rows"]
    assert report.content["faults"]["by_kind"] == {"empty line": 1, "too few columns": 30}
    assert report.lines()


def test_validate_rejects_preprocessed_data_and_other_schemas(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = log_of(tmp_path, only=varied(40))
    build_preprocessor(path, tmp_path / "prepared")
    other = CONFIG.replace(schema=SCHEMA.replace(dense=("a", "c")))
    rejects("columns must match", validate, path, config=other, preprocessor=tmp_path / "prepared")
    (tmp_path / "prepared" / "dataset.json").write_text("{}")
    rejects("preprocessed", validate, tmp_path / "prepared")


# -- against a Preprocessor
def build_preprocessor(
    path: Path,
    folder: Path,
    config: PreparationConfig = CONFIG,
) -> Preprocessor:
    made = learn(
        open_index(path, segment_bytes=config.segment_bytes, schema=SCHEMA),
        SCHEMA,
        config.rules,
    )
    made.save(str(folder))
    return made


def ids_by_token(made: Preprocessor, place: int, tokens: set[int]) -> dict[int, int]:
    column = made.sparse[place]
    if column.num_tokens is None:
        return {token: 2 + token % (column.num_embeddings - 2) for token in tokens}
    before = sum(other.num_tokens or 0 for other in made.sparse[:place])
    known = made.tokens[before : before + column.num_tokens].tolist()
    return {token: token % 25 for token in tokens if token % 25 in known}


def test_unknown_and_collision_rates_match_encoding(tmp_path: Path) -> None:
    path = log_of(tmp_path, day_0=varied(300), day_1=varied(300, 1))
    config = CONFIG.replace(min_count=10, max_num_embeddings=20, token_modulo=25)
    made = build_preprocessor(path / "day_0", tmp_path / "prepared", config)
    assert made.sparse[0].num_tokens is None or made.sparse[0].token_modulo
    report = found_in(path, preprocessor=tmp_path / "prepared")
    assert report["unknown_to"] == f"Preprocessor {made.hash()}"
    tokens = [[row[3 + s] for row in varied(300) + varied(300, 1)] for s in range(2)]
    for s, name in enumerate(("s", "t")):
        ids = ids_by_token(made, s, set(tokens[s]))
        found = report["sparse"][name]
        if made.sparse[s].num_tokens is None:
            assert found["unknown_rate"] is None
        else:
            assert found["unknown_rate"] == np.mean([token not in ids for token in tokens[s]])
        values = [token for token in tokens[s] if token in ids]
        shared = [sum(ids[token] == other for other in ids.values()) > 1 for token in values]
        assert found["collision_rate"] == pytest.approx(np.mean(shared))


@pytest.mark.parametrize("modulo", [None, 7])
def test_unknown_rate_compares_last_slice_to_past(tmp_path: Path, modulo: int | None) -> None:
    days = [varied(60, seed) for seed in range(3)]
    path = log_of(tmp_path, **{f"day_{i}": day for i, day in enumerate(days)})
    report = found_in(path, config=CONFIG.replace(min_count=5, token_modulo=modulo))
    past = [row[3] % (modulo or 1000) for day in days[:2] for row in day]
    latest = [row[3] % (modulo or 1000) for row in days[2]]
    assert report["sparse"]["s"]["unknown_rate"] == np.mean(
        [past.count(token) < 5 for token in latest]
    )


# -- planted faults
FAULTS = {
    "empty line": (b"\n", ""),
    "too few columns": (b"1\t2\n", ""),
    "too many columns": (b"1\t2\t3\t4\t5\t6\n", ""),
    "label is not 0 or 1": (b"2\t1\t1\t\t\n", "click"),
    "not an integer": (b"1\t1\tx\t\t\n", "b"),
    "not 8 hexadecimal digits": (b"1\t1\t1\t\tabc\n", "t"),
    "line too long": (b"1\t" + b"1" * 5000 + b"\n", ""),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_report_finds_injected_fault(tmp_path: Path, kind: str) -> None:
    (line, column), good = FAULTS[kind], text_of(varied(50))
    report = validate(log_of(tmp_path, day_0=good, day_1=good + line * 12 + good), Gates())
    faults = report.content["faults"]
    assert (report.content["bad_rows"], faults["by_kind"]) == (12, {kind: 12})
    assert faults["by_column"] == ({kind: {column: 12}} if column else {})
    first = faults["first"][0]
    assert (Path(first["path"]).name, first["byte"], first["column"]) == (
        "day_1",
        len(good),
        column,
    )
    assert failed(report) == ["max_bad_fraction"]
    assert f"day_1 at byte {len(good)}: {kind}" in report.failures[0]
    assert any(f"12 x {kind}" in line for line in report.lines())


# -- gates
DAYS = {
    "day_0": varied(200),
    "day_1": [(*row[:3], row[3] + 1000, row[4]) for row in varied(200, 1)],
}
CONSTANT = {name: [(*row[:4], 5) for row in day] for name, day in DAYS.items()}
MISSING = [(i % 2, None if i % 5 < 3 else i, i % 7, i % 3, i % 4) for i in range(50)]
GATES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        {"max_bad_fraction": 0.0},
        {"max_bad_fraction": 0.02},
        {"day_2": b"junk\n" + text_of(varied(99))},
    ),
    ({"min_rows": 401}, {"min_rows": 400}, {}),
    (
        {"min_label_rate": 0.1},
        {"min_label_rate": 0.0},
        {"day_2": [(0, *row[1:]) for row in varied(10)]},
    ),
    (
        {"max_label_rate": 0.9},
        {"max_label_rate": 1.0},
        {"day_2": [(1, *row[1:]) for row in varied(10)]},
    ),
    (
        {"max_missing_rate": 0.59},
        {"max_missing_rate": 0.6},
        {"day_2": MISSING},
    ),
    (
        {"max_unknown_rate": 0.99},
        {"max_unknown_rate": 1.0},
        {},
    ),
    (
        {"max_drift": 0.99},
        {"max_drift": 1.0},
        {},
    ),
    (
        {"max_duplicate_rate": 0.3},
        {"max_duplicate_rate": 0.35},
        {"day_2": DAYS["day_0"]},
    ),
    (
        {"allow_constant_columns": False},
        {"allow_constant_columns": True},
        CONSTANT,
    ),
]


@pytest.mark.parametrize(("failing", "passing", "files"), GATES, ids=lambda x: next(iter(x), ""))
def test_gate_fails_and_passes(
    tmp_path: Path,
    failing: dict[str, Any],
    passing: dict[str, Any],
    files: dict[str, Any],
) -> None:
    path, (gate,) = log_of(tmp_path, **{**DAYS, **files}), failing
    report = validate(path, ALLOWED.replace(**failing))
    assert (failed(report), report.to_dict()["passed"]) == ([gate], False)
    (line,) = report.failures
    assert "\n" not in line
    assert f"--gates.{gate.replace('_', '-')}" in line
    assert line in " ".join(report.lines())
    again = validate(path, ALLOWED.replace(**passing))
    assert (failed(again), again.to_dict()["passed"]) == ([], True)


def test_max_bad_fraction_defaults_to_preparation(tmp_path: Path) -> None:
    path = log_of(tmp_path, day_0=b"junk\n" + text_of(varied(99)))
    assert failed(validate(path, Gates(), config=CONFIG.replace(max_bad_fraction=0.02))) == []
    assert failed(validate(path, Gates(), config=CONFIG.replace(max_bad_fraction=0.001))) == [
        "max_bad_fraction"
    ]


@pytest.mark.parametrize(
    "gates",
    [
        pytest.param({"max_drift": 1.5}, id="max_drift-1.5"),
        pytest.param({"max_missing_rate": -0.1}, id="max_missing_rate-0.1"),
        pytest.param({"min_label_rate": 0.5, "max_label_rate": 0.4}, id="min_label_rate-0.5"),
    ],
)
def test_gates_reject_invalid_limits(gates: dict[str, Any]) -> None:
    rejects("(?i)gates", Gates, **gates)


# -- planted drift and leakage
def test_report_finds_injected_drift(tmp_path: Path) -> None:
    days = [varied(4000, seed) for seed in range(3)]
    days[1] = [(y, a + 30, b, s, t) for y, a, b, s, t in days[1] if a is not None]
    days[2] = [(y, a, b, s, t if i % 5 else 77) for i, (y, a, b, s, t) in enumerate(days[2])]
    report = found_in(log_of(tmp_path, **{f"day_{i}": day for i, day in enumerate(days)}))
    shifted = report["slices"][1]["drift"]
    replaced = report["slices"][2]["drift"]
    assert report["dense"]["a"]["drift"] == shifted["a"]
    assert shifted.pop("a") == pytest.approx(30 / 55, abs=0.05)
    assert replaced.pop("t") == pytest.approx(0.2, abs=0.02)
    assert max(*shifted.values(), *replaced.values()) < 0.06
    assert report["dense"]["a"]["drift_by_chance"] < 0.03
    assert report["sparse"]["s"]["drift"] < 3 * report["sparse"]["s"]["drift_by_chance"]


LEAKS: dict[str, Callable[[Line, int], Line]] = {
    "a": lambda row, i: (row[0], row[0] * 1000 + i % 7, *row[2:]),
    "b": lambda row, i: (row[0], row[1], 1 if row[0] else None, *row[3:]),
    "s": lambda row, i: (*row[:3], row[0] * 500 + i % 500, row[4]),
    "t": lambda row, i: (*row[:4], i + 10 if row[0] else None),
}


@pytest.mark.parametrize("column", LEAKS)
def test_report_warns_of_leaking_column(tmp_path: Path, column: str) -> None:
    report = validate(
        log_of(tmp_path, only=[LEAKS[column](row, i) for i, row in enumerate(varied(20_000))])
    )
    (leak,) = (text for text in report.warnings if "alone predicts the label" in text)
    assert leak.startswith(f"column {column} alone")
    unrelated = [text for text in report.warnings if text != leak]
    # The categories of t are the rows' numbers.
    assert [text.partition(" of its values are unknown")[0] for text in unrelated] == [
        "column t: 100.0%"
    ] * (column == "t")
    columns = {**report.content["dense"], **report.content["sparse"]}
    assert columns.pop(column)["auroc"] > 0.98
    assert all(other["auroc"] == pytest.approx(0.5, abs=0.03) for other in columns.values())


@pytest.mark.parametrize(
    ("time", "fix"),
    [
        pytest.param(
            None,
            r"the table items may have values from after the click: give rows the time .* `time` "
            "of the table, or leave it out of the schema",
            id="without time",
        ),
        pytest.param("day", "see whether it is known before the click", id="with time"),
    ],
)
def test_report_warns_of_leaking_table(tmp_path: Path, time: str | None, fix: str) -> None:
    """A click rate that was computed from the log itself, as a number and through a bucket."""
    rows = [(i % 3 // 2, i // 3 * 2 + i % 3 // 2) for i in range(6000)]
    lines = [f"{click},{item},{i % 7},2026-01-02" for i, (click, item) in enumerate(rows)]
    (tmp_path / "log.csv").write_text("\n".join(["click,item,hour,at", *lines]) + "\n")
    rates = sorted({(item, 0.1 + 0.8 * click) for click, item in rows})
    table = [f"{item},{rate},2026-01-01" for item, rate in rates]
    (tmp_path / "items.csv").write_text("\n".join(["item,rate,day", *table]) + "\n")
    schema = Schema(
        label="click",
        sparse=("hour",),
        timestamp="at",
        delimiter=",",
        tables=(NamedTable(name="items", path=str(tmp_path / "items.csv"), key="item", time=time),),
        features=(
            Feature(name="rate", formula="number(lookup(items, item, rate))"),
            Feature(name="level", formula="bucketize(rate, [0.5])"),
        ),
    )
    report = validate(tmp_path / "log.csv", config=CONFIG.replace(schema=schema))
    warnings = [text for text in report.warnings if "alone predicts the label" in text]
    assert [text.split(" alone")[0] for text in warnings] == ["column rate", "column level"]
    for text in warnings:
        assert re.search(f"leakage is likely; {fix}", text)


# -- the division of the work does not matter
def test_report_ignores_log_division(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        (y, None if a == 3 else a, b, s if s > 3 else None, t) for y, a, b, s, t in varied(3000)
    ]
    bad = b"junk\n" * 15
    path = log_of(
        tmp_path,
        day_0=text_of(rows[:1000]) + bad,
        day_1=rows[1000:1100],
        day_2=bad + text_of(rows[1100:]),
    )
    monkeypatch.setattr(module, "_EDGE_ROWS", 256)  # stretches of 4 rows
    found = []
    for block_bytes, task_rows, read_rows, memory in (
        (1 << 30, 10**6, 10**6, None),
        (1 << 16, 10**6, 10**6, 1 << 24),
        (1 << 16, 100, 1, None),
        (1 << 17, 700, 300, None),
    ):
        monkeypatch.setattr(module, "_TASK_ROWS", task_rows)
        monkeypatch.setattr(module, "_READ_ROWS", read_rows)
        found.append(
            found_in(
                path,
                config=CONFIG.replace(
                    block_bytes=block_bytes,
                    segments_per_block=16,
                    memory_bytes=memory,
                ),
            )
        )
        assert found[-1] == found[0]
    assert found[0]["faults"]["by_kind"] == {"too few columns": 30}


def test_duplicates_are_sampled_within_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HASH_BYTES", 16 << 10)
    rows = varied(4000)
    report = validate(log_of(tmp_path, day_0=rows, day_1=rows))
    duplicates = report.content["duplicates"]
    assert duplicates["sampled"] == 1 / 8
    assert 600 < duplicates["rows"] < 1400
    assert duplicates["rate"] == pytest.approx(1 - len(set(rows)) / 8000, abs=0.05)
    assert any("duplicate rows were looked for among 12.500%" in text for text in report.warnings)


# -- other logs
ANY = Schema(
    label="y",
    dense=("price",),
    sparse=("user", "tags"),
    tokens="any",
    lists=("tags",),
    weight="w",
    delimiter=",",
)
CSV = """user,tags,y,price,w,ignored
ann,red|blue,1,0.5,1,x
bob,red,0,,2,x
ann,,0,-1.5,0,x
,red|red|green,1,1e3,1,x
eve,blue,7,1,1,x
"""


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_any_click_log_is_validated(tmp_path: Path, form: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CSV)
    if form == "parquet":
        table = arrow_csv.read_csv(path)
        path = tmp_path / "log.parquet"
        pq.write_table(table.set_column(1, "tags", pc.split_pattern(table["tags"], "|")), path)
    report = found_in(path, config=PreparationConfig(schema=ANY))
    assert (report["rows"], report["bad_rows"], report["label"]["rate"]) == (4, 1, 0.5)
    assert report["faults"]["by_column"] == {"label is not 0 or 1": {"y": 1}}
    assert report["faults"]["first"][0]["row"] == 4
    price = report["dense"]["price"]
    user = report["sparse"]["user"]
    tags = report["sparse"]["tags"]
    assert (price["min"], price["max"], price["missing_rate"]) == (-1.5, 1000, 0.25)
    assert (user["values"], user["distinct"], user["missing_rate"]) == (3, 2, 0.25)
    assert (tags["values"], tags["distinct"], tags["missing_rate"]) == (6, 3, 0.25)
    assert (tags["top_1_rate"], tags["once_rate"]) == (4 / 6, 2 / 6)
    assert report["weight"] == {"min": 0, "max": 2, "zero_rate": 0.25}


def test_synthetic_log_passes_validation(tmp_path: Path) -> None:
    generate(
        str(tmp_path / "log"),
        rows=6000,
        dialect="terabyte",
        days=3,
        seed=1,
        parallelism=1,
    )
    report = validate(
        tmp_path / "log",
        Gates(allow_constant_columns=True),
        config=PreparationConfig(),
    )
    assert (report.failures, report.content["rows"]) == ([], 6000)
    assert [piece["name"] for piece in report.content["slices"]] == ["day_0", "day_1", "day_2"]
    lines = report.lines()
    assert max(map(len, lines)) <= 120
    for word in (
        "label rate",
        "day_2",
        "int_12",
        "cat_25",
        "AUROC",
    ):
        assert any(word in line for line in lines)


def test_names_are_not_parsed_as_markup(tmp_path: Path) -> None:
    path = tmp_path / "[red] :smile:.csv"
    path.write_text(
        "click,[/b],:x: [i]\n"
        + "".join(f"{number % 2},{number},{number % 5}\n" for number in range(50))
    )
    schema = Schema(
        label="click",
        dense=("[/b]",),
        sparse=(":x: [i]",),
        tokens="any",
        delimiter=",",
    )
    text = "\n".join(
        validate(path, config=PreparationConfig(schema=schema, max_bad_fraction=0.1)).lines(
            width=200
        )
    )
    assert [name for name in ("[/b]", ":x: [i]", str(path)) if name not in text] == []


# -- Row hashes, and figures compared with manual results
LISTS = Schema(
    label="y",
    dense=("a",),
    sparse=("s", "tags"),
    tokens="any",
    lists=("tags",),
    weight="w",
)
Row = tuple[int, float | None, int | None, Sequence[int], float]
"""Label, a, s, tags, weight of LISTS."""
NUMBERS = st.none() | st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 7.0, 1e17])
CATEGORIES = (st.none() | st.integers(0, 6), st.lists(st.integers(0, 5), max_size=4))
ROWS = st.lists(
    st.tuples(st.integers(0, 1), NUMBERS, *CATEGORIES, st.sampled_from([0.0, 0.5, 2.0])),
    min_size=1,
    max_size=60,
)


def block_of_rows(rows: Sequence[Row]) -> RawBlock:
    labels, a, s, tags, weights = zip(*rows, strict=True)
    return find_block(
        LISTS,
        {"a": a, "s": s, "tags": tags},
        labels={"y": np.array(labels, np.float32)},
        weights=np.array(weights, np.float32),
    )


@given(ROWS)
def test_equal_rows_have_equal_hashes(rows: list[Row]) -> None:
    hashes = row_hashes(block_of_rows(rows)).tolist()
    plain = [(*row[:3], tuple(row[3]), row[4]) for row in rows]
    assert len(set(hashes)) == len(set(plain))
    assert len(set(zip(plain, hashes, strict=True))) == len(set(plain))


def test_signs_of_zero_hash_alike_and_edges_are_values() -> None:
    zeros: list[Row] = [(0, zero, None, [], 0.0) for zero in (0.0, -0.0)]
    assert len(set(row_hashes(block_of_rows(zeros)).tolist())) == 1
    edges = quantile_edges(
        [
            np.arange(1000.0),
            np.zeros(0),
            np.array([5.0]),
        ]
    )
    assert edges.shape == (3, 39)
    assert edges[0, [3, 19, 35]].tolist() == [99, 499, 899]
    assert not edges[1].any()
    assert set(edges[2]) == {5.0}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 1, 0], [2, 2, 0], 0),
        ([4, 0], [0, 9], 1),
        ([3, 1], [1, 3], 0.5),
        ([0, 0], [1, 3], None),
    ],
)
def test_total_variation_matches_reference(
    first: list[int],
    second: list[int],
    expected: float | None,
) -> None:
    found = data_report.total_variation(np.array(first), np.array(second))
    assert (found and found[0]) == expected


def test_total_variation_expectation_matches_samples() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(50, 0.5))
    drawn = [
        data_report.total_variation(rng.multinomial(2000, shares), rng.multinomial(500, shares))
        for _ in range(200)
    ]
    distances, by_chance = np.array(drawn).T
    assert by_chance.mean() == pytest.approx(distances.mean(), rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_auroc_of_rates_matches_scored_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outcomes = rng.poisson(rng.exponential(20, (12, 4))).astype(np.int64)
    misses, clicks, held_misses, held_clicks = outcomes.T
    average = clicks.sum() / (misses + clicks).sum()
    scores = (clicks + 10 * average) / (misses + clicks + 10)
    labels = np.repeat([0, 1], [held_misses.sum(), held_clicks.sum()])
    row_terms = np.concatenate([np.repeat(scores, held_misses), np.repeat(scores, held_clicks)])
    if min(held_misses.sum(), held_clicks.sum()) >= 20:
        assert data_report.rate_auroc(outcomes) == pytest.approx(roc_auc_score(labels, row_terms))


def test_auroc_of_rates_and_top_categories_match_reference() -> None:
    assert data_report.rate_auroc(np.array([[300, 0, 100, 0], [0, 300, 0, 100]])) == 1
    assert data_report.rate_auroc(np.full((2, 4), 100)) == 0.5
    assert data_report.rate_auroc(np.array([[300, 0, 19, 0], [0, 300, 0, 100]])) is None
    assert data_report.rate_auroc(np.zeros((2, 4), np.int64)) is None
    rng = np.random.default_rng(3)
    tokens = rng.permutation(1000).astype(np.uint32)
    counts = rng.integers(1, 20, 1000)
    expected = tokens[np.lexsort((tokens, -counts))][:TOP]
    for _ in range(3):
        order = rng.permutation(1000)
        found = data_report.top_categories(tokens[order], counts[order])
        assert (found.dtype, found.tolist()) == (np.uint64, expected.tolist())


FOUR = SparseColumn(num_embeddings=4, num_tokens=4)  # ids 2, 3, 4 % 4 = 0, 5 % 4 = 1
THREE = SparseColumn(num_embeddings=3, num_tokens=4)  # 2, 0, 1, 2
HASHED = SparseColumn(num_embeddings=12, num_tokens=None)  # 2 + token mod 10
KNOWN = [70, 50, 60, 90]
SOME = {
    50: 1,
    60: 2,
    70: 3,
    90: 4,
    13: 50,
    14: 50,
}


@pytest.mark.parametrize(
    ("column", "vocabulary", "counts", "expected"),
    [
        (FOUR, KNOWN, SOME, 0),
        (THREE, KNOWN, SOME, 0.7),
        (
            HASHED,
            [],
            {1: 3, 11: 2, 5: 4, 7: 1},
            0.5,
        ),
        (HASHED, [], {}, None),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_collision_rate_matches_encoder(
    column: SparseColumn,
    vocabulary: list[int],
    counts: dict[int, int],
    expected: Any,
    dtype: type,
) -> None:
    known = np.array(vocabulary, dtype)
    tokens = np.array(list(counts), dtype)
    assert (
        data_report.collision_rate(column, known, tokens, np.array(list(counts.values()), np.int64))
        == expected
    )


def test_collision_rate_supports_murmur3() -> None:
    column = SparseColumn(10, None, first_id=0, murmur3=True)
    tokens = np.arange(1, 16, dtype=np.uint32)
    counts = np.arange(1, 16)
    places = (murmur3(np.arange(16, dtype=np.uint32)) % 10).tolist()
    expected = sum(token for token in range(1, 16) if places[1:].count(places[token]) > 1) / sum(
        range(1, 16)
    )
    assert data_report.collision_rate(column, np.zeros(0, np.uint32), tokens, counts) == expected
