"""Checkpoints from DLRM weights of other programs: dlrm_s_pytorch.py (also e2eAIOK's) and
TorchRec's DLRM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from rayrec import storage
from rayrec.checkpoint.safetensors import read_weights
from rayrec.checkpoint.writer import save
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.scorer import empty_model, expected_weights
from rayrec.workloads.scoring import PREFIX

# Names of weights by part. Indices of layers are in the names, so that parts are sorted by number,
# not as text (10 follows 9).
#
#   part         dlrm_s_pytorch.py   TorchRec                here
#   table        emb_l.N             embedding_bags.NAME     table of a sparse column
#   bottom       bot_l.N             dense_arch              bottom_mlp.layers.N
#   top          top_l.N             over_arch               top_mlp.layers.N
#   down, up     -                   inter_arch.crossnet     interaction (DCNv2, low rank)
_V1: Final = {
    "table": r"emb_l\.\d+\.weight",
    "bottom": r"bot_l\.\d+\.(weight|bias)",
    "top": r"top_l\.\d+\.(weight|bias)",
}
_TORCHREC: Final = {
    "table": r"sparse_arch\.embedding_bag_collection\.embedding_bags\..+\.weight",
    "bottom": r"dense_arch\.model\._mlp\.\d+\._linear\.(weight|bias)",
    "top": r"over_arch\.model\.(0\._mlp\.\d+\._linear|1)\.(weight|bias)",
    "up": r"inter_arch\.crossnet\.W_kernels\.\d+",
    "down": r"inter_arch\.crossnet\.V_kernels\.\d+",
    "cross_bias": r"inter_arch\.crossnet\.bias\.\d+",
}


def adopt_dlrm(path: str, *, out: str, preprocessor: str, config: TrainConfig) -> dict[str, Any]:
    """Write a DLRM's state dict (a file of torch.save or safetensors) as a checkpoint atomically
    into folder `out`, for scoring, export and `init_from`. It has no optimizer state. Tables and
    layers are ordered by their names, not by their order in the file; see `_tables_in_order`.
    Memory: twice the weights. Executes nothing in the file. Returns JSON values: `out`,
    `interaction`, `tables` (rows of each), `preprocessor`. Raises InputError for weights of another
    network or other columns.

    Args:
        preprocessor: Folder of the Preprocessor with the ids of the tables' rows.
        config: Click model run whose schema and model are replaced.
    """
    columns = Preprocessor.load(preprocessor)
    model, weights = _converted(read_weights(path), columns, path)
    described = config.replace(workload={"schema": columns.schema, "model": model})
    empty = empty_model(model, preprocessor=columns, precision="fp32")
    tables = list(dict.fromkeys(empty.table_weights().values()))
    rows = [len(table) for table in weights["table"]]
    if rows != columns.num_embeddings or len(tables) < len(rows):
        raise InputError(
            f"{path}: rows of tables must be {columns.num_embeddings}, those of {preprocessor}, "
            f"got {rows}"
        )
    named = dict(zip(tables, weights["table"], strict=True))
    for part, prefix in (("bottom", "bottom_mlp"), ("top", "top_mlp")):
        for number, tensor in enumerate(weights[part]):
            named[f"{prefix}.layers.{number // 2}.{('weight', 'bias')[number % 2]}"] = tensor
    for part, name in (("down", "down"), ("up", "up"), ("cross_bias", "bias")):
        named |= {
            f"interaction.{name}.{number}": tensor for number, tensor in enumerate(weights[part])
        }
    for name, shape in expected_weights(empty, columns).items():
        if name not in named or list(named[name].shape) != shape:
            raise InputError(
                f"{path}: the weight for {name} must have shape {shape}. Save the full state_dict()"
            )

    def write_extra_files(folder: str) -> None:
        storage.write_bytes(storage.join(folder, "config.yaml"), described.to_yaml().encode())
        columns.save(storage.join(folder, PREPROCESSOR_FOLDER))

    # The folder appears under its name once it is complete: a killed adoption leaves no checkpoint.
    with storage.writing_folder(out) as folder:
        tensors = {PREFIX + name: tensor.float().contiguous() for name, tensor in named.items()}
        save(folder, tensors, state={}, extra_files=write_extra_files)
    return {
        "out": storage.absolute(out),
        "interaction": model.interaction,
        "tables": rows,
        "preprocessor": columns.hash(),
    }


def _converted(
    state: dict[str, torch.Tensor], columns: Preprocessor, path: str
) -> tuple[DLRMConfig, dict[str, list[torch.Tensor]]]:
    """Return the model's configuration, and its weights by part, in order. Raises InputError for
    another network.
    """
    weights = _parts_in_order(state, columns, path)
    bottom = weights["bottom"]
    top = weights["top"]
    tables = weights["table"]
    if not (bottom and top and tables) or len({table.shape[1] for table in tables}) > 1:
        raise InputError(
            f"{path}: must have both MLPs and tables of one width. Save the full state_dict()"
        )
    vectors = len(tables) + 1
    dim = tables[0].shape[1]
    width = top[0].shape[1]
    crosses = len(weights["down"])
    if width != (vectors * dim if crosses else dim + vectors * (vectors - 1) // 2):
        raise InputError(
            f"{path}: its top MLP takes {width} values, not those of all pairs' dot products. "
            "Train a new model"
        )
    if _is_v1(state):  # pairs (1, 0), (2, 0), (2, 1), ...; here (0, 1), (0, 2), ...
        # Only the order of dot products differs between programs, so that the columns of the top
        # MLP's first layer are permuted and the result is the same network.
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        top[0] = torch.cat(
            [top[0][:, :dim], top[0][:, dim + second * (second - 1) // 2 + first]], dim=1
        )
    crossed: dict[str, Any] = (
        {"cross_layers": crosses, "cross_low_rank": weights["down"][0].shape[0]} if crosses else {}
    )
    model = DLRMConfig(
        interaction="cross" if crosses else "dot",
        embedding_dim=dim,
        bottom_mlp=tuple(len(tensor) for tensor in bottom[::2]),
        top_mlp=tuple(len(tensor) for tensor in top[::2]),
        **crossed,
    )
    return model, weights


def _is_v1(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the weights have the names of dlrm_s_pytorch.py."""
    return any(re.search(rf"(^|\.){_V1['table']}$", name) for name in state)


