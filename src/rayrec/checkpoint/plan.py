"""Save plan, which assigns tensor chunks to ranks, and a copy of a rank's chunks in host memory, in
file layout.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.safetensors import DTYPES
from rayrec.config import InputError
from rayrec.humanize import size_text

_logger = logging.getLogger(__name__)

# Importing torch.distributed.checkpoint takes a second, which processes that do not save can avoid.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


@dataclass(frozen=True)
class Part:
    """Chunk of a tensor that this rank writes."""

    item: WriteItem
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Byte offset in the body of the file."""
    size_bytes: int


Shapes = dict[str, tuple[int, ...]]
"""Shape of every tensor of the model, by name, over all ranks."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk within its tensor."""


@dataclass(frozen=True)
class Plan:
    """Parts that this rank writes, in file order."""

    parts: tuple[Part, ...]
    shapes: Shapes

    @property
    def body_bytes(self) -> int:
        return self.parts[-1].start + self.parts[-1].size_bytes if self.parts else 0


@final
class LocalTensors:
    """Local tensors of a rank, as torch's save planner sees them. Raises TypeError for values that
    a checkpoint cannot store.
    """

    def __init__(self, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        from rayrec.compat.torch_compat import ShardedTensor

        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors)
        self.plan: SavePlan = self._planner.create_local_plan()
        for item in self.plan.items:
            _check_item(item)
        self.shapes: Shapes = {name: tuple(tensor.size()) for name, tensor in tensors.items()}
        self.sharded = frozenset(
            name for name, tensor in tensors.items() if isinstance(tensor, ShardedTensor)
        )
        """Names of tensors whose parts are each stored by exactly one rank."""

    def signature(self) -> Hashable:
        """Return a key that determines the plan: while it is unchanged on all ranks, so is the
        plan.
        """
        return tuple(
            (item.index.fqn, *_layout(item), item.type)
            for item in self.plan.items
            if item.tensor_data is not None
        )

    def data(self, part: Part) -> torch.Tensor:
        """Return the live values of a part."""
        data = self._planner.resolve_data(part.item)
        assert isinstance(data, torch.Tensor)
        return data.detach()


