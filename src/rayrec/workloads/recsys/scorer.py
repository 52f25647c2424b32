"""The trained click model in one process, for all that scores: its network and plain tables, no TorchRec, no optimizer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rayrec import models, storage
from rayrec.batch import DENSE, Batch
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.checkpoint.writer import Place
from rayrec.config import InputError
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.layers.keyed_embeddings import Embedded, Sequences
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs, stored_model, unpooled_features
from rayrec.models.ensemble import build_network
from rayrec.models.heads import Head, LabelHead, measured, named_outputs
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.models.scoring_tables import (
    DeviceTables,
    HostTables,
    Lookup,
    Quantization,
    RowFormat,
    Tables,
    table_name,
    table_weight,
)
from rayrec.workloads.scoring import PREFIX, check_weights

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig


class PlainModel(nn.Module):
    """A network between plain tensors, as scoring calls it and exports write it."""

    def __init__(
        self,
        network: nn.Module,
        inputs: ModelInputs,
        heads: Sequence[Head],
        *,
        width: int,
        sequences: tuple[str, ...] = (),
        unpooled: tuple[str, ...] = (),
        tables: tuple[str, ...] = (),
    ) -> None:
        """`width`: of an embedding. `sequences`: features whose embeddings the network takes one by one; `unpooled`: those whose
        tables a checkpoint names so; `tables`: those whose full table the network reads."""
        super().__init__()
        self.network, self.inputs, self.heads, self.width = network, inputs, heads, width
        self.sequences, self._unpooled, self.tables = sequences, unpooled, tables
        self.predicts_by_tables = True
        """Whether predictions read the tables, and not evaluations alone."""

    def forward(
        self, dense: torch.Tensor, pooled: torch.Tensor, *sequences: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Logits (rows,), float32, of the main label, or what heads of no label predict, from dense features (rows, num_dense),
        pooled embeddings (rows, num_features * width), both float32, the latter in the order of the features, and for each of
        the model's sequences, which `pooled` then does not have: float32 (ids of all rows, width), int64 lengths (rows,). A model
        without labels also takes each sequence's ids, int64 (ids of all rows,), and each full table, float32 (num_embeddings,
        width)."""
        values = self.predict(dense, pooled, *sequences)
        return values[self.heads[0].name] if isinstance(self.heads[0], LabelHead) else tuple(values.values())

    def predict(self, dense: torch.Tensor, pooled: torch.Tensor, *sequences: torch.Tensor) -> dict[str, torch.Tensor]:
        """The values of the heads for these inputs, by the names of their tensors."""
        embedded = self.embedded(pooled, *sequences)
        values = self.outputs(dense, embedded)
        if hasattr(self.network, "predict"):
            values = self.network.predict(values, embedded)  # type: ignore[operator]
            for head in self.heads:
                head.check(values, rows=dense.shape[0], where=f"{type(self.network).__name__}: predict")
        return {name: values[name] for head in self.heads for name in head.names}

    def outputs(self, dense: torch.Tensor, embedded: Embedded) -> Mapping[str, torch.Tensor]:
        """What the network gives: the values of the heads, and whatever else."""
        given = self.network(dense, embedded)
        return named_outputs(given, self.heads, where=f"{type(self.network).__name__}: forward")

    def embedded(self, pooled: torch.Tensor, *sequences: torch.Tensor) -> Embedded:
        """What the network takes beside dense features. Without tables it does not read any."""
        count = len(self.sequences)
        jagged, ids, tables = sequences[: 2 * count], sequences[2 * count : 3 * count], sequences[3 * count :]
        one_by_one = {
            name: Sequences(values, lengths)
            for name, values, lengths in zip(self.sequences, jagged[::2], jagged[1::2], strict=True)
        }
        return Embedded.in_order(
            self.inputs.features,
            self.width,
            pooled,
            one_by_one,
            ids=dict(zip(self.sequences, ids, strict=False)),
            tables=dict(zip(self.tables, tables, strict=False)),
        )

    def table_weights(self) -> dict[str, str]:
        """The name of each feature's table among the weights of a checkpoint, without `PREFIX`."""
        return {
            feature: table_weight(table_name(vocabulary), unpooled=feature in self._unpooled)
            for feature, vocabulary in self.inputs.table_of.items()
        }


