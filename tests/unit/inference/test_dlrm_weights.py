"""Checkpoints from state dicts of dlrm_s_pytorch.py and of TorchRec's DLRM score like these
networks, and start runs.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from builders.runs import QUIET, evaluated_and_predicted, one_worker, train
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rayrec
from rayrec.checkpoint import open_checkpoint
from rayrec.checkpoint.reader import weights_sha256
from rayrec.checkpoint.safetensors import write_weights
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.text_parser import parse
from rayrec.datasets.criteo import SCHEMA

BOTTOM = (16, 8)
TOP = (24, 12, 1)
DIM = 8
SMALL = {"embedding_dim": DIM, "bottom_mlp": BOTTOM, "top_mlp": TOP}


class FirstDLRM(nn.Module):
    """The network of dlrm_s_pytorch.py: dot products of the pairs (1, 0), (2, 0), (2, 1), ..."""

    def __init__(
        self, rows: list[int], *, bottom: tuple[int, ...] = BOTTOM, top: tuple[int, ...] = TOP
    ) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(size, DIM, mode="sum") for size in rows)
        self.bot_l = self._mlp((13, *bottom), nn.ReLU())
        self.top_l = self._mlp((DIM + 27 * 26 // 2, *top), nn.Sigmoid())

    @staticmethod
    def _mlp(sizes: tuple[int, ...], last: nn.Module) -> nn.Sequential:
        layers = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1], last)

    def forward(self, dense: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        x = self.bot_l(dense)
        vectors = torch.stack(
            [
                x,
                *(
                    table(column_ids[:, None])
                    for table, column_ids in zip(self.emb_l, ids, strict=True)
                ),
            ],
            dim=1,
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = [(i, j) for i in range(27) for j in range(i)]
        return self.top_l(torch.cat([x, *(products[:, i, j][:, None] for i, j in pairs)], dim=1))[
            :, 0
        ]


def torchrec_dlrm(
    rows: list[int], *, crosses: bool, layers: int = 2, bottom: tuple[int, ...] = BOTTOM
) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=DIM, num_embeddings=size, feature_names=[name]
        )
        for name, size in zip(SCHEMA.sparse, rows, strict=True)
    ]
    arguments: dict[str, Any] = {
        "dense_in_features": 13,
        "dense_arch_layer_sizes": [*bottom],
        "over_arch_layer_sizes": [*TOP],
        "embedding_bag_collection": EmbeddingBagCollection(tables=configs),
    }
    return DLRMTrain(
        DLRM_DCN(**arguments, dcn_num_layers=layers, dcn_low_rank_dim=4)
        if crosses
        else DLRM(**arguments)
    )


@pytest.fixture(scope="module")
def preprocessor(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("adopted") / "preprocessor")
    rayrec.vocabulary(
        str(click_log / "train.txt"),
        out=out,
        min_count=20,
        console=QUIET,
    )
    return out


@pytest.mark.parametrize("kind", ["dlrm_s_pytorch", "torchrec", "torchrec_dcn"])
def test_adopted_weights_score_like_their_network(
    kind: str, click_log: Path, preprocessor: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    columns = Preprocessor.load(preprocessor)
    network = FirstDLRM(columns.num_embeddings)
    if kind != "dlrm_s_pytorch":
        network = torchrec_dlrm(columns.num_embeddings, crosses=kind == "torchrec_dcn")
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    script_weights = (
        {"state_dict": network.state_dict(), "nepochs": 1}
        if kind == "dlrm_s_pytorch"
        else network.state_dict()
    )
    torch.save(script_weights, tmp_path / "model.pt")
    out = str(tmp_path / "adopted")
    log = str(click_log / "train.txt")
    report = rayrec.adopt(
        str(tmp_path / "model.pt"), out=out, preprocessor=preprocessor, console=QUIET
    )
    assert (report["interaction"], report["tables"]) == (
        "cross" if "dcn" in kind else "dot",
        columns.num_embeddings,
    )
    _, predicted = evaluated_and_predicted(out, log, tmp_path / "predicted.parquet")
    rows = columns.encode(parse(SCHEMA, (click_log / "train.txt").read_bytes())[0])
    dense = torch.from_numpy(rows.dense)
    ids = [torch.from_numpy(np.asarray(column_ids)).long() for column_ids in rows.ids]
    with torch.inference_mode():
        if kind == "dlrm_s_pytorch":
            expected = network(dense, ids)
        else:
            lengths = torch.ones(len(rows) * len(ids), dtype=torch.int32)
            features = KeyedJaggedTensor(list(SCHEMA.sparse), torch.cat(ids), lengths=lengths)
            expected = network.get_submodule("model")(dense, features).squeeze(1).sigmoid()
    assert expected.std() > 0.01
    np.testing.assert_allclose(predicted["score"].to_numpy(), expected.numpy(), atol=1e-6, rtol=0)

    still = {
        "sparse_optimizer": {"learning_rate": 0.0},
        "dense_optimizer": {"learning_rate": 0.0},
        "preprocessor": preprocessor,
    }
    crosses = {"cross_layers": 2, "cross_low_rank": 4} if "dcn" in kind else {}
    config = one_worker(
        click_log,
        tmp_path,
        steps=1,
        evaluate_every=1,
        init_from=out,
        workload={
            **still,
            "model": {
                **SMALL,
                "interaction": report["interaction"],
                "first_order": False,
                **crosses,
            },
        },
    )
    assert train(config).summary["weights_sha256"] == weights_sha256(open_checkpoint(out))


DEEP = (16,) * 11 + (DIM,)
"""Sizes of an MLP whose layers have numbers of one and of two digits."""


@pytest.fixture(scope="module")
def equal_tables(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Preprocessor with tables of one size, of which any order would be accepted."""
    out = str(tmp_path_factory.mktemp("equal") / "preprocessor")
    rayrec.vocabulary(
        str(click_log / "train.txt"),
        out=out,
        max_num_embeddings=5,
        console=QUIET,
    )
    assert set(Preprocessor.load(out).num_embeddings) == {5}
    return out


