"""ONNX graph of an exported click model, tables included, and its model repository for NVIDIA's
Triton Inference Server. Triton's standard image runs ONNX without PyTorch or Python. The export
checks the scores in the runtime that Triton embeds.
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
from rayrec.checkpoint.format import compute_sha256
from rayrec.config import InputError
from rayrec.imports import require

if TYPE_CHECKING:
    from rayrec.data.encoded_rows import EncodedRows
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.inference.export.manifest import ExportedModel
    from rayrec.inference.export.parity import ParityRows
    from rayrec.models.scoring_tables import RowFormat
    from rayrec.workloads.recsys.scorer import ClickScorer


DENSE: Final = "dense"
IDS: Final = "ids"
OUTPUT: Final = "logit"
_EXAMPLE_ROWS = 4


class _FullModel(nn.Module):
    """Model with tables: ids of all columns, int64 [rows, ids], and float32 [rows, num_dense], if
    any -> logits [rows, 1].
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[torch.Tensor],
        *,
        row_format: RowFormat,
        hotness: Sequence[int],
    ) -> None:
        super().__init__()
        self._model = model
        self._format = row_format
        self._hotness = tuple(hotness)
        width = row_format.dim // 2 if row_format.quantization == "int4" else row_format.dim
        for number, table in enumerate(tables):
            self.register_buffer(f"values_{number}", table[:, :width].contiguous())
            # ONNX cannot reinterpret bytes as floats
            if row_format.quantization in ("int8", "int4"):
                kind = torch.float32 if row_format.quantization == "int8" else torch.float16
                affine = (
                    table[:, width:].clone(memory_format=torch.contiguous_format).view(kind).float()
                )
                self.register_buffer(f"affine_{number}", affine)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor | None = None) -> torch.Tensor:
        pooled = []
        start = 0
        for number, size in enumerate(self._hotness):
            column = ids[:, start : start + size]
            pooled.append(
                self._rows(number, column).sum(1)
                if size > 1
                else self._rows(number, column.squeeze(1))
            )
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
            values = torch.stack((values % 16, values // 16), dim=-1).reshape(
                *ids.shape, self._format.dim
            )
        return values.float() * affine[..., :1] + affine[..., 1:]


def write_onnx(preprocessor: Preprocessor, scorer: ClickScorer, path: str) -> None:
    """Write an export's model to local file `path`, and its weights to `path`.data. Memory: two
    more copies of the weights. Raises InputError if the extra `onnx` is not installed, and for
    models with list columns.
    """
    require(extra="onnx")
    import torch.onnx

    hotness = id_widths(preprocessor)
    network, tables, row_format = scorer.parts()
    model = _FullModel(network, tables, row_format=row_format, hotness=hotness).eval()
    num_dense = len(preprocessor.inputs.dense)
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
    """Suppress the log of PyTorch's exporter, about missing packages and deprecations."""
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
    """Return the number of ids per row of each sparse column. Raises InputError for a model that
    `write_onnx` rejects.
    """
    widths = []
    for name, size in zip(preprocessor.inputs.sparse, preprocessor.hotness, strict=True):
        if size is None:
            raise InputError(
                f"onnx: column {name} has a varying number of ids, but inputs a fixed width. "
                "Serve with rayrec."
            )
        widths.append(size)
    return widths


def onnx_inputs(rows: EncodedRows) -> dict[str, np.ndarray]:
    """Convert encoded rows to inputs of the graph."""
    columns = [np.asarray(column, np.int64).reshape(len(rows), -1) for column in rows.ids]
    return {
        IDS: np.concatenate(columns, axis=1),
        **({DENSE: rows.dense} if rows.dense.shape[1] else {}),
    }


# -- model repository of Triton

MODEL_NAME: Final = "click_model"
MAX_BATCH_ROWS: Final = 8192
_LARGEST_DIFFERENCE: Final = 1e-4
"""Maximum difference of logits from the export, relative to max(1, |logit|), as orders of sums
differ. For bf16 100 times it.
"""


def write_repository(
    exported: ExportedModel, scorer: ClickScorer, folder: str, *, rows: ParityRows
) -> dict[str, Any]:
    """Write click_model/config.pbtxt and click_model/1/model.onnx (with model.onnx.data) into
    `folder`, and compare the scores of ONNX Runtime on `rows`. Returns the report. Raises
    InputError if the ONNX graph cannot be built or scores differently.
    """
    preprocessor = exported.preprocessor
    graph = storage.join(folder, MODEL_NAME, "1", "model.onnx")
    write_onnx(preprocessor, scorer, graph)
    import onnxruntime  # which it requires

    config = config_pbtxt(
        exported.version,
        num_dense=len(preprocessor.inputs.dense),
        num_ids=sum(id_widths(preprocessor)),
    )
    storage.write_bytes(storage.join(folder, MODEL_NAME, "config.pbtxt"), config.encode())
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    logits = rows.score(lambda batch: session.run([OUTPUT], onnx_inputs(batch))[0][:, 0])
    expected = rows.score(scorer.score)
    difference = float(
        (np.abs(logits.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))).max()
    )
    if not difference <= (
        _LARGEST_DIFFERENCE if exported.precision == "fp32" else 100 * _LARGEST_DIFFERENCE
    ):
        raise InputError(
            f"triton: logits of the ONNX graph differ by up to {difference:.2g}. Export without "
            "--triton."
        )
    return {
        "model": MODEL_NAME,
        "backend": "onnxruntime",
        "max_relative_difference": difference,
        "bytes": sum(
            os.path.getsize(file.path) for file in storage.files_in(os.path.dirname(graph))
        ),
        "sha256": compute_sha256(graph),
    }


def config_pbtxt(version: str, *, num_dense: int, num_ids: int) -> str:
    """Return Triton's ModelConfig as protobuf text. `dims` omit the batch. `dynamic_batching`
    merges waiting requests.
    """
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
