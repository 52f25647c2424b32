"""Positions of good rows among all lines, for any positions of faulty ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.logs.index import Segment, numbered
from rayrec.data.logs.lines import good_lines, line_starts, read_text
from rayrec.data.logs.text_log import Chunk, index_chunk
from rayrec.schema import Schema

SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("i",), sparse=("c",))
GOOD = b"1\t3\t0000000a"
LINES = [GOOD, b"", b"1\t2", b"2\t3\t0000000a", b"1\t3\t0a", b"x" * 5000]


def test_line_starts() -> None:
    text = np.frombuffer(b"ab\n\nc\nd" + bytes(64), np.uint8)
    assert line_starts(text, 7).tolist() == [0, 3, 4, 6]
    assert line_starts(text, 6).tolist() == [0, 3, 4]
    assert line_starts(text, 0).tolist() == []


@pytest.mark.parametrize("ending", [b"\n", b""])
@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=80))
def test_good_lines_of_any_mixture(tmp_path_factory: pytest.TempPathFactory, ending: bytes, kinds: list[int]) -> None:
    if not ending and LINES[kinds[-1]] == b"":
        kinds = [*kinds, 0]  # an empty last line without a newline is no line
    path = tmp_path_factory.getbasetemp() / "mixture.tsv"
    content = b"\n".join(LINES[kind] for kind in kinds) + ending
    path.write_bytes(content)
    expected = [place for place, kind in enumerate(kinds) if kind == 0]

    entries, faults = index_chunk(Chunk(str(path), 0, len(content), len(content)), SCHEMA, 200)
    segments = numbered(entries)
    assert faults.total == len(kinds) - len(expected)
    got, first = [], 0
    for segment in segments:
        got += [first + int(line) for line in good_lines(segment, SCHEMA)]
        first += len(line_starts(read_text(segment), segment.stop - segment.start))
    assert got == expected
    assert first == len(kinds)


def test_many_faults(tmp_path: Path) -> None:
    lines = [GOOD if place % 3 else b"bad" for place in range(1000)]
    content = b"\n".join(lines) + b"\n"
    (tmp_path / "log.tsv").write_bytes(content)
    segment = Segment(str(tmp_path / "log.tsv"), 0, len(content), 0, 666)
    assert good_lines(segment, SCHEMA).tolist() == [place for place in range(1000) if place % 3]
