"""Samples of the rows with one label: which rows are kept, by any reader, and that predictions stay
those of all rows.
"""

import importlib.util
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects, watched
from builders.golden_inputs import (
    SCHEMAS,
    Log,
    adopted,
    click_loader,
    log_of,
    order_of,
    prepared,
)
from builders.logs import learn, open_index
from builders.runs import QUIET, check_no_rows_lost, check_same_in_two_parts, train

import rayrec
from rayrec.data.logs import table_log
from rayrec.data.logs.index import LogIndex
from rayrec.hashing import xxh64
from rayrec.inference.training_rows import row_hashes
from rayrec.ingest.block_order import BlockOrder
from rayrec.ingest.stream import encode_block
from rayrec.models.boosted.lightgbm import LightGBMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.recipes.clicks import clicks
from rayrec.recipes.interactions import two_tower
from rayrec.schema import Feature, RowSample, Schema, load_schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.row_sample import sample_order

THIRD = RowSample(label=0, keep=1 / 3)
_WORD = 2**64


def sampled_of(log: Log, order: BlockOrder, folder: Path, rule: RowSample = THIRD) -> BlockOrder:
    folder.mkdir(exist_ok=True)
    return sample_order(
        order,
        log.index,
        rule,
        schema=log.preprocessor.schema,
        engine=LoopEngine(),
        folder=str(folder),
    )


def contents(log: Log, order: BlockOrder) -> list[tuple[int, float]]:
    """The hash and the label of each row of an order, in order."""
    rows = [encode_block(block, 0, block.rows, log.preprocessor) for block in order.blocks(0)]
    return [
        (int(number), float(label))
        for part in rows
        for number, label in zip(row_hashes(part), part.label, strict=True)
    ]


# -- Which rows are kept
def is_sampled(name: str, position: int, label: float, rule: RowSample) -> bool:
    """The definition, in plain integers."""
    value = (position * 0x9E3779B97F4A7C15 + xxh64(name.encode())) % _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _WORD
    value ^= value >> 31
    return label != rule.label or value >> 11 < round(rule.keep * 2**53)


def expected_of(log: Log, order: BlockOrder, rule: RowSample) -> list[tuple[int, float]]:
    """The rows of an order in the log's order that the definition keeps."""
    positions: Counter[str] = Counter()
    wanted = set()
    all_rows = BlockOrder(tuple(log.index.parts(0, log.index.rows)), "none", 0, 3)
    rows = iter(contents(log, all_rows))
    for segment in log.index.segments:
        name = Path(segment.path).name.removesuffix(".parquet")
        for number in range(segment.first_row, segment.first_row + segment.rows):
            _, label = next(rows)
            if is_sampled(name, positions[name], label, rule):
                wanted.add(number)
            positions[name] += 1
    numbers = [
        part.segment.first_row + row for part in order.parts for row in range(part.start, part.stop)
    ]
    return [
        each for number, each in zip(numbers, contents(log, order), strict=True) if number in wanted
    ]


@pytest.mark.parametrize("kind", ["text", "csv", "parquet"])
@pytest.mark.parametrize("rule", [THIRD, RowSample(label=1, keep=0.2), RowSample(label=0, keep=1)])
def test_file_and_position_decide_on_rows(kind: str, rule: RowSample, tmp_path: Path) -> None:
    """The logs have three files, with faulty rows, and segments that the set's borders divide."""
    log = log_of(tmp_path, kind, SCHEMAS["criteo" if kind == "text" else "everything"]())
    order = order_of(log, "none")
    expected = expected_of(log, order, rule)
    assert (len(expected) == order.rows) == (rule.keep == 1)
    assert contents(log, sampled_of(log, order, tmp_path / "run", rule)) == expected


@pytest.mark.parametrize(
    ("kind", "format"),
    [("text", "npy"), ("text", "binary"), ("text", "parquet"), ("csv", "parquet")],
)
def test_preprocessed_data_has_same_sample(kind: str, format: str, tmp_path: Path) -> None:
    log = log_of(tmp_path, kind, SCHEMAS["criteo" if kind == "text" else "everything"]())
    written = prepared(log, tmp_path / "out", format=format, shuffle="none")
    found = []
    for each in (log, written):
        order = order_of(each, "window")
        found.append(contents(each, sampled_of(each, order, tmp_path / each.index.format)))
    assert found[0] == found[1]
    assert len(found[0]) < order.rows


