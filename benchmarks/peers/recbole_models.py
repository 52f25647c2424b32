"""RecBole's models on a given split, run by the Python of an environment that has RecBole: prints a
JSON line of test metrics.

python recbole_models.py MODEL FOLDER clicks|top-k [SEED]   # FOLDER/ml/ml.{train,valid,test}.inter
python recbole_models.py MODEL FOLDER "next-item DROPOUT EPOCHS"   # FOLDER/ml/ml.inter, in the
order of time
"""

import json
import sys
import time
import types
from typing import Any

# RecBole imports Ray for its own search of settings, which is not used here
sys.modules["ray"] = types.ModuleType("ray")
sys.modules["ray.tune"] = types.ModuleType("ray.tune")
vars(sys.modules["ray"])["tune"] = sys.modules["ray.tune"]

import numpy as np  # noqa: E402
import torch  # noqa: E402

for name, kind in (
    ("float_", np.float64),
    ("bool8", np.bool_),
    ("complex_", np.complex128),
    ("unicode_", np.str_),
):
    if not hasattr(np, name):
        setattr(np, name, kind)  # names that RecBole still uses
_load = torch.load
# RecBole's checkpoint
torch.load = lambda *args, **kwargs: _load(*args, **{**kwargs, "weights_only": False})


SHARED = {
    "benchmark_filename": ["train", "valid", "test"],
    "field_separator": "\t",
    "seq_separator": " ",
    "state": "ERROR",
    "show_progress": False,
}
CLICKS = {
    "LABEL_FIELD": "label",
    "load_col": {
        "inter": [
            "user_id",
            "item_id",
            "age",
            "gender",
            "occupation",
            "zip_code",
            "release_year",
            "class",
            "label",
        ]
    },
    "eval_args": {
        "split": {"RS": [0.8, 0.1, 0.1]},
        "group_by": "None",
        "order": "RO",
        "mode": "labeled",
    },
    "metrics": ["AUC", "LogLoss"],
    "valid_metric": "AUC",
    "train_neg_sample_args": None,
    "epochs": 30,
    "stopping_step": 5,
    "train_batch_size": 1024,
    "eval_batch_size": 8192,
    "learning_rate": 1e-3,
    "embedding_size": 16,
}
TOP_K = {
    "load_col": {"inter": ["user_id", "item_id"]},
    "eval_args": {
        "split": {"LS": "valid_and_test"},
        "group_by": "user",
        "order": "RO",
        "mode": "full",
    },
    "metrics": ["Recall", "NDCG"],
    "topk": [10],
    "valid_metric": "NDCG@10",
}
NEXT_ITEM = {
    "benchmark_filename": None,
    "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
    "eval_args": {
        "split": {"LS": "valid_and_test"},
        "group_by": "user",
        "order": "TO",
        "mode": "full",
    },
    "metrics": ["Recall", "NDCG"],
    "topk": [10],
    "valid_metric": "NDCG@10",
    "loss_type": "CE",
    "train_neg_sample_args": None,
    "MAX_ITEM_LIST_LENGTH": 20,
    "stopping_step": 5,
}


def nest_settings(task: str) -> dict[str, Any]:
    kind, *numbers = task.split()
    if kind != "next-item":
        return CLICKS if kind == "clicks" else TOP_K
    dropout = float(numbers[0])
    return {
        **NEXT_ITEM,
        "hidden_dropout_prob": dropout,
        "attn_dropout_prob": dropout,
        "epochs": int(numbers[1]),
    }


def main(model: str, folder: str, task: str, seed: str = "0") -> None:
    import recbole.model.sequential_recommender  # noqa: F401
    from recbole.quick_start import run_recbole

    torch.autograd.set_detect_anomaly(False)  # importing RecBole's SINE turns it on for all models
    settings = {
        **SHARED,
        **nest_settings(task),
        "seed": int(seed),
        "data_path": folder,
        "checkpoint_dir": f"{folder}/checkpoints",
    }
    begin = time.monotonic()
    done = run_recbole(model=model, dataset="ml", config_dict=settings)
    test_metrics = done["test_result"]
    named = {"auc": "auroc"}
    metrics = {named.get(name, name): float(value) for name, value in test_metrics.items()}
    validation = float(done["best_valid_score"])
    print(json.dumps({**metrics, "validation": validation, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main(*sys.argv[1:])
