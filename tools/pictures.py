"""Draws the pictures of README and docs into docs/assets, light and dark: `python
tools/pictures.py` (make pictures).

`numbers` is drawn from rows of benchmarks/results, `kill` from docs/assets/kill.jsonl, which
tools/kill_run.py records, `top` from docs/assets/top.txt; `flow` and `batch` are drawings. `python
tools/pictures.py report` trains on a synthetic log, takes a screenshot of the report with Chromium,
and records what `rayrec top` shows while it trains.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import results  # noqa: E402  (a file of this folder)

ASSETS = ROOT / "docs" / "assets"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Theme(NamedTuple):
    """Colors of a picture."""

    text: str
    quiet: str
    ours: str
    peer: str
    box: str
    line: str
    alarm: str
    terminal: TerminalTheme


CONSOLE = Console()
THEMES = {
    "light": Theme(
        "#1f2328",
        "#59636e",
        "#2f6fde",
        "#b6bec9",
        "#f3f5f8",
        "#8b949e",
        "#cf222e",
        DEFAULT_TERMINAL_THEME,
    ),
    "dark": Theme(
        "#e6edf3", "#9198a1", "#5b9bff", "#565f6b", "#1c232c", "#8b949e", "#ff7b72", MONOKAI
    ),
}


def text(
    x: float,
    y: float,
    words: str,
    color: str,
    *,
    size: int = 14,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str = "none",
    round_: float = 3,
) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{round_:g}"'
    return f'<rect {shape} fill="{fill}" stroke="{stroke}"/>'


def line(
    x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1.5, more: str = ""
) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="{width:g}"{more}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """Draw a horizontal or vertical arrow with a head of 7 pixels."""
    if y1 == y2:
        head = 7 if x2 > x1 else -7
        tip = f"M{x2:g} {y2:g}l{-head} -4v8z"
    else:
        head = 7 if y2 > y1 else -7
        tip = f"M{x2:g} {y2:g}l-4 {-head}h8z"
    return line(x1, y1, x2, y2, color) + f'<path d="{tip}" fill="{color}"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
    )
    body = "\n".join(parts)
    return (
        f'{head}role="img" font-family="{FONT}">\n<title>{escape(title)}</title>\n{body}\n</svg>\n'
    )


SHOWN = (
    (results.SUMMARY[0], "Raw log to shuffled batches"),
    (results.SUMMARY[1], "Raw log to vocabulary"),
    (results.SUMMARY[4], "Raw log to trained DLRM"),
)
"""Lines of the summary that the front page shows, with their titles there."""


def numbers(theme: Theme) -> str:
    """Draw the rows/s of rayrec and a peer as two bars for each entry in SHOWN."""
    parts = []
    panel = 290
    hardware = ""
    for index, (shown, title) in enumerate(SHOWN):
        _, row = results.find(shown.name, shown.workload, shown.peer)
        left = index * panel + 10
        ours = row["rows_per_s"]
        peer = row["peer_rows_per_s"]
        hardware = row["hardware"]
        ratio = f"{ours / peer:.1f}" if ours / peer < 20 else f"{ours / peer:.0f}"
        parts += [
            text(left, 24, title, theme.text, size=15, bold=True),
            text(left, 62, f"{ratio}×", theme.ours, size=30, bold=True),
            rectangle(left, 78, 250, 16, theme.ours),
            text(left, 112, f"rayrec {ours:,.0f} rows/s", theme.text, size=13),
            rectangle(left, 124, max(250 * peer / ours, 2), 16, theme.peer),
            text(left, 158, f"{shown.peer_text} {peer:,.0f}", theme.quiet, size=13),
        ]
    caption = f"Rows/s, same run, {hardware}. Synthetic logs in Criteo's format. CPU only."
    parts.append(text(10, 188, caption, theme.quiet, size=12))
    return picture(3 * panel, 200, "rayrec and peers: rows a second", parts)


def kill(theme: Theme) -> str:
    """Draw step against time of a run with a killed worker, from docs/assets/kill.jsonl."""
    events = [json.loads(row) for row in (ASSETS / "kill.jsonl").read_text().splitlines()]
    steps = [
        event
        for event in events
        if event["kind"] in ("start", "step", "finish") and "step" in event
    ]
    width = 870
    height = 330
    left = 60
    bottom = 270
    top = 50
    start_s = min(event["seconds"] for event in steps) - 2
    end_s = max(event["seconds"] for event in events if event["kind"] == "summary")
    max_step = max(event["step"] for event in steps)

    def x(seconds: float) -> float:
        return left + (seconds - start_s) / (end_s - start_s) * (width - left - 20)

    def y(step: float) -> float:
        return bottom - step / max_step * (bottom - top)

    parts = [
        text(10, 22, "A worker is killed: what the run does", theme.text, size=16, bold=True),
        line(left, bottom, width - 20, bottom, theme.line),
        line(left, top, left, bottom, theme.line),
    ]
    for step in range(0, max_step + 1, max_step // 4):
        parts.append(text(left - 8, y(step) + 4, f"{step:,}", theme.quiet, size=12, anchor="end"))
    for second in range(0, int(end_s - start_s), 20):
        parts.append(
            text(
                x(start_s + second),
                bottom + 18,
                f"{second} s",
                theme.quiet,
                size=12,
                anchor="middle",
            )
        )
    attempt: list[str] = []
    for event in steps:
        if event["kind"] == "start" and attempt:
            parts.append(
                f'<polyline points="{" ".join(attempt)}" fill="none" stroke="{theme.ours}" '
                'stroke-width="2.5"/>'
            )
            attempt = []
        attempt.append(f"{x(event['seconds']):.1f},{y(event['step']):.1f}")
    parts.append(
        f'<polyline points="{" ".join(attempt)}" fill="none" stroke="{theme.ours}" '
        'stroke-width="2.5"/>'
    )
    for event in events:
        if event["kind"] == "checkpoint":
            position = f'cx="{x(event["seconds"]):.1f}" cy="{y(event["step"]):.1f}"'
            parts.append(
                f'<circle {position} r="4.5" fill="{theme.box}" stroke="{theme.ours}" '
                'stroke-width="2"/>'
            )
    (killed,) = (event["seconds"] for event in events if event["kind"] == "SIGKILL")
    resumed = next(
        event for event in events if event["kind"] == "start" and event["seconds"] > killed
    )
    stepped = next(
        event
        for event in events
        if event["kind"] == "step" and event["seconds"] > resumed["seconds"]
    )
    before = max(event["step"] for event in steps if event["seconds"] < killed)
    parts += [
        line(x(killed), top - 8, x(killed), bottom, theme.alarm, more=' stroke-dasharray="5 4"'),
        text(
            x(killed) - 6,
            top + 4,
            "kill -9 of a worker",
            theme.alarm,
            size=13,
            anchor="end",
            bold=True,
        ),
        text(
            x(resumed["seconds"]) + 8,
            y(resumed["step"]) + 22,
            f"resumes from the checkpoint of step {resumed['step']:,}",
            theme.text,
            size=13,
        ),
        text(
            x(resumed["seconds"]) + 8,
            y(resumed["step"]) + 40,
            f"{stepped['seconds'] - killed:.1f} s to the next logged step; "
            f"{max(before - resumed['step'], 0):,} steps repeated",
            theme.quiet,
            size=13,
        ),
        text(
            10,
            316,
            "Step against time, two workers on two cores. Circles are checkpoints. The final "
            "weights have the SHA-256 of a run that nothing disturbed.",
            theme.quiet,
            size=12,
        ),
    ]
    return picture(width, height, "A run in which a worker is killed", parts)


class Box(NamedTuple):
    """A step of a drawing: where it is, and its lines; the first is its title."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]


