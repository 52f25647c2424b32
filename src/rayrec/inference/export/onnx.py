"""An exported click model, tables included, as one ONNX graph, and as a model repository for NVIDIA's Triton Inference Server.

Triton gets ONNX rather than TorchScript or a Python backend: its standard image runs ONNX without PyTorch or Python, and the
export checks the scores in the runtime that Triton embeds.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from rayrec import storage
from rayrec.checkpoint.format import sha256_of
from rayrec.config import InputError
from rayrec.imports import require
from rayrec.inference.export.manifest import OpenedExport
from rayrec.inference.export.parity import ParityRows
from rayrec.models.scoring_tables import RowFormat

if TYPE_CHECKING:
    from rayrec.data.encoded import EncodedRows
    from rayrec.data.encoding.preprocessor import Preprocessor


DENSE: Final = "dense"
IDS: Final = "ids"
OUTPUT: Final = "logit"
_EXAMPLE_ROWS = 4


class _WholeModel(nn.Module):
    """ids int64 (rows, ids of all columns side by side) and, if the model has dense columns, dense float32 (rows, num_dense) ->
    logits (rows, 1)."""

    def __init__(
        self, model: nn.Module, tables: Sequence[torch.Tensor], *, row_format: RowFormat, hotness: Sequence[int]
    ) -> None:
        super().__init__()
        self._model, self._format, self._hotness = model, row_format, tuple(hotness)
        dim, packed = row_format.dim, row_format.quantization in ("int8", "int4")
        width = {"int8": dim, "int4": dim // 2}.get(row_format.quantization, dim)
        for number, table in enumerate(tables):
            self.register_buffer(f"values_{number}", table[:, :width].contiguous())
            if packed:  # ONNX cannot see floats in bytes
                kind = torch.float32 if row_format.quantization == "int8" else torch.float16
                self.register_buffer(
                    f"affine_{number}", table[:, width:].clone(memory_format=torch.contiguous_format).view(kind).float()
                )

    def forward(self, ids: torch.Tensor, dense: torch.Tensor | None = None) -> torch.Tensor:
        pooled, start = [], 0
        for number, size in enumerate(self._hotness):
            column = ids[:, start : start + size]
            pooled.append(self._rows(number, column).sum(1) if size > 1 else self._rows(number, column.squeeze(1)))
            start += size
        if dense is None:
            dense = pooled[0][:, :0]
        return self._model(dense, torch.cat(pooled, dim=1)).unsqueeze(1)

    def _rows(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        values = getattr(self, f"values_{number}")[ids]
        if self._format.quantization in ("fp32", "fp16"):
            return values.float()
        affine = getattr(self, f"affine_{number}")[ids]
        if self._format.quantization == "int4":
            pairs = torch.stack((values % 16, values // 16), dim=-1)
            values = pairs.reshape(*ids.shape, self._format.dim)
        return values.float() * affine[..., :1] + affine[..., 1:]


def write_onnx(opened: OpenedExport, path: str) -> None:
    """Writes the model into local file `path`, its weights beside it in `path`.data (a graph alone ends at 2 GiB).

    Memory: the weights twice more. Raises InputError where the extra `onnx` is not installed, and for models that inputs of a
    fixed width cannot feed: with columns of any number of ids a row.
    """
    require(extra="onnx")
    import torch.onnx

    hotness = id_widths(opened.preprocessor)
    network, tables, row_format = opened.scorer.parts()
    model = _WholeModel(network, tables, row_format=row_format, hotness=hotness).eval()
    num_dense = len(opened.preprocessor.inputs.dense)
    examples = {IDS: torch.zeros(_EXAMPLE_ROWS, sum(hotness), dtype=torch.int64)}
    if num_dense:
        examples[DENSE] = torch.zeros(_EXAMPLE_ROWS, num_dense)
    rows = torch.export.Dim("rows", min=1)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with _quietly():
        program = torch.onnx.export(
            model,
            tuple(examples.values()),
            dynamo=True,
            dynamic_shapes=tuple({0: rows} for _ in examples),
            input_names=list(examples),
            output_names=[OUTPUT],
            verbose=False,
        )
        assert program is not None
        program.save(storage.absolute(path), external_data=True)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what PyTorch's exporter logs: operators of packages that are not here, uses it deprecates."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def id_widths(preprocessor: Preprocessor) -> list[int]:
    """Ids a row has in each sparse column. Raises InputError for a model that `write_onnx` refuses."""
    widths = []
    for name, size in zip(preprocessor.inputs.sparse, preprocessor.hotness, strict=True):
        if size is None:
            raise InputError(
                f"onnx: column {name} has any number of ids a row, and inputs have a fixed width; serve with rayrec"
            )
        widths.append(size)
    return widths


def onnx_inputs(rows: EncodedRows) -> dict[str, np.ndarray]:
    """Encoded rows as the graph's inputs."""
    import numpy as np

    columns = [np.asarray(column, np.int64).reshape(len(rows), -1) for column in rows.ids]
    dense = {DENSE: rows.dense} if rows.dense.shape[1] else {}
    return {IDS: np.concatenate(columns, axis=1), **dense}


