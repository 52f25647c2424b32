"""Segments and indices: every line is read once, in order; changed, damaged and invalid files are
rejected by name.
"""

import gzip
import os
import random
import re
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from builders.faults import fails_with, raising, rejects
from builders.same import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec import hashing, storage
from rayrec.data.encoding.encoder import build_slots, find_ids, num_slots
from rayrec.data.log_source import LogSource
from rayrec.data.logs import index as log_index
from rayrec.data.logs.column_values import EMPTY, REJECTED, VALUE, integer_tokens, text_tokens
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import CachedIndex, LogIndex, Segment, numbered
from rayrec.data.logs.text_log import cut, index_chunk, read_lines, read_segments
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, parse
from rayrec.schema import Schema
from rayrec.storage import cache
from rayrec.storage.cache import is_packed, unpack

SCHEMA = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("a",),
    sparse=("b",),
)
LINES = [b"1\t5\tdeadbeef", b"0\t-3\t00000001", b"1\t\t", b"1\t123456789\t12345678"]
BAD_LINES = [
    b"",
    b"junk",
    b"1\tx\tdeadbeef",
    b"2\t5\tdeadbeef",
    b"1\t5\t6\t7",
    b"\0\xff",
]


def write(folder: Path, text: bytes, name: str = "log.txt") -> storage.File:
    (folder / name).write_bytes(text)
    return storage.File(str(folder / name), len(text), 0)


def index(file: storage.File, chunk_bytes: int, segment_bytes: int) -> LogIndex:
    entries = []
    faults = Faults()
    for chunk in cut([file], chunk_bytes):
        more, found = index_chunk(chunk, SCHEMA, segment_bytes)
        entries += more
        faults.add(found)
    return LogIndex(numbered(entries), faults)


def check_cutting(folder: Path, text: bytes, chunk_bytes: int, segment_bytes: int) -> None:
    file = write(folder, text)
    expected, faults = parse(SCHEMA, text, path=file.path)
    made = index(file, chunk_bytes, segment_bytes)
    assert made.rows == expected.rows
    assert (made.faults.counts, made.faults.first) == (faults.counts, faults.first)
    assert_same(read_segments(made.segments, SCHEMA), expected, ignored="files")
    row = end = 0
    for segment in [*made.segments, Segment(file.path, len(text), len(text), made.rows, 0)]:
        assert segment.first_row == row
        row += read_segments([segment], SCHEMA).rows if segment.rows else 0  # each also alone
        gap = text[end : segment.start]
        assert segment.start >= end
        # Only the rest of a line that is too long anyway is left out.
        assert not gap or (
            b"\n" not in gap[:-1]
            and len(text[: segment.start].rstrip(b"\n").rsplit(b"\n")[-1]) > MAX_LINE_BYTES
        )
        end = segment.stop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cutting")


@settings(max_examples=250, deadline=None)
@given(
    lines=st.lists(st.sampled_from(LINES + LINES + BAD_LINES), max_size=12),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    chunk_bytes=st.integers(1, 300),
    segment_bytes=st.integers(1, 300),
)
def test_any_chunk_and_segment_size(
    *,
    folder: Path,
    lines: list[bytes],
    ending: bytes,
    last: bool,
    chunk_bytes: int,
    segment_bytes: int,
) -> None:
    check_cutting(
        folder,
        ending.join(lines) + (ending if last else b""),
        chunk_bytes,
        segment_bytes,
    )


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(LINES)
        | st.integers(4085, 4100).map(lambda n: b"1" * n)
        | st.integers(1, 20_000).map(lambda n: b"x" * n),
        max_size=8,
    ),
    last=st.booleans(),
    chunk_bytes=st.integers(600, 12_000),
    segment_bytes=st.integers(1, 9000),
)
def test_very_long_lines(
    folder: Path,
    lines: list[bytes],
    last: bool,
    chunk_bytes: int,
    segment_bytes: int,
) -> None:
    check_cutting(folder, b"\n".join(lines) + (b"\n" if last else b""), chunk_bytes, segment_bytes)


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"\n\n\n", b"1", b"1\t5\tdeadbeef", b"\r\n", b"\r", b"1" * 50_000],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 13, 1 << 20])
def test_odd_files(tmp_path: Path, text: bytes, chunk_bytes: int) -> None:
    if len(text) > 1000:
        chunk_bytes *= 1000
    check_cutting(tmp_path, text, chunk_bytes, 10)