def boxes(items: list[Box], theme: Theme) -> list[str]:
    parts = []
    for box in items:
        parts.append(
            rectangle(box.x, box.y, box.width, box.height, theme.box, stroke=theme.line, round_=6)
        )
        for number, words in enumerate(box.lines):
            middle = box.x + box.width / 2
            color, size = (theme.text, 14) if number == 0 else (theme.quiet, 12)
            parts.append(
                text(
                    middle,
                    box.y + 24 + 18 * number,
                    words,
                    color,
                    size=size,
                    anchor="middle",
                    bold=number == 0,
                )
            )
    return parts


def flow(theme: Theme) -> str:
    """Draw the path from the raw log to the served model, and the Preprocessor shared by all
    parts.
    """
    items = [
        Box(10, 40, 150, 70, ("Raw log", "TSV, CSV, Parquet", "disk, s3, gs, az")),
        Box(205, 40, 150, 70, ("Index", "faults counted", "rows numbered")),
        Box(400, 40, 165, 70, ("Data tasks", "parse, shuffle, encode", "threads, Ray, Spark")),
        Box(610, 40, 165, 70, ("Workers", "one loop, TorchRec", "process, torchrun, Ray")),
        Box(820, 40, 150, 70, ("Checkpoint", "plan-free, no pickle", "exact position")),
        Box(302, 165, 265, 54, ("Preprocessor", "schema, constants, vocabularies; hashed")),
        Box(610, 165, 165, 54, ("Evaluate, predict", "slices, intervals")),
        Box(820, 165, 150, 54, ("Export, serve", "HTTP, swap, shadow")),
        Box(10, 165, 230, 54, ("events.jsonl", "console, top, report, trackers")),
    ]
    arrows = [
        arrow(160, 75, 204, 75, theme.line),
        arrow(355, 75, 399, 75, theme.line),
        arrow(565, 75, 609, 75, theme.line),
        arrow(775, 75, 819, 75, theme.line),
        line(280, 110, 280, 137, theme.line),
        line(280, 137, 330, 137, theme.line),
        arrow(330, 137, 330, 164, theme.line),
        arrow(482, 164, 482, 111, theme.line),
        arrow(895, 110, 895, 164, theme.line),
        line(895, 137, 707, 137, theme.line),
        arrow(707, 137, 707, 164, theme.line),
        arrow(567, 192, 609, 192, theme.line),
    ]
    return picture(
        980,
        235,
        "How data flows through rayrec",
        [
            text(
                10,
                22,
                "One Preprocessor from the first row to the last request",
                theme.text,
                size=16,
                bold=True,
            ),
            *arrows,
            *boxes(items, theme),
        ],
    )


