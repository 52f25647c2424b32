"""The trained click model in one process, for all that scores: its network and plain tables, no TorchRec, no optimizer."""

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
from rayrec.data.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.layers.embedded import Embedded
from rayrec.layers.mlp import Precision
from rayrec.models import ranking
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.stored import stored_model
from rayrec.models.tables import DeviceTables, HostTables, Lookup, Quantization, RowFormat, Tables, table_name

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

PREFIX = "model."
"""Of the weights' names in a checkpoint."""


class PlainModel(nn.Module):
    """A network between plain tensors, as scoring calls it and exports write it."""

    def __init__(self, network: nn.Module, inputs: ModelInputs, *, embedding_dim: int) -> None:
        super().__init__()
        self.network, self.inputs, self.embedding_dim = network, inputs, embedding_dim

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits (rows,), float32, of the main label, from dense features (rows, num_dense) and pooled embeddings (rows,
        num_features * embedding_dim), both float32, the latter in the order of the features."""
        return self.outputs(dense, pooled)[self.inputs.label]

    def outputs(self, dense: torch.Tensor, pooled: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the network gives for them: logits by label, and whatever else."""
        return self.network(dense, Embedded.in_order(self.inputs.features, self.embedding_dim, pooled))


@final
class ClickScorer:
    """Scores encoded rows with a trained click model; by any number of threads at once."""

    def __init__(self, model: PlainModel, tables: Tables, *, device: torch.device) -> None:
        """Both on `device`; the model in eval mode and without gradients."""
        self._model, self._tables, self._device = model, tables, device

    @property
    def quantization(self) -> Quantization:
        """Of the tables."""
        return self._tables.row_format.quantization

    @property
    def weight_bytes(self) -> int:
        """Memory of tables and the network's weights."""
        return self._tables.size_bytes + sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted, the main label first."""
        return self._model.inputs.label_names

    def score_labels(self, rows: EncodedRows) -> dict[str, np.ndarray]:
        """float32 (rows,) by label: its logits, for a label that is a number the prediction itself."""
        with torch.inference_mode():
            outputs = self._model.outputs(torch.from_numpy(rows.dense).to(self._device), self.pool(rows))
            return {label: outputs[label].cpu().numpy() for label in self.labels}  # device sync

    def score(self, rows: EncodedRows) -> np.ndarray:
        """float32 (rows,): the logits of the main label."""
        with torch.inference_mode():
            logits = self._model(torch.from_numpy(rows.dense).to(self._device), self.pool(rows))
            return logits.cpu().numpy()  # device sync

    def pool(self, rows: EncodedRows) -> torch.Tensor:
        """float32 (rows, num_sparse * embedding_dim): what the tables give, the model's second input."""
        return self._tables.pool(_lookups(rows.ids), len(rows))

    def parts(self) -> tuple[PlainModel, list[torch.Tensor], RowFormat]:
        """What it is made of, to write the model in another form: network, tables as stored, and how they are stored."""
        return self._model, self._tables.tensors(), self._tables.row_format


def _lookups(columns: Sequence[Ids]) -> list[Lookup]:
    return [
        Lookup(
            np.ascontiguousarray(column.values),
            column.offsets(),
            None if column.weights is None else np.ascontiguousarray(column.weights),
        )
        if isinstance(column, Bags)
        else Lookup(np.ascontiguousarray(column))
        for column in columns
    ]


def empty_model(config: ClickModelConfig, *, preprocessor: Preprocessor, precision: Precision) -> PlainModel:
    """The model that fits a Preprocessor's columns, its network's weights still to be put in."""
    inputs = ModelInputs.of(preprocessor.inputs)
    if type(config).__module__.startswith(f"{ranking.__name__}."):
        with torch.device("meta"):  # no memory, and no start values drawn from the caller's generator
            network = config.build(inputs, precision=precision)
    else:  # may compute constants, such as indices, that no checkpoint has
        with torch.random.fork_rng(devices=[]):
            network = config.build(inputs, precision=precision)
    model = PlainModel(network, inputs, embedding_dim=config.embedding_dim)
    return model.eval().requires_grad_(requires_grad=False)


def table_weight(vocabulary: str) -> str:
    """The name of a vocabulary's table among the weights of a checkpoint, without `PREFIX`."""
    return f"embeddings.embedding_bags.{table_name(vocabulary)}.weight"


