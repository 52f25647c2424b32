"""Metrics of recommendations against those of RecTools 0.19. It has other dependencies than this
project: run this file with a Python that has it, torch and pytest.
"""

import numpy as np
import pytest
import torch

from rayrec.metrics.item_ranks import ItemNumbers, tiled_rank_measures
from rayrec.metrics.recommended import RECOMMENDED, RecommendedItems


def random_items(rng: np.random.Generator, rows: int, candidates: int, most: int) -> ItemNumbers:
    """Return up to `most` distinct items per row, some of them unknown."""
    lists = [
        (row, number - 1)
        for row in range(rows)
        for number in rng.choice(candidates + 1, rng.integers(0, most + 1), replace=False)
    ]
    columns = torch.tensor(lists, dtype=torch.int64)
    return ItemNumbers(columns[:, 0], columns[:, 1])


def test_metrics_match_rectools() -> None:
    metrics = pytest.importorskip("rectools.metrics")
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(5)
    rows = 50
    candidates = 30
    logits = torch.from_numpy(rng.permuted(np.tile(np.arange(30.0), (rows, 1)), axis=1)).float()
    targets = random_items(rng, rows, candidates, 6)
    seen = random_items(rng, rows, candidates, 8)
    measures = tiled_rank_measures(
        lambda start, stop: logits[start:stop].clone(),
        targets,
        shape=(rows, candidates),
        ks=(1, 5, 10),
        seen=seen,
    )
    best = measures[RECOMMENDED].numpy()
    user, place = np.nonzero(best >= 0)
    recommended = pandas.DataFrame(
        {"user_id": user, "item_id": best[user, place], "rank": place + 1}
    )
    interactions = pandas.DataFrame(
        {"user_id": targets.rows.numpy(), "item_id": targets.numbers.numpy()}
    )
    for k in (1, 5, 10):
        for name, metric in (
            ("recall", metrics.Recall(k)),
            ("ndcg", metrics.NDCG(k, divide_by_achievable=True)),
            ("hit_rate", metrics.HitRate(k)),
            ("mrr", metrics.MRR(k)),
        ):
            expected = metric.calc_per_user(recommended, interactions).sort_index()
            found = measures[f"{name}_at_{k}"].numpy()
            np.testing.assert_allclose(found[expected.index], expected.to_numpy(), atol=1e-9)
            assert np.isnan(np.delete(found, expected.index)).all()
        coverage = RecommendedItems(candidates, (k,))
        coverage.update(best)
        catalog = range(candidates)
        found_coverage = coverage.compute()[f"coverage_at_{k}"]
        assert found_coverage == pytest.approx(
            metrics.CatalogCoverage(k, normalize=True).calc(recommended, catalog),
            abs=1e-9,
        )
