"""Evaluations and comparisons of a retrieval model on prepared lists, against plain Python."""

import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.interactions import PAIRS, small, write_log
from builders.runs import QUIET, train

import rayrec
from rayrec.inference.evaluation_report import render
from rayrec.inference.result_tables import comparison_text, evaluation_text
from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.models.item_baselines import ItemKNN
from rayrec.schema import Feature, Schema

ITEMS = 40
KS = (1, 5, 10)
SCHEMA = Schema(
    label=None,
    dense=(),
    sparse=("item", "target", "seen"),
    lists=("item", "target", "seen"),
    optional=("target", "seen"),
    features=(
        Feature(name="item", max_length=8),
        Feature(name="target", vocabulary="item"),
        Feature(name="seen", vocabulary="item"),
    ),
)
Lists = list[list[int]]


def random_lists(seed: int, rows: int) -> Lists:
    """Return lists of up to 9 items, each some steps after the one before. Models read the last
    8.
    """
    rng = np.random.default_rng(seed)
    lists = []
    for size in rng.integers(0, 10, rows):
        steps = rng.integers(1, 4, size).cumsum() + rng.integers(0, ITEMS)
        lists.append((steps % ITEMS).tolist())
    return lists


def random_targets(rows: int) -> Lists:
    """Return up to three items, of which some are unknown, seen or repeated."""
    rng = np.random.default_rng(9)
    return [
        rng.integers(
            0,
            ITEMS + 9,
            size,
        ).tolist()
        for size in rng.integers(1, 4, rows)
    ]


def write(path: Path, item: Lists, target: Lists | None = None) -> str:
    """Write lists, of which all but those of training have targets and their items as seen."""
    empty: Lists = [[] for _ in item]
    columns = {"item": item, "target": target or empty, "seen": item if target else empty}
    return write_lists(path, columns)


def write_lists(path: Path, columns: dict[str, Lists]) -> str:
    arrays = {name: pa.array(lists, pa.list_(pa.int64())) for name, lists in columns.items()}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(arrays), path)
    return str(path)


