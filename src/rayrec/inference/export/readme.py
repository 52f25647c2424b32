"""README.md of an export: its files, and code that scores with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rayrec.models.base import ModelInputs

if TYPE_CHECKING:
    from rayrec.inference.export.manifest import ExportedModel

LOADER: Final = '''\
import json

import numpy as np
import torch
from safetensors.numpy import load_file

FOLDER = "."
model = json.load(open(f"{FOLDER}/manifest.json"))["model"]
dim = model.get("width", model["model"]["embedding_dim"])
tables = load_file(f"{FOLDER}/tables.safetensors")
program = torch.export.load(f"{FOLDER}/dense.pt2").module()


def unpack(rows):  # rows of a table as they are stored -> float32 (n, dim)
    if model["quantization"] in ("fp32", "fp16"):
        return rows.astype(np.float32)
    if model["quantization"] == "int8":  # dim bytes, then scale and offset, float32 each
        scale, offset = np.ascontiguousarray(rows[:, dim:]).view(np.float32).T
        values = rows[:, :dim]
    else:  # int4: half bytes, the even values in the low bits, then scale and offset, float16 each
        scale, offset = np.ascontiguousarray(rows[:, dim // 2 :]).view(np.float16).astype(np.float32).T
        values = np.stack([rows[:, : dim // 2] & 15, rows[:, : dim // 2] >> 4], axis=2).reshape(len(rows), dim)
    return values.astype(np.float32) * scale[:, None] + offset[:, None]


def score(dense, ids):
    """Logits (rows,) of dense float32 (rows, num_dense) and, for each of the features, integers (rows,) or (rows, ids a row), or
    the ids of row after row and how many each row has, one at least."""
    pooled, one_by_one = [np.zeros((len(dense), 0), np.float32)], []
    for feature, name, column in zip(model["features"], model.get("tables", model["features"]), ids):
        if feature in model.get("sequences", []):
            one_by_one += [torch.from_numpy(unpack(tables[name][column[0]])), torch.from_numpy(column[1].astype(np.int64))]
            continue
        if isinstance(column, tuple):
            starts = np.cumsum(column[1]) - column[1]
            pooled.append(np.add.reduceat(unpack(tables[name][column[0]]), starts))
            continue
        column = column.reshape(len(dense), -1)
        pooled.append(unpack(tables[name][column.reshape(-1)]).reshape(*column.shape, dim).sum(axis=1))
    with torch.inference_mode():
        return program(torch.from_numpy(dense), torch.from_numpy(np.concatenate(pooled, axis=1)), *one_by_one).numpy()
'''
"""Code that scores encoded rows with only PyTorch, NumPy and safetensors."""


FROM_RAW: Final = """\
import sys

sys.path.insert(0, FOLDER)
from encode import Encoder

encoder = Encoder(f"{FOLDER}/preprocessor")
rows = [{}, {}]  # a column that is absent is missing; encoder.parse(lines) gives such rows of a tab-separated log
print(score(*encoder.encode(rows)))
"""
"""Code that follows LOADER and scores raw rows without rayrec."""


def readme(exported: ExportedModel) -> str:
    """Return the text of an export's README.md."""
    is_label = exported.model.LABELLED
    gives, calls = "a logit; the probability of a click is 1 / (1 + exp(-logit))", _WITHOUT_RAYREC
    if not is_label:
        heads = exported.model.output_heads(ModelInputs.of(exported.preprocessor.inputs))
        gives = " and ".join(f"{head.kind} `{head.name}`" for head in heads)
        calls = _calls(exported, [name for head in heads for name in head.names])
    network, inputs = type(exported.model).__name__.removesuffix("Config"), exported.preprocessor.inputs
    return f"""# {exported.version}

A click model trained with rayrec: network {network}, {len(inputs.dense)} dense features,
{len(inputs.sparse)} embedding tables of {exported.model.table_width} values a row (stored as {exported.quantization}),
arithmetic in {exported.precision}. It gives {gives}.

| file | holds |
| --- | --- |
| `manifest.json` | the architecture, the names and sizes of the tables, size and SHA-256 of every other file |
| `tables.safetensors` | a tensor for each sparse column, a row for each id |
| `dense.safetensors` | the weights of everything else, float32 |
| `dense.pt2` | everything but the tables as a `torch.export` program, for any number of rows |
| `preprocessor/` | how raw columns become dense features and ids: constants and vocabularies |
| `encode.py` | does that with NumPy alone; rayrec does not run it |
| `report.json` | how this folder's scores compare with the checkpoint's, sizes, speed |

No file runs or is unpickled when rayrec uses this folder: it builds the network from `manifest.json` and the two
safetensors files. `dense.pt2` is for other runtimes.

With rayrec, from raw lines:

```bash
rayrec serve .
```

```python
from rayrec.inference.model import open_served

served = open_served(".")
{"logits = served.score" if is_label else "values = served.scorer.predict"}(served.preprocessor.encode(raw_rows))
```

Without rayrec, with PyTorch, NumPy and safetensors, {calls}"""


_WITHOUT_RAYREC: Final = f"""from encoded rows:

```python
{LOADER}```

and from raw rows:

```python
{FROM_RAW}```
"""


def _calls(exported: ExportedModel, outputs: Sequence[str]) -> str:
    """Describe the inputs of the program of a model without labels."""
    model, inputs = exported.model, ModelInputs.of(exported.preprocessor.inputs)
    sequences, width = model.sequences(inputs), model.table_width
    tables = model.full_tables(inputs) if model.TRAINS_ON_TABLES else ()
    return f"""by `torch.export.load("dense.pt2").module()`, which takes in this order:

- dense features, float32 (rows, {inputs.num_dense});
- embeddings of the features but {_listed(sequences)}, summed over a row's ids, side by side, float32 (rows,
  {(len(inputs.features) - len(sequences)) * width});
- of each of {_listed(sequences)} its embeddings, float32 (ids of all rows, {width}), and how many ids each row has, int64
  (rows,);
- of each of them the ids, int64 (ids of all rows,);
- the full table of each of {_listed(tables)}, float32.

It gives a tuple of {_listed(outputs)}, with ids in place of categories.
"""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
