"""The page at /: try a row by hand, see its score and which of its categories the model does not know. It needs no other file."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1b1b1a; --soft: #62625e; --hair: #c9c8c2; --card: #f4f3ef;
  --accent: #2a6fc9; --on-accent: #ffffff; --wrong: #b3231a; --unknown: #8a5200; }
@media (prefers-color-scheme: dark) { :root { --page: #191918; --ink: #f1f0ec; --soft: #a5a49d; --hair: #55544f;
  --card: #242422; --accent: #7db0f5; --on-accent: #10233f; --wrong: #ff8075; --unknown: #f0b35a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
p { margin: 0 0 12px; overflow-wrap: anywhere; } .soft { color: var(--soft); font-size: 13px; }
label { display: block; color: var(--soft); font-size: 13px; }
input, textarea { width: 100%; font: 14px/1.4 ui-monospace, monospace; color: var(--ink); background: var(--card);
  border: 1px solid var(--hair); border-radius: 6px; padding: 5px 8px; }
textarea { min-height: 56px; resize: vertical; }
#fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 150px), 1fr)); gap: 8px 12px; margin: 14px 0; }
.mark { font-size: 12px; min-height: 18px; }
.unknown input { border-color: var(--unknown); border-width: 2px; } .unknown .mark { color: var(--unknown); }
.wrong input { border-color: var(--wrong); border-width: 2px; } .wrong .mark { color: var(--wrong); }
button { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--hair); border-radius: 6px;
  padding: 6px 16px; margin: 0 8px 8px 0; cursor: pointer; }
button.main { background: var(--accent); border-color: var(--accent); color: var(--on-accent); font-weight: 600; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
#result { background: var(--card); border-radius: 8px; padding: 12px 16px; margin: 16px 0; }
#result b { font-size: 28px; margin-right: 14px; } .error { color: var(--wrong); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
[hidden] { display: none !important; }
"""

