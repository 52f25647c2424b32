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
    return [rng.integers(0, ITEMS + 9, size).tolist() for size in rng.integers(1, 4, rows)]


def write(path: Path, item: Lists, target: Lists | None = None) -> str:
    """Write lists, of which all but those of training have targets and their items as seen."""
    empty: Lists = [[] for _ in item]
    columns = {"item": item, "target": target or empty, "seen": item if target else empty}
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


def evaluate(checkpoint: str, **options: Any) -> dict[str, Any]:
    return rayrec.evaluate(checkpoint, console=QUIET, **options)


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


def test_baselines_have_intervals_and_differences(runs: list[str]) -> None:
    result = evaluate(runs[0], k=KS, baselines=("itemknn", "ease"), confidence=0.9, resamples=50)
    names = [baseline["name"] for baseline in result["baselines"]]
    assert names == ["popularity", "itemknn", "ease"]
    for baseline in result["baselines"]:
        difference = baseline["differences"]["recall_at_10"]
        gain = result["recall_at_10"] - baseline["recall_at_10"]
        assert difference["difference"] == pytest.approx(gain)
        assert difference["low"] <= gain <= difference["high"]
        low, high = baseline["intervals"]["recall_at_10"]
        assert low <= baseline["recall_at_10"] <= high
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
    result = evaluate(runs[0], compare=runs[1], slice_by=("length:item",), resamples=50)
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
    rejects(r"train\.parquet", evaluate, run.checkpoint, baselines=("itemknn",))


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
