"""The header of a safetensors file, and the names that the format gives to the types of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
DTYPES = {  # names of the safetensors format
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
    """The start of a safetensors file for (name, dtype, shape, start in the body, bytes), padded for alignment."""
    table = {
        name: {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, start + size_bytes]}
        for name, dtype, shape, start, size_bytes in entries
    }
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded
