"""LightGBM from a raw log to the AUROC of its test rows: what a user without a deep model would
run.

Usage: python lightgbm_clicks.py LOG; a Kaggle-format log, split as `rayrec` splits it: the last
seventh is halved into validation and test rows. Prints {"auroc": ...} as its last line.
"""

import json
import sys

import lightgbm
import pandas

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
ROUNDS = 200
PATIENCE = 20


def main(path: str) -> None:
    categories = {1 + NUM_INTEGERS + number: "category" for number in range(NUM_CATEGORIES)}
    rows = pandas.read_csv(path, sep="\t", header=None, dtype=categories)
    labels = rows[0]
    columns = rows.drop(columns=0)
    train = len(rows) * 6 // 7
    test = (train + len(rows)) // 2
    parameters = {"objective": "binary", "metric": "auc", "verbosity": -1, "seed": 0}
    train_set = lightgbm.Dataset(columns[:train], labels[:train])
    sets = {
        "validation": train_set.create_valid(columns[train:test], labels[train:test]),
        "test": train_set.create_valid(columns[test:], labels[test:]),
    }
    evaluations: dict[str, dict[str, list[float]]] = {}
    model = lightgbm.train(
        parameters,
        train_set,
        ROUNDS,
        valid_sets=list(sets.values()),
        valid_names=list(sets),
        callbacks=[
            lightgbm.early_stopping(PATIENCE, first_metric_only=True, verbose=False),
            lightgbm.record_evaluation(evaluations),
        ],
    )
    print(
        json.dumps(
            {
                "auroc": evaluations["test"]["auc"][model.best_iteration - 1],
                "rounds": model.best_iteration,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