def batch(theme: Theme) -> str:
    """Draw the steps of one batch's rows, in order."""
    steps = [
        ("Segment", "a byte range", "of the index"),
        ("Block", "segments by seed", "rows permuted"),
        ("Columns", "parsed in C", "faults skipped"),
        ("Ids", "one lookup", "per category"),
        ("Batch", "cut at an", "exact position"),
        ("Step", "forward, backward", "fused optimizer"),
    ]
    width = 140
    items = [Box(10 + 163 * index, 40, width, 70, lines) for index, lines in enumerate(steps)]
    arrows = [arrow(box.x + width, 75, box.x + 162, 75, theme.line) for box in items[:-1]]
    return picture(
        990,
        165,
        "The life of a batch",
        [
            text(10, 22, "The life of a batch", theme.text, size=16, bold=True),
            *arrows,
            *boxes(items, theme),
            text(
                10,
                145,
                "The order is a function of log, seed and epoch; a checkpoint stores the position "
                "in it, for any number of workers.",
                theme.quiet,
                size=12,
            ),
        ],
    )


def top(theme: Theme) -> str:
    """Draw the terminal output of `rayrec top`."""
    lines = [
        Text.from_ansi(line) for line in (ASSETS / "top.txt").read_text().rstrip().splitlines()
    ]
    width = round(7.8 * max(map(len, lines))) + 30
    height = 18 * len(lines) + 56
    parts = [rectangle(1, 1, width - 2, height - 2, theme.box, stroke=theme.line, round_=8)]
    parts.append(text(16, 26, "$ rayrec top runs/demo", theme.quiet, size=13))
    # Each character has its own place, so that columns stand below each other in any font.
    for number, shown in enumerate(lines):
        column = 0
        for segment in shown.render(CONSOLE):
            positions = " ".join(
                f"{16 + 7.8 * (column + offset):g}" for offset in range(len(segment.text))
            )
            column += len(segment.text)
            spaced = segment.text.replace(" ", "\u00a0")  # SVG makes one of several spaces
            color = segment.style and segment.style.color
            fill = color.get_truecolor(theme.terminal).hex if color else theme.text
            at = f'x="{positions}" y="{50 + 18 * number}"'
            parts.append(
                f'<text {at} fill="{fill}" font-size="13" '
                f'font-family="monospace">{escape(spaced)}</text>'
            )
    return picture(width, height, "rayrec top", parts)