def load_scorer(
    config: ClickModelConfig, *, precision: Precision, checkpoint: str, preprocessor: Preprocessor, device: str
) -> ClickScorer:
    """The model of a checkpoint's folder. Memory: the weights once, they are read straight into what is used.

    Every checksum is verified. Raises InputError for damaged weights and for those of another model.
    """
    model = empty_model(config, preprocessor=preprocessor, precision=precision)
    vocabularies, tables = preprocessor.inputs.vocabularies, Checkpoint(checkpoint)
    check_weights(checkpoint, wanted_weights(model, preprocessor))
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in full_tensors(tables, PREFIX)}
    by_vocabulary = {vocabulary: weights.pop(table_weight(vocabulary)) for vocabulary in dict.fromkeys(vocabularies)}
    arrays = [by_vocabulary[vocabulary] for vocabulary in vocabularies]
    model.network.load_state_dict(weights, assign=True)
    return make_scorer(model, arrays, row_format=RowFormat("fp32", config.embedding_dim), device=device)


def make_scorer(
    model: PlainModel, tables: Sequence[torch.Tensor], *, row_format: RowFormat, device: str
) -> ClickScorer:
    """A scorer of loaded weights; `tables` (num_embeddings, row_format.width) as row_format.dtype, one for each feature: the same
    tensor for features that share one."""
    place = torch.device(device)
    on_device: Tables
    if place.type == "cpu":
        on_device = HostTables(row_format, [table.numpy() for table in tables])
    else:
        moved = {id(table): table.to(place) for table in tables}
        on_device = DeviceTables(row_format, [moved[id(table)] for table in tables])
    return ClickScorer(model.to(place), on_device, device=place)


def wanted_weights(model: PlainModel, preprocessor: Preprocessor) -> dict[str, list[int]]:
    """The shape of every weight of a checkpoint, by name without `PREFIX`."""
    wanted = {name: list(tensor.shape) for name, tensor in model.network.state_dict().items()}
    for vocabulary, rows in zip(preprocessor.inputs.vocabularies, preprocessor.num_embeddings, strict=True):
        wanted[table_weight(vocabulary)] = [rows, model.embedding_dim]
    return wanted


def check_weights(checkpoint: str, wanted: dict[str, list[int]]) -> None:
    """Raises InputError where a checkpoint's weights are not those of its config.yaml and Preprocessor. Reads none."""
    entries = Checkpoint(checkpoint).manifest()["tensors"]
    stored = {name.removeprefix(PREFIX): entries[name]["shape"] for name in entries if name.startswith(PREFIX)}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise InputError(
                f"{checkpoint}: {name} has shape {stored.get(name)}, its config.yaml asks for {wanted.get(name)}; "
                "the files are not of one checkpoint, or the recipe's network has changed since"
            )


def load_preprocessor(checkpoint: str) -> Preprocessor:
    """The Preprocessor stored with the weights. Raises InputError where there is none, or its hash does not fit its content."""
    folder = storage.join(checkpoint, PREPROCESSOR_FOLDER)
    if not storage.exists(folder):
        raise InputError(f"{checkpoint}: holds no {PREPROCESSOR_FOLDER}/, which every checkpoint of a click model has")
    return Preprocessor.load(folder)


def click_settings(
    checkpoint: Checkpoint, config: TrainConfig | None = None, *, own: type[ClickModelConfig] | None = None
) -> tuple[ClickModelConfig, Precision]:
    """The settings of a checkpoint's network and the precision it was trained with, from `config` or from its config.yaml, where
    `own` is the class of a network that is not rayrec's.

    Raises InputError where they are not those of a click model, and for a network that is neither rayrec's nor `own`.
    """
    if config is not None:
        model = getattr(config.workload, "model", None)
        if not isinstance(model, ClickModelConfig):
            raise InputError(f"{checkpoint.path}: recipe {config.recipe} trains no click model, which is needed here")
        return model, config.precision
    import yaml

    path = storage.join(checkpoint.path, "config.yaml")
    try:
        values: dict[str, Any] = yaml.safe_load(storage.read_bytes(path).decode())
        model_values, precision = values["workload"]["model"], values["precision"]
        known = "embedding_dim" in model_values and precision in ("fp32", "bf16")
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        known = False
    if not known:
        raise InputError(
            f"{path}: is not the complete configuration of a click model; take the checkpoint's folder whole"
        )
    return stored_model(model_values, where=path, own=own), cast(Precision, precision)