_SCRIPT: Final = """
"use strict";
const find = id => document.getElementById(id);
const NUMBER = /^-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][+-]?[0-9]+)?$/;
let columns = [];  // {name, numeric, list}
let example = {};
let predicts_clicks = true;

function add(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return parent.appendChild(made);
}

async function ask(path, options = {}) {
  const token = find("token").value;
  const headers = {...options.headers, ...(token ? {authorization: "Bearer " + token} : {})};
  const response = await fetch(path, {...options, headers});
  const found = await response.json();
  if (response.status === 401) find("access").hidden = false;
  if (!response.ok) throw found.error;
  return found;
}

function describe(name, property) {
  const types = [].concat(property.type || []);
  return {name, list: types.includes("array"), numeric: !types.includes("string") && !types.includes("array")};
}

async function open_() {
  try {
    const described = await ask("openapi.json");
    const json = described.paths["/v1/score"].post.requestBody.content["application/json"];
    const properties = described.components.schemas.Row.properties;
    example = json.example.rows[0];
    predicts_clicks = described.components.schemas.Scores.properties.scores?.items.maximum === 1;
    columns = Object.keys(properties).filter(name => properties[name].type).map(name => describe(name, properties[name]));
    show_fields();
    const ready = await ask("readyz");
    find("model").textContent = "Model " + ready.model + ", Preprocessor " + ready.preprocessor;
    find("form").hidden = false;
    find("result").hidden = true;
  } catch (error) { show_error(error); }
}

function show_fields() {
  const fields = find("fields");
  fields.replaceChildren();
  for (const [number, column] of columns.entries()) {
    const field = add(fields, "div");
    const label = add(field, "label", column.name + (column.list ? " (separated by commas)" : ""));
    const input = add(field, "input");
    input.id = "field-" + number;
    label.htmlFor = input.id;
    input.autocomplete = "off";
    input.spellcheck = false;
    if (column.numeric) input.inputMode = "decimal";
    const mark = add(field, "div", "", "mark");
    mark.id = "mark-" + number;
    input.setAttribute("aria-describedby", mark.id);
    column.field = field; column.input = input; column.mark = mark;
  }
}

function as_json(column) {
  const text = column.input.value.trim();
  if (!text) return "null";
  if (column.list) return JSON.stringify(text.split(",").map(item => item.trim()));
  return column.numeric && NUMBER.test(text) ? text : JSON.stringify(text);
}

function mark(column, className, text) {
  column.field.className = className;
  column.mark.textContent = text;
}

async function score() {
  for (const column of columns) mark(column, "", "");
  const row = columns.map(column => JSON.stringify(column.name) + ":" + as_json(column)).join(",");
  try {
    const body = '{"rows":[{' + row + "}]}";
    const headers = {"content-type": "application/json"};
    show_scores(await ask("v1/score?columns=true", {method: "POST", headers, body}));
  } catch (error) { show_error(error); }
}

function show_scores(found) {
  const unknown = found.unknown_columns[0];
  const result = find("result");
  result.replaceChildren();
  result.hidden = false;
  const values = {};
  if (predicts_clicks) {
    add(result, "b", (100 * found.scores[0]).toPrecision(4) + " %");
    add(result, "span", "probability of a click");
    values["Logit"] = found.logits[0];
  } else {
    const others = ["unknown", "unknown_columns", "model", "preprocessor"];
    for (const name of Object.keys(found)) if (!others.includes(name)) values[name] = found[name][0];
  }
  const list = add(result, "dl");
  const entries = {...values, "Unknown categories": unknown.length ? unknown.join(", ") : "none",
    "Model": found.model, "Preprocessor": found.preprocessor};
  for (const [name, value] of Object.entries(entries)) { add(list, "dt", name); add(list, "dd", String(value)); }
  for (const column of columns) if (unknown.includes(column.name)) mark(column, "unknown", "not in the vocabulary");
}

function show_error(error) {
  const result = find("result");
  result.replaceChildren();
  result.hidden = false;
  add(result, "span", error.message || String(error), "error");
  const column = columns.find(column => column.name === error.field);
  if (column) { mark(column, "wrong", "not taken"); column.input.focus(); }
}

function fill(value_of) {
  for (const [number, column] of columns.entries()) {
    const value = value_of(column.name, number);
    column.input.value = value === undefined || value === null ? "" : value;
    mark(column, "", "");
  }
}

find("line").addEventListener("input", () => {
  const found = find("line").value.replace(/[\\r\\n]+$/, "").split("\\t");
  const before = found.length - columns.length;  // a label, which is ignored
  if (before === 0 || before === 1) fill((name, number) => found[number + before]);
});
find("form").addEventListener("submit", event => { event.preventDefault(); score(); });
find("example").addEventListener("click", () => fill(name => example[name]));
find("clear").addEventListener("click", () => { find("line").value = ""; fill(() => ""); find("result").hidden = true; });
find("access").addEventListener("submit", event => { event.preventDefault(); open_(); });
open_();
"""

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rayrec: try a row</title>
<style>@STYLE@</style>
</head>
<body>
<main>
<h1>Try a row</h1>
<p class="soft" id="model"></p>
<form id="access" hidden>
<p><label for="token">Bearer token of this server</label><input id="token" type="password" autocomplete="off"></p>
<button class="main">Use token</button>
</form>
<form id="form" hidden>
<label for="line">A line of the log, tab-separated; it fills the fields below</label>
<textarea id="line" spellcheck="false" autocomplete="off"></textarea>
<div id="fields"></div>
<button class="main">Score</button>
<button type="button" id="example">Example</button>
<button type="button" id="clear">Clear</button>
<p class="soft">An empty field is a missing value.</p>
</form>
<div id="result" role="status" hidden></div>
<noscript><p>This page needs JavaScript; POST rows to v1/score without it.</p></noscript>
</main>
<script>@SCRIPT@</script>
</body>
</html>
"""


def _source(text: str) -> str:
    """A Content-Security-Policy source: this very text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HTML: Final = _PAGE.replace("@STYLE@", _STYLE).replace("@SCRIPT@", _SCRIPT).encode()
HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; style-src {_source(_STYLE)}; script-src {_source(_SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}
