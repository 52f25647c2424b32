"""Tokens compared with published hashes and plain Python; lookup tables compared with a dict."""

import random
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.encoding.encoder import build_slots, find_ids, num_slots
from rayrec.data.logs.column_values import EMPTY, REJECTED, VALUE, integer_tokens, text_tokens

MASK = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotated(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & MASK


def xxh64(data: bytes) -> int:
    """Compute XXH64 step by step like the specification."""

    def lane(accumulator: int, at: int) -> int:
        return rotated((accumulator + int.from_bytes(data[at : at + 8], "little") * P2) & MASK, 31) * P1 & MASK

    at = 0
    if len(data) >= 32:
        accumulators = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while len(data) - at >= 32:
            accumulators = [lane(a, at + 8 * i) for i, a in enumerate(accumulators)]
            at += 32
        value = sum(rotated(a, bits) for a, bits in zip(accumulators, (1, 7, 12, 18), strict=True)) & MASK
        for a in accumulators:
            value = ((value ^ (rotated(a * P2 & MASK, 31) * P1 & MASK)) * P1 + P4) & MASK
    else:
        value = P5
    value = (value + len(data)) & MASK
    while len(data) - at >= 8:
        value = (rotated(value ^ lane(0, at), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        value = (rotated(value ^ (int.from_bytes(data[at : at + 4], "little") * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        value = rotated(value ^ (byte * P5 & MASK), 11) * P1 & MASK
    value = (value ^ value >> 33) * P2 & MASK
    value = (value ^ value >> 29) * P3 & MASK
    return value ^ value >> 32


def token(text: bytes) -> int:
    """Return the token that the module's docstring specifies."""
    if re.fullmatch(rb"0|-?[1-9][0-9]*", text) and -(2**63) <= int(text) < 2**63:
        return int(text) & MASK
    if text in (b"true", b"True", b"TRUE", b"false", b"False", b"FALSE"):
        return int(text.lower() == b"true")
    return xxh64(text)


def self_test_buffer() -> bytes:
    state, out = 2654435761, bytearray()
    for _ in range(222):
        out.append(state >> 56)
        state = state * 0x9E3779B185EBCA8D & MASK
    return bytes(out)


BUFFER = self_test_buffer()
PUBLISHED = {
    # Of the xxHash repository's own self-test (the first 0, 1, 4, 14 and 222 bytes of its buffer), and of the manuals of
    # python-xxhash and other bindings.
    b"": 0xEF46DB3751D8E999,
    BUFFER[:1]: 0xE934A84ADB052768,
    BUFFER[:4]: 0x9136A0DCA57457EE,
    BUFFER[:14]: 0x8282DCC4994E35C8,
    BUFFER: 0xB641AE8CB691C174,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"xxhash": 0x32DD38952C4BC720,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


@pytest.mark.parametrize("text", PUBLISHED, ids=len)
def test_published_hashes(text: bytes) -> None:
    assert xxh64(text) == PUBLISHED[text]
    tokens, status = tokens_of(text_tokens, pa.array([text], pa.binary()))
    if status.tolist() == [VALUE]:
        assert tokens.tolist() == [PUBLISHED[text]]
    else:
        assert text in (b"", BUFFER[:4], BUFFER[:14], BUFFER)  # no value, and no UTF-8


def tokens_of(function: Callable[..., np.ndarray], array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty(len(array), np.uint64)
    return out, function(array, out)


def check_texts(texts: list[bytes | None]) -> None:
    def expected(text: bytes | None) -> tuple[int, int]:
        try:
            return (token(text), VALUE) if text and text.decode() else (0, EMPTY)
        except UnicodeDecodeError:
            return 0, REJECTED

    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        found = tokens_of(text_tokens, pa.array([b"before", *texts], kind).slice(1))
        assert list(zip(*(array.tolist() for array in found), strict=True)) == [expected(text) for text in texts]


numerals = st.integers(-(2**66), 2**66).map(lambda n: str(n).encode()) | st.from_regex(rb"[-+]?[0-9]{0,21}", fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.none() | st.text(max_size=80).map(str.encode) | st.binary(max_size=12) | numerals, max_size=6))
def test_texts(texts: list[bytes | None]) -> None:
    check_texts(texts)


def test_text_tokens_match_python_for_all_lengths_and_bytes() -> None:
    rng = random.Random(0)
    check_texts([bytes(rng.choices(b"abc \xc3"[:4], k=n)) for n in range(1, 140)])
    check_texts([str(n).encode() for edge in (0, 2**31, 2**63, 2**64, 10**19) for n in range(-edge - 2, -edge + 3)])
    check_texts([str(n).encode() for edge in (2**31, 2**63, 2**64, 10**18, 10**19) for n in range(edge - 2, edge + 3)])
    check_texts([b"-", b"-0", b"00", b"01", b"+1", b"1 ", b" 1", b"1.0", b"1e3", "١".encode(), b"0x1", b"\0"])
    ends = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
    check_texts([bytes([a, b]) for a in range(256) for b in (0x00, 0x7F, 0x80, 0xBF, 0xC0)])
    check_texts([bytes([a, b, 0x80]) for a in range(0xE0, 0x100) for b in ends])
    check_texts([bytes([a, b, 0x80, c]) for a in range(0xEE, 0x100) for b in ends for c in (0x41, 0x80)])
    tails = (b"\xe2\x82", b"\xe2\x82\xac", b"\xff1234567", b"\xc3\xa4")
    check_texts([b"abcdefgh" * n + tail for n in range(3) for tail in tails])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.integers(0, 2**64 - 1) | st.sampled_from([2**24 + 1, 2**40, 2**63 - 1, 2**63])))
def test_integer_tokens_match_text(values: list[int | None]) -> None:
    text, _ = tokens_of(text_tokens, pa.array([None if v is None else str(v) for v in values], pa.string()))
    tokens, status = tokens_of(integer_tokens, pa.array(values, pa.uint64()))
    assert tokens.tolist() == text.tolist()
    assert status.tolist() == [EMPTY if v is None else VALUE for v in values]
    for bits, signed in ((8, False), (8, True), (16, True), (32, False), (32, True), (64, True)):
        narrow = [None if v is None else v % 2**bits - (2 ** (bits - 1) if signed else 0) for v in values]
        tokens, _ = tokens_of(integer_tokens, pa.array(narrow, getattr(pa, f"{'' if signed else 'u'}int{bits}")()))
        text, _ = tokens_of(text_tokens, pa.array([None if v is None else str(v) for v in narrow], pa.string()))
        assert tokens.tolist() == text.tolist()
    assert tokens_of(integer_tokens, pa.array([True, None, False]))[0].tolist() == [1, 0, 0]


# Tables --------------------------------------------------------------------------------------------------------------
def built(tokens: list[int], ids: list[int]) -> np.ndarray:
    slots = np.zeros((num_slots(len(tokens)), 2), np.uint64)
    assert build_slots(np.array(tokens, np.uint64), np.array(ids, np.int32), slots)
    return slots


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, MASK) | st.integers(0, 30) | st.integers(0, 30).map(lambda n: n << 40),
        st.integers(0, 2**31 - 1),
        max_size=120,
    ),
    st.lists(st.integers(0, MASK) | st.integers(0, 40)),
)
def test_lookup_matches_dict(known: dict[int, int], others: list[int]) -> None:
    slots = built(list(known), list(known.values()))
    asked = others + list(known)
    assert find_ids(np.array(asked, np.uint64), slots, -7).tolist() == [known.get(t, -7) for t in asked]


def test_lookup_finds_many_tokens_and_rejects_repeated_ones() -> None:
    rng = np.random.default_rng(0)
    for tokens in (rng.integers(0, MASK, 100_000, np.uint64), np.arange(100_000, dtype=np.uint64) << np.uint64(44)):
        tokens = np.unique(tokens)
        ids = rng.permutation(len(tokens)).astype(np.int32)
        slots = built(tokens.tolist(), ids.tolist())
        assert (find_ids(tokens, slots, -1) == ids).all()
        assert (find_ids(~tokens, slots, -1) == -1).all()
    assert not build_slots(np.array([5, 2**40, 5], np.uint64), np.arange(3, dtype=np.int32), np.zeros((16, 2), np.uint64))