DRAWINGS: dict[str, Callable[[Theme], str]] = {
    "numbers": numbers,
    "kill": kill,
    "flow": flow,
    "batch": batch,
    "top": top,
}
"""Each picture by its name."""


def files() -> dict[str, str]:
    """Return the content of every drawing by its name in docs/assets."""
    return {
        f"{name}-{theme}.svg": draw(colors)
        for name, draw in DRAWINGS.items()
        for theme, colors in THEMES.items()
    }


def report() -> None:
    """Write docs/assets/report.png and docs/assets/top.txt.

    The picture is the upper part of the report of a run on a synthetic log (two epochs, 150,000
    rows). The text is the output of `rayrec top` after its first evaluations.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("pictures: no chromium; install Debian's package chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rayrec = [sys.executable, "-m", "rayrec"]
        train = [
            *rayrec,
            "train",
            "criteo_demo",
            "--train-data.path",
            "log/train.txt",
            "--scaling.num-workers",
            "1",
        ]
        train += ["--scaling.threads-per-worker", "1", "--epochs", "2", "--name", "demo"]
        terminal = {"COLUMNS": "104", "FORCE_COLOR": "1"}
        how: dict[str, Any] = {
            "cwd": folder,
            "env": {**os.environ, "PYTHONPATH": str(ROOT / "src"), **terminal},
        }
        subprocess.run(
            [*rayrec, "generate", "log", "--rows", "150000"],
            check=True,
            stdout=subprocess.DEVNULL,
            **how,
        )
        with subprocess.Popen(train, stdout=subprocess.DEVNULL, **how) as training:
            events = folder / "runs" / "demo" / "events.jsonl"
            while training.poll() is None and not (
                events.exists() and events.read_text().count('"evaluate"') >= 3
            ):
                time.sleep(0.1)
            once = [*rayrec, "top", "runs/demo", "--once"]
            shown = subprocess.run(once, check=True, capture_output=True, text=True, **how)
        (ASSETS / "top.txt").write_text(shown.stdout or shown.stderr)
        assert training.returncode == 0
        page = folder / "runs" / "demo" / "report.html"
        shown = page.read_text().replace(str(ROOT / "src" / "rayrec" / "__main__.py"), "rayrec")
        page.write_text(shown)
        camera = [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=3000",
        ]
        camera += [
            "--window-size=1200,1180",
            f"--screenshot={ASSETS / 'report.png'}",
            page.as_uri(),
        ]
        subprocess.run(camera, check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    if sys.argv[1:] == ["report"]:
        report()
        return
    ASSETS.mkdir(exist_ok=True)
    for name, content in files().items():
        (ASSETS / name).write_text(content)


if __name__ == "__main__":
    main()
