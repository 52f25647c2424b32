"""Synthetic click log: format, determinism, ground truth, and complete or absent files."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import fails_with, rejects
from builders.logs import open_index
from builders.runs import QUIET, check_same_in_two_parts, one_worker, train
from sklearn.metrics import roc_auc_score

import rayrec
from rayrec import recipes
from rayrec.data import synthetic
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.text_parser import parse
from rayrec.data.synthetic import format_rows, max_row_bytes
from rayrec.data.synthetic_law import BLOCK_ROWS, DIALECTS, GroundTruth, Rows
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema
from rayrec.workloads.recsys import planning
from rayrec.workloads.recsys.workload import ClickWorkload

ROWS = 70_000  # more than one block


def all_rows(plan: GroundTruth, rows: int, days: int) -> list[Rows]:
    starts = synthetic.day_starts(rows, days)
    return [
        r
        for b in range(-(-rows // BLOCK_ROWS))
        for _, r in plan.rows(b, spans=synthetic.block_spans(b, starts=starts))
    ]


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("kaggle")
    return out, synthetic.generate(
        str(out),
        rows=ROWS,
        days=3,
        seed=5,
        parallelism=2,
    )


@pytest.fixture(scope="module")
def planted() -> tuple[np.ndarray, np.ndarray]:
    """Return logits and labels of the rows of `kaggle`, drawn again without files."""
    pieces = all_rows(GroundTruth("kaggle", 5), ROWS, 3)
    return np.concatenate([p.logits for p in pieces]), np.concatenate([p.labels for p in pieces])


def test_bytes_depend_on_seed_not_on_parallelism_or_later_rows(
    kaggle: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    out, truth = kaggle
    assert (
        synthetic.generate(
            str(tmp_path),
            rows=ROWS,
            days=3,
            seed=5,
            parallelism=1,
        )
        == truth
    )
    for name in ("train.txt", "truth.json"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()
    plan = GroundTruth("terabyte", 1)
    (short,), long = all_rows(plan, 5_000, 1), all_rows(plan, 20_000, 1)
    for name in ("labels", "logits", "missing", "tokens"):
        assert (
            np.concatenate([getattr(piece, name) for piece in long], axis=-1)[..., :5_000]
            == getattr(short, name)
        ).all()
    one, other = (all_rows(GroundTruth("kaggle", seed), 1_000, 1)[0] for seed in (0, 1))
    both = (one.tokens != 0) & (other.tokens != 0)  # 0 stands where a token is missing
    assert (one.tokens[both] != other.tokens[both]).mean() > 0.99


def test_rows_are_criteo_rows(kaggle: tuple[Path, dict[str, Any]]) -> None:
    row = re.compile(r"[01](\t(-?\d+)?){13}(\t([0-9a-f]{8})?){26}")
    lines = (kaggle[0] / "train.txt").read_text().split("\n")
    assert (len(lines), lines[-1]) == (ROWS + 1, "")
    assert all(row.fullmatch(line) for line in lines[:-1])
    cells = np.array([line.split("\t") for line in lines[:20_000]])
    empty = (cells[:, 1:] == "").mean(axis=0)
    desired = np.zeros(39)
    for rate, columns in DIALECTS["kaggle"].missing:
        desired[list(columns)] = rate
    assert np.abs(empty - desired).max() < 0.015
    # int_0 and int_9 are missing together
    assert ((cells[:, 1] == "") == (cells[:, 10] == "")).all()
    assert (cells[:, 2] == "-1").mean() == pytest.approx(0.1, abs=0.01)
    assert "-2" in cells[:, 2]
    assert len(np.unique(cells[:, 14 + 2])) > 5_000  # the heavy tail of cat_2
    assert len(np.unique(cells[:, 14 + 8])) <= 3


@pytest.mark.parametrize(("dialect", "rate"), [("kaggle", 0.256), ("terabyte", 0.03)])
def test_label_rate_and_auroc_match_targets(dialect: str, rate: float) -> None:
    pieces = all_rows(GroundTruth(dialect, 2), 100_000, 1)
    logits = np.concatenate([p.logits for p in pieces])
    labels = np.concatenate([p.labels for p in pieces])
    assert labels.mean() == pytest.approx(rate, rel=0.05)
    assert synthetic.exact_auroc(logits, labels) == pytest.approx(0.80, abs=0.015)


def test_truth_matches_file_rows(
    kaggle: tuple[Path, dict[str, Any]],
    planted: tuple[np.ndarray, np.ndarray],
) -> None:
    out, truth = kaggle
    logits, labels = planted
    assert (
        np.array([line[0] == "1" for line in (out / "train.txt").read_text().splitlines()])
        == labels
    ).all()
    assert json.loads((out / "truth.json").read_text()) == truth
    assert truth["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert truth["label_rate"] == labels.mean()
    assert truth["logloss"] == pytest.approx(truth["expected_logloss"], rel=0.01)
    split = truth["split"]
    assert [split[name]["rows"] for name in ("train", "validation", "test")] == [
        60_000,
        5_000,
        5_000,
    ]
    for name, part in (("validation", slice(60_000, 65_000)), ("test", slice(65_000, 70_000))):
        assert split[name]["auroc"] == pytest.approx(
            roc_auc_score(labels[part], logits[part]),
            abs=1e-12,
        )
        assert split[name]["normalized_entropy"] < 1
    assert [detail["rows"] for detail in truth["days_detail"]] == [23_334, 23_333, 23_333]


@pytest.mark.parametrize("rows", [1, 6, 7, 13, 20, 71])
def test_kaggle_split_is_seven_near_equal_parts(rows: int) -> None:
    sizes = [rows // 7 + (part < rows % 7) for part in range(7)]
    validation, test = synthetic.split_starts("kaggle", [0, rows])
    assert validation == sum(sizes[:6])
    assert (test - validation, rows - test) == (-(-sizes[6] // 2), sizes[6] // 2)


def test_auroc_counts_ties_half_and_terabyte_has_daily_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 4, 2_000).astype(np.float32)
    labels = rng.integers(0, 2, 2_000).astype(np.uint8)
    scores[:10] = -0.0
    assert synthetic.exact_auroc(scores, labels) == pytest.approx(
        roc_auc_score(labels, scores),
        abs=1e-12,
    )
    assert synthetic.exact_auroc(scores, np.ones(2_000, dtype=np.uint8)) is None
    calls: list[tuple[int, int]] = []
    truth = synthetic.generate(
        str(tmp_path / "new"),
        rows=1_001,
        dialect="terabyte",
        days=3,
        progress=lambda *row_terms: calls.append(row_terms),
    )
    assert sorted(os.listdir(tmp_path / "new")) == ["day_0", "day_1", "day_2", "truth.json"]
    lines = [len((tmp_path / "new" / f"day_{day}").read_text().splitlines()) for day in range(3)]
    assert lines == [detail["rows"] for detail in truth["days_detail"]] == [334, 334, 333]
    assert [truth["split"][name]["rows"] for name in ("train", "validation", "test")] == [
        668,
        167,
        166,
    ]
    assert calls == [(1_001, 1_001)]


def test_dated_folders_apply_drift(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"rows": 6_000, "days": 3, "seed": 4}
    truth = synthetic.generate(
        str(tmp_path / "dated"),
        drift=5,
        first_date="2026-02-27",
        **arguments,
    )
    names = [f"dt={date}/train.txt" for date in ("2026-02-27", "2026-02-28", "2026-03-01")]
    files = sorted(
        str(path.relative_to(tmp_path / "dated")) for path in (tmp_path / "dated").rglob("*.*")
    )
    assert files == [*names, "truth.json"]
    # The truth is that of the rows: theirs are drawn from the law of day 0, 5 and 10.
    plan = GroundTruth("kaggle", 4)
    days = [
        rows
        for _, rows in GroundTruth("kaggle", 4, 5).rows(
            0,
            spans=[(0, 2_000), (1, 2_000), (2, 2_000)],
        )
    ]
    draws = plan._draws(
        np.random.Generator(np.random.SFC64(np.random.SeedSequence(4, spawn_key=(2, 0))))
    )
    for number, day in enumerate((0, 5, 10)):
        expected = plan._rows(draws[:, 2_000 * number : 2_000 * (number + 1)], day)
        assert (days[number].logits == expected.logits).all()
        assert truth["days_detail"][number]["auroc"] == synthetic.exact_auroc(
            expected.logits,
            expected.labels,
        )
    assert truth["drift"] == 5
    synthetic.generate(str(tmp_path / "plain"), **arguments)
    synthetic.generate(str(tmp_path / "split"), first_date="2026-01-01", **arguments)
    parts = sorted((tmp_path / "split").glob("dt=*/train.txt"))
    assert (
        b"".join(part.read_bytes() for part in parts)
        == (tmp_path / "plain" / "train.txt").read_bytes()
    )
    for wrong in ("2026-02-30", "today", "9999-12-30"):
        rejects(
            "must be a date such as 2026-01-31",
            synthetic.generate,
            str(tmp_path / "wrong"),
            first_date=wrong,
            **arguments,
        )


def test_failed_dated_log_leaves_no_folder_and_tokens_drift(tmp_path: Path) -> None:
    fails_with(
        ZeroDivisionError,
        "",
        synthetic.generate,
        str(tmp_path / "log"),
        rows=100,
        days=2,
        first_date="2026-01-01",
        progress=lambda *_: 1 // 0,
    )
    assert list((tmp_path / "log").iterdir()) == []
    plan = GroundTruth("kaggle", 0)
    first, same, later = (plan._tables(day).tokens[2][:-1] for day in (0, 0, 6))
    assert (first == same).all()
    assert len(np.unique(first)) == len(first)  # one-to-one
    new = ~np.isin(later, first)
    assert 0.1 < new.mean() < 0.3
    assert not new[:20].any()  # the popular ones stay
    assert (np.isin(later, first) & (later != first)).sum() > 100


@pytest.mark.parametrize("parallelism", [1, 2])
def test_failed_log_is_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallelism: int,
) -> None:
    genuine = synthetic._block_text

    def failing(plan: Any, block: int, *rest: Any) -> Any:
        if block == 1:
            raise RuntimeError("a block failed")
        return genuine(plan, block, *rest)

    monkeypatch.setattr(synthetic, "_block_text", failing)
    fails_with(
        RuntimeError,
        "a block failed",
        synthetic.generate,
        str(tmp_path),
        rows=ROWS,
        days=2,
        dialect="terabyte",
        parallelism=parallelism,
    )
    assert os.listdir(tmp_path) == []


def test_failed_publish_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = os.rename

    def failing(source: str, target: str) -> None:
        if target.endswith("truth.json"):
            raise OSError("no space")
        genuine(source, target)

    monkeypatch.setattr(os, "rename", failing)
    fails_with(OSError, "no space", synthetic.generate, str(tmp_path), rows=100)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["train.txt", "truth.json"])
def test_never_overwrites(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    rejects(f"already has {name}", synthetic.generate, str(tmp_path), rows=100)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_generate_rejects_invalid_arguments(tmp_path: Path) -> None:
    for wrong, message in (
        *(
            ({name: value}, name)
            for name, value in (
                ("days", 0),
                ("seed", -1),
                ("parallelism", 0),
            )
        ),
        *(({"rows": rows}, "rows") for rows in (0, 2.5, True)),
        ({"days": 101}, "must be at most the number of rows"),
        ({"dialect": "avazu"}, "kaggle, terabyte"),
        ({"out": "FOLDER/file"}, "must be a folder, got a file"),
        ({"out": "s3://bucket/log"}, "local folder"),
    ):
        (tmp_path / "file").write_text("")
        arguments = {"out": "FOLDER/out", "rows": 100, **wrong}
        rejects(
            message,
            synthetic.generate,
            arguments.pop("out").replace("FOLDER", str(tmp_path)),
            **arguments,
        )
        assert os.listdir(tmp_path) == ["file"]


EXTREMES = np.array([[0, 9, 10, 99, 100, -1, -2, 12345, 2**31 - 1, -(2**31)]], dtype=np.int32)


def format_extremes(capacity: int) -> bytes:
    """Return ten rows whose integers reach every branch of the kernel, without the last row's
    token.
    """
    count = EXTREMES.shape[1]
    out = np.full(capacity + 8, 0xEE, dtype=np.uint8)
    missing = np.zeros(count, dtype=np.uint64)
    missing[-1] = 2
    tokens = np.full((1, count), 0x0A1F9BCD, dtype=np.uint32)
    labels = np.ones(count, dtype=np.uint8)
    try:
        size = format_rows(
            labels,
            dense=EXTREMES,
            tokens=tokens,
            missing=missing,
            out=out[:capacity],
        )
    finally:
        assert (out[capacity:] == 0xEE).all()
    return out[:size].tobytes()


def test_format_rows_matches_python_and_rejects_mismatched_arrays() -> None:
    desired = "".join(
        f"1\t{value}\t{token}\n"
        for value, token in zip(EXTREMES[0], [*["0a1f9bcd"] * 9, ""], strict=True)
    ).encode()
    assert format_extremes(10 * max_row_bytes(1, 1)) == desired
    assert format_extremes(len(desired)) == desired  # a buffer of just the right size will do
    for capacity in range(len(desired)):
        fails_with(ValueError, "must have room for", format_extremes, capacity)
    good = {
        "dense": np.zeros((1, 2), np.int32),
        "tokens": np.zeros((1, 2), np.uint32),
        "missing": np.zeros(2, np.uint64),
        "out": np.zeros(100, np.uint8),
    }
    labels = np.zeros(2, dtype=np.uint8)
    assert format_rows(labels, **good) == len("0\t0\t00000000\n") * 2
    for name, array in good.items():
        fails_with(
            ValueError,
            f"^{name}:",
            format_rows,
            labels,
            **{**good, name: array.astype(np.int16)},
        )


# -- Random logs of any schema
PATH = "random:20000:1"


@pytest.mark.parametrize("segment_bytes", [2 << 20, 150_000])
def test_rows_match_generated_log(click_log: Path, segment_bytes: int) -> None:
    raw, _ = parse(SCHEMA, (click_log / "train.txt").read_bytes())
    index = open_index(PATH, segment_bytes=segment_bytes)
    made = read_raw(index.segments, SCHEMA)
    for name in ("numbers", "categories", "missing"):
        ours = getattr(made, name)
        theirs = getattr(raw, name)
        assert ours.dtype == theirs.dtype
        assert ours.flags.c_contiguous
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(made.labels["label"], raw.labels["label"])
    last = read_raw(index.segments[-1:], SCHEMA.unlabelled())
    np.testing.assert_array_equal(last.categories, raw.categories[-last.rows :])
    assert not last.labels


@pytest.mark.extended
def test_run_matches_generated_log_and_resumes(click_log: Path, tmp_path: Path) -> None:
    """The weights are those of the log, bit by bit; a run resumes exactly, and other commands take
    the rows too.
    """
    config = one_worker(click_log, tmp_path, train_data={"shuffle": "none"})
    log_result = train(config, name="log")
    random_result = train(config, name="random", train_data={"path": PATH})
    assert random_result.summary["weights_sha256"] == log_result.summary["weights_sha256"]
    constant = {"schedule": {"decay_fraction": 0.0}}  # A decay depends on the number of steps.
    shuffled = config.replace(train_data={"path": PATH, "shuffle": "window"}, workload=constant)
    check_same_in_two_parts(shuffled, train(shuffled, name="run"), steps=7)
    log_scores = rayrec.evaluate(log_result.folder, str(click_log / "train.txt"), console=QUIET)
    assert rayrec.evaluate(log_result.folder, PATH, console=QUIET)["auroc"] == log_scores["auroc"]
    made = rayrec.preprocess(
        PATH,
        out=str(tmp_path / "ready"),
        format="binary",
        split="last_file",
        console=QUIET,
    )
    assert made["rows"] == 20_000
    assert rayrec.export(random_result.folder, out=str(tmp_path / "exported"))
    assert isinstance(config.workload, ClickWorkload)
    assert (
        planning._read_slice(config.workload, config.replace(train_data={"path": PATH})).rows_of_log
        == 20_000
    )


def test_unsuitable_paths_and_schemas_raise(tmp_path: Path) -> None:
    for path in ("random:", "random:0", "random:9:x", "random:1e6"):
        config = recipes.criteo_demo(path).replace(storage_path=str(tmp_path))
        rejects("must be random:ROWS or random:ROWS:SEED", train, config)
    other = Schema(dense=("a",), sparse=("b",))
    rejects(
        "the columns of Criteo's logs, 13 dense and 26 sparse",
        LogSource.at("random:100").check_head,
        other,
    )
    assert [segment.rows for segment in open_index("random:3", segment_bytes=1).segments] == [
        1,
        1,
        1,
    ]