def flat_values(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> np.ndarray:
    """Return the numbers that PlainModel gives, one after the other, without ids. float32 [values]."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([tensor.flatten() for tensor in tensors if tensor.is_floating_point()]).cpu().numpy()  # device sync


@final
class ClickScorer:
    """Scores encoded rows with a trained click model; by any number of threads at once."""

    def __init__(self, model: PlainModel, tables: Tables, *, device: torch.device) -> None:
        """Both on `device`; the model in eval mode and without gradients."""
        self._model, self._tables, self._device = model, tables, device
        self._sequences = [model.inputs.features.index(name) for name in model.sequences]

    @property
    def quantization(self) -> Quantization:
        """Of the tables."""
        return self._tables.row_format.quantization

    @property
    def weight_bytes(self) -> int:
        """Memory of tables and the network's weights."""
        return self._tables.size_bytes + sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def heads(self) -> Sequence[Head]:
        """What is predicted, the main one first."""
        return self._model.heads

    def predict(self, rows: EncodedRows) -> dict[str, np.ndarray]:
        """(rows, ...) by the names of the heads' tensors: of a label float32 logits, or the number that is predicted."""
        with torch.inference_mode():
            values = self._model.predict(*self.inputs(rows))
            return {name: tensor.cpu().numpy() for name, tensor in values.items()}  # device sync

    def measure(self, rows: EncodedRows) -> dict[str, np.ndarray]:
        """float64 (rows,): what an evaluation of a model without labels averages; NaN in rows that are left out."""
        with torch.inference_mode():
            dense, *others = self.inputs(rows, measuring=True)
            batch = Batch(
                {DENSE: dense},
                1.0,
                labels={name: torch.from_numpy(values) for name, values in rows.labels.items()},
                groups=None if rows.groups is None else torch.from_numpy(rows.groups),
                timestamps=None if rows.timestamps is None else torch.from_numpy(rows.timestamps),
            ).to(self._device)
            outputs = self._model.outputs(dense, self._model.embedded(*others))
            values = measured(self._model.network, outputs, batch)
            return {name: tensor.double().cpu().numpy() for name, tensor in values.items()}  # device sync

    def score(self, rows: EncodedRows) -> np.ndarray:
        """float32 (rows,): the logits of the main label. Raises InputError for a model that predicts none."""
        main = self.heads[0]
        if not isinstance(main, LabelHead):
            raise InputError(f"the model predicts {main.kind} {main.name} and no label, which is needed here")
        return self.predict(rows)[main.name]

    def values(self, rows: EncodedRows) -> np.ndarray:
        """float32: the logits of the main label, or the numbers of all heads, one after the other."""
        with torch.inference_mode():
            return flat_values(self._model(*self.inputs(rows)))

    def inputs(self, rows: EncodedRows, *, measuring: bool = False) -> list[torch.Tensor]:
        """What PlainModel takes: the dense features, and what the tables give. `measuring`: with tables that the network reads in
        evaluations alone."""
        dense = torch.from_numpy(rows.dense).to(self._device)
        if not self._sequences:
            return [dense, self._tables.pool([_lookup(ids) for ids in rows.ids], len(rows))]
        lookups = [None if number in self._sequences else _lookup(ids) for number, ids in enumerate(rows.ids)]
        inputs = [dense, self._tables.pool(lookups, len(rows))]
        for number in self._sequences:
            ids = rows.ids[number]
            bags = ids if isinstance(ids, Bags) else _as_bags(ids)
            inputs.append(self._tables.one_by_one(number, np.ascontiguousarray(bags.values)))
            inputs.append(torch.from_numpy(bags.lengths.astype(np.int64)).to(self._device))
        if isinstance(self.heads[0], LabelHead):
            return inputs
        for number in self._sequences:
            ids = rows.ids[number]
            values = ids.values if isinstance(ids, Bags) else ids.reshape(-1)
            inputs.append(torch.from_numpy(values.astype(np.int64)).to(self._device))
        return [*inputs, *(self._full_tables if measuring or self._model.predicts_by_tables else ())]

    @cached_property
    def _full_tables(self) -> list[torch.Tensor]:
        """The full tables that the network reads, float32; of quantised ones copies."""
        tensors, row_format = self._tables.tensors(), self._tables.row_format
        return [row_format.unpack(tensors[self._model.inputs.features.index(name)]) for name in self._model.tables]

    def parts(self) -> tuple[PlainModel, list[torch.Tensor], RowFormat]:
        """What it is made of, to write the model in another form: network, tables as stored, and how they are stored."""
        return self._model, self._tables.tensors(), self._tables.row_format


def _lookup(ids: Ids) -> Lookup:
    if not isinstance(ids, Bags):
        return Lookup(np.ascontiguousarray(ids))
    weights = None if ids.weights is None else np.ascontiguousarray(ids.weights)
    return Lookup(np.ascontiguousarray(ids.values), ids.offsets(), weights)


def _as_bags(ids: np.ndarray) -> Bags:
    rows = len(ids)
    return Bags(ids.reshape(-1), np.full(rows, ids.size // max(rows, 1), np.int32))


def empty_model(
    config: ClickModelConfig,
    *,
    preprocessor: Preprocessor,
    precision: Precision,
    stored_bytes: int | None = None,
    where: str = "",
) -> PlainModel:
    """The model that fits a Preprocessor's columns, its network's weights still to be put in. Raises InputError as soon as one of
    rayrec's networks needs far more than the `stored_bytes` of the weights that it is for, as by damaged settings."""
    inputs = ModelInputs.of(preprocessor.inputs)
    if type(config).__module__.startswith(f"{models.__name__}."):
        with torch.device("meta"), _limited_weights(stored_bytes, where):  # no memory, and no start values drawn
            network = build_network(config, inputs, precision=precision)
    else:  # may compute constants, such as indices, that no checkpoint has
        with torch.random.fork_rng(devices=[]):
            network = build_network(config, inputs, precision=precision)
    model = PlainModel(
        network,
        inputs,
        config.output_heads(inputs),
        width=config.table_width,
        sequences=config.sequences(inputs),
        unpooled=unpooled_features(config, inputs),
        tables=config.full_tables(inputs),
    )
    model.predicts_by_tables = config.TRAINS_ON_TABLES
    return model.eval().requires_grad_(requires_grad=False)


@contextmanager
def _limited_weights(stored_bytes: int | None, where: str) -> Iterator[None]:
    """Ends the construction of a network by this thread if its weights take more than twice `stored_bytes` and 16 MiB, or if a
    size is one that no tensor can have."""
    room = math.inf if stored_bytes is None else 2 * stored_bytes + (16 << 20)  # parts may be made and left out again
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal room
        if parameter is not None and threading.get_ident() == thread:
            room -= parameter.nbytes + 64
            if room < 0:
                raise _Oversized

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except (_Oversized, OverflowError, RuntimeError, TypeError, MemoryError) as error:
        if stored_bytes is None:
            raise
        why = "it has more" if isinstance(error, _Oversized) else " ".join(str(error).split())[:200]
        raise InputError(
            f"{where}: the network does not fit the {stored_bytes:,} bytes of stored weights ({why}); its settings are damaged"
        ) from None
    finally:
        hook.remove()


class _Oversized(Exception):
    """A network has more weights than are stored."""


def load_scorer(
    config: ClickModelConfig, *, precision: Precision, checkpoint: str, preprocessor: Preprocessor, device: str
) -> ClickScorer:
    """The model of a checkpoint's folder. Memory: the weights once, they are read straight into what is used.

    Every checksum is verified. Raises InputError for damaged weights and for those of another model.
    """
    tensors = Checkpoint(checkpoint).manifest()["tensors"]
    stored_bytes = sum(chunk["bytes"] for tensor in tensors.values() for chunk in tensor["chunks"])
    model = empty_model(config, preprocessor=preprocessor, precision=precision, stored_bytes=stored_bytes, where=checkpoint)
    check_weights(checkpoint, wanted_weights(model, preprocessor))
    return make_scorer_of(model, dict(full_tensors(Checkpoint(checkpoint), PREFIX)), device=device)


def make_scorer_of(model: PlainModel, weights: Mapping[str, torch.Tensor], *, device: str) -> ClickScorer:
    """A scorer of all the weights of a checkpoint, by their names there."""
    left = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    names = model.table_weights().values()
    tables = {name: left.pop(name) for name in dict.fromkeys(names)}
    arrays = [tables[name] for name in names]
    model.network.load_state_dict(left, assign=True)
    return make_scorer(model, arrays, row_format=RowFormat("fp32", model.width), device=device)


def make_scorer(model: PlainModel, tables: Sequence[torch.Tensor], *, row_format: RowFormat, device: str) -> ClickScorer:
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
    for table, rows in zip(model.table_weights().values(), preprocessor.num_embeddings, strict=True):
        wanted[table] = [rows, model.width]
    return wanted


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
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise InputError(f"{path}: is not the complete configuration of a click model; take the checkpoint's folder whole")
    return stored_model(model_values, where=path, own=own), cast(Precision, precision)


@dataclass(frozen=True)
class Joined:
    """The model that checkpoints make together."""

    model: EnsembleConfig
    precision: Precision
    places: tuple[dict[str, Place], ...]
    """Where the weights of each checkpoint are in the model's: tables side by side, networks one after the other."""


def joined(
    checkpoints: Sequence[Checkpoint], settings: Sequence[tuple[ClickModelConfig, Precision]], *, preprocessor: Preprocessor
) -> Joined:
    """The model of two or more checkpoints that were trained with one Preprocessor; `settings` is what `click_settings` gives for
    each. Reads no weights. Raises InputError for several precisions, and for weights that do not fit their settings."""
    precision = settings[0][1]
    for checkpoint, (_, other) in zip(checkpoints, settings, strict=True):
        if other != precision:
            raise InputError(
                f"{checkpoint.path}: is of precision {other}, and {checkpoints[0].path} of {precision}; give models of one"
            )
    model = EnsembleConfig(models=tuple(alone.replace(embedding_penalty=0.0) for alone, _ in settings))
    return Joined(model, precision, _places(checkpoints, model, preprocessor=preprocessor, precision=precision))


def load_mean_scorer(checkpoints: Sequence[str], *, preprocessor: Preprocessor, device: str) -> ClickScorer:
    """The mean of the models of two or more checkpoints' folders, as `rayrec ensemble` would write it. Memory: all their weights
    once, and one table besides.

    Every checksum is verified. Raises InputError for damaged weights, and for models that do not fit together.
    """
    opened = [Checkpoint(checkpoint) for checkpoint in checkpoints]
    found = joined(opened, [click_settings(checkpoint) for checkpoint in opened], preprocessor=preprocessor)
    model = empty_model(found.model, preprocessor=preprocessor, precision=found.precision)
    weights: dict[str, torch.Tensor] = {}
    for checkpoint, places in zip(opened, found.places, strict=True):
        for name, tensor in full_tensors(checkpoint, PREFIX):
            place = places[name]
            if tensor.shape == place.shape:
                weights[place.name] = tensor
                continue
            whole = weights.setdefault(place.name, torch.empty(place.shape, dtype=tensor.dtype))
            whole[:, place.first_column : place.first_column + tensor.shape[1]] = tensor
    return make_scorer_of(model, weights, device=device)


def _places(
    checkpoints: Sequence[Checkpoint], config: EnsembleConfig, *, preprocessor: Preprocessor, precision: Precision
) -> tuple[dict[str, Place], ...]:
    def empty(model: ClickModelConfig) -> PlainModel:
        return empty_model(model, preprocessor=preprocessor, precision=precision)

    whole, first_column, found = empty(config), 0, []
    tables, shapes = whole.table_weights(), wanted_weights(whole, preprocessor)
    for number, (checkpoint, model) in enumerate(zip(checkpoints, config.models, strict=True)):
        alone = empty(model)
        wanted = wanted_weights(alone, preprocessor)
        check_weights(checkpoint.path, wanted)
        names = {own: tables[feature] for feature, own in alone.table_weights().items()}
        places = {}
        for own in wanted:
            name = names.get(own, f"members.{number}.{own}")
            places[PREFIX + own] = Place(PREFIX + name, tuple(shapes[name]), first_column if own in names else 0)
        found.append(places)
        first_column += model.table_width
    return tuple(found)
