"""Items of an exported retrieval model: users' ids, and vectors whose dot products with a row's
query are scores.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import torch

from rayrec import storage
from rayrec.checkpoint.safetensors import read_weights, write_weights
from rayrec.config import InputError
from rayrec.inference.export.manifest import FIX, ExportedModel
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.items.recommender import Recommender

ITEM_IDS: Final = "items/ids.arrow"
"""File with the ids, a column `id`, int64 or text."""
ITEM_VECTORS: Final = "items/vectors.safetensors"
"""File with the vectors in the same order, a tensor `vectors`, float32 [items, dim], whatever the
quantization of the tables.
"""


def write_items(out: str, recommender: Recommender) -> None:
    """Write the ids and vectors of a retrieval model's items."""
    sink = pa.BufferOutputStream()
    table = pa.table({"id": recommender.ids.values})
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    storage.write_bytes(storage.join(out, ITEM_IDS), sink.getvalue().to_pybytes())
    vectors = recommender.vectors.cpu().contiguous()
    write_weights(storage.join(out, ITEM_VECTORS), {"vectors": vectors})


def read_vectors(path: str, exported: ExportedModel) -> torch.Tensor | None:
    """Return the item vectors in an export that `open_export` has verified, float32 [items, dim].
    None for other models and exports by earlier versions. Raises InputError if they belong to other
    items.
    """
    file_path = storage.join(path, ITEM_VECTORS)
    if not storage.exists(file_path):
        return None
    inputs = model_inputs(exported.preprocessor)
    feature = exported.model.candidate_feature(inputs)
    vectors = read_weights(file_path).get("vectors")
    count = None if feature is None else inputs.candidates_of(feature).count
    if vectors is None or vectors.dtype != torch.float32 or vectors.shape[:1] != (count,):
        raise InputError(f"{file_path}: does not match the items of the model; {FIX}")
    return vectors
