"""Small images inside a page: pixels as a PNG in a data: URL, by the standard library alone."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence


def data_url(pixels: Sequence[Sequence[int | Sequence[int]]]) -> str:
    """`data:image/png;base64,...` of rows of pixels, each 0 to 255 or (red, green, blue)."""
    height, width = len(pixels), len(pixels[0])
    in_color = not isinstance(pixels[0][0], int)
    lines = []
    for row in pixels:
        values = [value for pixel in row for value in pixel] if in_color else row  # type: ignore[union-attr]
        lines.append(b"\0" + bytes(values))  # type: ignore[arg-type]  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if in_color else 0, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(b"".join(lines), 9)), _chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
