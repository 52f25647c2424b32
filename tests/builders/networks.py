"""Networks of every click model for two numbers and features a, b and c: each structure that its settings can give it."""

from dataclasses import replace

from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.autoint import AutoIntConfig
from rayrec.models.ranking.dcnv2 import DCNv2Config
from rayrec.models.ranking.dcnv3 import DCNv3Config
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalmlp import FinalMLPConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.models.ranking.gdcn import GDCNConfig
from rayrec.models.ranking.linear import LinearConfig
from rayrec.models.ranking.masknet import MaskNetConfig
from rayrec.models.ranking.mmoe import MMoEConfig
from rayrec.models.ranking.ple import PLEConfig
from rayrec.models.ranking.widedeep import WideDeepConfig
from rayrec.models.ranking.wukong import WukongConfig
from rayrec.models.ranking.xdeepfm import XDeepFMConfig
from rayrec.schema import Label

DIM = 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
SEVERAL = replace(INPUTS, more_labels=(Label(name="like"), Label(name="seconds", kind="number")))

CROSSES = DCNv2Config(embedding_dim=DIM, cross_layers=2, mlp=(8, 6), dropout=0.3, batch_norm=True)
GDCN = GDCNConfig(embedding_dim=DIM, cross_layers=2, mlp=(8, 6), dropout=0.3)
MASKNET = MaskNetConfig(embedding_dim=DIM, mlp=(8, 6), num_blocks=2, block_dim=5, reduction_ratio=0.5, dropout=0.3)
FINALMLP = FinalMLPConfig(embedding_dim=DIM, first_mlp=(8, 6), second_mlp=(4,), heads=2, gate_mlp=(3,))
FINALNET = FinalNetConfig(embedding_dim=DIM, first_tower=(12, 8), second_tower=(10,), second_dropout=0.3)
WUKONG = WukongConfig(embedding_dim=DIM, linear_vectors=3, product_vectors=2, rank=2, block_mlp=(6,), mlp=(8,), dropout=0.3)
DEEPFM = DeepFMConfig(embedding_dim=DIM, mlp=(8, 6), batch_norm=True, dropout=0.3)
WIDEDEEP = WideDeepConfig(embedding_dim=DIM, mlp=(8,), dropout=0.3)
XDEEPFM = XDeepFMConfig(embedding_dim=DIM, interaction=(5, 3), mlp=(8,), dropout=0.3)
DCNV3 = DCNv3Config(embedding_dim=DIM, deep_layers=2, shallow_layers=3)
AUTOINT = AutoIntConfig(embedding_dim=DIM, layers=2, attention_dim=6, heads=2, mlp=(8,), dropout=0.3)
MMOE = MMoEConfig(embedding_dim=DIM, experts=3, expert=(8, 6), gate=(5,), tower=(7,), dropout=0.3)
PLE = PLEConfig(embedding_dim=DIM, levels=2, own_experts=2, expert=(9,), gate=(5,), tower=(8,), dropout=0.3)
DLRM = DLRMConfig(interaction="dot", embedding_dim=DIM, bottom_mlp=(7, 6, 4), top_mlp=(8, 5, 1), cross_layers=2, cross_low_rank=3)
DLRM = DLRM.replace(projection_first=(6, 8), projection_second=(5, 12))
CONFIGS: dict[str, ClickModelConfig] = {
    "linear": LinearConfig(number_scale=4.0, category_scale=0.5),
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
    "dlrm projection": DLRM.replace(interaction="projection"),
    "dlrm batch norm": DLRM.replace(batch_norm=True),
    "dlrm dropout": DLRM.replace(bottom_dropout=0.2, top_dropout=0.4, batch_norm=True),
    "dlrm top dropout": DLRM.replace(top_dropout=0.4),
}


def inputs_of(config: ClickModelConfig) -> ModelInputs:
    return SEVERAL if config.SEVERAL_LABELS else INPUTS
