"""Hash functions of integers and text, in NumPy and plain Python. The `encode.py` of an export
contains this module's text.
"""

from collections.abc import Sequence

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
"""Odd number near 2^64 divided by the golden ratio: the increment of SplitMix64."""
_MASK = 2**64 - 1
_PRIME1 = 0x9E3779B185EBCA87
_PRIME2 = 0xC2B2AE3D27D4EB4F
_PRIME3 = 0x165667B19E3779F9
_PRIME4 = 0x85EBCA77C2B2AE63
_PRIME5 = 0x27D4EB2F165667C5


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer (Steele, Lea, Flood 2014), a bijection that spreads multiples
    over any modulus, to uint64.
    """
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def key_tokens(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the 64-bit token of each key, uint64 [keys], from those of its one or two columns,
    whose order counts.
    """
    if len(columns) == 1:
        return columns[0]
    first, second = columns
    # The first is spread before the sum: sums of ids that are multiples of 2^n would repeat.
    return mix64(mix64(first + np.uint64(GOLDEN)) + second)


def murmur3(tokens: np.ndarray) -> np.ndarray:
    """Return murmur3_x86_32 (Appleby) of each token's bytes, seed 0, plus 0x9E3779B9 from cuDF's
    row hash. uint32 [tokens].
    """
    k = tokens * np.uint32(0xCC9E2D51)
    k = k << np.uint32(15) | k >> np.uint32(17)
    h = k * np.uint32(0x1B873593)
    h = (h << np.uint32(13) | h >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return (h ^ h >> np.uint32(16)) + np.uint32(0x9E3779B9)


def xxh64(data: bytes) -> int:
    """Return XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    position = 0
    length = len(data)
    value = _PRIME5
    if length >= 32:
        lanes = [(_PRIME1 + _PRIME2) & _MASK, _PRIME2, 0, -_PRIME1 & _MASK]
        while length - position >= 32:
            for number in range(4):
                lanes[number] = _lane(lanes[number], _word(data, position + 8 * number, 8))
            position += 32
        value = sum(map(_rotate, lanes, (1, 7, 12, 18))) & _MASK
        for lane in lanes:
            value = ((value ^ _lane(0, lane)) * _PRIME1 + _PRIME4) & _MASK
    value = (value + length) & _MASK
    while length - position >= 8:
        value = (
            _rotate(value ^ _lane(0, _word(data, position, 8)), 27) * _PRIME1 + _PRIME4
        ) & _MASK
        position += 8
    if length - position >= 4:
        value = (
            _rotate(value ^ _word(data, position, 4) * _PRIME1 & _MASK, 23) * _PRIME2 + _PRIME3
        ) & _MASK
        position += 4
    for byte in data[position:]:
        value = _rotate(value ^ byte * _PRIME5 & _MASK, 11) * _PRIME1 & _MASK
    value = (value ^ value >> 33) * _PRIME2 & _MASK
    value = (value ^ value >> 29) * _PRIME3 & _MASK
    return value ^ value >> 32


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _MASK


def _lane(accumulator: int, lane: int) -> int:
    return _rotate((accumulator + lane * _PRIME2) & _MASK, 31) * _PRIME1 & _MASK


def _word(data: bytes, position: int, size: int) -> int:
    return int.from_bytes(data[position : position + size], "little")
