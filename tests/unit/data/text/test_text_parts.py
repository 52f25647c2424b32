"""Parts of a text hold all of it, once, in order; they begin where lines do; a tokenizer learns the same on any threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.faults import rejects
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data.text import text_blocks
from rayrec.data.text.text_blocks import Source, cut, parts_of, read_part
from rayrec.data.text.tokenizer import load_tokenizer

WORDS = st.lists(st.sampled_from(["a", "é", "日本", "😀", "\n", "\n\n", "\r\n", " "]), max_size=60).map("".join)


def cuts_of(content: bytes, positions: range) -> list[int]:
    return [cut(lambda start, count: content[start : start + count], len(content), position) for position in positions]


@given(text=WORDS)
def test_cut_returns_next_line_start(text: str) -> None:
    content = text.encode()
    starts = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n")), len(content)]
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
    texts=st.lists(WORDS, min_size=1, max_size=4), part_bytes=st.integers(1, 40), fraction=st.sampled_from([0.0, 0.1, 0.5, 0.99])
)
def test_parts_cover_text(texts: list[str], part_bytes: int, fraction: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    sources = []
    for number, text in enumerate(texts):
        (folder / str(number)).write_bytes(text.encode())
        sources.append(Source(str(folder / str(number)), f"{number}.txt", len(text.encode())))
    parts = parts_of(sources, validation_fraction=fraction, part_bytes=part_bytes)
    assert "".join(map(read_part, parts)) == "".join(texts)
    assert [part.number for part in parts] == list(range(len(parts)))
    sets = [part.set for part in parts]
    assert sets == sorted(sets)  # training text comes first
    total = len("".join(texts).encode())
    held_out = sum(part.stop - part.start for part in parts if part.set == "validation")
    assert held_out == (0 if fraction == 0 else total - int(total * (1 - fraction)))
    begun = {part.path for part in parts if part.start == 0}
    assert sum(part.follows for part in parts) >= len(begun) - 2  # but for the first of each set


def test_invalid_utf8_raises_with_position(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line\n" * 10 + "hé".encode("latin-1"))
    parts = parts_of([Source(str(tmp_path / "latin.txt"), "latin.txt", 52)], validation_fraction=0.0, part_bytes=16)
    assert read_part(parts[0]) == "line\n" * 4
    rejects(r"^latin\.txt: byte 51 is not UTF-8 [^\n]*iconv[^\n]*$", read_part, parts[-1])


def test_bpe_matches_on_any_thread_count(tmp_path: Path) -> None:
    code = """
import sys
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer
texts = [" ".join(f"w{i * j % 997}" for i in range(200)) for j in range(60)]
write_tokenizer(bytes_bpe(texts, 600), sys.argv[1])
"""
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / threads)], env=environment, check=True, timeout=300)
    assert (tmp_path / "1" / "tokenizer.json").read_bytes() == (tmp_path / "4" / "tokenizer.json").read_bytes()


def test_missing_tokenizer_raises_one_line(tmp_path: Path) -> None:
    rejects(r"^[^\n]*tokenizer not found\. [^\n]*$", load_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    rejects(r"^[^\n]*: not a tokenizer, or of another version[^\n]*$", load_tokenizer, str(tmp_path))
