"""Rows of tokens in MDS shards: what is read is what was written, also next to other readers."""

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import fails_with, raising, rejects, until
from hosts.processes import run_command
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data.text import mds, text_blocks
from rayrec.data.text.mds import TokenRows
from rayrec.data.text.text_blocks import Source, cut, read_part, split_parts
from rayrec.data.text.tokenizer import load_tokenizer
from rayrec.storage import cache
from rayrec.storage.cache import MIN_FILES, ShardCache

BLOCK = 16
SHARDS = (30, 30, 30, 7)
ROWS = np.random.default_rng(0).integers(0, 50_000, (sum(SHARDS), BLOCK)).astype(np.uint16)


def write(folder: Path, rows: np.ndarray = ROWS, sizes: Sequence[int] = SHARDS) -> Path:
    bounds = enumerate(itertools.pairwise(np.cumsum([0, *sizes])))
    infos = [
        mds.write_shard(rows[low:high], str(folder / f"shard.{number:05d}.mds"))
        for number, (low, high) in bounds
    ]
    mds.write_index(str(folder), infos)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mds") / "train")


def url(folder: Path) -> str:
    """That takes the way of a store's."""
    return f"file://{folder}"


def copies(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.mds"))


def edited(written: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(written, folder)
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


# -- what is read
@pytest.mark.parametrize("place", [str, url], ids=["folder", "url"])
def test_read_returns_rows_in_order(
    written: Path,
    tmp_path: Path,
    place: Callable[[Path], str],
) -> None:
    rows = TokenRows(place(written), cache_folder=str(tmp_path))
    assert (
        len(rows),
        tuple(rows.chunk_rows),
        rows.block_size,
    ) == (97, SHARDS, BLOCK)
    order = np.random.default_rng(1).permutation(97)
    rows.will_read(order[:40])
    found = rows.read(order)["tokens"]
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, ROWS[order])
    np.testing.assert_array_equal(rows.read(np.array([96, 0, 96]))["tokens"], ROWS[[96, 0, 96]])
    assert rows.read(np.empty(0, np.int64))["tokens"].shape == (0, BLOCK)
    rows.close()
    rows.close()


def test_shards_match_streaming_both_ways_and_are_reproducible(
    written: Path,
    tmp_path: Path,
) -> None:
    streaming = mds.load_streaming()
    theirs = streaming.StreamingDataset(local=str(written), shuffle=False, batch_size=1)
    np.testing.assert_array_equal(np.stack([sample["tokens"] for sample in theirs]), ROWS)
    wide = ROWS.astype(np.uint32) + 100_000
    columns = {"tokens": f"ndarray:uint32:{BLOCK}"}
    options = {
        "out": str(tmp_path / "theirs"),
        "columns": columns,
        "hashes": ["sha1"],
        "size_limit": 2_000,
    }
    with streaming.MDSWriter(**options) as writer:
        for row in wide:
            writer.write({"tokens": row})
    rows = TokenRows(str(tmp_path / "theirs"))
    assert len(rows.chunk_rows) > 2
    np.testing.assert_array_equal(rows.read(np.arange(97))["tokens"], wide)
    again = write(tmp_path / "again")
    for file in written.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


# -- one among many processes
READER = """
import sys
import numpy as np
from rayrec.data.text.mds import TokenRows
path, cache = sys.argv[1:]
rows = TokenRows(path, cache_folder=cache)
print("ready", flush=True)
input()
total = rows.read(np.arange(len(rows)))["tokens"].sum()
print(total, rows.downloaded_bytes)
rows.close()
"""


@pytest.mark.slow
@pytest.mark.extended
def test_node_processes_fetch_shard_once(written: Path, tmp_path: Path) -> None:
    size_bytes = sum(file.stat().st_size for file in written.glob("*.mds"))
    command = [
        sys.executable,
        "-c",
        READER,
        url(written),
        str(tmp_path),
    ]
    readers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [reader.stdout.readline() for reader in readers] == ["ready\n"] * 3
    for reader in readers:
        print(file=reader.stdin, flush=True)
    found = [
        [int(word) for word in reader.communicate(timeout=60)[0].split()] for reader in readers
    ]
    assert {total for total, _ in found} == {int(ROWS.sum(dtype=np.int64))}
    assert sum(downloaded for _, downloaded in found) == size_bytes
    assert len(copies(tmp_path)) == len(SHARDS)


GIVEN_BACK = """
import gc, os, sys, threading
from pathlib import Path
import numpy as np
from rayrec.data.text.mds import TokenRows

def held():
    gc.collect()
    maps, threads = Path("/proc/self/maps").read_text(), threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    return files, maps.count(".mds"), threads

source, cache = sys.argv[1:]
for number in range(6):
    if number == 1:
        before = held()  # After the first, which imports streaming
    rows = TokenRows(source, cache_folder=cache)
    rows.will_read(np.arange(97))
    rows.read(np.arange(97))
    while_open = held()
    rows.close()
del rows
print(*before, *held(), while_open[1] > before[1])
"""
"""Open files, mapped shards and threads of a process before and after reading."""


def test_readers_release_all_when_closed_and_cannot_be_pickled(
    written: Path,
    tmp_path: Path,
) -> None:
    # A process of its own: what other tests leave to the garbage collector would be counted here.
    *held, seen = run_command(
        sys.executable,
        "-c",
        GIVEN_BACK,
        url(written),
        tmp_path,
    ).stdout.split()
    assert (held[:3], seen) == (held[3:], "True")
    fails_with(TypeError, "in the process that reads", pickle.dumps, TokenRows(str(written)))


# -- a store of shards
def test_cached_shards_are_not_fetched(written: Path, tmp_path: Path) -> None:
    for expected in (True, False):
        rows = TokenRows(url(written), cache_folder=str(tmp_path))
        rows.read(np.arange(97))
        assert (rows.downloaded_bytes > 0) is expected
        rows.close()
    other = TokenRows(url(write(tmp_path / "changed", ROWS + 1)), cache_folder=str(tmp_path))
    np.testing.assert_array_equal(other.read(np.arange(97))["tokens"], ROWS + 1)


def test_limited_cache_keeps_limit_and_mapped_shards(tmp_path: Path) -> None:
    many = ROWS[:96]
    source = write(tmp_path / "source", many, [4] * 24)
    shard_bytes = (source / "shard.00000.mds").stat().st_size
    limit_bytes = 8 * shard_bytes
    cache = tmp_path / "cache"
    first = TokenRows(url(source), cache_folder=str(cache), cache_bytes=limit_bytes)
    np.testing.assert_array_equal(first.read(np.array([0, 5]))["tokens"], many[[0, 5]])
    second = TokenRows(url(source), cache_folder=str(cache), cache_bytes=limit_bytes)
    for batch in np.array_split(np.random.default_rng(0).permutation(96), 12):
        second.will_read(batch)
        np.testing.assert_array_equal(second.read(batch)["tokens"], many[batch])
    second.close()
    assert sum(file.stat().st_size for file in copies(cache)) <= limit_bytes
    assert first.downloaded_bytes == 2 * shard_bytes
    assert copies(cache)[1].name == "shard.00001.mds"  # mapped all the time
    first.close()
    rejects(
        r"^file://.* at least [\d,]+ bytes",
        TokenRows,
        url(source),
        cache_folder=str(cache),
        cache_bytes=3 * shard_bytes,
    )


@pytest.mark.slow
def test_killed_download_does_not_block_others(written: Path, tmp_path: Path) -> None:
    dying = """
import os, signal, sys
import numpy as np
from rayrec import storage
from rayrec.data.text.mds import TokenRows
rows = TokenRows(sys.argv[1], cache_folder=sys.argv[2])
def broken(path):
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
storage.read_stream = broken
rows.read(np.arange(3))
"""
    run_command(sys.executable, "-c", dying, url(written), tmp_path, status=-signal.SIGKILL)
    assert list(tmp_path.glob("*/*.partial"))
    np.testing.assert_array_equal(
        TokenRows(url(written), cache_folder=str(tmp_path)).read(np.arange(97))["tokens"],
        ROWS,
    )
    assert not list(tmp_path.glob("*/*.partial"))


def test_failed_download_retries(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = TokenRows(url(written), cache_folder=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(cache.ShardCache, "fetch", raising(OSError("the store is out")))
        rows.will_read(np.arange(97))
        fails_with(OSError, "the store is out", rows.read, np.arange(3))
    rows.will_read(np.arange(97))
    np.testing.assert_array_equal(rows.read(np.arange(97))["tokens"], ROWS)
    rows.close()


def test_will_read_fetches_ahead(written: Path, tmp_path: Path) -> None:
    rows = TokenRows(url(written), cache_folder=str(tmp_path))
    rows.will_read(np.array([40]))
    until(lambda: copies(tmp_path))
    assert [file.name for file in copies(tmp_path)] == ["shard.00001.mds"]
    rows.close()


def test_damaged_copy_is_fetched_again(written: Path, tmp_path: Path) -> None:
    rows = TokenRows(url(written), cache_folder=str(tmp_path))
    rows.read(np.arange(97))
    rows.close()
    for number, change in enumerate((lambda data: data[:-3], lambda data: data[:-1] + b"\xff")):
        copy = copies(tmp_path)[number]
        copy.write_bytes(change(copy.read_bytes()))
    again = TokenRows(url(written), cache_folder=str(tmp_path))
    np.testing.assert_array_equal(again.read(np.arange(97))["tokens"], ROWS)
    assert again.downloaded_bytes == sum(file.stat().st_size for file in copies(tmp_path)[:2])
    again.close()


# -- damage and misuse
@pytest.mark.parametrize("place", [str, url], ids=["folder", "url"])
@pytest.mark.parametrize(
    "content",
    [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), None],
    ids=["short", "flipped", "gone"],
)
def test_damaged_shard_raises_with_name(
    written: Path,
    tmp_path: Path,
    place: Callable[[Path], str],
    content: Any,
) -> None:
    shutil.copytree(written, tmp_path / "set")
    shard = tmp_path / "set" / "shard.00001.mds"
    shard.write_bytes(content(shard.read_bytes())) if content else shard.unlink()
    rows = TokenRows(place(tmp_path / "set"), cache_folder=str(tmp_path / "cache"))
    np.testing.assert_array_equal(rows.read(np.arange(30))["tokens"], ROWS[:30])
    rejects(r"^[^\n]*set/shard\.00001\.mds: [^\n]*$", rows.read, np.array([31]))
    np.testing.assert_array_equal(rows.read(np.array([96]))["tokens"], ROWS[96:])
    rows.close()


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda index: index.update(version=3), "must name shards"),
        (lambda index: index.update(shards=[]), "must name shards"),
        (lambda index: index.pop("shards"), "damaged"),
        (lambda index: index["shards"][1].update(compression="zstd"), "damaged"),
        (lambda index: index["shards"][0].update(column_names=["text"]), "and the same columns"),
        (
            lambda index: [shard.update(column_encodings=["pkl"]) for shard in index["shards"]],
            r"have tokens \(pkl\), but rayrec writes .*`rayrec adopt`",
        ),
        (lambda index: index["shards"][0]["raw_data"].update(basename="../x.mds"), "in its folder"),
        (lambda index: index["shards"][0].update(samples="many"), "damaged"),
    ],
)
def test_reader_rejects_foreign_index(
    written: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    reported: str,
) -> None:
    rejects(
        rf"index\.json: .*({reported})",
        TokenRows,
        str(edited(written, tmp_path / "set", change)),
    )


