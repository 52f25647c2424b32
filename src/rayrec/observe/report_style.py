"""How a report looks, by day and by night."""

STYLE = """
:root { --page: #fcfcfb; --ink: #1b1b1a; --soft: #62625e; --hair: #e3e2dd; --card: #f4f3ef; --wrong: #c0271d;
  --series-1: #2a6fc9; --series-2: #d9622b; }
@media (prefers-color-scheme: dark) { :root { --page: #191918; --ink: #f1f0ec; --soft: #a5a49d; --hair: #3a3935;
  --card: #242422; --wrong: #ff8075; --series-1: #5b9df0; --series-2: #f08a55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 20px; }
.figures div { background: var(--card); border-radius: 8px; padding: 8px 14px; min-width: 112px; }
.figures b { display: block; font-size: 20px; } .figures span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: 14px; }
svg { width: 100%; height: auto; display: block; }
.label, .marked { fill: var(--soft); font-size: 11px; } .marked { font-size: 10px; }
.grid { stroke: var(--hair); } .axis { stroke: var(--soft); } .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dot { stroke: none; }
.line.series-1 { stroke: var(--series-1); } .line.series-2 { stroke: var(--series-2); }
.dot.series-1 { fill: var(--series-1); } .dot.series-2 { fill: var(--series-2); }
.legend { font-weight: 400; margin-left: 14px; color: var(--soft); }
.swatch { display: inline-block; width: 14px; height: 3px; vertical-align: middle; margin-right: 5px; }
.swatch.series-1 { background: var(--series-1); } .swatch.series-2 { background: var(--series-2); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--hair); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
.images { display: grid; grid-template-columns: repeat(3, max-content); gap: 14px; }
.images figure { border: 2px solid var(--hair); border-radius: 8px; padding: 6px; text-align: center; }
.images .wrong { border-color: var(--wrong); } .wrong figcaption { color: var(--wrong); }
.images img { width: 112px; height: auto; image-rendering: pixelated; display: block; margin: 0 auto 4px; }
.images figcaption { font-weight: 400; font-size: 13px; }
.text, pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: 8px; padding: 10px 14px; }
.text { font-family: ui-serif, Georgia, serif; } pre { font-size: 12.5px; }
summary { cursor: pointer; color: var(--soft); margin-top: 10px; }
"""
