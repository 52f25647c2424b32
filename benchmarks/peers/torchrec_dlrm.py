"""TorchRec's own DLRM as its example builds it: its model, planner, fused optimizer and pipeline,
with default kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

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


@dataclass(frozen=True)
class Network:
    """Layers and optimizers."""

    embedding_dim: int
    bottom: list[int]
    top: list[int]
    table_optimizer: type[torch.optim.Optimizer]
    table_settings: dict[str, float]
    dense_optimizer: Callable[..., torch.optim.Optimizer]
    dense_settings: dict[str, float]
    table_state_bytes: int
    """Bytes of state of a table's row."""


KAGGLE: Final = Network(
    embedding_dim=16,
    bottom=[512, 256, 64, 16],
    top=[512, 256, 1],
    table_optimizer=RowWiseAdagrad,
    table_settings={"lr": 0.02, "eps": 1e-8},
    dense_optimizer=torch.optim.Adam,
    dense_settings={"lr": 0.001},
    table_state_bytes=4,
)
"""Network of the recipe criteo_kaggle."""
MLPERF: Final = Network(
    embedding_dim=128,
    bottom=[512, 256, 128],
    top=[1024, 1024, 512, 256, 1],
    table_optimizer=torch.optim.SGD,
    table_settings={"lr": 0.005},
    dense_optimizer=torch.optim.SGD,
    dense_settings={"lr": 0.005},
    table_state_bytes=0,
)
"""Network of the recipe mlperf_dlrm."""


def build(
    sizes: list[int],
    *,
    precision: str,
    network: Network = KAGGLE,
    device: torch.device | None = None,
    batch_size: int = 2048,
) -> TrainPipelineSparseDist:
    """Build the pipeline of one worker, on the CPU unless `device` is given. `sizes`: rows of the
    tables.
    """
    device = device or torch.device("cpu")
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}",
            feature_names=[f"cat_{i}"],
            num_embeddings=size,
            embedding_dim=network.embedding_dim,
        )
        for i, size in enumerate(sizes)
    ]
    model = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=13,
        dense_arch_layer_sizes=network.bottom,
        over_arch_layer_sizes=network.top,
        dense_device=device,
    )
    train = DLRMTrain(model)
    settings = dict(network.table_settings)  # TorchRec adds to them
    apply_optimizer_in_backward(network.table_optimizer, model.sparse_arch.parameters(), settings)
    from rayrec.sharding.planner import Site, embedding_sharders, plan_sharding

    memory = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else 8 << 30
    plan = plan_sharding(
        train,
        Site(1, kind, memory),
        batch_size=batch_size,
        state_bytes=lambda rows, _: network.table_state_bytes * rows,
    )
    sharded = DistributedModelParallel(
        train, device=device, plan=plan, sharders=embedding_sharders(device=kind)
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: network.dense_optimizer(params, **network.dense_settings),
    )
    if precision == "bf16":
        forward = sharded.forward

        def autocast_forward(*arguments: Any, **named: Any) -> Any:
            with torch.autocast(kind, torch.bfloat16):
                return forward(*arguments, **named)

        sharded.forward = autocast_forward
    return TrainPipelineSparseDist(
        sharded,
        CombinedOptimizer([sharded.fused_optimizer, dense]),
        device,
        execute_all_batches=True,
    )
