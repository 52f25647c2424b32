"""Retrieval runs against naive ranks: random logs with rare, unknown and missing items, through
training, evaluation and prediction.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.click_models import make_app
from builders.faults import rejects
from builders.interactions import LENGTH, LISTS, PAIRS, small, write_log
from builders.requests import score
from builders.runs import QUIET, evaluated_and_predicted, events_of, export, train

import rayrec
from rayrec.inference.model import open_served
from rayrec.observe.console import Console
from rayrec.training import trainer
from rayrec.training.result import summary_rows

pytestmark = pytest.mark.usefixtures("own_cache")

K = 5
ALL_ITEMS = 1000
"""More than any log has, so that predictions contain every candidate."""


def random_lists(seed: int, *, rows: int, items: int) -> list[list[int | None]]:
    """Return lists of up to LENGTH items, some frequent and many rare, of which some are missing.
    Category -1 is frequent.
    """
    rng = np.random.default_rng(seed)
    lists: list[list[int | None]] = []
    for size in rng.integers(0, LENGTH + 1, rows):
        values = (items * rng.random(size) ** 3).astype(int) - 1
        lists.append([None if rng.random() < 0.05 else int(value) for value in values])
    return lists


def write_lists(folder: Path, lists: Sequence[Sequence[int | None]]) -> str:
    folder.mkdir()
    pq.write_table(
        pa.table({"item": pa.array(lists, pa.list_(pa.int64()))}),
        folder / "log.parquet",
    )
    return str(folder)


def expected_at_k(scores: dict[int, float], item: int, k: int) -> tuple[float, float]:
    """Return mean NDCG and recall at k over all orders of tied items, 0 for an item without a
    score.
    """
    if item not in scores:
        return 0.0, 0.0
    above = sum(other > scores[item] for other in scores.values())
    tied = sum(other == scores[item] for other in scores.values())
    ranks = [rank for rank in range(above, above + tied) if rank < k]
    return sum(1 / math.log2(rank + 2) for rank in ranks) / tied, len(ranks) / tied


def present_items(lists: Sequence[Sequence[int | None]]) -> list[list[int]]:
    return [[item for item in items if item is not None] for items in lists]


@pytest.mark.parametrize("min_count", [1, 2, 3, 4, 5])
def test_next_item_metrics_match_naive_ranks(min_count: int, tmp_path: Path) -> None:
    trained = random_lists(min_count, rows=60, items=60)
    later = random_lists(100 + min_count, rows=80, items=90)
    log = write_lists(tmp_path / "log", trained)
    evaluated = write_lists(tmp_path / "later", later)
    config = small("next_item", log, tmp_path, 3, eval_data={"path": evaluated}).replace(
        workload={"preset": {"min_count": min_count}}
    )
    run = train(config)
    complete = train(config, name="all", workload={"model": {"k": ALL_ITEMS}})

    counts = Counter(itertools.chain(*present_items(trained)))
    vocabulary = {item for item, count in counts.items() if count >= min_count}
    assert -1 in vocabulary
    metrics = rayrec.evaluate(run.checkpoint, evaluated, console=QUIET)
    present = present_items(later)
    before = write_lists(tmp_path / "before", [items[:-1] for items in present])
    _, predicted = evaluated_and_predicted(
        complete.checkpoint,
        before,
        tmp_path / "scores",
        exclude_seen=False,
    )
    results = []
    unknown = 0
    for items, order, scores in zip(
        present,
        predicted["items"].to_pylist(),
        predicted["scores"].to_pylist(),
        strict=True,
    ):
        # Each candidate once, after empty and unknown histories too
        assert sorted(order) == sorted(vocabulary)
        if len(items) < 2:
            continue
        unknown += items[-1] not in vocabulary
        results.append(expected_at_k(dict(zip(order, scores, strict=True)), items[-1], K))
    assert (metrics["targets"], metrics["unknown_targets"]) == (len(results), unknown)
    assert metrics["unknown_targets"] > 0
    names = (f"ndcg_at_{K}", f"recall_at_{K}")
    result = [metrics[name] for name in names]
    assert result == pytest.approx(np.mean(results, axis=0).tolist(), rel=1e-5)
    assert [run.metrics[name] for name in names] == pytest.approx(result, abs=1e-6)


def test_towers_with_several_item_features_rank_distinct_items(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower")
    table = pq.read_table(log)
    kind = pa.array(table["item"].to_numpy() % 3)
    pq.write_table(table.append_column("kind", kind), f"{log}/log.parquet")
    schema = PAIRS.replace(sparse=("user", "item", "kind"))
    run = train(
        small("two_tower", log, tmp_path, 30).replace(
            workload={"schema": schema, "model": {"item_features": ("item", "kind")}}
        )
    )
    rows = pq.read_table(log)
    metrics, predicted = evaluated_and_predicted(run.checkpoint, log, tmp_path / "scores")
    users, items = (np.array(predicted[name].to_pylist()) for name in ("user", "item"))
    names = rows["item"].to_numpy()
    _, first = np.unique(names, return_index=True)
    results = [
        expected_at_k(
            dict(zip(names[first].tolist(), (items[first] @ user).tolist(), strict=True)),
            int(name),
            K,
        )
        for user, name in zip(users, names, strict=True)
    ]
    assert metrics["ndcg_at_5"] == pytest.approx(np.mean([ndcg for ndcg, _ in results]), rel=1e-3)
    assert metrics["recall_at_5"] == pytest.approx(
        np.mean([recall for _, recall in results]),
        rel=1e-3,
    )
    assert metrics["ndcg_at_5"] < metrics["recall_at_5"] < 1


def test_answers_have_all_items_but_no_reserved_rows(tmp_path: Path) -> None:
    """Covers k above the number of items, an empty history, and a history of unknown items."""
    log = write_lists(tmp_path / "log", [[-1, 7, 8], [7, -1, 9], [8, 9, -1, 7]])
    run = train(small("next_item", log, tmp_path, 2), workload={"model": {"k": ALL_ITEMS}})
    export(run.checkpoint, tmp_path / "export")
    rows = [
        {"item": [7, 8]},
        {"item": []},
        {"item": [55, 56]},
        {},
    ]
    for source in (run.checkpoint, f"{tmp_path}/export"):
        answer = score(make_app(open_served(source)), {"rows": rows})
        assert [sorted(items) for items in answer["items"]] == [[-1, 7, 8, 9]] * len(rows)
        assert all(scores == sorted(scores, reverse=True) for scores in answer["scores"])
    program = torch.export.load(tmp_path / "export" / "dense.pt2").module()
    ids = torch.tensor([2, 3])
    table = torch.randn(6, 16)
    table[:2] = 100.0
    items, scores = program(
        torch.zeros(1, 0),
        torch.zeros(1, 0),
        table[ids],
        torch.tensor([2]),
        ids,
        table,
    )
    assert (sorted(items[0].tolist()), scores.shape) == ([2, 3, 4, 5], (1, 4))


ONE_EACH = [[7], [8], [], [7]]
IN_ORDER = [[7, 8], [8, 7]]


@pytest.mark.parametrize(
    ("lists", "later", "message"),
    [
        pytest.param(
            ONE_EACH,
            IN_ORDER,
            "log: no list of column item in the train rows has two items, got at most 1",
            id="one",
        ),
        pytest.param(
            IN_ORDER,
            ONE_EACH,
            "later: no list of column item in the validation rows has two items",
            id="validation",
        ),
        pytest.param(
            [[7, 1], [7, 2, 3]],
            IN_ORDER,
            "log: no train row has a known item of column item to predict",
            id="rare",
        ),
        pytest.param(
            [[1], [2, 3]],
            IN_ORDER,
            r"min_count: no category of column item is in enough .* got 2\. Lower",
            id="none",
        ),
    ],
)
def test_lists_without_targets_end_run_at_once(
    lists: Any,
    later: Any,
    message: str,
    tmp_path: Path,
) -> None:
    log = write_lists(tmp_path / "log", lists)
    evaluated = write_lists(tmp_path / "later", later)
    config = small("next_item", log, tmp_path, 3, eval_data={"path": evaluated})
    min_count = 2 if "known" in message or "min_count" in message else 1
    rejects(message, train, config.replace(workload={"preset": {"min_count": min_count}}))
    assert events_of(tmp_path / "run", "step") == []


def test_single_items_end_run_at_once(tmp_path: Path) -> None:
    """A column of single items, as in a log of events."""
    log = tmp_path / "log.csv"
    log.write_text("item\n7\n8\n7\n")
    rejects(
        "no list of column item in the train rows has two items",
        train,
        small("next_item", str(log), tmp_path, 3),
    )
    log.write_text("item\n7|8\n8\n7\n")
    assert train(small("next_item", str(log), tmp_path, 1), name="lists").metrics["targets"] == 1


def test_targets_are_searched_in_all_files(tmp_path: Path) -> None:
    log = write_lists(tmp_path / "log", ONE_EACH)
    (tmp_path / "log" / "log.parquet").rename(tmp_path / "log" / "a.parquet")
    write_lists(tmp_path / "later", IN_ORDER)
    (tmp_path / "later" / "log.parquet").rename(tmp_path / "log" / "b.parquet")
    assert train(small("next_item", log, tmp_path, 1)).metrics["targets"] == 2


def test_columns_before_list_are_no_targets(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item\n1,7\n2,8\n1,7\n")
    schema = LISTS.replace(sparse=("user", "item"))
    config = small("next_item", str(log), tmp_path, 1).replace(workload={"schema": schema})
    rejects("no list of column item in the train rows has two items, got at most 1", train, config)


def test_hashed_items_are_rejected_before_training(tmp_path: Path) -> None:
    log = write_lists(tmp_path / "log", [[1, 2, 3], [4, 5, 6]])
    hashed = {"preset": {"max_num_embeddings": 4}}
    rejects(
        "each category of column item must have a separate id, because SASRecConfig predicts them",
        train,
        small("next_item", log, tmp_path, 3).replace(workload=hashed),
    )
    pairs = write_log(tmp_path / "pairs", "two_tower", users=20)
    run = train(small("two_tower", pairs, tmp_path, 1).replace(workload=hashed), name="vectors")
    assert run.metrics["recall_at_5"] == 1  # Of two rows


def test_k_above_number_of_items_is_noted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = write_lists(tmp_path / "log", IN_ORDER)
    trainer.train(small("next_item", log, tmp_path, 1), console=Console())
    assert (
        f"workload.model.k: column item has only 2 known items, got {K}. The first {K} are all of "
        "them"
    ) in capsys.readouterr().err


def test_summary_names_rows_of_metrics(tmp_path: Path) -> None:
    log = write_lists(tmp_path / "log", [[row, row + 1, row + 2] for row in range(42)])
    with_test = train(
        small("next_item", log, tmp_path, 1, eval_data={"path": None}),
        name="held_out",
    ).summary
    assert (with_test["metrics_set"], with_test["rows_of_sets"]) == (
        "test",
        {"train": 36, "validation": 3, "test": 3},
    )
    rows = dict(summary_rows(with_test, folder="run"))
    assert "metrics of" not in rows
    without_test = train(small("next_item", log, tmp_path, 1), name="given").summary
    assert (without_test["metrics_set"], without_test["metrics"]) == (
        "validation",
        without_test["validation"],
    )
    rows = dict(summary_rows(without_test, folder="run"))
    assert rows["metrics of"] == "the validation rows, because no rows are held out for a test"
