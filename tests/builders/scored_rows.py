"""Small data-parallel workload that scores rows of a .npz file, and a checkpoint of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rayrec import checkpoint as checkpoints
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.data_parallel.workload import DataParallelWorkload

CLASSES = 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(CLASSES, CLASSES, bias=False)
        self.norm = torch.nn.BatchNorm1d(CLASSES)
        self.outer = torch.nn.Linear(CLASSES, CLASSES)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)))


@dataclass(frozen=True, kw_only=True)
class Scored(DataParallelWorkload):
    """Classifier of four numbers, with arrays x and label in a file."""

    def _train(self, *_: Any) -> Any:
        raise AssertionError("nothing is trained here")

    prepare = set_rows = open_set = _train

    def build(self, prepared: Any) -> Net:
        return Net()

    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        logits = model(tensors["x"])
        loss = functional.cross_entropy(logits.float(), tensors["label"], reduction="none")
        return {"loss": loss, "bits": torch.full_like(loss, 8.0 * logits.element_size())}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "perplexity": float(np.exp(means["loss"]))}

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        arrays = dict(np.load(path))
        if "label" not in arrays:
            raise InputError(f"{path}: has no labels; give a file with an array label")
        return ArrayRows(arrays)

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        return ArrayRows({"x": np.load(path)["x"]})

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> Net:
        return Net()

    def predict(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, np.ndarray | list[str]]:
        logits = model(tensors["x"]).float()
        best = logits.argmax(dim=1)
        return {
            "logits": logits.numpy(),
            "best": best.numpy(),
            "named": [f"class {number}" for number in best.tolist()],
        }


def scored() -> TrainConfig:
    return TrainConfig(recipe="scored", workload=Scored(), eval_batch_size=10)


def trained(folder: Path) -> tuple[str, Net]:
    """Return the folder of a checkpoint of step 1 in a run, and the saved model."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    weights = {
        f"model.{name}": tensor
        for name, tensor in checkpoints.drop_tied_tensors(model.state_dict()).items()
    }
    place = checkpoints.step_folder(str(folder), 1)

    def write_config(target: str) -> None:
        Path(target, "config.yaml").write_text(scored().to_yaml())

    checkpoints.save(place, weights, state={}, extra_files=write_config)
    return place, model.eval()


def rows_file(folder: Path, rows: int, *, labelled: bool = True) -> str:
    rng = np.random.default_rng(rows)
    arrays: dict[str, np.ndarray] = {"x": rng.normal(size=(rows, CLASSES)).astype(np.float32)}
    if labelled:
        arrays["label"] = rng.integers(0, CLASSES, rows)
    path = folder / f"{rows}{'' if labelled else '-unlabelled'}.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)