def test_chunks_cover_files_in_order_and_segments_match_request(tmp_path: Path) -> None:
    files = [
        storage.File("a", 10, 0),
        storage.File("empty", 0, 0),
        storage.File("b", 4, 0),
    ]
    found = [(chunk.path, chunk.start, chunk.stop, chunk.file_size) for chunk in cut(files, 4)]
    assert found == [
        ("a", 0, 4, 10),
        ("a", 4, 8, 10),
        ("a", 8, 10, 10),
        ("b", 0, 4, 4),
    ]
    file = write(tmp_path, b"aa\nbbbb\ncc\n")
    expected = {
        0: b"aa\n",
        1: b"",
        3: b"bbbb\n",
        4: b"",
        8: b"cc\n",
        9: b"",
    }
    for start, own in expected.items():
        (chunk,) = [c for c in cut([file], 1) if c.start == start]
        text, length, byte = read_lines(chunk)
        assert text[:length].tobytes() == own
        assert not own or byte == start
        assert not text[length : length + 64].any()
    *sizes, last = (
        s.stop - s.start
        for s in index(write(tmp_path, b"\n".join(LINES * 500)), 1 << 20, 1000).segments
    )
    assert all(900 <= size <= 1000 for size in sizes)
    assert last <= 1500


def test_index_json_roundtrip(tmp_path: Path) -> None:
    made = index(write(tmp_path, b"\n".join((LINES + BAD_LINES) * 5)), 100, 50)
    path = str(tmp_path / "index.json")
    storage.write_json(path, made.to_dict())
    assert LogIndex.from_dict(storage.read_json(path)) == made
    assert (made.rows, made.faults.total) == (20, 30)
    assert made.size_bytes == (tmp_path / "log.txt").stat().st_size


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{ torn",
        "[]",
        "null",
        '{"paths": []}',
        '{"paths": [], "segments": [[0, 1]]}',
    ],
)
def test_damaged_cached_index_is_rebuilt(tmp_path: Path, damaged: str) -> None:
    made = index(write(tmp_path, b"\n".join(LINES)), 100, 50)
    cache = CachedIndex(
        str(tmp_path / "index.json"),
        "1",
        frozenset(segment.path for segment in made.segments),
    )
    assert cache.read() is None
    cache.write(made)
    assert cache.read() == made
    (tmp_path / "index.json").write_text(damaged)
    assert cache.read() is None


def test_parts_cover_all_row_ranges_and_changed_file_is_rejected(tmp_path: Path) -> None:
    made = LogIndex(
        numbered(
            [
                ("f", 0, 9, 3),
                ("f", 9, 9, 0),
                ("f", 9, 20, 4),
                ("g", 0, 8, 2),
            ]
        ),
        Faults(),
    )
    assert [(part.segment.first_row, part.start, part.stop) for part in made.parts(0, 9)] == [
        (0, 0, 3),
        (3, 0, 4),
        (7, 0, 2),
    ]
    for start in range(9):
        for stop in range(start, 10):
            rows = [
                p.segment.first_row + r
                for p in made.parts(start, stop)
                for r in range(p.start, p.stop)
            ]
            assert rows == list(range(start, stop))
    assert list(LogIndex((), Faults()).parts(0, 0)) == []
    text = b"\n".join(LINES * 20) + b"\n"
    file = write(tmp_path, text)
    segments = index(file, 1 << 20, 200).segments
    flipped = re.sub(rb"(?m)^[01]\t", lambda label: b"10"[int(label[0][:1]) :][:1] + b"\t", text)
    assert len(flipped) == len(text)
    for changed in (text[:-1][:-30], b"", text[5:], text.replace(b"deadbeef", b"deadbee"), flipped):
        write(tmp_path, changed)
        rejects(
            r"log\.txt: bytes \d+-\d+ changed since the log was indexed; restore the",
            read_segments,
            segments,
            SCHEMA,
        )
    os.remove(file.path)
    rejects(r"log\.txt: no such file", read_segments, segments, SCHEMA)