def deep_network(kind: str, rows: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "dlrm_s_pytorch":
        return FirstDLRM(rows, bottom=DEEP, top=(*DEEP, 1)).state_dict()
    return torchrec_dlrm(
        rows,
        crosses=True,
        layers=12,
        bottom=DEEP,
    ).state_dict()


def renamed(state: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Return the weights with other names for TorchRec's tables, which are named after their
    columns.
    """
    pairs = zip(SCHEMA.sparse, names, strict=True)
    column_names = {
        f"embedding_bags.t_{column}.": f"embedding_bags.{name}." for column, name in pairs
    }
    result = {}
    for name, tensor in state.items():
        found = next((old for old in column_names if old in name), "")
        result[name.replace(found, column_names.get(found, ""))] = tensor
    return result


def adopted_hash(
    state: dict[str, torch.Tensor], preprocessor: str, folder: Path, *, file: str = "model.pt"
) -> str:
    """Adopt the weights, and return the hash of the checkpoint's."""
    folder.mkdir()
    if file.endswith(".pt"):
        torch.save(state, folder / file)
    else:
        write_weights(str(folder / file), state)
    rayrec.adopt(
        str(folder / file), out=str(folder / "out"), preprocessor=preprocessor, console=QUIET
    )
    return weights_sha256(open_checkpoint(str(folder / "out")))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([f"t_{column}" for column in SCHEMA.sparse], id="columns"),
        pytest.param([f"table_{number}" for number in range(26)], id="numbers"),
    ],
)
@pytest.mark.parametrize("file", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("kind", ["dlrm_s_pytorch", "torchrec_dcn"])
def test_order_in_file_changes_no_weight(
    kind: str, file: str, names: list[str], equal_tables: str, tmp_path: Path
) -> None:
    state = deep_network(kind, [5] * 26)
    expected = adopted_hash(state, equal_tables, tmp_path / "in_order")
    alphabetical = dict(sorted(renamed(state, names).items()))
    assert list(alphabetical) != list(renamed(state, names))
    assert (
        adopted_hash(alphabetical, equal_tables, tmp_path / "alphabetical", file=file) == expected
    )


def test_tables_without_column_or_number_are_rejected(equal_tables: str, tmp_path: Path) -> None:
    words = [f"table_{chr(ord('z') - number)}" for number in range(26)]
    state = renamed(deep_network("torchrec_dcn", [5] * 26), words)
    expected = adopted_hash(state, equal_tables, tmp_path / "as_registered")
    assert expected == adopted_hash(
        deep_network("torchrec_dcn", [5] * 26), equal_tables, tmp_path / "as_columns"
    )
    torch.save(dict(sorted(state.items())), tmp_path / "model.pt")
    rejects(
        "cannot match the tables table_a, table_b, table_c, ...",
        rayrec.adopt,
        str(tmp_path / "model.pt"),
        out=str(tmp_path / "out"),
        preprocessor=equal_tables,
        console=QUIET,
    )


def test_other_networks_are_rejected(preprocessor: str, tmp_path: Path) -> None:
    rows = Preprocessor.load(preprocessor).num_embeddings
    fits = FirstDLRM(rows).state_dict()
    options = {"out": str(tmp_path / "out"), "preprocessor": preprocessor, "console": QUIET}
    wrong = {
        "emb_l.0.weight_q is not a weight of a DLRM": {**fits, "emb_l.0.weight_q": torch.ones(1)},
        "must have both MLPs": {name: tensor for name, tensor in fits.items() if "top" not in name},
        "its top MLP takes 385 values": {**fits, "top_l.0.weight": torch.ones(24, 385)},
        "rows of tables must be": FirstDLRM([*rows[1:], 3]).state_dict(),
        r"the weight for bottom_mlp.layers.0.weight must have shape \[16, 13\]": {
            **fits,
            "bot_l.0.weight": torch.ones(16, 12),
        },
        "must contain only": {"emb_l.0.weight": "code"},
    }
    for problem, state in wrong.items():
        torch.save(state, tmp_path / "model.pt")
        rejects(problem, rayrec.adopt, str(tmp_path / "model.pt"), **options)
    rejects(
        "needs --preprocessor DIR", rayrec.adopt, str(tmp_path / "model.pt"), out="x", console=QUIET
    )
    rejects(
        "--files: an option for arrays",
        rayrec.adopt,
        str(tmp_path / "model.pt"),
        **options,
        files=("day_0",),
    )
    assert not (tmp_path / "out").exists()
