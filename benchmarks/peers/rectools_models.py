"""RecTools' sequence models on given lists, run by Python with RecTools: prints metrics or speed
as a JSON line.

python rectools_models.py quality FOLDER SETTINGS   # events of FOLDER/{train,valid,test}.csv
python rectools_models.py speed FOLDER SETTINGS     # events of FOLDER/train.csv

SETTINGS is JSON: model (SASRec, eSASRec), seed, epochs, patience, and RecTools' own arguments in
`arguments`. Each line of a CSV file is `user,item,place`. The model with the best NDCG@10 of the
validation events is tested, with the history of both parts before it, and is not trained again.
"""

import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.ligr import LiGRLayers

K = 10


def main(task: str, folder: str, settings: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(settings["threads"])
    seed_everything(settings["seed"], verbose=False)
    parts = {
        name: _events(f"{folder}/{name}.csv")
        for name in (("train",) if task == "speed" else ("train", "valid", "test"))
    }
    model = _model(settings)
    result = _speed(model, parts) if task == "speed" else _quality(model, parts, settings)
    print(json.dumps(result))


def _events(path: str) -> pd.DataFrame:
    frame = pd.read_csv(path, names=[Columns.User, Columns.Item, "place"])
    frame[Columns.Weight] = 1
    # Distinct times, so that the order of the file is the order of time
    frame[Columns.Datetime] = pd.Timestamp("2000-01-01") + pd.to_timedelta(frame["place"], unit="s")
    return frame.drop(columns="place")


def _model(settings: dict[str, Any]) -> SASRecModel:
    arguments = dict(settings["arguments"])
    if settings["model"] == "eSASRec":
        arguments["transformer_layers_type"] = LiGRLayers

    def trainer() -> Trainer:
        return Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    return SASRecModel(get_trainer_func=trainer, **arguments)


def _quality(
    model: SASRecModel, parts: dict[str, pd.DataFrame], settings: dict[str, Any]
) -> dict[str, Any]:
    train = Dataset.construct(parts["train"])
    both = Dataset.construct(pd.concat([parts["train"], parts["valid"]]))
    best: dict[str, Any] = {"validation": -1.0}
    started = time.perf_counter()
    for epoch in range(settings["epochs"]):
        model.fit_partial(train, min_epochs=1, max_epochs=1)
        validation = _metrics(model, train, parts["valid"])
        if validation["ndcg"] > best["validation"]:
            test = _metrics(model, both, parts["test"])
            best = {"validation": validation["ndcg"], "epoch": epoch, **test}
        if epoch - best["epoch"] >= settings["patience"]:
            break
    return {**best, "seconds": time.perf_counter() - started}


def _metrics(model: SASRecModel, dataset: Dataset, targets: pd.DataFrame) -> dict[str, float]:
    """Return NDCG and recall of one target a user among the first K recommendations. Users whom the
    model cannot recommend to are misses.
    """
    users = targets[Columns.User].unique()
    recommended = model.recommend(
        users, dataset, k=K, filter_viewed=True, on_unsupported_targets="ignore"
    )
    merged = recommended.merge(targets, on=[Columns.User, Columns.Item])
    ranks = merged[Columns.Rank].to_numpy()
    return {
        "ndcg": float((1 / np.log2(ranks + 1)).sum() / len(users)),
        "recall": len(ranks) / len(users),
    }


def _speed(model: SASRecModel, parts: dict[str, pd.DataFrame]) -> dict[str, float]:
    """Return the seconds of an epoch after the first one, without the preparation of the data."""
    dataset = Dataset.construct(parts["train"])
    model.fit_partial(dataset, min_epochs=1, max_epochs=1)
    started = time.perf_counter()
    model.fit_partial(dataset, min_epochs=1, max_epochs=1)
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
