"""Private names of torch and TorchRec, each imported when it is first used, and functions for private attributes."""

# ruff: noqa: F401  # the names are for other modules
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from rayrec.compat import PrivateName, resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed.remote_device import _remote_device as remote_device
    from torch.utils._python_dispatch import TorchDispatchMode
    from torchrec.distributed import DistributedModelParallel

_SHARDED: Final = "torch.distributed._shard.sharded_tensor"

NAMES: Final = {
    "ShardMetadata": PrivateName(
        "torch.distributed._shard.metadata", "ShardMetadata", "Place of a shard in a state of a column-sharded table."
    ),
    "Shard": PrivateName(_SHARDED, "Shard", "Shard of a state of a column-sharded table."),
    "ShardedTensor": PrivateName(_SHARDED, "ShardedTensor", "Type of TorchRec's sharded tables and their states."),
    "ShardedTensorMetadata": PrivateName(_SHARDED, "ShardedTensorMetadata", "Shape of a state that checkpoints store."),
    "TensorProperties": PrivateName(_SHARDED, "TensorProperties", "Dtype of a state that checkpoints store."),
    "remote_device": PrivateName(
        "torch.distributed.remote_device", "_remote_device", "Device of a shard in a plan for nodes of unequal size."
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch", "TorchDispatchMode", "Counts operations without torch's compiler."
    ),
}
"""Every private name of torch that rayrec imports, by the name that this module gives it."""


def __getattr__(name: str) -> Any:
    return resolve(NAMES, name, __name__)


def linear_pointwise(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """`inputs` (rows, in) times `weight` (out, in) transposed, plus `bias` (out,), by oneDNN in one step; `activation`: "none"
    or "relu". torch has it for inductor only."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, activation, [], "")
    return product


def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU; torch has no public function for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def uncounted_operators(attention: Callable[..., int], linear: Callable[..., int]) -> dict[Any, Callable[..., int]]:
    """Formulas by operator, for the operators of attention and of products on CPU that torch's own table of formulas lacks."""
    found: dict[Any, Callable[..., int]] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    if torch.backends.mkldnn.is_available():
        found[torch.ops.mkldnn._linear_pointwise] = linear
    return found


def operator_of(overload: Any) -> Any:
    """The operator of an overload that a dispatch mode receives; torch's table of formulas has operators as its keys."""
    return overload._overloadpacket


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queues `callback` for the end of the backward pass that is running; DDP and FSDP queue theirs in the same way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sharded_tensor(shards: list[Shard], metadata: ShardedTensorMetadata, like: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor of this rank's `shards`, in the process group of `like`, without a collective. The public constructors
    exchange metadata first."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    group: ProcessGroup | None = like._process_group
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=group)


def move_wrapped_module(model: DistributedModelParallel, device: torch.device) -> None:
    """Moves the module that DistributedModelParallel wraps to `device`, as TorchRec's own wrappers do."""
    model._dmp_wrapped_module = model._dmp_wrapped_module.to(device)


def set_optimizer_in_backward(
    parameters: Iterable[torch.nn.Parameter], optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    """Replaces the optimizer that `apply_optimizer_in_backward` gave to tables, before they are sharded."""
    for parameter in parameters:
        parameter._optimizer_classes = [optimizer]  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = [dict(arguments)]  # type: ignore[attr-defined]


def forget_cached_rows(model: torch.nn.Module) -> None:
    """Empties the caches of tables in host memory, after their rows were changed there; TorchRec does so after
    `load_state_dict` alone."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            purge = getattr(lookup, "purge", None)  # data_parallel tables are wrapped, and have no cache
            if purge is not None:
                purge()


def table_kernels(model: torch.nn.Module) -> Iterator[tuple[Any, list[tuple[str, int, int]]]]:
    """fbgemm's kernels with a fused optimizer in a sharded model, and what each of their tables is: (name, first row, first
    column), since a kernel may have only a part of it. TorchRec has no public way to its kernels."""
    from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag

    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in getattr(lookup, "_emb_modules", ()):
                if isinstance(kernel, BatchedFusedEmbedding | BatchedFusedEmbeddingBag):
                    parts = [(table.name, table.local_metadata) for table in kernel.config.embedding_tables]
                    yield kernel.emb_module, [(name, *part.shard_offsets) for name, part in parts]
