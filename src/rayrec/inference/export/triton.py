"""Model repository of an exported click model for NVIDIA's Triton Inference Server. It contains ONNX instead of TorchScript or a
Python backend: Triton's standard image runs ONNX without PyTorch or Python. The export checks the scores in the runtime that
Triton embeds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec import storage
from rayrec.checkpoint.format import sha256_of
from rayrec.config import InputError
from rayrec.inference.export.onnx import DENSE, IDS, OUTPUT, id_widths, onnx_inputs, write_onnx

if TYPE_CHECKING:
    from rayrec.inference.export.manifest import ExportedModel
    from rayrec.inference.export.parity import ParityRows
    from rayrec.workloads.recsys.scorer import ClickScorer

MODEL_NAME: Final = "click_model"
MAX_BATCH_ROWS: Final = 8192
_LARGEST_DIFFERENCE: Final = 1e-4
"""Maximum logit difference from the export, relative to max(1, |logit|), because runtimes add up in different orders. bf16 models
are allowed 100 times as much."""


def write_repository(exported: ExportedModel, scorer: ClickScorer, folder: str, *, rows: ParityRows) -> dict[str, Any]:
    """Write click_model/config.pbtxt and click_model/1/model.onnx (with model.onnx.data) into `folder`, and compare the scores of
    ONNX Runtime on `rows`. Returns the report. Raises InputError if the ONNX graph cannot be built or scores differently."""
    preprocessor = exported.preprocessor
    graph = storage.join(folder, MODEL_NAME, "1", "model.onnx")
    write_onnx(preprocessor, scorer, graph)
    import onnxruntime  # which it requires

    config = config_pbtxt(exported.version, num_dense=len(preprocessor.inputs.dense), num_ids=sum(id_widths(preprocessor)))
    storage.write_bytes(storage.join(folder, MODEL_NAME, "config.pbtxt"), config.encode())
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    logits = rows.score(lambda batch: session.run([OUTPUT], onnx_inputs(batch))[0][:, 0])
    expected = rows.score(scorer.score)
    difference = float((np.abs(logits.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))).max())
    if not difference <= (_LARGEST_DIFFERENCE if exported.precision == "fp32" else 100 * _LARGEST_DIFFERENCE):
        raise InputError(f"triton: logits of the ONNX graph differ by up to {difference:.2g}. Export without --triton.")
    return {
        "model": MODEL_NAME,
        "backend": "onnxruntime",
        "max_relative_difference": difference,
        "bytes": sum(os.path.getsize(file.path) for file in storage.files_in(os.path.dirname(graph))),
        "sha256": sha256_of(graph),
    }


def config_pbtxt(version: str, *, num_dense: int, num_ids: int) -> str:
    """Return Triton's ModelConfig as protobuf text. `dims` omit the batch. `dynamic_batching` merges waiting requests."""
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
