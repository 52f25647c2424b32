"""The trained click model in one process, for all that scores: plain tables and the dense part, no TorchRec, no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch import nn

from rayrec import storage
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.config import InputError
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.preprocessor import Preprocessor
from rayrec.models.dlrm import DLRMConfig
from rayrec.models.mlp import Precision
from rayrec.models.tables import DeviceTables, HostTables, Lookup, Quantization, RowFormat, Tables, table_name
from rayrec.workloads.recsys import PREPROCESSOR_FOLDER

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

PREFIX = "model."
"""Of the weights' names in a checkpoint."""


@final
class ClickScorer:
    """Scores encoded rows with a trained click model; by any number of threads at once."""

    def __init__(self, dense_part: nn.Module, tables: Tables, *, device: torch.device) -> None:
        """Both on `device`; the dense part in eval mode and without gradients."""
        self._dense_part, self._tables, self._device = dense_part, tables, device

    @property
    def quantization(self) -> Quantization:
        """Of the tables."""
        return self._tables.row_format.quantization

    @property
    def weight_bytes(self) -> int:
        """Memory of tables and dense weights."""
        return self._tables.size_bytes + sum(parameter.nbytes for parameter in self._dense_part.parameters())

    def score(self, rows: EncodedRows) -> np.ndarray:
        """float32 (rows,): the logits."""
        with torch.inference_mode():
            logits = self._dense_part(torch.from_numpy(rows.dense).to(self._device), self.pool(rows))
            return logits.cpu().numpy()  # device sync

    def pool(self, rows: EncodedRows) -> torch.Tensor:
        """float32 (rows, num_sparse * embedding_dim): what the tables give, the dense part's second input."""
        return self._tables.pool(_lookups(rows.ids), len(rows))

    def parts(self) -> tuple[nn.Module, list[torch.Tensor], RowFormat]:
        """What it is made of, for whoever writes the model in another form: dense part, tables as stored, and how they are."""
        return self._dense_part, self._tables.tensors(), self._tables.row_format


def _lookups(columns: Sequence[Ids]) -> list[Lookup]:
    return [
        Lookup(np.ascontiguousarray(column.values), column.offsets())
        if isinstance(column, Bags)
        else Lookup(np.ascontiguousarray(column))
        for column in columns
    ]


def empty_dense_part(model: DLRMConfig, *, preprocessor: Preprocessor, precision: Precision) -> nn.Module:
    """The dense part that fits a Preprocessor's columns, its weights still to be put in."""
    inputs = preprocessor.inputs
    with torch.device("meta"):  # no memory, and no start values drawn from the caller's generator
        dense_part = model.build_dense_part(num_dense=len(inputs.dense), features=inputs.sparse, precision=precision)
    return dense_part.eval().requires_grad_(requires_grad=False)


def table_weight(feature: str) -> str:
    """The name of a sparse column's table among the weights of a checkpoint, without `PREFIX`."""
    return f"embeddings.embedding_bags.{table_name(feature)}.weight"


def load_scorer(
    model: DLRMConfig, *, precision: Precision, checkpoint: str, preprocessor: Preprocessor, device: str
) -> ClickScorer:
    """The model of a checkpoint's folder. Memory: the weights once, they are read straight into what is used.

    Every checksum is verified. Raises InputError for damaged weights and for those of another model.
    """
    dense_part = empty_dense_part(model, preprocessor=preprocessor, precision=precision)
    features, tables = preprocessor.inputs.sparse, Checkpoint(checkpoint)
    check_weights(checkpoint, wanted_weights(model, dense_part, preprocessor))
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in full_tensors(tables, PREFIX)}
    arrays = [weights.pop(table_weight(feature)) for feature in features]
    dense_part.load_state_dict(weights, assign=True)
    return make_scorer(dense_part, arrays, row_format=RowFormat("fp32", model.embedding_dim), device=device)


def make_scorer(
    dense_part: nn.Module, tables: Sequence[torch.Tensor], *, row_format: RowFormat, device: str
) -> ClickScorer:
    """A scorer of loaded weights; `tables` (num_embeddings, row_format.width) as row_format.dtype."""
    place = torch.device(device)
    on_device: Tables
    if place.type == "cpu":
        on_device = HostTables(row_format, [table.numpy() for table in tables])
    else:
        on_device = DeviceTables(row_format, [table.to(place) for table in tables])
    return ClickScorer(dense_part.to(place), on_device, device=place)


def wanted_weights(model: DLRMConfig, dense_part: nn.Module, preprocessor: Preprocessor) -> dict[str, list[int]]:
    """The shape of every weight of a checkpoint, by name without `PREFIX`."""
    wanted = {name: list(tensor.shape) for name, tensor in dense_part.state_dict().items()}
    for feature, rows in zip(preprocessor.inputs.sparse, preprocessor.num_embeddings, strict=True):
        wanted[table_weight(feature)] = [rows, model.embedding_dim]
    return wanted


def check_weights(checkpoint: str, wanted: dict[str, list[int]]) -> None:
    """Raises InputError where a checkpoint's weights are not those of its config.yaml and Preprocessor. Reads none."""
    entries = Checkpoint(checkpoint).manifest()["tensors"]
    stored = {name.removeprefix(PREFIX): entries[name]["shape"] for name in entries if name.startswith(PREFIX)}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise InputError(
                f"{checkpoint}: {name} has shape {stored.get(name)}, its config.yaml asks for {wanted.get(name)}; "
                "the files are not of one checkpoint, or the network is one of your own, which evaluate and predict take, and "
                "export and serve do not"
            )


def load_preprocessor(checkpoint: str) -> Preprocessor:
    """The Preprocessor stored with the weights. Raises InputError where there is none, or its hash does not fit its content."""
    folder = storage.join(checkpoint, PREPROCESSOR_FOLDER)
    if not storage.exists(folder):
        raise InputError(f"{checkpoint}: holds no {PREPROCESSOR_FOLDER}/, which every checkpoint of a click model has")
    return Preprocessor.load(folder)


def click_settings(checkpoint: Checkpoint, config: TrainConfig | None = None) -> tuple[DLRMConfig, Precision]:
    """The network of a checkpoint and the precision it was trained with, from its config.yaml or from `config`.

    Raises InputError where they are not those of a click model.
    """
    if config is not None:
        model = getattr(config.workload, "model", None)
        if not isinstance(model, DLRMConfig):
            raise InputError(f"{checkpoint.path}: recipe {config.recipe} trains no click model, which is needed here")
        return model, config.precision
    import yaml

    path = storage.join(checkpoint.path, "config.yaml")
    try:
        values: dict[str, Any] = yaml.safe_load(storage.read_bytes(path).decode())
        model_values, precision = values["workload"]["model"], values["precision"]
        known = "interaction" in model_values and precision in ("fp32", "bf16")
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        known = False
    if not known:
        raise InputError(
            f"{path}: is not the complete configuration of a click model; take the checkpoint's folder whole"
        )
    return DLRMConfig().updated(model_values), cast(Precision, precision)
