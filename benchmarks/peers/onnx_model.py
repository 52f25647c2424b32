"""Peer of serving: the exported click model under ONNX Runtime, on preprocessed arrays."""

import os
import tempfile
from collections.abc import Callable

import numpy as np
import onnxruntime

from rayrec.inference.export.manifest import open_export
from rayrec.inference.export.onnx import DENSE, IDS, OUTPUT, write_onnx


def load(export: str, *, num_threads: int = 0) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return an export's model as a thread-safe function of dense features and ids.

    Takes float32 [rows, num_dense] and integer [rows, ids per row], returns logits, float32 [rows].
    `num_threads` 0: ONNX Runtime's choice.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    with tempfile.TemporaryDirectory() as folder:
        graph = os.path.join(folder, "model.onnx")
        exported, scorer = open_export(export)
        write_onnx(exported.preprocessor, scorer, graph)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def score(dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return session.run([OUTPUT], {DENSE: dense, IDS: np.asarray(ids, np.int64)})[0][:, 0]

    return score
