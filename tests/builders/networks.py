"""Networks of every click model for two numbers and features a, b and c: each structure that its
settings can give it.
"""

from dataclasses import replace
from typing import Any

from rayrec import models
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.schema import Label

DIM = 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
SEVERAL = replace(INPUTS, more_labels=(Label(name="like"), Label(name="seconds", kind="number")))


def small(name: str, **settings: Any) -> Any:
    return models.config_class(name)(embedding_dim=DIM, **settings)


CROSSES = small(
    "dcnv2",
    cross_layers=2,
    mlp=(8, 6),
    dropout=0.3,
    batch_norm=True,
)
GDCN = small(
    "gdcn",
    cross_layers=2,
    mlp=(8, 6),
    dropout=0.3,
)
MASKNET = small(
    "masknet",
    mlp=(8, 6),
    num_blocks=2,
    block_dim=5,
    reduction_ratio=0.5,
    dropout=0.3,
)
FINALMLP = small(
    "finalmlp",
    first_mlp=(8, 6),
    second_mlp=(4,),
    heads=2,
    gate_mlp=(3,),
)
FINALNET = small(
    "finalnet",
    first_tower=(12, 8),
    second_tower=(10,),
    second_dropout=0.3,
)
WUKONG = small(
    "wukong", linear_vectors=3, product_vectors=2, rank=2, block_mlp=(6,), mlp=(8,), dropout=0.3
)
DEEPFM = small(
    "deepfm",
    mlp=(8, 6),
    batch_norm=True,
    dropout=0.3,
)
WIDEDEEP = small("widedeep", mlp=(8,), dropout=0.3)
XDEEPFM = small(
    "xdeepfm",
    interaction=(5, 3),
    mlp=(8,),
    dropout=0.3,
)
DCNV3 = small("dcnv3", deep_layers=2, shallow_layers=3)
AUTOINT = small(
    "autoint",
    layers=2,
    attention_dim=6,
    heads=2,
    mlp=(8,),
    dropout=0.3,
)
MMOE = small(
    "mmoe",
    experts=3,
    expert=(8, 6),
    gate=(5,),
    tower=(7,),
    dropout=0.3,
)
PLE = small(
    "ple",
    levels=2,
    own_experts=2,
    expert=(9,),
    gate=(5,),
    tower=(8,),
    dropout=0.3,
)
DLRM = small(
    "dlrm",
    interaction="dot",
    bottom_mlp=(7, 6, 4),
    top_mlp=(8, 5, 1),
    cross_layers=2,
    cross_low_rank=3,
).replace(projection_first=(6, 8), projection_second=(5, 12))
CONFIGS: dict[str, ClickModelConfig] = {
    "linear": models.config_class("linear")(number_scale=4.0, category_scale=0.5),
    "widedeep": WIDEDEEP,
    "widedeep batch norm": WIDEDEEP.replace(batch_norm=True),
    "deepfm": DEEPFM,
    "xdeepfm": XDEEPFM,
    "xdeepfm without mlp": XDEEPFM.replace(mlp=()),
    "autoint": AUTOINT,
    "autoint scaled": AUTOINT.replace(mlp=(), scale=True, attention_dim=DIM),
    "autoint wide": AUTOINT.replace(use_wide=True, batch_norm=True),
    "dcnv2": CROSSES,
    "dcnv2 stacked": CROSSES.replace(structure="stacked"),
    "dcnv2 stacked parallel": CROSSES.replace(structure="stacked_parallel", stacked_mlp=(7,)),
    "dcnv2 low rank": CROSSES.replace(low_rank=3),
    "dcnv2 mixture": CROSSES.replace(low_rank=3, experts=2),
    "dcnv2 crosses alone": CROSSES.replace(mlp=()),
    "gdcn": GDCN,
    "gdcn stacked": GDCN.replace(structure="stacked", batch_norm=True),
    "dcnv3": DCNV3,
    "dcnv3 heads": DCNV3.replace(heads=2, batch_norm=True),
    "dcnv3 without norm": DCNV3.replace(layer_norm=False),
    "masknet": MASKNET,
    "masknet parallel": MASKNET.replace(structure="parallel"),
    "masknet without norms": MASKNET.replace(layer_norm=False, embedding_layer_norm=False),
    "finalmlp": FINALMLP.replace(batch_norm=True),
    "finalmlp gates": FINALMLP.replace(feature_gates=True, first_context=("c", "numbers")),
    "finalnet": FINALNET,
    "finalnet without tower losses": FINALNET.replace(tower_losses=False),
    "finalnet without activation": FINALNET.replace(activation="none"),
    "finalnet one tower": FINALNET.replace(second_tower=(), feature_gate=False, batch_norm=False),
    "wukong": WUKONG,
    "wukong shortcut": WUKONG.replace(linear_vectors=2, mlp_batch_norm=True),
    "mmoe": MMOE,
    "mmoe batch norm": MMOE.replace(batch_norm=True, gate=()),
    "ple": PLE,
    "ple batch norm": PLE.replace(batch_norm=True, levels=1),
    "dlrm dot": DLRM,
    "dlrm cross": DLRM.replace(interaction="cross"),
    "dlrm first order": DLRM.replace(first_order=True),
    "dlrm projection": DLRM.replace(interaction="projection"),
    "dlrm batch norm": DLRM.replace(batch_norm=True),
    "dlrm dropout": DLRM.replace(bottom_dropout=0.2, top_dropout=0.4, batch_norm=True),
    "dlrm top dropout": DLRM.replace(top_dropout=0.4),
}


def inputs_of(config: ClickModelConfig) -> ModelInputs:
    return SEVERAL if config.SEVERAL_LABELS else INPUTS