def test_adopted_arrays_are_sampled(tmp_path: Path) -> None:
    log = adopted(tmp_path / "arrays")
    order = order_of(log, "none")
    expected = expected_of(log, order, THIRD)
    assert 0 < len(expected) < order.rows
    assert contents(log, sampled_of(log, order, tmp_path / "run")) == expected


def test_segments_and_file_order_do_not_change_sample(tmp_path: Path) -> None:
    log = log_of(tmp_path, "text", SCHEMAS["criteo"]())
    schema = log.preprocessor.schema
    found = []
    for number, names in enumerate([("day_0", "day_1", "day_2"), ("day_2", "day_0", "day_1")]):
        paths = [open_index(tmp_path / "text" / name, schema, segment_bytes=900) for name in names]
        joined = numbered_again(paths)
        order = BlockOrder(tuple(joined.parts(0, joined.rows)), "none", 0, 2)
        other = Log(joined, log.preprocessor)
        found.append(sorted(contents(other, sampled_of(other, order, tmp_path / str(number)))))
    whole = BlockOrder(tuple(log.index.parts(0, log.index.rows)), "none", 0, 3)
    assert found[0] == found[1] == sorted(contents(log, sampled_of(log, whole, tmp_path / "all")))


def numbered_again(indices: list[LogIndex]) -> LogIndex:
    """One log of several."""
    segments = [segment for index in indices for segment in index.segments]
    stored = {
        "paths": [segment.path for segment in segments],
        "format": "text",
        "segments": [
            [number, each.start, each.stop, each.rows, each.checksum]
            for number, each in enumerate(segments)
        ],
        "faults": {"counts": {}, "first": []},
    }
    return LogIndex.from_dict(stored)


def test_equal_rows_are_sampled_separately(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,user\n" + "0,u\n" * 3000 + "1,u\n" * 50)
    schema = Schema(label="click", sparse=("user",))
    index = open_index(path, schema, cache=tmp_path / "cache")
    log = Log(index, learn(index, schema))
    order = BlockOrder(tuple(index.parts(0, index.rows)), "none", 0, 3)
    labels = Counter(label for _, label in contents(log, sampled_of(log, order, tmp_path / "run")))
    assert labels[1] == 50
    assert abs(labels[0] - 1000) < 4 * math.sqrt(3000 * 2 / 9)


def steps(loaders: list[Any], count: int | None = None) -> Iterator[list[int]]:
    for _ in range(loaders[0].steps if count is None else count):
        yield [number for loader in loaders for number in next(loader).row_numbers.numbers.tolist()]


@pytest.mark.parametrize("kind", ["text", "npy"])
def test_other_workers_train_rest_of_sample_once(kind: str, tmp_path: Path) -> None:
    log = log_of(tmp_path, "text", SCHEMAS["criteo"]())
    if kind == "npy":
        log = prepared(log, tmp_path / "out", format=kind, shuffle="none")
    order = sampled_of(log, order_of(log, "window"), tmp_path / "run")
    first = [click_loader(log, order, rank, 3, batch_size=10) for rank in range(3)]
    trained = [number for step in steps(first, 2) for number in step]
    state = first[0].state()
    assert first[0].trained_rows().rows == len(trained)
    second = [click_loader(log, order, rank, 2, state=state, batch_size=10) for rank in range(2)]
    trained += [number for step in steps(second) for number in step]
    assert sorted(trained) == list(range(order.rows))
    for loader in (*first, *second):
        loader.close()


def test_resumed_run_does_not_count_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path, "text", SCHEMAS["criteo"]())
    order = order_of(log, "window")
    first = sampled_of(log, order, tmp_path / "run")
    engine = LoopEngine(dies_after=0)
    again = sample_order(
        order,
        log.index,
        THIRD,
        schema=log.preprocessor.schema,
        engine=engine,
        folder=str(tmp_path / "run"),
    )
    assert (engine.tasks, again) == (0, first)
    other = sampled_of(log, order, tmp_path / "run", RowSample(label=0, keep=0.9))
    assert other.rows > first.rows


