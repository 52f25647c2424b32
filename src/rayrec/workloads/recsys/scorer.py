"""Trained click model for scoring in one process: network and plain tables, without TorchRec or
optimizer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rayrec import models, storage
from rayrec.batch import DENSE, Batch
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.checkpoint.writer import TargetSlice
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.humanize import one_line
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
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
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.scoring import PREFIX, check_weights, stored_settings


class PlainModel(nn.Module):
    """Network with plain tensors as inputs and outputs, for scoring and export."""

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
        candidates: str | None = None,
    ) -> None:
        """`width` is the embedding width. Features: `sequences` with unpooled embeddings,
        `unpooled` whose tables have unpooled names in a checkpoint, `tables` whose full table the
        network reads. `candidates` is the item feature of a retrieval model.
        """
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.heads = heads
        self.width = width
        self.sequences = sequences
        self.aged = tuple(name for name in sequences if name in inputs.aged)
        """Sequences with times."""
        self._unpooled = unpooled
        self.tables = tables
        self.candidates = candidates
        # Modules are slow to answer this, and requests may have one row
        self._has_predict = hasattr(network, "predict")
        self.predicts_by_tables = True
        """Flag for predictions that read full tables. Otherwise only evaluations do."""
        self.reads_request_time = False
        """Flag for a network that reads the time at which it is asked."""

    def forward(
        self,
        dense: torch.Tensor,
        pooled: torch.Tensor,
        *sequences: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the logits of the main label, float32 [rows], or the outputs of all heads if none
        predicts a label.

        Args:
            dense: Dense features, float32 [rows, num_dense].
            pooled: Pooled embeddings of the other features in order, float32 [rows, num_features *
                width].
            sequences: For each sequence, embeddings, float32 [ids of all rows, width], and lengths,
                int64 [rows]. A model without labels also takes the ids of each sequence, int64 [ids
                of all rows], and full tables, float32 [num_embeddings, width]. Between both are the
                `JaggedEmbeddings.gaps` of each sequence with times, float32 [ids of all rows].
        """
        values = self.predict(dense, pooled, *sequences)
        return (
            values[self.heads[0].name]
            if isinstance(self.heads[0], LabelHead)
            else tuple(values.values())
        )

    def predict(
        self,
        dense: torch.Tensor,
        pooled: torch.Tensor,
        *sequences: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the head values for inputs of `forward`, by tensor name."""
        embedded = self.embedded(pooled, *sequences)
        values = self.outputs(dense, embedded)
        if self._has_predict:
            values = self.network.predict(values, embedded)  # type: ignore[operator]
            for head in self.heads:
                head.check(
                    values,
                    rows=dense.shape[0],
                    where=f"{type(self.network).__name__}: predict",
                )
        return {name: values[name] for head in self.heads for name in head.names}

    def outputs(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> Mapping[str, torch.Tensor]:
        """Return the network outputs: head values and others."""
        return named_outputs(
            self.network(dense, embedded),
            self.heads,
            where=f"{type(self.network).__name__}: forward",
        )

    def embedded(self, pooled: torch.Tensor, *sequences: torch.Tensor) -> KeyedEmbeddings:
        """Build the embeddings of the network from inputs of `forward`. `sequences` may omit ids
        and what follows, or tables.
        """
        count = len(self.sequences)
        jagged = sequences[: 2 * count]
        ids = sequences[2 * count : 3 * count]
        first_table = 3 * count + len(self.aged)
        gaps = dict(zip(self.aged, sequences[3 * count : first_table], strict=False))
        tables = sequences[first_table:]
        one_by_one = {
            name: JaggedEmbeddings(values, lengths, gaps.get(name))
            for name, values, lengths in zip(self.sequences, jagged[::2], jagged[1::2], strict=True)
        }
        return KeyedEmbeddings.in_order(
            self.inputs.features,
            self.width,
            pooled,
            one_by_one,
            ids=dict(zip(self.sequences, ids, strict=False)),
            tables=dict(zip(self.tables, tables, strict=False)),
        )

    @property
    def has_queries(self) -> bool:
        """Flag for a network with vectors of rows and items. Their dot products are scores."""
        return hasattr(self.network, "queries") and hasattr(self.network, "item_vectors")

    @property
    def has_item_vectors(self) -> bool:
        """Flag for candidates whose vectors all follow from their full table."""
        return self.candidates in self.tables

    def table_weights(self) -> dict[str, str]:
        """Return the weight name of each feature's table in a checkpoint, without `PREFIX`."""
        return {
            feature: table_weight(table_name(vocabulary), unpooled=feature in self._unpooled)
            for feature, vocabulary in self.inputs.table_of.items()
        }


def flat_values(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> np.ndarray:
    """Concatenate the outputs of PlainModel without ids, float32 [values]."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    # device sync
    return (
        torch.cat([tensor.flatten() for tensor in tensors if tensor.is_floating_point()])
        .cpu()
        .numpy()
    )


# From rows to logits. All parts are read only, so threads score at the same time:
#
#   EncodedRows -- ids --> Tables.pool, one native call -----> pooled [rows, features * width]
#               -- ids --> Tables.one_by_one, per sequence --> embeddings [ids, width], lengths
#               -- dense -------------------------------------> PlainModel --> values of heads
#
# A request with one id per column has a shorter way, `pool_one_each`.
@final
class ClickScorer:
    """Thread-safe scorer of encoded rows with a trained click model."""

    def __init__(self, model: PlainModel, tables: Tables, *, device: torch.device) -> None:
        """Create a scorer. Both are on `device`, the model in eval mode and without gradients."""
        self._model = model
        self._tables = tables
        self._device = device
        self._sequences = [model.inputs.features.index(name) for name in model.sequences]

    @property
    def quantization(self) -> Quantization:
        """Quantization of the tables."""
        return self._tables.row_format.quantization

    @property
    def weight_bytes(self) -> int:
        """Memory of tables and network weights."""
        return self._tables.size_bytes + sum(
            parameter.nbytes for parameter in self._model.parameters()
        )

    @property
    def heads(self) -> Sequence[Head]:
        """Prediction heads, the main head first."""
        return self._model.heads

    @property
    def device(self) -> torch.device:
        """Device of the network and the tables."""
        return self._device

    @property
    def model(self) -> PlainModel:
        """Network, without tables."""
        return self._model

    def queries(self, rows: EncodedRows) -> torch.Tensor:
        """Return the vectors of rows of a retrieval model, float32 [rows, dim]."""
        with torch.inference_mode():
            dense, *embedding_inputs = self.inputs(rows)
            outputs = self._model.outputs(dense, self._model.embedded(*embedding_inputs))
            network: Any = self._model.network
            queries: torch.Tensor = network.queries(outputs)
            return queries.float()

    def item_vectors(self) -> torch.Tensor:
        """Return the vectors of all candidates of a retrieval model, float32 [candidates, dim]."""
        rows = self._empty_row()
        with torch.inference_mode():
            dense, *embedding_inputs = self.inputs(rows, measuring=True)
            outputs = self._model.outputs(dense, self._model.embedded(*embedding_inputs))
            network: Any = self._model.network
            vectors: torch.Tensor = network.item_vectors(outputs)
            return vectors.float()

    def _empty_row(self) -> EncodedRows:
        """Return one row with the first id of each feature, and empty lists."""
        inputs = self._model.inputs
        lists = dict(inputs.lists)
        ids: list[Ids] = []
        for name in inputs.features:
            empty = JaggedIds(np.zeros(0, np.int32), np.zeros(1, np.int32))
            ids.append(empty if name in lists else np.zeros(1, np.int32))
        return EncodedRows(np.zeros((1, inputs.num_dense), np.float32), ids, {})

    def predict(self, rows: EncodedRows) -> dict[str, np.ndarray]:
        """Return the heads' predictions [rows, ...] by tensor name. For labels, these are float32
        logits or predicted numbers.
        """
        with torch.inference_mode():
            # device sync
            return {
                name: tensor.cpu().numpy()
                for name, tensor in self._model.predict(*self.inputs(rows)).items()
            }

    def measure(self, rows: EncodedRows, *, ks: Sequence[int] = ()) -> dict[str, np.ndarray]:
        """Return the measures of a model without labels, float64 [rows], NaN in excluded rows, and
        counts, int64 [rows]. `ks`: ranks of a retrieval model, if not its own k.
        """
        with torch.inference_mode():
            dense, *embedding_inputs = self.inputs(rows, measuring=True)
            batch = Batch(
                {DENSE: dense},
                1.0,
                labels={name: torch.from_numpy(values) for name, values in rows.labels.items()},
                groups=None if rows.groups is None else torch.from_numpy(rows.groups),
                timestamps=None if rows.timestamps is None else torch.from_numpy(rows.timestamps),
            ).to(self._device)
            outputs = self._model.outputs(dense, self._model.embedded(*embedding_inputs))
            values = measured(self._model.network, outputs, batch, ks=ks)
            wide = {
                name: tensor.double() if tensor.is_floating_point() else tensor
                for name, tensor in values.items()
            }
            return {name: tensor.cpu().numpy() for name, tensor in wide.items()}  # device sync

    def score(self, rows: EncodedRows) -> np.ndarray:
        """Return the logits of the main label, float32 [rows]. Raises InputError for models without
        labels.
        """
        main = self.heads[0]
        if not isinstance(main, LabelHead):
            raise InputError(f"the model must predict a label, got {main.kind} {main.name}")
        return self.predict(rows)[main.name]

    def values(self, rows: EncodedRows) -> np.ndarray:
        """Return the logits of the main label, or the concatenated numbers of all heads,
        float32.
        """
        with torch.inference_mode():
            return flat_values(self._model(*self.inputs(rows)))

    def inputs(self, rows: EncodedRows, *, measuring: bool = False) -> list[torch.Tensor]:
        """Return the inputs of PlainModel. `measuring` includes tables that the network reads only
        in evaluations.
        """
        dense = torch.from_numpy(rows.dense).to(self._device)
        if isinstance(rows.ids, np.ndarray) and not self._sequences:
            return [dense, self._tables.pool_one_each(rows.ids)]
        lookups = [
            None if number in self._sequences else _lookup(ids)
            for number, ids in enumerate(rows.ids)
        ]
        inputs = [dense, self._tables.pool(lookups, len(rows))]
        sequences = [_as_bags(rows.ids[number]) for number in self._sequences]
        for number, bags in zip(self._sequences, sequences, strict=True):
            inputs.append(self._tables.one_by_one(number, np.ascontiguousarray(bags.values)))
            inputs.append(torch.from_numpy(bags.lengths.astype(np.int64)).to(self._device))
        if not sequences or isinstance(self.heads[0], LabelHead):
            return inputs
        inputs += [
            torch.from_numpy(bags.values.astype(np.int64)).to(self._device) for bags in sequences
        ]
        for name in self._model.aged:
            bags = sequences[self._model.sequences.index(name)]
            inputs.append(torch.from_numpy(_gaps(bags)).to(self._device))
        return [
            *inputs,
            *(self._full_tables if measuring or self._model.predicts_by_tables else ()),
        ]

    @cached_property
    def _full_tables(self) -> list[torch.Tensor]:
        """Full tables for the network, float32. Dequantized copies of quantized tables."""
        tensors = self._tables.tensors()
        row_format = self._tables.row_format
        return [
            row_format.unpack(tensors[self._model.inputs.features.index(name)])
            for name in self._model.tables
        ]

    def parts(self) -> tuple[PlainModel, list[torch.Tensor], RowFormat]:
        """Return the network, the tables as stored, and their format, for exports."""
        return self._model, self._tables.tensors(), self._tables.row_format


def _lookup(ids: Ids) -> Lookup:
    if not isinstance(ids, JaggedIds):
        return Lookup(np.ascontiguousarray(ids))
    weights = None if ids.weights is None else np.ascontiguousarray(ids.weights)
    return Lookup(np.ascontiguousarray(ids.values), ids.offsets, weights)


def _gaps(bags: JaggedIds) -> np.ndarray:
    """Return the seconds between a list's ids, 0 if unknown, float32 [ids]."""
    gaps = bags.weights
    return np.zeros(len(bags.values), np.float32) if gaps is None else np.ascontiguousarray(gaps)


def _as_bags(ids: Ids) -> JaggedIds:
    if isinstance(ids, JaggedIds):
        return ids
    return JaggedIds(ids.reshape(-1), np.full(len(ids), ids.size // max(len(ids), 1), np.int32))


def empty_model(
    config: ClickModelConfig,
    *,
    preprocessor: Preprocessor,
    precision: Precision,
    stored_bytes: int | None = None,
    where: str = "",
) -> PlainModel:
    """Build the model for a Preprocessor's columns, without loading the network weights. Raises
    InputError as soon as one of rayrec's networks needs far more than `stored_bytes`, as with
    damaged settings.
    """
    inputs = model_inputs(preprocessor)
    if type(config).__module__.startswith(f"{models.__name__}."):
        # no memory and no initialization
        with torch.device("meta"), _limited_weights(stored_bytes, where):
            network = build_network(config, inputs, precision=precision)
    else:  # custom networks may compute constants that no checkpoint has, such as indices
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
        candidates=config.candidate_feature(inputs),
    )
    model.predicts_by_tables = config.TRAINS_ON_TABLES
    model.reads_request_time = config.reads_request_time
    return model.eval().requires_grad_(requires_grad=False)


@contextmanager
def _limited_weights(stored_bytes: int | None, where: str) -> Iterator[None]:
    """Stop building a network in this thread if its weights exceed twice `stored_bytes` plus 16
    MiB, or have impossible sizes.
    """
    # some parts may be built and dropped
    remaining_bytes = math.inf if stored_bytes is None else 2 * stored_bytes + (16 << 20)
    # The hook is global to torch, but other threads may build networks of other sizes.
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal remaining_bytes
        if parameter is not None and threading.get_ident() == thread:
            remaining_bytes -= parameter.nbytes + 64
            if remaining_bytes < 0:
                raise _Oversized

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except (_Oversized, OverflowError, RuntimeError, TypeError, MemoryError) as error:
        if stored_bytes is None:
            raise
        why = "it is larger" if isinstance(error, _Oversized) else one_line(error)
        raise InputError(
            f"{where}: the network does not match the {stored_bytes:,} bytes of stored weights "
            f"({why}). Its settings are damaged."
        ) from None
    finally:
        hook.remove()


class _Oversized(Exception):
    """Error for a network with more weights than are stored."""


def load_scorer(
    config: ClickModelConfig,
    *,
    precision: Precision,
    checkpoint: str,
    preprocessor: Preprocessor,
    device: str,
) -> ClickScorer:
    """Load the model of a checkpoint folder. Weights are read in place, so they take memory once.
    Verifies all checksums. Raises InputError for damaged weights and weights of another model.
    """
    tensors = Checkpoint(checkpoint).manifest()["tensors"]
    stored_bytes = sum(chunk["bytes"] for tensor in tensors.values() for chunk in tensor["chunks"])
    model = empty_model(
        config,
        preprocessor=preprocessor,
        precision=precision,
        stored_bytes=stored_bytes,
        where=checkpoint,
    )
    check_weights(checkpoint, expected_weights(model, preprocessor))
    left = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in full_tensors(Checkpoint(checkpoint), PREFIX)
    }
    names = model.table_weights().values()
    tables = {name: left.pop(name) for name in dict.fromkeys(names)}
    # Mapped from the files: reading touches only the rows that are looked up, and processes share
    # them.
    arrays = [tables[name] for name in names]
    model.network.load_state_dict(left, assign=True)
    return make_scorer(model, arrays, row_format=RowFormat("fp32", model.width), device=device)


def make_scorer(
    model: PlainModel,
    tables: Sequence[torch.Tensor],
    *,
    row_format: RowFormat,
    device: str,
) -> ClickScorer:
    """Create a scorer from loaded weights. `tables` has one tensor [num_embeddings,
    row_format.width] of row_format.dtype for each feature. Features that share a table share the
    tensor.
    """
    torch_device = torch.device(device)
    on_device: Tables
    if torch_device.type == "cpu":
        on_device = HostTables(row_format, [table.numpy() for table in tables])
    else:
        # By identity: features that share a table must share its copy.
        moved = {id(table): table.to(torch_device) for table in tables}
        on_device = DeviceTables(row_format, [moved[id(table)] for table in tables], torch_device)
    return ClickScorer(model.to(torch_device), on_device, device=torch_device)


def expected_weights(model: PlainModel, preprocessor: Preprocessor) -> dict[str, list[int]]:
    """Return the shape of each checkpoint weight, by name without `PREFIX`."""
    shapes = {name: list(tensor.shape) for name, tensor in model.network.state_dict().items()}
    for table, rows in zip(
        model.table_weights().values(),
        preprocessor.num_embeddings,
        strict=True,
    ):
        shapes[table] = [rows, model.width]
    return shapes


def load_preprocessor(checkpoint: str) -> Preprocessor:
    """Load the Preprocessor of a checkpoint. Raises InputError if it is missing or its hash does
    not match.
    """
    folder = storage.join(checkpoint, PREPROCESSOR_FOLDER)
    if not storage.exists(folder):
        raise InputError(
            f"{checkpoint}: {PREPROCESSOR_FOLDER}/ not found, which every click model checkpoint "
            "has"
        )
    return Preprocessor.load(folder)


def click_settings(
    checkpoint: Checkpoint,
    config: TrainConfig | None = None,
    *,
    own: type[ClickModelConfig] | None = None,
) -> tuple[ClickModelConfig, Precision]:
    """Return the network settings and training precision of a checkpoint, from `config` or its
    config.yaml. `own` is the class of a custom network. Raises InputError if the checkpoint has no
    click model, or an unknown network class.
    """
    if config is not None:
        model = getattr(config.workload, "model", None)
        if not isinstance(model, ClickModelConfig):
            raise InputError(
                f"{checkpoint.path}: must be a click model, got recipe {config.recipe}"
            )
        return model, config.precision
    values = stored_settings(checkpoint)
    path = storage.join(checkpoint.path, "config.yaml")
    model_values = values["workload"].get("model")
    precision = values.get("precision")
    if (
        not isinstance(model_values, dict)
        or "embedding_dim" not in model_values
        or precision not in ("fp32", "bf16")
    ):
        raise InputError(
            f"{path}: must be the complete configuration of a click model. Copy the full "
            "checkpoint folder."
        )
    return stored_model(model_values, where=path, own=own), precision


def merge_checkpoints(
    checkpoints: Sequence[Checkpoint],
    settings: Sequence[tuple[ClickModelConfig, Precision]],
    *,
    preprocessor: Preprocessor,
) -> tuple[EnsembleConfig, tuple[dict[str, TargetSlice], ...]]:
    """Combine two or more checkpoints with the same Preprocessor into an ensemble, given the
    `click_settings` of each. Return its settings, and the target in it of each checkpoint's
    weights: tables are concatenated by column, networks are separate members. Reads no weights.
    Raises InputError for different precisions, and weights that do not match their settings.
    """
    precision = settings[0][1]
    for checkpoint, (_, other) in zip(checkpoints, settings, strict=True):
        if other != precision:
            raise InputError(
                f"{checkpoint.path}: precision {other} does not match {precision} of "
                f"{checkpoints[0].path}. Use one precision."
            )
    config = EnsembleConfig(
        models=tuple(alone.replace(embedding_penalty=0.0) for alone, _ in settings)
    )

    def empty(model: ClickModelConfig) -> PlainModel:
        return empty_model(model, preprocessor=preprocessor, precision=precision)

    full_model = empty(config)
    first_column = 0
    all_targets = []
    tables = full_model.table_weights()
    shapes = expected_weights(full_model, preprocessor)
    for number, (checkpoint, model) in enumerate(zip(checkpoints, config.models, strict=True)):
        member = empty(model)
        expected = expected_weights(member, preprocessor)
        check_weights(checkpoint.path, expected)
        names = {
            weight_name: tables[feature] for feature, weight_name in member.table_weights().items()
        }
        targets = {}
        for weight_name in expected:
            name = names.get(weight_name, f"members.{number}.{weight_name}")
            targets[PREFIX + weight_name] = TargetSlice(
                PREFIX + name,
                tuple(shapes[name]),
                first_column if weight_name in names else 0,
            )
        all_targets.append(targets)
        first_column += model.table_width
    return config, tuple(all_targets)
