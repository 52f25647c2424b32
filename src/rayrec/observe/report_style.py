"""How a report looks, by day and by night."""

NUM_SERIES = 8
"""Lines that a chart has at most, each with a colour and a dash; the colours can be told apart without seeing red and green."""
NUM_PARTS = NUM_SERIES + 1
"""Parts that a whole has at most; the last one is grey."""
_DASHES = ("", "7 3", "2 2", "9 3 2 3", "14 4", "1 4", "9 2 1 2 1 2", "4 7")
"""Lengths of strokes and gaps in turn, of each line; the first is drawn through."""


def _gradient(number: int) -> str:
    """The dash of a line as a background of CSS, for the legend."""
    colour, place, stops = f"var(--series-{number})", 0, []
    for index, length in enumerate(map(int, _DASHES[number - 1].split())):
        stops.append(f"{'transparent' if index % 2 else colour} {place}px {place + length}px")
        place += length
    return f"repeating-linear-gradient(90deg, {', '.join(stops)})" if stops else colour


_SERIES = "\n".join(
    [
        f".dot.series-{number} {{ fill: var(--series-{number}); }} "
        f".swatch.series-{number} {{ background: var(--series-{number}); }}"
        for number in range(1, NUM_PARTS + 1)
    ]
    + [
        f".line.series-{number} {{ stroke: var(--series-{number}); stroke-dasharray: {_DASHES[number - 1] or 'none'}; }} "
        f".swatch.dashed.series-{number} {{ background: {_gradient(number)}; }}"
        for number in range(1, NUM_SERIES + 1)
    ]
)
STYLE = """
:root { --page: #fcfcfb; --ink: #1b1b1a; --soft: #62625e; --hair: #e3e2dd; --card: #f4f3ef; --wrong: #c0271d;
  --series-1: #2a6fc9; --series-2: #d9622b; --series-3: #1e8f6e; --series-4: #a2559f; --series-5: #8a7a12;
  --series-6: #c2447a; --series-7: #5d6b7a; --series-8: #7a4a1f; --series-9: #b9b8b2; }
@media (prefers-color-scheme: dark) { :root { --page: #191918; --ink: #f1f0ec; --soft: #a5a49d; --hair: #3a3935;
  --card: #242422; --wrong: #ff8075; --series-1: #5b9df0; --series-2: #f08a55; --series-3: #4cc79f; --series-4: #cf8fcc;
  --series-5: #cdbb45; --series-6: #f089b0; --series-7: #a3b1c0; --series-8: #c99a6b; --series-9: #62615c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
main.all { max-width: none; } .all th, .all td { padding-right: 10px; font-size: 13px; overflow-wrap: anywhere; }
h1 { font-size: 26px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 20px; }
.figures div { background: var(--card); border-radius: 8px; padding: 8px 14px; min-width: 112px; }
.figures b { display: block; font-size: 20px; } .figures span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: 14px; }
svg { width: 100%; height: auto; display: block; }
.label, .marked { fill: var(--soft); font-size: 11px; } .marked { font-size: 10px; }
.grid { stroke: var(--hair); } .axis { stroke: var(--soft); } .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dot { stroke: none; }
@SERIES@
.legend { display: inline-block; font-weight: 400; margin-left: 14px; color: var(--soft); }
.swatch { display: inline-block; width: 14px; height: 3px; vertical-align: middle; margin-right: 5px; }
.swatch.dashed { width: 34px; }
.wide { overflow-x: auto; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 14px 0; font-size: 14px; }
a { color: var(--series-1); }
:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; border-radius: 4px; }
.verdict { border-left: 4px solid var(--series-1); background: var(--card); border-radius: 0 8px 8px 0; padding: 10px 14px;
  margin: 20px 0 0; }
.bars { margin: 0 0 18px; } .bars figcaption { margin-bottom: 6px; } .bars svg { min-width: 620px; }
.value { fill: var(--ink); font-size: 11px; } .lost { fill: var(--wrong); } .tick { stroke: var(--ink); stroke-width: 1.5; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--hair); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } tbody th { color: inherit; font-weight: inherit; }
.images { display: grid; grid-template-columns: repeat(3, max-content); gap: 14px; }
.images figure { border: 2px solid var(--hair); border-radius: 8px; padding: 6px; text-align: center; }
.images .wrong { border-color: var(--wrong); } .wrong figcaption { color: var(--wrong); }
.images img { width: 112px; height: auto; image-rendering: pixelated; display: block; margin: 0 auto 4px; }
.images figcaption { font-weight: 400; font-size: 13px; }
.text, pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: 8px; padding: 10px 14px; }
.text { font-family: ui-serif, Georgia, serif; } pre { font-size: 12.5px; }
summary { cursor: pointer; color: var(--soft); margin-top: 10px; }
""".replace("@SERIES@", _SERIES)
