"""Next-item networks against RecTools, with equal weights. Skipped without its package."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rayrec import models
from rayrec.layers.sequence_blocks import ListElements
from rayrec.models.base import CandidateRows, ModelInputs

pytest.importorskip("rectools.models.nn.transformers.sasrec", exc_type=ImportError)
from rectools.models.nn.transformers import (
    hstu,
    ligr,
    net_blocks,
    sasrec,
    similarity,
    torch_backbone,
)

LENGTH = 9
DIM = 8
HEADS = 2
BLOCKS = 2
ITEMS = 30
INPUTS = ModelInputs(
    0,
    ("item",),
    lists=(("item", LENGTH + 1),),
    candidates=(("item", CandidateRows(1, ITEMS)),),
)
TIMED_INPUTS = replace(INPUTS, aged=("item",))
LISTS = ((3, 4, 5, 6, 7, 8, 9, 10, 11), (12, 13, 14, 15), (16,), (2, 2, 29, 28, 27, 26, 25, 24))


def names_of(name: str, block: int) -> dict[str, str]:
    """Return the names of RecTools' weights by ours."""
    theirs = f"transformer_layers.{'stu' if name == 'hstu' else 'transformer'}_blocks.{block}"
    attention = {
        "query_key_value.weight": "multi_head_attn.in_proj_weight",
        "query_key_value.bias": "multi_head_attn.in_proj_bias",
        "mixed.weight": "multi_head_attn.out_proj.weight",
        "mixed.bias": "multi_head_attn.out_proj.bias",
        "first.weight": "feed_forward.ff_linear_1.weight",
        "second.weight": "feed_forward.ff_linear_2.weight",
    }
    own = {
        "sasrec": attention
        | {f"query_norm.{kind}": f"q_layer_norm.{kind}" for kind in ("weight", "bias")}
        | {f"norm.{kind}": f"ff_layer_norm.{kind}" for kind in ("weight", "bias")}
        | {
            "first.bias": "feed_forward.ff_linear_1.bias",
            "second.bias": "feed_forward.ff_linear_2.bias",
        },
        "esasrec": attention
        | {f"attention_norm.{kind}": f"layer_norm_1.{kind}" for kind in ("weight", "bias")}
        | {f"norm.{kind}": f"layer_norm_2.{kind}" for kind in ("weight", "bias")}
        | {f"attention_gate.{kind}": f"gating_linear_1.{kind}" for kind in ("weight", "bias")}
        | {f"gate.{kind}": f"gating_linear_2.{kind}" for kind in ("weight", "bias")}
        | {"factor.weight": "feed_forward.ff_linear_3.weight"},
        "hstu": {f"mixed.{kind}": f"output_mlp.{kind}" for kind in ("weight", "bias")},
    }[name]
    return {f"blocks.{block}.{mine}": f"{theirs}.{other}" for mine, other in own.items()}


def weights_of(name: str, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return our weights from RecTools'."""
    weights = {"positions": theirs["pos_encoding_layer.pos_emb.weight"]}
    if name == "sasrec":
        for kind in ("weight", "bias"):
            weights[f"norm.{kind}"] = theirs[f"transformer_layers.last_layernorm.{kind}"]
    for block in range(BLOCKS):
        for mine, other in names_of(name, block).items():
            weights[mine] = theirs[other]
        if name == "hstu":
            prefix = f"transformer_layers.stu_blocks.{block}"
            u, v, q, k = theirs[f"{prefix}.uvqk_proj"].T.chunk(4)
            weights[f"blocks.{block}.joint.weight"] = torch.cat([u, q, k, v])
            by_offset = theirs[f"{prefix}.rel_attn.pos_weights"]
            weights[f"blocks.{block}.distances"] = by_offset[:LENGTH].flip(0)
            if f"{prefix}.rel_attn.time_weights" in theirs:
                weights[f"blocks.{block}.times"] = theirs[f"{prefix}.rel_attn.time_weights"]
    return weights


def make_theirs(name: str, *, timed: bool = False) -> Any:
    shared = {"n_blocks": BLOCKS, "n_factors": DIM, "n_heads": HEADS, "dropout_rate": 0.0}
    layers = {
        "sasrec": lambda: sasrec.SASRecTransformerLayers(**shared),
        "esasrec": lambda: ligr.LiGRLayers(**shared),
        "hstu": lambda: hstu.STULayers(
            **shared,
            linear_hidden_dim=DIM // HEADS,
            attention_dim=DIM // HEADS,
            session_max_len=LENGTH,
            relative_time_attention=timed,
            relative_pos_attention=True,
        ),
    }[name]()
    return torch_backbone.TransformerTorchBackbone(
        n_heads=HEADS,
        dropout_rate=0.0,
        item_model=nn.Module(),
        pos_encoding_layer=net_blocks.LearnableInversePositionalEncoding(
            use_pos_emb=True,
            session_max_len=LENGTH,
            n_factors=DIM,
            use_scale_factor=name == "hstu",
        ),
        transformer_layers=layers,
        similarity_module=similarity.DistanceSimilarityModule(),
        use_key_padding_mask=name != "hstu",
    ).eval()


@pytest.mark.parametrize(
    ("name", "timed"),
    [
        ("sasrec", False),
        ("esasrec", False),
        ("hstu", False),
        ("hstu", True),
    ],
)
def test_network_matches_rectools(name: str, timed: bool) -> None:
    """RecTools' HSTU with times knows that of the next item."""
    torch.manual_seed(0)
    theirs = make_theirs(name, timed=timed)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            # HSTU's own code has norms without weights
            if name != "hstu" or ".norm_" not in parameter_name:
                parameter.normal_(std=0.5)
    config = models.config_class(name)(
        embedding_dim=DIM,
        attention_heads=HEADS,
        blocks=BLOCKS,
        dropout=0.0,
        **({"request_time": True} if timed else {}),
    )
    ours = config.build(TIMED_INPUTS if timed else INPUTS).eval()
    ours.load_state_dict(weights_of(name, theirs.state_dict()))
    table = torch.randn(ITEMS, DIM)
    table[0] = 0
    padded = torch.zeros(len(LISTS), LENGTH, dtype=torch.int64)
    for row, items in enumerate(LISTS):
        padded[row, LENGTH - len(items) :] = torch.tensor(items)
    lengths = torch.tensor([len(items) for items in LISTS])
    elements = ListElements(lengths.cumsum(0) - lengths, lengths, width=LENGTH)
    # Of items and of the next one, with differences from seconds to years
    times = (10 ** (7 * torch.rand(len(LISTS), LENGTH + 1))).long().cumsum(1)
    gaps = [row.diff()[LENGTH - len(items) :] for row, items in zip(times, LISTS, strict=True)]
    if timed:
        elements.measure_times(torch.cat(gaps).float()[elements.item], to_next=True)
    ids = torch.tensor([item for items in LISTS for item in items])
    with torch.no_grad():
        expected = theirs.encode_sessions({"x": padded, "unix_ts": times}, table)
        states = ours.encode(table[ids[elements.item]], elements)
    of_places = expected[elements.rows, LENGTH - 1 - elements.age]
    torch.testing.assert_close(states, of_places, rtol=1e-5, atol=1e-5)
    assert states.abs().max() > math.sqrt(DIM) / 10
