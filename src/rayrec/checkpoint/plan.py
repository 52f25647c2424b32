"""Which rank writes which part of which tensor, and a copy of it in host memory laid out as the file will be."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from rayrec.checkpoint.communicator import Ranks
from rayrec.checkpoint.safetensors import DTYPES
from rayrec.config import InputError
from rayrec.quantities import size_text

_logger = logging.getLogger(__name__)

# torch.distributed.checkpoint takes a second to import, which a process that saves nothing need not do
if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor that this rank writes."""

    item: WriteItem
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """In the body of the file."""
    size_bytes: int


Shapes = dict[str, tuple[int, ...]]
"""The shape of every tensor of the model, by name, over all ranks."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk within its tensor."""


@dataclass(frozen=True)
class Plan:
    """What this rank writes, one part after the other."""

    parts: tuple[Part, ...]
    shapes: Shapes

    @property
    def body_bytes(self) -> int:
        return self.parts[-1].start + self.parts[-1].size_bytes if self.parts else 0


@final
class LocalTensors:
    """The tensors a rank holds as torch's planner sees them. Raises TypeError for what a checkpoint cannot hold."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        from rayrec.compat.torch_compat import ShardedTensor

        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors)
        self.plan: SavePlan = self._planner.create_local_plan()
        for item in self.plan.items:
            _check_item(item)
        self.shapes: Shapes = {name: tuple(tensor.size()) for name, tensor in tensors.items()}
        self.sharded = frozenset(name for name, tensor in tensors.items() if isinstance(tensor, ShardedTensor))
        """Tensors of which every part is held by one rank only."""

    def signature(self) -> Hashable:
        """As long as it stays the same on all ranks, so does the plan."""
        return tuple((item.index.fqn, *_layout(item), item.type) for item in self.plan.items if item.tensor_data is not None)

    def data(self, part: Part) -> torch.Tensor:
        """The live values of a part."""
        data = self._planner.resolve_data(part.item)
        assert isinstance(data, torch.Tensor)
        return data.detach()


def _layout(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    data = item.tensor_data
    assert data is not None
    return data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def make_plan(local: LocalTensors, ranks: Ranks) -> Plan:
    """Collective: a replicated tensor is written by one rank, the one with the least to write so far.

    Raises InputError, on all ranks, if the parts that the ranks hold do not make up every tensor exactly once.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    everyone = ranks.gather_all((local.plan, local.shapes, local.sharded))
    shapes = _agreed_shapes([held for _, held, _ in everyone])
    sharded = frozenset().union(*(names for *_, names in everyone))
    boxes: dict[str, list[Box]] = {}
    for plan, *_ in everyone:
        for item in plan.items:
            boxes.setdefault(item.index.fqn, []).append(_layout(item)[2:])
    check_covered(shapes, {name: found if name in sharded else set(found) for name, found in boxes.items()})
    # Each rank makes the same plan of the same list, which spares sending the plans back.
    plans, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([plan for plan, *_ in everyone])
    return Plan(laid_out(plans[ranks.rank].items), shapes)


def laid_out(items: Iterable[WriteItem]) -> tuple[Part, ...]:
    """The places in one file of what a rank writes. Widest numbers first: every part then begins at a multiple of the width of
    its own. Raises TypeError for an item that is no tensor, or has a type that a checkpoint does not hold."""
    items = list(items)
    for item in items:
        _check_item(item)
    parts, start = [], 0
    for item in sorted(items, key=lambda item: -_layout(item)[0].itemsize):
        dtype, shape, offsets, sizes = _layout(item)
        size_bytes = dtype.itemsize * torch.Size(sizes).numel()
        parts.append(Part(item, item.index.fqn, dtype, shape, offsets, sizes, start, size_bytes))
        start += size_bytes
    return tuple(parts)


def _check_item(item: WriteItem) -> None:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor; plain state belongs into the manifest's state")
    if item.tensor_data.properties.dtype not in DTYPES:
        raise TypeError(f"{item.index.fqn} is {item.tensor_data.properties.dtype}, which no checkpoint holds")


def _agreed_shapes(everyone: Sequence[Shapes]) -> Shapes:
    shapes: Shapes = {}
    for held in everyone:
        for name, shape in held.items():
            if shapes.setdefault(name, shape) != shape:
                raise InputError(f"{name}: has shape {list(shapes[name])} on one worker and {list(shape)} on another")
    return shapes


def check_covered(shapes: Mapping[str, Sequence[int]], boxes: Mapping[str, Iterable[Box]]) -> None:
    """Raises InputError if the boxes to be written of a tensor have fewer or more elements than the tensor. Pure."""
    for name, shape in shapes.items():
        covered = sum(math.prod(sizes) for _, sizes in boxes.get(name, ()))
        if covered != math.prod(shape):
            raise InputError(
                f"{name}: the workers hold {covered:,} of its {math.prod(shape):,} elements, so that no checkpoint can be "
                "saved; their sharding plans differ: use the same number of workers on every machine, and report this"
            )


class TensorSource(Protocol):
    """Has the live values of parts."""

    def data(self, part: Part) -> torch.Tensor: ...


@final
class HostCopy:
    """The parts of a plan in host memory. Costs as much of it as the rank writes, and keeps it from save to save."""

    def __init__(self, plan: Plan, local: TensorSource) -> None:
        self.plan = plan
        self._bytes = torch.empty(plan.body_bytes, dtype=torch.uint8)
        devices = {local.data(part).device for part in plan.parts}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._stream = torch.cuda.Stream(self._device) if self._device else None
        self._pinned = self._device is not None and plan.body_bytes > 0 and _pinned(self._bytes, self._device)

    def fill(self, local: TensorSource) -> None:
        """Copies the live values; on return they may change. One device sync."""
        targets = [
            self._bytes.narrow(0, part.start, part.size_bytes).view(part.dtype).view(part.sizes) for part in self.plan.parts
        ]
        if self._stream is None:
            for part, target in zip(self.plan.parts, targets, strict=True):
                target.copy_(local.data(part))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, target in zip(self.plan.parts, targets, strict=True):
                target.copy_(local.data(part), non_blocking=True)
        self._stream.synchronize()

    def body(self) -> memoryview:
        return self._bytes.numpy().data if self.plan.body_bytes else memoryview(b"")

    def free(self) -> None:
        """Gives the memory back; not while the body is being written."""
        if self._pinned:
            # An error of the device that ends the run is the one to report, not what comes of it here.
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.plan = Plan((), {})
        self._device = self._stream = None


def _pinned(memory: torch.Tensor, device: torch.device) -> bool:
    """Pins host memory in place, since torch's allocator of pinned memory would round up to a power of two. False, with a
    warning, if the system refuses: copies to it then take longer."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if not code:
        return True
    # CUDA gives the error again to the operation that asks next, and then clears it.
    with contextlib.suppress(Exception):
        torch.zeros(1, device=device)
    _logger.warning(
        "%s of host memory for checkpoints cannot be pinned (CUDA error %d): saves stall training for longer",
        size_text(memory.nbytes),
        code,
    )
    return False


def untied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that share all of their memory with one named before."""
    from torch.distributed.tensor import DTensor

    seen: set[Any] = set()
    kept = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Of no elements, or of a class of its own, a tensor shares nothing that could be told here.
        if type(local) is torch.Tensor and local.numel():
            place = (local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if place in seen:
                continue
            seen.add(place)
        kept[name] = tensor
    return kept
