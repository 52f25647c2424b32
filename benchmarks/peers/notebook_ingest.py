"""The pipeline of Ray's DLRM notebook: `read_csv` with inferred types, then Python dictionaries
under `np.vectorize`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.csv as arrow_csv
import ray

DENSE = [f"int_{i}" for i in range(13)]
SPARSE = [f"cat_{i}" for i in range(26)]


def _fill(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name in DENSE:
        batch[name] = np.nan_to_num(batch[name].astype(np.float32), nan=0.0)
    for name in SPARSE:
        batch[name] = np.where(batch[name] == None, "", batch[name]).astype(str)  # noqa: E711
    return batch


def _encode(
    batch: dict[str, np.ndarray], vocabularies: dict[str, dict[str, int]]
) -> dict[str, np.ndarray]:
    for name in SPARSE:
        table = vocabularies[name]
        batch[name] = np.vectorize(lambda token, table=table: table.get(token, 1))(batch[name])
    return batch


def _normalise(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    dense = np.log(np.stack([batch[name] for name in DENSE], axis=1) + 3)
    return {
        "dense": dense,
        "sparse": np.stack([batch[name] for name in SPARSE], axis=1),
        "labels": batch["label"],
    }


def vocabularies_of(path: str, rows: int) -> dict[str, dict[str, int]]:
    """Return token -> id, from 2, for the first rows. The notebook uses preprocessed
    vocabularies.
    """
    seen: dict[str, dict[str, int]] = {name: {} for name in SPARSE}
    with open(path) as file:
        for number, line in enumerate(file):
            if number == rows:
                break
            for name, token in zip(SPARSE, line.rstrip("\n").split("\t")[14:], strict=True):
                seen[name].setdefault(token, len(seen[name]) + 2)
    return seen


def batches(
    path: str, vocabularies: dict[str, dict[str, int]], batch_size: int
) -> Iterator[dict[str, Any]]:
    shared = ray.put(vocabularies)
    dataset = (
        ray.data.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(
                column_names=["label", *DENSE, *SPARSE], block_size=64 << 20
            ),
            parse_options=arrow_csv.ParseOptions(delimiter="\t"),
        )
        .map_batches(_fill)
        .map_batches(lambda batch: _encode(batch, ray.get(shared)))
        .map_batches(_normalise)
    )
    yield from dataset.iter_batches(batch_size=batch_size, batch_format="numpy", prefetch_batches=2)
