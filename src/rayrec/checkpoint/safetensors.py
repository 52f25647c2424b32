"""Weight files of other tools: safetensors and torch state dicts. Never executes file content."""

import io
import itertools
import json
import pickle
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rayrec import storage
from rayrec.config import InputError

_ALIGNMENT = 64
DTYPES = {  # names in the safetensors format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def header(entries: Sequence[tuple[str, torch.dtype, Sequence[int], int, int]]) -> bytes:
    """Return the header of a safetensors file for (name, dtype, shape, start in the body, bytes),
    padded for alignment.
    """
    table = {
        name: {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, start + size_bytes],
        }
        for name, dtype, shape, start, size_bytes in entries
    }
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read named tensors from a .safetensors file or a `torch.save` state dict (.pt, .pth), also
    below key state_dict or model, by path or URL. Executes nothing in it. Raises InputError if it
    is missing, damaged or has anything but named tensors.
    """
    data = storage.read_bytes(path)
    if not storage.name_of(path).endswith(".safetensors"):
        return _state_dict(data, path)
    try:
        return load(data)
    except SafetensorError:
        raise InputError(
            f"{path}: damaged, must be a complete safetensors file. Download or export it again"
        ) from None


def _state_dict(data: bytes, path: str) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # UnpicklingError is also raised for code
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        raise InputError(
            f"{path}: must contain only tensors, for torch.load(weights_only=True). Save a "
            "state_dict()"
        ) from None
    if isinstance(tensors, Mapping) and isinstance(
        inner := tensors.get("state_dict", tensors.get("model")), Mapping
    ):
        tensors = inner
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise InputError(f"{path}: must contain only named tensors. Save a state_dict()")
    return dict(tensors)


def write_weights(path: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a safetensors file atomically and return its size in bytes."""
    entries = []
    start = 0
    for name, tensor in tensors.items():
        entries.append((name, tensor.dtype, tensor.shape, start, tensor.nbytes))
        start += tensor.nbytes

    bodies = (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for tensor in tensors.values()
    )
    return storage.write_stream(
        path, itertools.chain([header(entries)], (body.numpy().data for body in bodies))
    )