def _layout(
    item: WriteItem,
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    data = item.tensor_data
    assert data is not None
    return (
        data.properties.dtype,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
    )


def make_plan(local: LocalTensors, ranks: Communicator) -> Plan:
    """Plan the save; collective. Each replicated tensor is written by the rank with the fewest
    bytes so far. Raises InputError on all ranks if the ranks' parts do not cover every tensor
    exactly once.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    # Plans have sizes and places only, so this exchange is small, and happens again only if they
    # change.
    gathered = ranks.all_gather((local.plan, local.shapes, local.sharded))
    shapes: Shapes = {}
    for _, local_shapes, _ in gathered:
        for name, shape in local_shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise InputError(
                    f"{name}: shapes of workers do not match, got {list(shapes[name])} and "
                    f"{list(shape)}"
                )
    sharded = frozenset().union(*(names for *_, names in gathered))
    boxes: dict[str, list[Box]] = {}
    for plan, *_ in gathered:
        for item in plan.items:
            boxes.setdefault(item.index.fqn, []).append(_layout(item)[2:])
    check_covered(
        shapes, {name: chunks if name in sharded else set(chunks) for name, chunks in boxes.items()}
    )
    # Each rank computes the same plan from the same list, so no rank sends it.
    plans, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(
        [plan for plan, *_ in gathered]
    )
    return Plan(lay_out(plans[ranks.rank].items), shapes)


def lay_out(items: Iterable[WriteItem]) -> tuple[Part, ...]:
    """Lay out a rank's items in one file, widest dtypes first, so that every part is aligned to its
    dtype. Raises TypeError for an item that is not a tensor or has an unsupported dtype.
    """
    items = list(items)
    for item in items:
        _check_item(item)
    parts = []
    # Widest dtypes first: then every part starts at a multiple of its item size, and readers can
    # view it without a copy.
    start = 0
    for item in sorted(items, key=lambda item: -_layout(item)[0].itemsize):
        dtype, shape, offsets, sizes = _layout(item)
        size_bytes = dtype.itemsize * torch.Size(sizes).numel()
        parts.append(Part(item, item.index.fqn, dtype, shape, offsets, sizes, start, size_bytes))
        start += size_bytes
    return tuple(parts)


def _check_item(item: WriteItem) -> None:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: must be a tensor. Put plain values into `state`")
    if item.tensor_data.properties.dtype not in DTYPES:
        raise TypeError(
            f"{item.index.fqn}: dtype {item.tensor_data.properties.dtype} is not supported in "
            "checkpoints"
        )


def check_covered(shapes: Mapping[str, Sequence[int]], boxes: Mapping[str, Iterable[Box]]) -> None:
    """Check that the boxes of each tensor have as many elements as the tensor. Pure. Raises
    InputError.
    """
    for name, shape in shapes.items():
        covered = sum(math.prod(sizes) for _, sizes in boxes.get(name, ()))
        if covered != math.prod(shape):
            raise InputError(
                f"{name}: the workers have {covered:,} of its {math.prod(shape):,} elements, so no "
                "checkpoint can be saved. Their sharding plans do not match: use the same number "
                "of workers on every machine, and report this"
            )


Values = Callable[[Part], torch.Tensor]
"""Returns the live values of a part."""


@final
class HostCopy:
    """Host memory copy of the parts of a plan. Allocates the rank's bytes once and reuses them for
    every save.
    """

    def __init__(self, plan: Plan, values: Values) -> None:
        self.plan = plan
        self._bytes = torch.empty(plan.body_bytes, dtype=torch.uint8)
        devices = {values(part).device for part in plan.parts}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._stream = torch.cuda.Stream(self._device) if self._device else None
        self._pinned = (
            self._device is not None and plan.body_bytes > 0 and _pinned(self._bytes, self._device)
        )

    def fill(self, values: Values) -> None:
        """Copy the live values, which may change after the return. One device sync."""
        targets = [
            self._bytes.narrow(0, part.start, part.size_bytes).view(part.dtype).view(part.sizes)
            for part in self.plan.parts
        ]
        if self._stream is None:
            for part, target in zip(self.plan.parts, targets, strict=True):
                target.copy_(values(part))
            return
        # A separate stream: the copies wait for the training's kernels, but these wait for nothing
        # until the synchronization below.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, target in zip(self.plan.parts, targets, strict=True):
                target.copy_(values(part), non_blocking=True)
        self._stream.synchronize()

    def body(self) -> memoryview:
        return self._bytes.numpy().data if self.plan.body_bytes else memoryview(b"")

    def free(self) -> None:
        """Free the memory. Must not be called while the body is being written."""
        if self._pinned:
            # Ignores errors, because the device error that ended the run is the one to report.
            # Before the memory is freed, or CUDA would keep a mapping of foreign memory.
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.plan = Plan((), {})
        self._device = self._stream = None


def _pinned(memory: torch.Tensor, device: torch.device) -> bool:
    """Pin host memory in place: torch's allocator rounds up to a power of two. Return False, with a
    warning, if it fails.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if not code:
        return True
    # CUDA reports the error again to the next operation, then clears it.
    with contextlib.suppress(Exception):
        torch.zeros(1, device=device)
    _logger.warning(
        "Cannot pin %s of host memory for checkpoints (CUDA error %d). Saves stall training for "
        "longer",
        size_text(memory.nbytes),
        code,
    )
    return False


def drop_tied_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Drop tensors that share all their memory with an earlier one."""
    from torch.distributed.tensor import DTensor

    seen: set[Any] = set()
    result = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Memory sharing can only be detected for plain, non-empty tensors.
        if type(local) is torch.Tensor and local.numel():
            storage = (local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if storage in seen:
                continue
            seen.add(storage)
        result[name] = tensor
    return result