TRAINED = random_lists(0, 150)
HISTORIES = random_lists(1, 50)
TARGETS = random_targets(50)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the checkpoints of two models of one log."""
    folder = tmp_path_factory.mktemp("recommendations")
    log = write(folder / "log" / "train.parquet", TRAINED)
    later = write(folder / "later" / "valid.parquet", HISTORIES, TARGETS)
    config = small("next_item", log, folder, 20, eval_data={"path": later}).replace(
        workload={"schema": SCHEMA}
    )
    one = train(config, name="one")
    # Evaluations in training report what a later one does
    metrics = rayrec.evaluate(one.checkpoint, console=QUIET)
    for name, value in one.metrics.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert {"coverage_at_5", "mrr_at_5", "hit_rate_at_5", "seen_targets"} < set(one.metrics)
    return [one.checkpoint, train(config, name="two", seed=1).checkpoint]


def evaluate(checkpoint: str, path: str | None = None, **options: Any) -> dict[str, Any]:
    return rayrec.evaluate(checkpoint, path, console=QUIET, **options)


def expected_metrics(
    counts: Counter[int],
    left: set[int],
    relevant: set[int],
    total: int,
) -> dict[str, float]:
    """Return recall and NDCG at each k of a row with these candidates, means over orders of tied
    ones.
    """
    metrics = {}
    for k in KS:
        hits = 0.0
        gain = 0.0
        for item in relevant & left:
            above = sum(counts[other] > counts[item] for other in left)
            tied = sum(counts[other] == counts[item] for other in left)
            ranks = [rank for rank in range(above, above + tied) if rank < k]
            hits += len(ranks) / tied
            gain += sum(1 / math.log2(rank + 2) for rank in ranks) / tied
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, total)))
        metrics |= {f"recall_at_{k}": hits / total, f"ndcg_at_{k}": gain / ideal}
    return metrics


def test_popularity_matches_plain_counts_and_ranks(runs: list[str]) -> None:
    counts = Counter(itertools.chain(*TRAINED))
    known = set(counts)
    expected: dict[str, list[float]] = {}
    recommended: set[int] = set()
    for history, target in zip(HISTORIES, TARGETS, strict=True):
        left = known - set(history)
        relevant = {item for item in target if item in known}
        unknown = [item for item in target if item not in known]
        total = len(relevant) + len(unknown)
        for name, value in expected_metrics(counts, left, relevant, total).items():
            expected.setdefault(name, []).append(value)
        recommended |= set(sorted(left, key=lambda item: -counts[item])[:1])
    result = evaluate(runs[0], k=KS)
    (popularity,) = result["baselines"]
    assert (popularity["name"], popularity["trained_rows"]) == ("popularity", len(TRAINED))
    for name, values in expected.items():
        assert popularity[name] == pytest.approx(np.mean(values), abs=1e-12), name
    for name in ("targets", "unknown_targets", "seen_targets", "rows"):
        assert popularity[name] == result[name] > 0, name
    unknown_targets = [item for item in itertools.chain(*TARGETS) if item not in known]
    assert result["unknown_targets"] == len(unknown_targets)
    # Which of tied items is recommended depends on the vocabulary's order
    assert popularity["coverage_at_1"] == pytest.approx(len(recommended) / len(known), abs=0.1)
    assert result["popularity_at_1"] < popularity["popularity_at_1"]


def test_batches_change_no_metric(runs: list[str]) -> None:
    one = evaluate(runs[0], k=KS, baselines=("itemknn",))
    parts = evaluate(runs[0], k=KS, baselines=("itemknn",), batch_rows=7)
    for name, value in one.items():
        if isinstance(value, float):
            assert parts[name] == pytest.approx(value, abs=1e-6), name
    assert parts["baselines"] == one["baselines"]
    assert list(evaluate(runs[0]))[1] == "ndcg_at_5"


def test_rows_without_targets_hold_out_their_last_item(runs: list[str], tmp_path: Path) -> None:
    """In a log with columns of targets and seen items, which are empty."""
    plain = write(tmp_path / "plain" / "rows.parquet", HISTORIES)
    longer = [items for items in HISTORIES if len(items) > 1]
    held_out = write_lists(
        tmp_path / "rows.parquet",
        {
            "item": [items[:-1] for items in longer],
            "target": [items[-1:] for items in longer],
            "seen": [[] for _ in longer],
        },
    )
    found = evaluate(runs[0], path=plain, baselines=("itemknn",))
    expected = evaluate(runs[0], path=held_out, baselines=("itemknn",))
    assert (found["rows"], expected["rows"]) == (len(HISTORIES), len(longer))
    pairs = zip(found["baselines"], expected["baselines"], strict=True)
    for one, other in ((found, expected), *pairs):
        for name in ("targets", "unknown_targets", "ndcg_at_5", "mrr_at_5"):
            assert one[name] == pytest.approx(other[name]), name


def test_baselines_have_intervals_and_differences(runs: list[str]) -> None:
    result = evaluate(
        runs[0],
        k=KS,
        baselines=("itemknn", "ease"),
        confidence=0.9,
        resamples=50,
    )
    names = [baseline["name"] for baseline in result["baselines"]]
    assert names == ["popularity", "itemknn", "ease"]
    for baseline in result["baselines"]:
        difference = baseline["differences"]["recall_at_10"]
        gain = result["recall_at_10"] - baseline["recall_at_10"]
        assert difference["difference"] == pytest.approx(gain)
        assert difference["low"] <= gain <= difference["high"]
        low, high = baseline["intervals"]["recall_at_10"]
        assert low <= baseline["recall_at_10"] <= high
        assert (low, high) != tuple(result["intervals"]["recall_at_10"])
    assert result["resampling"]["confidence"] == 0.9
    text = evaluation_text(result)
    assert re.search(r"recall_at_10 +0\.\d{5} +[+-]0\.\d{5}", text)
    assert "itemknn" in text
    assert "itemknn" in render(result)


def test_slices_add_up_to_all_rows(runs: list[str]) -> None:
    by = ("length:item", "frequency:item", "day")
    result = evaluate(runs[0], slice_by=by, confidence=0.9, resamples=20)
    assert list(result["slices"]) == list(by)
    for slices in result["slices"].values():
        assert sum(part["rows"] for part in slices) == result["rows"]
        assert sum(part["targets"] for part in slices) == result["targets"]
        mean = sum(part["rows"] * part["recall_at_5"] for part in slices) / result["rows"]
        assert mean == pytest.approx(result["recall_at_5"])
    assert "by length:item:" in evaluation_text(result)


def test_slices_follow_lengths_and_first_targets(runs: list[str]) -> None:
    result = evaluate(runs[0], slice_by=("length:item", "frequency:item"))
    lengths = {part["value"]: part["rows"] for part in result["slices"]["length:item"]}
    assert lengths["2-4"] == sum(2 <= len(items) <= 4 for items in HISTORIES)
    assert lengths["0"] == HISTORIES.count([])
    (unknown,) = (
        part
        for part in result["slices"]["frequency:item"]
        if part["value"] == "(not in the vocabulary)"
    )
    known = {item for items in TRAINED for item in items}
    assert unknown["rows"] == sum(target[0] not in known for target in TARGETS)
    rejects(
        r"slice_by: length:user: must name a list",
        evaluate,
        runs[0],
        slice_by=("length:user",),
    )


def test_two_models_are_compared_on_their_rows(runs: list[str]) -> None:
    result = evaluate(
        runs[0],
        compare=runs[1],
        slice_by=("length:item",),
        resamples=50,
    )
    other = evaluate(runs[1])
    compared = result["compared"]
    assert compared["ndcg_at_5"] == other["ndcg_at_5"] != result["ndcg_at_5"]
    difference = compared["differences"]["ndcg_at_5"]
    assert difference["difference"] == pytest.approx(result["ndcg_at_5"] - other["ndcg_at_5"])
    assert compared["checkpoint"] == runs[1]
    part = result["slices"]["length:item"][0]
    gain = part["ndcg_at_5"] - part["compared"]["ndcg_at_5"]
    assert part["compared"]["differences"]["ndcg_at_5"]["difference"] == pytest.approx(gain)
    assert "other" in evaluation_text(result)


def test_models_of_other_items_are_compared(runs: list[str], tmp_path: Path) -> None:
    """One that was trained on more items later, some of which are targets."""
    grown = [*TRAINED, *([item + 20 for item in items] for items in TRAINED)]
    log = write(tmp_path / "log" / "train.parquet", grown)
    # Of the last row's target, the first model only knows that it has two
    path = tmp_path / "later" / "valid.parquet"
    later = write(path, [*HISTORIES, [1, 2]], [*TARGETS, [ITEMS + 5, ITEMS + 5]])
    config = small("next_item", log, tmp_path, 20, eval_data={"path": later})
    other = train(config.replace(workload={"schema": SCHEMA})).checkpoint
    result = evaluate(runs[0], path=later, compare=other)
    compared = result["compared"]
    assert compared["unknown_targets"] < result["unknown_targets"]
    rayrec.predict(other, later, out=str(tmp_path / "items"), k=5, console=QUIET)
    items = pq.read_table(tmp_path / "items")["items"].to_pylist()
    counts = Counter(itertools.chain(*TRAINED))
    events = [counts[item] for item in itertools.chain(*items)]
    assert compared["popularity_at_5"] == pytest.approx(np.mean(events))
    known = {item for row in grown for item in row}
    assert compared["coverage_at_5"] == len({*itertools.chain(*items)}) / len(known)
    assert 0 < sum(count == 0 for count in events) < len(events)
    names = [
        model["name"]
        for model in rayrec.compare(
            [*runs, other],
            later,
            console=QUIET,
        )["models"]
    ]
    assert len(names) == 3


def test_comparison_has_baselines_and_gates(runs: list[str]) -> None:
    gates = rayrec.ComparisonGates(min_ndcg_gain=0.5, max_p_value=0.0001)
    result = rayrec.compare(
        runs,
        k=KS,
        baselines=("ease",),
        gates=gates,
        resamples=50,
        console=QUIET,
    )
    names = [model["name"] for model in result["models"]]
    assert names[2:] == ["popularity", "ease"]
    one, two, popularity, _ = result["models"]
    assert one["recall_at_10"] == evaluate(runs[0], k=KS)["recall_at_10"]
    assert one["parameters"] > 0
    assert popularity["parameters"] is None
    pair = result["differences"][0]
    assert (pair["model"], pair["other"]) == (names[1], names[0])
    gain = two["recall_at_5"] - one["recall_at_5"]
    assert pair["recall_at_5"]["difference"] == pytest.approx(gain)
    assert [failure.partition(":")[0] for failure in result["failures"]] == [
        "gates.min_ndcg_gain",
        "gates.max_p_value",
    ]
    assert "ndcg_at_1 over" in result["failures"][0]
    assert "ease less popularity" in comparison_text(result)
    auroc = rayrec.ComparisonGates(min_auroc_gain=0.1)
    rejects(
        r"gates\.min_auroc_gain: the models have no AUROC",
        rayrec.compare,
        runs,
        gates=auroc,
        console=QUIET,
    )


def test_gates_are_on_gain_of_last_model(runs: list[str]) -> None:
    options = {"k": (5,), "resamples": 10, "console": QUIET}
    (pair,) = rayrec.compare(runs, **options)["differences"]
    gain = pair["ndcg_at_5"]["difference"]
    assert gain
    for least, is_failed in ((gain, False), (gain + 1e-6, True)):
        gates = rayrec.ComparisonGates(min_ndcg_gain=least)
        assert (
            bool(
                rayrec.compare(
                    runs,
                    gates=gates,
                    **options,
                )["failures"]
            )
            == is_failed
        )


def test_gain_without_targets_fails_gate(runs: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows" / "rows.parquet", [[3], [4], []])
    gates = rayrec.ComparisonGates(min_ndcg_gain=-1.0)
    result = rayrec.compare(runs, path, gates=gates, resamples=10, console=QUIET)
    assert "gains +nan" in result["failures"][0]


def test_models_of_other_k_are_compared_without_gates(runs: list[str], tmp_path: Path) -> None:
    log = write(tmp_path / "log" / "train.parquet", TRAINED)
    rows = write(tmp_path / "rows" / "rows.parquet", HISTORIES, TARGETS)
    config = small("next_item", log, tmp_path, 2, eval_data={"path": rows})
    other = train(config.replace(workload={"schema": SCHEMA, "model": {"k": 3}})).checkpoint
    options = {"path": rows, "resamples": 10, "console": QUIET}
    result = rayrec.compare([runs[0], other], **options)
    assert ["ndcg_at_3" in model for model in result["models"]] == [False, True]
    gates = rayrec.ComparisonGates(min_ndcg_gain=0.1)
    rejects(
        "gates: the models must have metrics at the same k, got 3 and 5. Choose one by --k",
        rayrec.compare,
        [runs[0], other],
        gates=gates,
        **options,
    )


def test_baselines_learn_from_last_rows(
    runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    add = ItemKNN.add

    def recorded(self: ItemKNN, lists: ItemNumbers, rows: int) -> None:
        lengths.extend(lists.counts(rows).tolist())
        add(self, lists, rows)

    monkeypatch.setattr(ItemKNN, "add", recorded)
    result = evaluate(runs[0], baselines=("itemknn",), baseline_rows=40)
    assert lengths == [len(items) for items in TRAINED[-40:]]
    assert [each["trained_rows"] for each in result["baselines"]] == [len(TRAINED), 40]


def test_seen_items_are_not_predicted(runs: list[str], tmp_path: Path) -> None:
    """Those of the list `seen`, which the row's own list lacks."""
    seen = [[item for item in range(ITEMS) if item % 3], [1]]
    rows = write_lists(tmp_path / "rows.parquet", {"item": [[0], [2]], "seen": seen})
    rayrec.predict(
        runs[0],
        rows,
        out=str(tmp_path / "out"),
        k=ITEMS,
        console=QUIET,
    )
    found = pq.read_table(tmp_path / "out")["items"].to_pylist()
    known = set(itertools.chain(*TRAINED))
    assert [set(items) for items in found] == [known - {0, *seen[0]}, known - {2, 1}]


