"""Metrics within groups (GAUC, NDCG and others) in one pass, against only the sort by NumPy and
only the ranks by pandas.
"""

import numpy as np
import pandas as pd
from rows import emit, interleaved, timed

from rayrec.metrics.ranking import ranking_metrics

ROWS = 10_000_000
QUICK_ROWS = 200_000
ROWS_PER_GROUP = 20


def main(*, quick: bool = False) -> None:
    rows, repeats = (QUICK_ROWS, 1) if quick else (ROWS, 3)
    chance = np.random.default_rng(0)
    groups = chance.integers(0, rows // ROWS_PER_GROUP, rows) * 0x9E3779B1 + 1
    logits = chance.standard_normal(rows).astype(np.float32)
    labels = (chance.random(rows) < 0.2).astype(np.uint8)

    def rank() -> int:
        ranking_metrics(groups, logits, labels)
        return rows

    def sort() -> int:
        return len(np.lexsort((logits, groups)))

    def rank_by_pandas() -> int:
        return len(
            pd.DataFrame({"group": groups, "logit": logits}).groupby("group")["logit"].rank()
        )

    def rate(seconds: float) -> float:
        return rows / seconds

    rates = interleaved(
        repeats,
        ours=lambda: rate(timed(rank)[1]),
        numpy=lambda: rate(timed(sort)[1]),
        pandas=lambda: rate(timed(rank_by_pandas)[1]),
    )
    for peer, name in (("numpy", "np.lexsort alone"), ("pandas", "pandas groupby.rank alone")):
        emit(
            "ranking_metrics",
            peer=name,
            workload=(
                f"{rows:,} rows in groups of {ROWS_PER_GROUP}: GAUC, NDCG, recall, hit rate, MRR"
            ),
            value=rates["ours"],
            ratio=rates["ours"] / rates[peer],
            repeats=repeats,
        )


if __name__ == "__main__":
    main()