def test_changed_labels_are_reported(tmp_path: Path) -> None:
    log = log_of(tmp_path, "text", SCHEMAS["criteo"]())
    log = prepared(log, tmp_path / "out", format="npy", shuffle="none")
    order = sampled_of(log, order_of(log, "none"), tmp_path / "run")
    for path in (tmp_path / "out").glob("*_labels.npy"):
        labels = np.load(path, mmap_mode="r+")
        labels[:] = 1
        labels.flush()
    rejects("changed since the log was indexed", contents, log, order)


def test_empty_sample_is_rejected(tmp_path: Path) -> None:
    log = log_of(tmp_path, "text", SCHEMAS["criteo"]())
    order = BlockOrder(tuple(log.index.parts(0, 1)), "none", 0, 1)
    ((_, label),) = contents(log, order)
    rule = RowSample(label=int(label), keep=1e-9)  # type: ignore[arg-type]
    rejects("keeps none of the 1 training rows", sampled_of, log, order, tmp_path / "run", rule)


def test_other_rows_of_tables_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 900
    table = pa.table({"click": [int(row % 9 == 0) for row in range(rows)], "user": range(rows)})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=100)
    features = (Feature(name="logarithm", formula="log(number(user))"),)
    schema = Schema(label="click", sparse=("user",), features=features)
    index = open_index(tmp_path / "log.parquet", schema, cache=tmp_path / "cache")
    log = Log(index, learn(index, schema))
    order = BlockOrder(tuple(index.parts(0, index.rows)), "none", 0, 3)
    kept = sampled_of(log, order, tmp_path / "run")
    calls = watched(monkeypatch, table_log, "parse_table")
    assert contents(log, kept) == expected_of(log, order, THIRD)
    assert sum(arguments[0].num_rows for arguments in calls[: len(index.segments)]) == kept.rows


# -- Schemas and settings
def test_schema_accepts_sample() -> None:
    schema = load_schema("label: click\nsparse: [user]\nsample: {label: 0, keep: 0.1}", "file")
    assert schema.sample == RowSample(label=0, keep=0.1)
    assert schema.updated({"sample": {"keep": 0.5}}).sample == RowSample(label=0, keep=0.5)
    assert schema.unlabelled().sample is None
    assert Schema(label=None, sparse=("-",)).updated(schema.to_dict()).sample == schema.sample


def test_sample_changes_no_stored_schema() -> None:
    schema = Schema(label="click", sparse=("user",))
    assert "sample" not in schema.to_dict()
    assert schema.replace(sample=THIRD).describe() == schema.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label: click\nsample: {label: 2, keep: 0.1}", "label: .*should be 0 or 1.*, got 2"),
        ("label: click\nsample: {label: 0, keep: 0}", "keep: must be above 0 and at most 1, got 0"),
        ("label: click\nsample: {label: 0, keep: 2}", "keep: must be above 0 and at most 1, got 2"),
        ("label: click\nsample: {label: 0}", "sample.keep: RowSample requires a value"),
        ("label: click\nsample: {label: 0, keep: 1, seed: 3}", "sample.seed: .*no such field"),
        ("label: null\nsample: {label: 0, keep: 1}", "sample needs a label of 0 and 1, got none"),
        (
            "label: click\nlabels: [{name: bought}]\nsample: {label: 0, keep: 1}",
            "sample needs a log with one label, got also bought",
        ),
    ],
)
def test_impossible_samples_are_rejected(text: str, message: str) -> None:
    rejects(message, load_schema, f"{text}\nsparse: [user]", "file")