def test_comparison_trains_requested_baselines_only(
    runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []
    monkeypatch.setattr(ItemKNN, "_learn", lambda *_: trained.append("itemknn"))
    result = rayrec.compare(runs, resamples=10, console=QUIET)
    assert "popularity_at_5" in result["models"][0]
    assert not trained


@pytest.fixture(scope="module")
def of_frequent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checkpoint of a model of the same log with fewer items."""
    folder = tmp_path_factory.mktemp("frequent")
    log = write(folder / "log" / "train.parquet", TRAINED)
    config = small("next_item", log, folder, 2, eval_data={"path": log})
    changes = {"schema": SCHEMA, "preset": {"min_count": 22}}
    return train(config.replace(workload=changes)).checkpoint


def test_models_of_other_vocabularies_are_compared(
    runs: list[str],
    of_frequent: str,
    tmp_path: Path,
) -> None:
    rows = write(
        tmp_path / "rows" / "rows.parquet",
        HISTORIES,
        [each[:1] for each in TARGETS],
    )
    checkpoints = [runs[0], of_frequent]
    result = rayrec.compare(checkpoints, rows, resamples=20, console=QUIET)
    for checkpoint, model in zip(checkpoints, result["models"], strict=True):
        alone = rayrec.evaluate(checkpoint, rows, console=QUIET)
        names = ("coverage_at_5", "ndcg_at_5", "unknown_targets")
        assert [model[name] for name in names] == [alone[name] for name in names]
    first, other = result["models"]
    assert first["unknown_targets"] != other["unknown_targets"]
    # The training events of the first one's items, which the other one has too
    assert first["popularity_at_5"] > 0
    assert other["popularity_at_5"] > 0


def test_missing_training_log_is_noted(
    runs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = write(tmp_path / "log" / "train.parquet", TRAINED)
    later = write(tmp_path / "later" / "valid.parquet", HISTORIES, TARGETS)
    config = small("next_item", log, tmp_path, 2, eval_data={"path": later})
    run = train(config.replace(workload={"schema": SCHEMA}))
    Path(log).unlink()
    result = rayrec.evaluate(run.checkpoint)
    assert "baselines" not in result
    assert "coverage_at_5" in result
    assert "No popularity beside" in capsys.readouterr().err
    for kinds in (("itemknn",), ()):
        rejects(r"train\.parquet", evaluate, run.checkpoint, baselines=kinds)


def test_baselines_of_other_models_are_rejected(runs: list[str], tmp_path: Path) -> None:
    rejects(
        r"baselines: lightgbm predicts clicks\. A model of recipe next_item has popularity, ",
        evaluate,
        runs[0],
        baselines=("lightgbm",),
    )
    log = write_log(tmp_path / "pairs", "two_tower")
    run = train(small("two_tower", log, tmp_path, 5))
    result = evaluate(run.checkpoint, k=(2, 5))
    assert result["baselines"][0]["targets"] == result["targets"] == result["rows"]
    assert 0 < result["recall_at_2"] <= result["recall_at_5"]
    rejects(
        r"baselines: itemknn needs lists of items, and column item has one item a row",
        evaluate,
        run.checkpoint,
        baselines=("itemknn",),
    )


def test_models_ranking_items_per_step_are_rejected(tmp_path: Path) -> None:
    log = write_log(tmp_path / "pairs", "two_tower")
    table = pq.read_table(log)
    kind = pa.array(table["item"].to_numpy() % 3)
    pq.write_table(table.append_column("kind", kind), f"{log}/log.parquet")
    config = small("two_tower", log, tmp_path, 2).replace(
        workload={
            "schema": PAIRS.replace(sparse=("user", "item", "kind")),
            "model": {"item_features": ("item", "kind")},
        }
    )
    run = train(config)
    assert not any(name.startswith("coverage") for name in run.metrics)
    for option in ({"confidence": 0.9}, {"baselines": ()}):
        rejects(
            r"recipe two_tower neither predicts clicks nor ranks all known items, which "
            f"{next(iter(option))} need",
            evaluate,
            run.checkpoint,
            **option,
        )
    rejects(
        r"k: metrics at k require groups or a retrieval model",
        evaluate,
        run.checkpoint,
        k=(3,),
    )
    rejects(
        r"Only such models can be compared",
        rayrec.compare,
        [run.checkpoint, run.checkpoint],
        console=QUIET,
    )