def _parts_in_order(
    state: Mapping[str, torch.Tensor], columns: Preprocessor, path: str
) -> dict[str, list[torch.Tensor]]:
    """Return the weights by part: tables in the order of the columns, layers by their numbers,
    weight before bias. The order in the file does not count: safetensors, DCP and sorted
    dictionaries have layer 10 before layer 2. Raises InputError.
    """
    kinds = _V1 if _is_v1(state) else _TORCHREC
    names: dict[str, list[str]] = defaultdict(list)
    for name in state:
        part = next(
            (part for part, pattern in kinds.items() if re.search(rf"(^|\.){pattern}$", name)), None
        )
        if part is None:
            raise InputError(
                f"{path}: {name} is not a weight of a DLRM with dot products or crosses. Save its "
                "state_dict()"
            )
        names[part].append(name)
    ordered = {
        part: sorted(each, key=_layer_order) for part, each in names.items() if part != "table"
    }
    ordered["table"] = _tables_in_order(
        {name: len(state[name]) for name in names["table"]}, columns, path
    )
    weights: dict[str, list[torch.Tensor]] = defaultdict(list)
    for part, each in ordered.items():
        weights[part] = [state[name] for name in each]
    return weights


def _layer_order(name: str) -> tuple[list[int], bool]:
    """Return the sort key of a layer's weight or bias: the numbers in its name, then weight before
    bias.
    """
    return [int(number) for number in re.findall(r"\d+", name)], name.endswith("bias")


def _tables_in_order(rows: Mapping[str, int], columns: Preprocessor, path: str) -> list[str]:
    """Return the table names in the Preprocessor's column order, given the rows of each in the
    file's order.

    Tables are ordered by the columns that they are named for (user or t_user), else by the number
    in their names (emb_l.10, t_cat_10). Otherwise they are ordered by their rows if no two tables
    have equally many. The file's order is used if it is not alphabetical, because then no program
    has sorted it. Raises InputError if none applies: tables of equal size could be exchanged
    unnoticed.
    """
    keys = {name: name.removesuffix(".weight").rpartition(".")[2] for name in rows}
    for prefix in ("t_", ""):
        column_numbers = {
            prefix + feature: number for number, feature in enumerate(columns.inputs.sparse)
        }
        if set(keys.values()) == set(column_numbers):
            return sorted(rows, key=lambda name: column_numbers[keys[name]])
    numbered = {
        name: match for name, key in keys.items() if (match := re.search(r"^(.*?)(\d+)$", key))
    }
    if len(numbered) == len(keys) and len({match[1] for match in numbered.values()}) == 1:
        return sorted(rows, key=lambda name: int(numbered[name][2]))
    sizes = columns.num_embeddings
    if sorted(rows.values()) == sorted(sizes) and len(set(sizes)) == len(sizes):
        return sorted(rows, key=lambda name: sizes.index(rows[name]))
    if list(rows) != sorted(rows):
        return list(rows)
    raise InputError(
        f"{path}: cannot match the tables {_some(list(keys.values()))} with the columns "
        f"{_some(columns.inputs.sparse)}. Name each table t_COLUMN, or number them in the order of "
        "the columns"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")