def test_recipes_without_clicks_reject_samples(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", rows=100)
    config = two_tower(str(log)).replace(storage_path=str(tmp_path))
    schema = SCHEMA.replace(sample=THIRD)
    rejects(
        "schema.sample: must be None for TwoTowerConfig, which predicts no clicks",
        train,
        config.replace(workload={"schema": schema, "model": {"item_features": ("item",)}}),
    )


# -- Training
SCHEMA = Schema(label="click", dense=("price",), sparse=("user", "item"), delimiter=",")
TENTH = RowSample(label=0, keep=0.1)
needs_lightgbm = pytest.mark.skipif(
    importlib.util.find_spec("lightgbm") is None, reason="needs lightgbm"
)


def write_log(path: Path, *, rows: int) -> Path:
    """A log with 5 % clicks, which depend on price, user and item."""
    draw = random.Random(1)
    users = [draw.gauss(0, 0.8) for _ in range(50)]
    items = [draw.gauss(0, 0.8) for _ in range(30)]
    lines = ["click,price,user,item"]
    for _ in range(rows):
        user = draw.randrange(50)
        item = draw.randrange(30)
        price = draw.expovariate(0.1)
        logit = users[user] + items[item] + 0.8 * (price < 5) - 3.7
        click = int(draw.random() < 1 / (1 + math.exp(-logit)))
        lines.append(f"{click},{price:.2f},u{user},i{item}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.csv", rows=40_000)


def config_of(log: Path, storage: Path, sample: RowSample | None, **changes: Any) -> TrainConfig:
    config = clicks(str(log), SCHEMA.replace(sample=sample))
    fields = {"name": "run", "storage_path": str(storage), "early_stopping": {"patience": 0}}
    return config.replace(**fields, batch_size=256, min_steps_per_epoch=1, **changes)


@pytest.fixture(scope="module")
def on_all(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a run on all rows."""
    return train(config_of(log, tmp_path_factory.mktemp("all"), None, steps=300))


def check_calibrated(run: Any, log: Path, out: Path) -> None:
    """Check that the mean probability is near the rate of clicks of the whole log."""
    rayrec.predict(run.checkpoint, str(log), out=str(out), console=QUIET)
    scores = pq.read_table(out).column("score").to_numpy()
    rate = np.loadtxt(log, delimiter=",", skiprows=1, usecols=0).mean()
    assert 0.04 < rate < 0.07
    assert len(scores) == 40_000
    assert abs(scores.mean() - rate) < min(0.02, 0.1 * rate)


@pytest.mark.parametrize(
    ("model", "teacher"),
    [
        (None, 0.0),
        (FinalNetConfig(first_tower=(64,), second_tower=(64,), batch_norm=False, members=2), 0.0),
        pytest.param(LightGBMConfig(trees=60, leaves=8), 0.0, marks=needs_lightgbm),
        (None, 0.9),
    ],
    ids=["recipe", "own loss", "trees", "teacher"],
)
def test_model_of_sample_is_calibrated(
    log: Path, tmp_path: Path, on_all: Any, model: Any, teacher: float
) -> None:
    workload: dict[str, Any] = {"dense_optimizer": {"learning_rate": 0.003}}
    if model is not None:
        workload["model"] = model
    if teacher:
        workload["teacher"] = {"checkpoint": on_all.checkpoint, "weight": teacher}
    config = config_of(log, tmp_path, TENTH, workload=workload)
    if not isinstance(model, LightGBMConfig):
        config = config.replace(steps=300)
    run = train(config)
    summary = run.summary
    check_no_rows_lost(summary, restarts=0)
    all_rows = on_all.summary["rows_of_sets"]
    rows = summary["rows_of_sets"]
    assert (rows["validation"], rows["test"]) == (all_rows["validation"], all_rows["test"])
    assert rows["train"] + summary["sampled_out"] == all_rows["train"]
    assert rows["train"] < 0.25 * all_rows["train"]
    assert summary["metrics"]["auroc"] > on_all.summary["metrics"]["auroc"] - 0.03
    check_calibrated(run, log, tmp_path / "scores")


@pytest.mark.parametrize(
    "model",
    [None, pytest.param(LightGBMConfig(trees=20, leaves=8), marks=needs_lightgbm)],
    ids=["dlrm", "trees"],
)
def test_resumed_run_has_same_weights(log: Path, tmp_path: Path, model: Any) -> None:
    # A schedule that does not depend on the last step
    workload = {"schedule": {"decay_fraction": 0.0}} | ({"model": model} if model else {})
    saved = {"evaluate_every": 10, "checkpoint": {"every": 10}}
    config = config_of(log, tmp_path, TENTH, workload=workload, steps=20, **saved)
    check_same_in_two_parts(config, train(config), steps=10)


def test_another_sample_does_not_resume(log: Path, tmp_path: Path) -> None:
    config = config_of(log, tmp_path, TENTH, steps=4)
    train(config)
    other = config_of(log, tmp_path, THIRD, steps=8)
    rejects("workload.schema.sample.keep: 0.1 -> 0.3333", train, other)
    rejects("workload.schema.sample: .*keep.* -> ", train, config_of(log, tmp_path, None, steps=8))