def test_check_rejects_too_many_invalid_rows(tmp_path: Path) -> None:
    file = write(tmp_path, b"\n".join([*LINES, b"junk", *LINES]))
    made = index(file, 10, 10)
    made.check(0.12, file.path)
    rejects(
        r"11\.11%.*1 x too few columns.*first: .*log\.txt at byte 52.*--max-bad-fraction",
        made.check,
        0.11,
        file.path,
    )
    for text in (b"", b"junk\n"):
        rejects("no usable rows", index(write(tmp_path, text), 10, 10).check, 1.0, file.path)


def test_cache_key_depends_on_files_columns_and_segments() -> None:
    def identity(*files: storage.File, schema: Schema = SCHEMA, segment_bytes: int = 5) -> str:
        cached = log_index.CachedIndex.at(
            "cache",
            files=files,
            schema=schema,
            segment_bytes=segment_bytes,
        )
        return f"{cached.path} {cached.version}"

    file = storage.File("a", 1, 2)
    others = [identity(storage.File(*fields)) for fields in (("b", 1, 2), ("a", 2, 2), ("a", 1, 3))]
    others += [
        identity(file, file),
        identity(file, schema=SCHEMA.unlabelled()),
        identity(file, segment_bytes=6),
    ]
    assert len({identity(file), *others}) == 7
    assert identity(file) == identity(storage.File("a", 1, 2))


# -- gzip
def stored_member(size: int) -> bytes:
    """Return a gzip member of exactly `size` bytes."""
    low = size - 200
    while len(packed := gzip.compress(b"a" * low, 0, mtime=0)) < size:
        low += size - len(packed)
    assert len(packed) == size
    return packed


ONE, TWO, NO_TEXT = (gzip.compress(text, mtime=0) for text in (b"one\n", b"two\n", b""))


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(b"hello\n" * 1000, mtime=0),
        ONE + NO_TEXT + TWO,
        ONE + b"\0" * 100,
        ONE + b"\0" * 512 + TWO,
        NO_TEXT,
        stored_member(1 << 20) + ONE,
        stored_member((1 << 20) - 1) + ONE,
    ],
    ids=[
        "one",
        "several",
        "padded",
        "padded between",
        "empty",
        "read boundary",
        "across reads",
    ],
)
def test_gzip_is_unpacked_once(tmp_path: Path, packed: bytes) -> None:
    file = write(tmp_path, packed, "day_0.gz")
    unpacked = unpack(file, str(tmp_path / "plain"))
    written = os.stat(unpacked.path)
    assert cache.is_packed(file.path)
    assert Path(unpacked.path).read_bytes() == gzip.decompress(packed)
    assert unpacked.path.endswith("-day_0")
    assert written.st_size == unpacked.size_bytes
    assert unpack(file, str(tmp_path / "plain")) == unpacked
    assert os.stat(unpacked.path).st_ino == written.st_ino  # not written again
    assert (
        unpack(
            storage.File(file.path, file.size_bytes, file.modified_ns + 1),
            str(tmp_path / "plain"),
        ).path
        != unpacked.path
    )


def test_unpack_rejects_damaged_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes())
    flipped = packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]  # of the CRC
    truncated = [packed[:-20], packed[:5], packed + packed[:50]]
    for content in (
        *truncated,
        flipped,
        b"\x1f\x8b" + b"\xff" * 100,
        packed + b"garbage behind it",
    ):
        file = write(tmp_path, content, "day_0.gz")
        why = "truncated" if content in truncated else "damaged"
        rejects(rf"day_0\.gz: .*{why}.*Download it again", unpack, file, str(tmp_path / "plain"))
        assert os.listdir(tmp_path / "plain") == []


def test_is_packed_reads_plain_files_and_rejects_unreadable_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in (b"", b"\x1f", b"1\t2"):
        assert not cache.is_packed(write(tmp_path, text).path)
    monkeypatch.setattr(storage, "read_into", raising(PermissionError(13, "Permission denied")))
    rejects(
        r"a\.txt: cannot be read \(Permission denied\)\. Check its permissions",
        is_packed,
        str(tmp_path / "a.txt"),
    )


CAUSES = [
    (b"y\ta\tb\n" + LINES[0], "looks like a header"),
    (LINES[0].replace(b"\t", b","), "separated by commas, not tabs"),
    (b"".join(bytes([byte, 0]) for byte in LINES[0]), "a binary file or UTF-16"),
    (b"\xff\xfe" + LINES[0], "it is UTF-16; convert it"),
    (b"\xef\xbb\xbf" + LINES[0], "starts with a byte order mark"),
    (b"hello", "no tab"),
    (LINES[0] + b"\tx", None),
]


@pytest.mark.parametrize(("text", "cause"), CAUSES)
def test_rejected_log_reports_likely_cause(tmp_path: Path, text: bytes, cause: str | None) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(text + b"\n")
    entries, faults = index_chunk(cut(storage.list_files(str(path)), 1 << 20)[0], SCHEMA, 1 << 20)
    line = rejects("", LogIndex(numbered(entries), faults).check, 0.001, str(path))
    assert cause in line if cause else "; it" not in line


def test_empty_first_file_keeps_log_labelled(tmp_path: Path) -> None:
    schema = Schema(
        label="y",
        sparse=("s",),
        tokens="any",
        delimiter=",",
    )
    (tmp_path / "a.csv").write_bytes(b"")
    assert LogSource.at(str(tmp_path)).is_labelled(schema)
    (tmp_path / "b.csv").write_bytes(b"y,s\n1,2\n")
    assert LogSource.at(str(tmp_path)).is_labelled(schema)
    (tmp_path / "b.csv").write_bytes(b"s\n2\n")
    assert not LogSource.at(str(tmp_path)).is_labelled(schema)


def test_gunzip_bounds_memory() -> None:
    packed = gzip.compress(bytes(100 << 20), 9)
    assert len(packed) < 200_000
    largest = total = 0
    tracemalloc.start()
    for piece in cache.gunzip(
        [
            packed[:70_000],
            packed[70_000:],
            gzip.compress(b"more"),
            bytes(5),
        ]
    ):
        largest, total = max(largest, len(piece)), total + len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == (100 << 20) + 4
    assert largest <= cache.GUNZIP_BYTES
    assert peak < 4 * cache.GUNZIP_BYTES
    for damaged, error in (
        (packed[:-9], EOFError),
        (packed[:50] + b"x" + packed[51:], zlib.error),
        (b"", EOFError),
    ):
        fails_with(error, "", list, cache.gunzip([damaged]))


def test_checksum_detects_changed_bytes() -> None:
    text = np.frombuffer(b"\n".join(LINES * 3)[:150], np.uint8).copy()
    sums = [log_index.checksum(text[:length]) for length in range(len(text) + 1)]
    for place in range(len(text)):
        for change in (1, 128):
            text[place] ^= change
            sums.append(log_index.checksum(text))
            text[place] ^= change
    assert len(set(sums)) == len(sums)
    assert min(sums) >= 0


# -- Tokens compared with xxhash and plain Python; lookup tables compared with a dict
MASK = 2**64 - 1


def token(text: bytes) -> int:
    """Return the token that the module's docstring specifies."""
    if re.fullmatch(rb"0|-?[1-9][0-9]*", text) and -(2**63) <= int(text) < 2**63:
        return int(text) & MASK
    if text in (
        b"true",
        b"True",
        b"TRUE",
        b"false",
        b"False",
        b"FALSE",
    ):
        return int(text.lower() == b"true")
    return xxhash.xxh64_intdigest(text)


def tokens_of(
    function: Callable[..., np.ndarray],
    array: pa.Array,
) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty(len(array), np.uint64)
    return out, function(array, out)


def check_texts(texts: list[bytes | None]) -> None:
    def expected(text: bytes | None) -> tuple[int, int]:
        try:
            return (token(text), VALUE) if text and text.decode() else (0, EMPTY)
        except UnicodeDecodeError:
            return 0, REJECTED

    for kind in (
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
    ):
        found = tokens_of(text_tokens, pa.array([b"before", *texts], kind).slice(1))
        assert list(zip(*(array.tolist() for array in found), strict=True)) == [
            expected(text) for text in texts
        ]


numerals = st.integers(-(2**66), 2**66).map(lambda n: str(n).encode()) | st.from_regex(
    rb"[-+]?[0-9]{0,21}",
    fullmatch=True,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.none() | st.text(max_size=80).map(str.encode) | st.binary(max_size=12) | numerals,
        max_size=6,
    )
)
def test_texts(texts: list[bytes | None]) -> None:
    check_texts(texts)


