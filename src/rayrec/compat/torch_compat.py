"""Private names of torch and TorchRec, imported lazily, and functions for private attributes."""

# ruff: noqa: F401  # the names are for other modules
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from rayrec.compat import read_names, resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import (
        Shard,
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed.remote_device import _remote_device as remote_device
    from torch.utils._python_dispatch import TorchDispatchMode
    from torchrec.distributed import DistributedModelParallel

NAMES: Final = read_names("torch")
"""All private names of torch imported by rayrec, by their name in this module."""


def __getattr__(name: str) -> Any:
    return resolve(NAMES, name, __name__)


def linear_pointwise(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Compute `inputs` [rows, in] times transposed `weight` [out, in] plus `bias` [out], fused with
    `activation` ("none" or "relu"), by oneDNN. torch uses this operator for inductor only.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        inputs, weight, bias, activation, [], ""
    )
    return product


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN supports bfloat16 on this CPU. torch has no public function for it."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def uncounted_operators(
    attention: Callable[..., int], linear: Callable[..., int]
) -> dict[Any, Callable[..., int]]:
    """Return FLOP formulas for the CPU operators of attention and linear layers that torch's own
    table lacks.
    """
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention
    }
    if torch.backends.mkldnn.is_available():
        formulas[torch.ops.mkldnn._linear_pointwise] = linear
    return formulas


def base_operator(overload: Any) -> Any:
    """Return the operator of an overload received by a dispatch mode, because torch's table of
    formulas is keyed by operators.
    """
    return overload._overloadpacket


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward pass, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sharded_tensor(
    shards: list[Shard], metadata: ShardedTensorMetadata, like: ShardedTensor
) -> ShardedTensor:
    """Create a ShardedTensor from local shards in the process group of `like`, without the public
    constructors' collective.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    group: ProcessGroup | None = like._process_group
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group
    )


def move_wrapped_module(model: DistributedModelParallel, device: torch.device) -> None:
    """Move the module wrapped by DistributedModelParallel to a device, as TorchRec's wrappers
    do.
    """
    model._dmp_wrapped_module = model._dmp_wrapped_module.to(device)


def set_optimizer_in_backward(
    parameters: Iterable[torch.nn.Parameter],
    optimizer: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
) -> None:
    """Replace the optimizer that `apply_optimizer_in_backward` set on tables, before they are
    sharded.
    """
    for parameter in parameters:
        parameter._optimizer_classes = [optimizer]  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = [dict(arguments)]  # type: ignore[attr-defined]


def forget_cached_rows(model: torch.nn.Module) -> None:
    """Clear the caches of tables in host memory, after their rows were changed. TorchRec does so
    only after `load_state_dict`.
    """
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            # data_parallel tables are wrapped and have no cache
            purge = getattr(lookup, "purge", None)
            if purge is not None:
                purge()


def table_kernels(model: torch.nn.Module) -> Iterator[tuple[Any, list[tuple[str, int, int]]]]:
    """Yield fbgemm's kernels with a fused optimizer in a sharded model, and (name, first row, first
    column) of their tables, because a kernel may have only a part of a table. TorchRec has no
    public access to its kernels.
    """
    from torchrec.distributed.batched_embedding_kernel import (
        BatchedFusedEmbedding,
        BatchedFusedEmbeddingBag,
    )

    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in getattr(lookup, "_emb_modules", ()):
                if isinstance(kernel, BatchedFusedEmbedding | BatchedFusedEmbeddingBag):
                    parts = [
                        (table.name, table.local_metadata)
                        for table in kernel.config.embedding_tables
                    ]
                    yield kernel.emb_module, [(name, *part.shard_offsets) for name, part in parts]