def test_streaming_is_loaded_without_modules_of_ours() -> None:
    streaming = mds.load_streaming()
    assert mds.load_streaming() is streaming
    modules = [module for name, module in sys.modules.items() if name.startswith("streaming.")]
    assert [
        module.__name__ for module in modules if getattr(module, "__spec__", None) is None
    ] == []


def test_reader_rejects_shard_with_wrong_row_count(written: Path, tmp_path: Path) -> None:
    folder = edited(written, tmp_path / "set", lambda index: index["shards"][0].update(samples=29))
    rejects(
        r"shard\.00000\.mds: damaged: does not have 29 rows",
        TokenRows(str(folder)).read,
        np.array([0]),
    )


def test_missing_shards_raise_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejects(r"^[^\n]*index\.json: no such file$", TokenRows, str(tmp_path / "nothing"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rejects(
        r"^streaming is not installed\. Run pip install 'rayrec\[language\]'\.$",
        mds.load_streaming,
    )


def test_cache_accepts_any_shard_name(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "room").write_bytes(b"shard")
    limits: dict[str, Any] = {"sizes_bytes": {"room": 5}, "limit_bytes": 5 * MIN_FILES}
    cache = ShardCache(
        str(tmp_path / "source"),
        index=b"",
        folder=str(tmp_path / "cache"),
        **limits,
    )
    fetched: list[int] = []
    thread = threading.Thread(
        target=lambda: fetched.append(cache.fetch("room", lambda path: None)),
        daemon=True,
    )
    thread.start()
    thread.join(20)
    assert fetched == [5]


# -- Parts of a text hold all of it, once, in order, and begin where lines do
WORDS = st.lists(
    st.sampled_from(
        [
            "a",
            "é",
            "日本",
            "😀",
            "\n",
            "\n\n",
            "\r\n",
            " ",
        ]
    ),
    max_size=60,
).map("".join)


def cuts_of(content: bytes, positions: range) -> list[int]:
    return [
        cut(lambda start, count: content[start : start + count], len(content), position)
        for position in positions
    ]


@given(text=WORDS)
def test_cut_returns_next_line_start(text: str) -> None:
    content = text.encode()
    starts = [
        0,
        *(place + 1 for place, byte in enumerate(content) if byte == ord("\n")),
        len(content),
    ]
    for position, found in enumerate(cuts_of(content, range(len(content) + 1))):
        assert found == min(start for start in starts if start >= position)


@given(text=WORDS)
def test_endless_line_is_cut_between_characters(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "LINE_BYTES", 4)
        patch.setattr(text_blocks, "_SCAN_BYTES", 3)
        content = text.encode()
        found = cuts_of(content, range(len(content) + 1))
    assert found == sorted(found)
    for place in found:
        content[:place].decode()
    assert all(place - position <= 8 for position, place in enumerate(found))


@given(
    texts=st.lists(WORDS, min_size=1, max_size=4),
    part_bytes=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.99]),
)
def test_parts_cover_text(
    texts: list[str],
    part_bytes: int,
    share: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    sources = []
    for number, text in enumerate(texts):
        (folder / str(number)).write_bytes(text.encode())
        sources.append(Source(str(folder / str(number)), f"{number}.txt", len(text.encode())))
    parts = split_parts(sources, validation_fraction=share, part_bytes=part_bytes)
    assert "".join(map(read_part, parts)) == "".join(texts)
    assert [part.number for part in parts] == list(range(len(parts)))
    sets = [part.set for part in parts]
    assert sets == sorted(sets)  # training text comes first
    total = len("".join(texts).encode())
    held_out = sum(part.stop - part.start for part in parts if part.set == "validation")
    assert held_out == (0 if share == 0 else total - int(total * (1 - share)))
    begun = {part.path for part in parts if part.start == 0}
    assert sum(part.follows for part in parts) >= len(begun) - 2  # but for the first of each set


def test_invalid_utf8_has_position_and_bpe_matches_on_threads(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line\n" * 10 + "hé".encode("latin-1"))
    parts = split_parts(
        [Source(str(tmp_path / "latin.txt"), "latin.txt", 52)],
        validation_fraction=0.0,
        part_bytes=16,
    )
    assert read_part(parts[0]) == "line\n" * 4
    rejects(r"^latin\.txt: byte 51 is not UTF-8 [^\n]*iconv[^\n]*$", read_part, parts[-1])
    code = """
import sys
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer
texts = [" ".join(f"w{i * j % 997}" for i in range(200)) for j in range(60)]
write_tokenizer(bytes_bpe(texts, 600), sys.argv[1])
"""
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / threads)],
            env=environment,
            check=True,
            timeout=300,
        )
    assert (tmp_path / "1" / "tokenizer.json").read_bytes() == (
        tmp_path / "4" / "tokenizer.json"
    ).read_bytes()


def test_missing_tokenizer_raises_one_line(tmp_path: Path) -> None:
    rejects(r"^[^\n]*tokenizer not found\. [^\n]*$", load_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    rejects(
        r"^[^\n]*: not a tokenizer, or of another version[^\n]*$",
        load_tokenizer,
        str(tmp_path),
    )