EDGES = (2**31, 2**63, 2**64, 10**18, 10**19)
TAILS = (b"\xe2\x82", b"\xe2\x82\xac", b"\xff1234567", b"\xc3\xa4")
LAST_BYTES = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
NO_NUMBERS = [b"-", b"-0", b"00", b"01", b"+1", b"1 ", b" 1", b"1.0", b"1e3", b"0x1", b"\0"]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(
            [
                str(sign * edge + n).encode()
                for sign in (-1, 1)
                for edge in EDGES
                for n in range(-2, 3)
            ],
            id="large numbers",
        ),
        pytest.param([str(n).encode() for n in range(-2, 3)], id="small numbers"),
        pytest.param([*NO_NUMBERS, "١".encode()], id="no numbers"),
        pytest.param(
            [bytes([a, b]) for a in range(256) for b in (0x00, 0x7F, 0x80, 0xBF, 0xC0)],
            id="2 bytes",
        ),
        pytest.param(
            [bytes([a, b, 0x80]) for a in range(0xE0, 0x100) for b in LAST_BYTES],
            id="3 bytes",
        ),
        pytest.param(
            [
                bytes([a, b, 0x80, c])
                for a in range(0xEE, 0x100)
                for b in LAST_BYTES
                for c in (0x41, 0x80)
            ],
            id="4 bytes",
        ),
        pytest.param([b"abcdefgh" * n + tail for n in range(3) for tail in TAILS], id="tails"),
    ],
)
def test_text_tokens_match_python(texts: list[bytes]) -> None:
    check_texts(texts)


def test_text_tokens_and_hash_match_xxhash_for_all_lengths() -> None:
    rng = random.Random(0)
    texts = [bytes(rng.choices(b"abc ", k=n)) for n in range(1, 140)]
    check_texts(texts)
    # that of encode.py
    assert [hashing.xxh64(text) for text in texts] == [
        xxhash.xxh64_intdigest(text) for text in texts
    ]


INTEGERS = st.lists(
    st.none() | st.integers(0, 2**64 - 1) | st.sampled_from([2**24 + 1, 2**40, 2**63 - 1, 2**63])
)


@given(INTEGERS)
def test_integer_tokens_match_text(values: list[int | None]) -> None:
    text, _ = tokens_of(
        text_tokens,
        pa.array([None if v is None else str(v) for v in values], pa.string()),
    )
    tokens, status = tokens_of(integer_tokens, pa.array(values, pa.uint64()))
    assert tokens.tolist() == text.tolist()
    assert status.tolist() == [EMPTY if v is None else VALUE for v in values]
    assert tokens_of(integer_tokens, pa.array([True, None, False]))[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        pytest.param(pa.uint8(), 0, id="uint8"),
        pytest.param(pa.int8(), -(2**7), id="int8"),
        pytest.param(pa.int16(), -(2**15), id="int16"),
        pytest.param(pa.uint32(), 0, id="uint32"),
        pytest.param(pa.int32(), -(2**31), id="int32"),
        pytest.param(pa.int64(), -(2**63), id="int64"),
    ],
)
@given(values=INTEGERS)
def test_narrow_integer_tokens_match_text(
    kind: pa.DataType,
    first: int,
    values: list[int | None],
) -> None:
    narrow = [None if v is None else first + v % 2**kind.bit_width for v in values]
    tokens, _ = tokens_of(integer_tokens, pa.array(narrow, kind))
    text, _ = tokens_of(
        text_tokens,
        pa.array([None if v is None else str(v) for v in narrow], pa.string()),
    )
    assert tokens.tolist() == text.tolist()


# -- Tables
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
    assert find_ids(np.array(asked, np.uint64), slots, -7).tolist() == [
        known.get(t, -7) for t in asked
    ]


def test_lookup_finds_many_tokens_and_rejects_repeated_ones() -> None:
    rng = np.random.default_rng(0)
    for tokens in (
        rng.integers(0, MASK, 100_000, np.uint64),
        np.arange(100_000, dtype=np.uint64) << np.uint64(44),
    ):
        tokens = np.unique(tokens)
        ids = rng.permutation(len(tokens)).astype(np.int32)
        slots = built(tokens.tolist(), ids.tolist())
        assert (find_ids(tokens, slots, -1) == ids).all()
        assert (find_ids(~tokens, slots, -1) == -1).all()
    assert not build_slots(
        np.array([5, 2**40, 5], np.uint64),
        np.arange(3, dtype=np.int32),
        np.zeros((16, 2), np.uint64),
    )
