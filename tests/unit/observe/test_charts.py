"""Charts, tables and images of a report."""

import base64
import re
import struct
import zlib
from typing import Any

import pytest

from rayrec.observe.report.charts import Line, Mark, Span, data_url, line_chart, tick_step, timeline
from rayrec.observe.report.page import table


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "expected"), [(0, 1, 5, 0.2), (0, 1000, 7, 200), (0.82, 1, 5, 0.05), (0, 7e-5, 5, 2e-5)]
)
def test_tick_step_returns_round_numbers(low: float, high: float, max_ticks: int, expected: float) -> None:
    assert tick_step(low, high, max_ticks=max_ticks) == pytest.approx(expected)


@pytest.mark.parametrize("points", [[(1.0, 0.5)], [(1.0, 0.0), (2.0, 0.0)], [(0.0, 3.0)], [(1.0, None), (2.0, 1e30)]])
def test_line_chart_plots_flat_lines(points: list[tuple[float, float | None]]) -> None:
    for from_zero in (False, True):
        figure = line_chart("flat", [Line("flat", points)], x_label="step", from_zero=from_zero)
        assert "nan" not in figure
        assert "<circle" in figure


def test_line_chart_is_empty_without_points_and_thins_long_lines() -> None:
    points: Any = [(1.0, None), (2.0, float("nan")), (3.0, float("inf"))]
    for lines in ([Line("none", points)], []):
        assert line_chart("none", lines, x_label="step") == ""
    points: list[tuple[float, float | None]] = [(float(x), 1.0 if x == 77_777 else 0.0) for x in range(100_000)]
    figure = line_chart("long", [Line("long", points)], x_label="step", marks=[Mark(2e5, "1", "beyond")])
    assert len(figure) < 30_000
    assert "beyond" not in figure
    assert len({pair.split(",")[1] for pair in re.findall(r"[\d.]+,[\d.]+", figure)}) == 2


@pytest.mark.parametrize(
    ("pixels", "kind", "lines"),
    [([[0, 7, 255], [1, 2, 3]], 0, [b"\0\0\7\xff", b"\0\1\2\3"]), ([[(1, 2, 3), (4, 5, 6)]], 2, [b"\0\1\2\3\4\5\6"])],
)
def test_data_url_encodes_png(pixels: Any, kind: int, lines: list[bytes]) -> None:
    data = base64.b64decode(data_url(pixels).removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        length, name = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(name + body)
        chunks[name] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (len(pixels[0]), len(pixels), 8, kind, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == b"".join(lines)


def test_empty_columns_and_lanes_are_omitted() -> None:
    shown = table(["a", "b", "c"], [["x", "", "-"], ["y", "", "1"]], name="t")
    assert ('<th scope="col">b' in shown, '<th scope="col">c' in shown) == (False, True)
    drawn = timeline("t", [("training", [Span(0, 1, "x")]), ("restarts", [])], [("evaluations", [])])
    assert ("training" in drawn, "restarts" in drawn, "evaluations" in drawn) == (True, False, False)
