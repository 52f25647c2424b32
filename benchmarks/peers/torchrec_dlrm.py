"""TorchRec's own DLRM as its example builds it: its model, planner, fused optimizer and pipeline,
with default kernels.
"""

from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def build(sizes: list[int], *, precision: str) -> TrainPipelineSparseDist:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}", feature_names=[f"cat_{i}"], num_embeddings=size, embedding_dim=16
        )
        for i, size in enumerate(sizes)
    ]
    model = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=13,
        dense_arch_layer_sizes=[512, 256, 64, 16],
        over_arch_layer_sizes=[512, 256, 1],
    )
    train = DLRMTrain(model)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.02, "eps": 1e-8}
    )
    device = torch.device("cpu")
    from rayrec.sharding.planner import Site, embedding_sharders, plan_sharding

    plan = plan_sharding(
        train, Site(1, "cpu", 8 << 30), batch_size=2048, state_bytes=lambda rows, _: 4 * rows
    )
    sharded = DistributedModelParallel(
        train, device=device, plan=plan, sharders=embedding_sharders()
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.001),
    )
    if precision == "bf16":
        forward = sharded.forward

        def autocast_forward(*arguments: Any, **named: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(*arguments, **named)

        sharded.forward = autocast_forward
    return TrainPipelineSparseDist(
        sharded,
        CombinedOptimizer([sharded.fused_optimizer, dense]),
        device,
        execute_all_batches=True,
    )