MODEL_NAME: Final = "click_model"
MAX_BATCH_ROWS: Final = 8192
_LARGEST_DIFFERENCE: Final = 1e-4
"""Of logits from those of the export, as a share of the logit or of 1: runtimes add up in other orders. bf16 models get 100 times
as much."""


def write_repository(opened: OpenedExport, folder: str, *, rows: ParityRows) -> dict[str, Any]:
    """Writes click_model/config.pbtxt and click_model/1/model.onnx (with model.onnx.data) into `folder`, and scores `rows` with
    ONNX Runtime. Returns what there is to report. Raises InputError where an ONNX graph cannot be made or scores otherwise."""
    widths = id_widths(opened.preprocessor)
    graph = storage.join(folder, MODEL_NAME, "1", "model.onnx")
    write_onnx(opened, graph)
    config = config_pbtxt(opened.version, num_dense=len(opened.preprocessor.inputs.dense), num_ids=sum(widths))
    storage.write_bytes(storage.join(folder, MODEL_NAME, "config.pbtxt"), config.encode())
    difference = _difference(graph, rows, rows.score(opened.scorer.score))
    if not difference <= (_LARGEST_DIFFERENCE if opened.precision == "fp32" else 100 * _LARGEST_DIFFERENCE):
        raise InputError(
            f"triton: the ONNX graph gives a logit that differs by {difference:.2g}; export without --triton"
        )
    return {
        "model": MODEL_NAME,
        "backend": "onnxruntime",
        "max_relative_difference": difference,
        "bytes": sum(os.path.getsize(file.path) for file in storage.files_in(os.path.dirname(graph))),
        "sha256": sha256_of(graph),
    }


def _difference(graph: str, rows: ParityRows, expected: np.ndarray) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    logits = rows.score(lambda batch: session.run([OUTPUT], onnx_inputs(batch))[0][:, 0])
    return float((np.abs(logits.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))).max())


def config_pbtxt(version: str, *, num_dense: int, num_ids: int) -> str:
    """Triton's ModelConfig in protobuf's text format. The batch is no part of `dims`; `dynamic_batching` joins requests that
    wait while another runs."""
    inputs = [f'{{ name: "{IDS}" data_type: TYPE_INT64 dims: [ {num_ids} ] }}']
    if num_dense:
        inputs.insert(0, f'{{ name: "{DENSE}" data_type: TYPE_FP32 dims: [ {num_dense} ] }}')
    listed = ",\n  ".join(inputs)
    return f"""name: "{MODEL_NAME}"
backend: "onnxruntime"
max_batch_size: {MAX_BATCH_ROWS}
input [
  {listed}
]
output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ 1 ] }} ]
dynamic_batching {{ }}
parameters {{ key: "rayrec_version" value {{ string_value: "{version}" }} }}
"""
