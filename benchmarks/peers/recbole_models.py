"""RecBole's models on a given split, run by the Python of an environment that has RecBole: prints a
JSON line of test metrics.

python recbole_models.py MODEL FOLDER clicks|top-k [SEED]   # FOLDER/ml/ml.{train,valid,test}.inter
"""

import json
import sys
import time
import types

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


def main(model: str, folder: str, task: str, seed: str = "0") -> None:
    from recbole.quick_start import run_recbole

    torch.autograd.set_detect_anomaly(False)  # importing RecBole's SINE turns it on for all models
    settings = {
        **SHARED,
        **(CLICKS if task == "clicks" else TOP_K),
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
