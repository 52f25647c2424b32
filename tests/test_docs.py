"""The documentation tells the truth: its commands and code run, its links lead somewhere, its flags
exist.

In README.md and other pages of the root, the pages in docs/ and the notebooks of examples/:
- blocks fenced as `python` are run, those of one page in one process and namespace, in order; one
  that begins with a comment `# NAME.py` is that file, and is written instead;
- in blocks fenced as `bash`, lines that begin with `rayrec`, or run such a file with `python`, are
  run, in order with the page's Python; of other lines only the targets of `make` are looked up;
- blocks fenced as `yaml` must load as a configuration; `text` and others are only read, but for
  README's way to recommendations, which a test of its own runs.

A page finds what docs/quickstart.md leaves behind (log/, runs/), unless it generates its own log.
It runs without Ray: its commands work in their own process. The pages of `WITH_RAY` show what only
Ray has, and start it as readers do.

The site (mkdocs.yml) is built from the same pages, and from the code.
"""

import ast
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders.faults import fails_with
from builders.movielens import FILMS, served_ml_100k
from builders.scripts import ROOT, script
from hosts.browser import SCHEMES, WIDTHS, chromium, opened
from hosts.ports import free_ports
from hosts.processes import Session

import rayrec
from rayrec import models, recipes
from rayrec.cli.flags import SWITCHES, Flag, recipe_flags
from rayrec.cli.parser import command_flags
from rayrec.commands import COMMANDS
from rayrec.data.logs.splits import Split
from rayrec.datasets.criteo import FULL_DAYS, KAGGLE_FILES, SMALL_DAYS
from rayrec.observe.event_json import INCOMPLETE_LINE
from rayrec.observe.events import KINDS
from rayrec.recipes import load_config
from rayrec.tuning.space import TuneConfig

QUICKSTART = ROOT / "docs" / "quickstart.md"
ROOT_PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
ON_NODES = ("dlrm_nodes", "gpt2_nodes")
"""Notebooks of a cluster, which `test_notebooks_run_on_nodes` runs."""
WITH_OUTPUTS = ("analysis", "quickstart", *ON_NODES)
"""Notebooks that are stored with what their cells print and draw."""
LIMIT_S = 900  # of one page; half a minute on a quiet machine

FILE = re.compile(r"# (\w+\.py)\n")
"""Begins a block that is a file."""


class Block(NamedTuple):
    kind: str
    line: int
    """Of the opening fence, counted from 1."""
    text: str


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, also those within lists."""
    text = page.read_text() if page.exists() else ""
    fence = re.compile(r"^( *)```(\w*) *\n", re.MULTILINE)
    opened = [*fence.finditer(text)][::2]
    closed = [*fence.finditer(text)][1::2]
    return [
        Block(
            begin[2],
            text.count("\n", 0, begin.start()) + 1,
            re.sub(f"(?m)^{begin[1]}", "", text[begin.end() : end.start()]),
        )
        for begin, end in zip(opened, closed, strict=True)
    ]


def _prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _commands(block: Block) -> list[str]:
    """The lines of a bash block, continued ones joined."""
    return [line.strip() for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]


def runnable(page: Path) -> list[Block]:
    found: list[Block] = []
    for block in blocks(page):
        if block.kind == "python":
            found.append(block._replace(kind="file") if FILE.match(block.text) else block)
        elif block.kind == "bash":
            ours = [line for line in _commands(block) if re.match(r"rayrec |python \w+\.py$", line)]
            found += [Block("bash", block.line, line) for line in ours]
    return found


WITH_RAY = {"bring-your-own", "predict", "recommend", "serve", "your-file"}
"""Pages that train with several workers, read a Ray Dataset, or serve."""
RUNNABLE = [page for page in PAGES if runnable(page) and page != QUICKSTART]


def _environment(folder: Path) -> dict[str, str]:
    """Commands `rayrec` and `python` are this interpreter's; nothing is kept outside the folder."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    for name, start in (("rayrec", "-m rayrec "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start}"$@"\n')
        (programs / name).chmod(0o755)
    own = {
        "RAYREC_CACHE": str(folder / ".cache"),
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


class Pages:
    """A process of `hosts/page_server.py`, which runs pages."""

    _server: subprocess.Popen[str] | None = None

    def run(
        self,
        name: str,
        desired: list[Block],
        folder: Path,
        *,
        with_ray: bool = False,
        **more_environment: str,
    ) -> str:
        """Run the blocks in a folder, and return what they print. They must start no Ray, which
        takes long, unless `with_ray`.
        """
        ray_files = folder / ".ray"
        environment = (
            _environment(folder)
            | more_environment
            | ({} if with_ray else {"RAY_TMPDIR": str(ray_files)})
        )
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "tests" / "hosts" / "page_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        request = json.dumps(
            {
                "name": name,
                "blocks": desired,
                "folder": str(folder),
                "environment": environment,
            }
        )
        print(request, file=self._server.stdin, flush=True)
        answered = select.select([self._server.stdout], [], [], LIMIT_S)[0]
        status = self._server.stdout.readline() if answered else f"not done after {LIMIT_S} s"
        if not answered:
            self.end()
        out, err = ((folder / output).read_text(errors="replace") for output in (".out", ".err"))
        assert status == "0\n", f"{name}: {status}:\n{out[-4000:]}\n{err[-4000:]}"
        assert out.endswith("-- done\n")
        assert not ray_files.exists(), f"{name} starts a Ray; WITH_RAY does not have it"
        return out

    def end(self) -> None:
        """SIGKILLs the server and a page that it still runs."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None


@pytest.fixture(scope="session")
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.end()


@pytest.fixture(scope="session")
def world(pages: Pages, made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The folder in which docs/quickstart.md has been followed."""
    return made_once(
        "quickstart",
        functools.partial(
            pages.run,
            _name(QUICKSTART),
            runnable(QUICKSTART),
        ),
    )


@pytest.mark.slow
def test_quickstart_runs(world: Path) -> None:
    assert all((world / name).exists() for name in ("log/truth.json", "runs/demo/summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=_name(page),
            marks=[pytest.mark.ray] * (page.stem in WITH_RAY),
        )
        for page in RUNNABLE
    ],
)
def test_pages_run(page: Path, pages: Pages, world: Path, tmp_path: Path) -> None:
    if "rayrec generate log " not in page.read_text():
        for name in ("log", "runs"):
            shutil.copytree(world / name, tmp_path / name)
    pages.run(
        _name(page),
        runnable(page),
        tmp_path,
        with_ray=page.stem in WITH_RAY,
    )


@pytest.mark.slow
@pytest.mark.ray
def test_recommendations_of_readme_run(pages: Pages, tmp_path: Path) -> None:
    """From the download, answered by a server of this test, to the answer of the command's own
    server, on a free port.
    """
    readme = ROOT_PAGES[0]
    (door,) = (block for block in blocks(readme) if "fetch movielens_100k" in block.text)
    port = free_ports(1)
    lines = [line.partition("  #")[0].rstrip() for line in _commands(door)]
    *prepare, serve, ask = (line.replace("8000", str(port)) for line in lines)
    with served_ml_100k(tmp_path) as patch:
        commands = [Block("bash", 0, line) for line in prepare]
        pages.run(
            _name(readme),
            [Block("here", 0, patch), *commands],
            tmp_path,
            no_proxy="*",
        )
    command = ["sh", "-c", f"cd {shlex.quote(str(tmp_path))} && exec {serve}"]
    environment = _environment(tmp_path)
    with Session(
        command,
        environment=environment,
        output=tmp_path / "server",
    ) as server:
        server.until(lambda: server.out.rstrip().endswith("}"))
        answer = json.loads(sent_by_curl(ask))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait().status == 0, server.err
    assert answer["fallback"] == [None]
    (items,) = answer["items"]
    assert len({*items}) == 5
    assert {*items} <= {*range(1, FILMS + 1)} - {50, 172}


def sent_by_curl(line: str) -> bytes:
    """Return the answer to what a command line of curl sends."""
    curl, h, header, d, body, url = shlex.split(line)
    assert (curl, h, d) == ("curl", "-H", "-d")
    headers = dict([header.split(": ")])
    request = urllib.request.Request(f"http://{url}", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


ON_RAY = [pytest.mark.ray, pytest.mark.exhaustive]


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(
            path,
            id=_name(path),
            marks=ON_RAY * (path.stem not in WITH_OUTPUTS),
        )
        for path in NOTEBOOKS
    ],
)
def test_notebooks_run(notebook: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text = notebook.read_text()
    cells = json.loads(text)["cells"]
    assert any(cell.get("outputs") for cell in cells) == (notebook.stem in WITH_OUTPUTS)
    for place in (
        tempfile.gettempdir(),
        str(Path.home()),
        str(ROOT),
    ):
        assert f"{place}/" not in text, f"an output names {place}, which other machines do not have"
    if notebook.stem in ON_NODES:
        return
    pages: Pages = request.getfixturevalue("pages")
    code = [
        Block("python", number, "".join(cell["source"]))
        for number, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    ]
    pages.run(
        _name(notebook),
        code,
        tmp_path,
        with_ray=notebook.stem not in WITH_OUTPUTS,
    )


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_configurations_load(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "yaml":
            load_config(block.text)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_and_targets_exist(page: Path) -> None:
    targets = set(
        re.findall(
            r"^([a-z]+):",
            (ROOT / "Makefile").read_text(),
            re.MULTILINE,
        )
    )
    lines = [line for block in blocks(page) if block.kind == "bash" for line in _commands(block)]
    for line in (*re.findall(r"`([^`\n]+)`", _prose(page)), *lines):
        words = line.split()
        if words[:1] == ["make"]:
            unknown = [
                word for word in words[1:] if re.fullmatch(r"[a-z]+", word) and word not in targets
            ]
            assert not unknown, line
        if words[:1] == ["rayrec"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            assert words[1] in {*COMMANDS, "resume"}, line


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", _prose(page)):
        target = "".join(link)
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = page if not place else (page.parent / place).resolve()
        assert file.exists(), target
        if anchor:
            # GitHub makes their anchors so
            headings = re.findall(r"^#+ (.+)$", _prose(file), re.MULTILINE)
            assert anchor in [
                re.sub(
                    r"[^\w\- ]",
                    "",
                    each.strip().lower(),
                ).replace(" ", "-")
                for each in headings
            ], target


def test_troubleshooting_messages_match_source() -> None:
    """Each heading in code style is a message; between its dots are parts of one text of the
    source, in this order.
    """
    shown = re.findall(
        r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(shown) > 20
    texts = [
        text
        for path in (ROOT / "src").rglob("*.py")
        for text in _messages(ast.parse(path.read_text()))
    ]
    for message in shown:
        desired = re.compile(
            ".*".join(re.escape(part) for part in message.split("...") if part), re.DOTALL
        )
        assert any(desired.search(text) for text in texts), message


def _messages(tree: ast.AST) -> Iterator[str]:
    """The texts of a file, with an empty text for each value in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_guarantees_name_targets_of_their_tests() -> None:
    marks: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        file_entry = [
            line.value
            for line in tree.body
            if isinstance(line, ast.Assign) and "pytestmark" in ast.unparse(line)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                places = map(ast.unparse, (*file_entry, *node.decorator_list))
                found = " ".join(place for place in places if "parametrize" not in place)
                marks[node.name] = set(re.findall(r"mark\.(\w+)", found))
    rows = re.findall(
        r"^\|.+\| (`test_.+`) \| `(make [a-z-]+)`",
        (ROOT / "docs" / "guarantees.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 15
    for names, target in rows:
        for name in re.findall(r"`(test_\w+)`", names):
            runs = [f"-{mark}" for mark in ("exhaustive", "extended") if mark in marks[name]]
            assert target == "make test" + "".join(runs[:1]), name


def _test_names() -> set[str]:
    functions = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^(?:async )?def (test_\w+)", functions, re.MULTILINE))


def test_rows_of_five_systems_name_existing_things(flags: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "five-systems.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    rows = [row for row in rows if row[0] not in ("row", "---")]
    tests = _test_names()
    benchmarks = set(script("benchmarks", "run").BENCHMARKS)
    assert len(rows) == 163
    for row, way, shown_by in rows:
        named = re.findall(r"`(test_\w+)`", shown_by)
        measured = re.findall(r"`rayrec benchmark (\S+)`", shown_by)
        assert named or measured or re.fullmatch(r"\[\w+\]\(\S+\.md#\S+\)", shown_by), row
        assert (tests.issuperset(named), benchmarks.issuperset(measured)) == (True, True), row
        for path in re.findall(r"`((?:deploy|examples)/[^`\s]+)`", way):
            assert (ROOT / path).exists(), path
        assert {*re.findall(r"`(?:rayrec )?(--[a-z][\w.-]*)", way)} <= set().union(
            *flags.values()
        ), row
        assert {*re.findall(r"`rayrec (\w+)`", way)} <= COMMANDS.keys(), row


def test_pictures_match_their_command() -> None:
    assets = ROOT / "docs" / "assets"
    drawn = script("tools", "pictures").files()
    assert {path.name for path in assets.glob("*.svg")} == set(drawn)
    for name, content in drawn.items():
        assert (assets / name).read_text() == content, f"{name}: run make pictures"
    assert (assets / "report.png").stat().st_size < 200_000


RESULTS = script("tools", "results")
FIGURE = re.compile(
    r"""\d[\d.,]*\s*(k|M|million|thousand)?\s*(rows|images|tokens|requests)
        (/s|\sa\ssecond)                            # a speed
    |\b\d+\.\d+\s+(to\s+\d+\.\d+\s+)?(of|times)\b   # a ratio
    |\b\d[\d.]*(\s+to\s+[\d.]+)?\s+times\s+
        (as\s+(fast|many|much)|faster|slower|more|our|the\s+(rate|speed))
    |\b\d+\.\d+\s*(s|ms|µs|ns|minutes)\b            # a time
    |\b0\.[4-9]\d{3}\b                              # AUROC, log loss
    |\d+\.\d+\s%""",
    re.VERBOSE,
)
"""What reads as a figure that was measured."""
NO_ROW = {
    ("docs/benchmarks.md", "700,000 rows/s"),  # a setting of its stand-in
    ("docs/cluster.md", "6,000 rows/s"),  # follows from the lines above it
    ("docs/spot.md", "1.1 s"),  # a setting of Ray's benchmark
    ("docs/tune.md", "13.5 %"),  # follows from the numbers beside it
}
# published by DCNv3's authors
NO_ROW |= {("docs/models.md", "0.8162"), ("docs/models/crosses.md", "0.8162")}
# by BARS
NO_ROW |= {
    ("docs/from-fuxictr.md", "0.8150"),
    ("docs/models.md", "0.8146"),
    ("docs/models.md", "0.8150"),
}
# by BARS
NO_ROW |= {("docs/models/towers.md", figure) for figure in ("0.8134", "0.8146", "0.8150")}
NO_ROW |= {("docs/from-e2eaiok.md", "0.7926")}  # by Intel
"""Figures in prose that are of no row of ours."""


@pytest.mark.parametrize("page", RESULTS.PAGES, ids=_name)
def test_figures_are_of_committed_rows(page: Path) -> None:
    """`make pictures` writes them. Markdown takes the rest of a line that begins with a mark for
    HTML.
    """
    text = page.read_text()
    assert RESULTS.page(text) == text, f"{_name(page)}: run make pictures"
    assert re.findall(r"^\s*(?:[-*+]|\d+\.)?\s*<!--=.*", text, re.MULTILINE) == []


def test_figures_skip_failed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RESULTS, "RESULTS", tmp_path)
    monkeypatch.setattr(
        RESULTS,
        "_rows",
        RESULTS._rows.__wrapped__,
    )  # without a cache
    row = {
        "name": "ingest",
        "workload": "a log",
        "peer": "a copy",
        "rows_per_s": 1234.0,
    }
    (tmp_path / "machine_2026-01-01.jsonl").write_text(json.dumps(row) + "\n")
    failed = {
        **row,
        "rows_per_s": None,
        "error": "RuntimeError: copy.py ended with signal 6 (Aborted): no message",
    }
    (tmp_path / "machine_2026-01-02.jsonl").write_text(json.dumps(failed) + "\n")
    assert RESULTS.figure("ingest; a log; a copy; rows_per_s; 3") == "1,230"
    assert RESULTS.find("ingest", "a log", "a copy")[0] == "2026-01-01"


def test_figures_in_prose_have_rows() -> None:
    """Every figure in prose is marked (tools/results.py). Cells with numbers alone are tables of
    measurements.
    """
    found = {
        (_name(page), figure)
        for page in RESULTS.PAGES
        for figure in _unmarked_figures(page.read_text())
    }
    assert found - NO_ROW == set(), "write them as tools/results.py says, or leave the number out"
    assert NO_ROW - found == set()


def test_pages_serve_at_different_ports() -> None:
    """Two pages run at once."""
    ports = [
        port
        for page in (ROOT / "docs").glob("*.md")
        if page.stem in WITH_RAY
        for port in set(re.findall(r"port[ =](8\d+)", page.read_text()))
    ]
    assert len(ports) >= 3
    assert len(set(ports)) == len(ports)


def test_tables_of_benchmarks_have_rows() -> None:
    scale = "Scale: many files, row groups and categories"
    memory = "Memory: forecasts of `rayrec plan`"
    not_kept = ("Shuffling", memory, scale)
    head, *sections = re.split(
        r"^## ", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE
    )
    assert RESULTS.TABLE.search(head)
    for section in sections:
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            assert section.startswith(not_kept) != bool(
                RESULTS.FIGURE.search(table) or table in RESULTS.serving()
            ), table


def _unmarked_figures(text: str) -> Iterator[str]:
    for pattern in (
        r"^( *)```.*?^\1```",
        RESULTS.TABLE,
        RESULTS.FIGURE,
        r"`[^`\n]*`",
        r"\]\([^)]*\)",
    ):
        text = re.sub(
            pattern, "x", text, flags=re.DOTALL | re.MULTILINE if isinstance(pattern, str) else 0
        )
    for line in text.splitlines():
        for part in line.split("|") if line.lstrip().startswith("|") else [line]:
            if not re.fullmatch(r"(?:[\s*\d.,;/%×()e+\-]|\b(?:s|ms|GB|MB|to)\b)*", part):
                yield from (match[0] for match in FIGURE.finditer(part))


def test_unmarked_figures_are_detected() -> None:
    figures = (
        "makes 89.5k rows/s, at 0.98 to 1.03 of its speed, | 1.9 times as fast as it |, 0.5 µs, "
        "AUROC 0.7618, 0.17 % of it"
    )
    for text in figures.split(", "):
        assert list(_unmarked_figures(text)), text
    assert not list(
        _unmarked_figures(
            "<!--= a; b; c; d; 2-->0.95<!--/--> of it in 5 s, `0.95 of`\n| x | 0.7618 |\n"
        )
    )


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (89529, 3, "89,500"),
        (0.9558, 2, "0.96"),
        (0.09999, 2, "0.10"),
        (9.996, 3, "10.0"),
        (1.0035, 3, "1.00"),
    ],
)
def test_figures_have_significant_digits(value: float, digits: int, text: str) -> None:
    assert RESULTS.number(value, digits) == text


def test_figure_of_several_rows_is_rejected() -> None:
    key = "train; 1 worker, from raw TSV; TorchRec; {}ratio; 2"
    fails_with(SystemExit, "different values", RESULTS.figure, key.format(""))
    assert float(RESULTS.figure(key.format("least "))) < float(RESULTS.figure(key.format("most ")))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_tables_are_complete(page: Path) -> None:
    """A head, a line of dashes, and rows of as many cells: otherwise the whole table is shown as
    text.
    """
    for table in re.findall(r"(?:^ *\|.*\n)+", _prose(page), re.MULTILINE):
        head, dashes, *rows = (
            re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in table.splitlines()
        )
        assert all(re.fullmatch(r" *:?-+:? *", cell) for cell in dashes), table
        assert {len(row) for row in (dashes, *rows)} == {len(head)}, table
        assert rows, table
        assert all(re.fullmatch(r" *:?-+:? *", cell) is None for row in rows for cell in row), table


def test_benchmarks_page_names_every_benchmark() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    run = script("benchmarks", "run")
    assert set(
        re.findall(
            r"^rayrec benchmark ([a-z0-9-]+)",
            text,
            re.MULTILINE,
        )
    ) == set(run.BENCHMARKS)
    (by_make,) = re.findall(
        r"^BENCHMARKS \?= (.+)$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    (said,) = re.findall(r"`make bench` runs (.*?), or", text, re.DOTALL)
    assert re.findall(r"`([a-z0-9-]+)`", said) == by_make.split()


def test_example_categories_are_in_demo_log(tmp_path: Path) -> None:
    rayrec.generate(str(tmp_path), rows=2000)
    rows = [line.split("\t") for line in (tmp_path / "train.txt").read_text().splitlines()]
    shown = {
        found for page in PAGES for found in re.findall(r'"cat_(\d+)": "(\w+)"', page.read_text())
    }
    assert shown
    for column, category in shown:
        assert sum(row[14 + int(column)] == category for row in rows) > 100, (column, category)


def test_table_of_disk_has_published_sizes() -> None:
    page = (ROOT / "docs" / "prepare.md").read_text()
    for recipe, files in (
        ("criteo_small", SMALL_DAYS),
        ("criteo_full", FULL_DAYS),
        ("criteo_kaggle", KAGGLE_FILES[:1]),
    ):
        (row,) = re.findall(rf"^\| `{recipe}`.* \| (\d+), (\d+), (\d+);", page, re.MULTILINE)
        packed = sum(
            (file.archive.size_bytes if file.archive else file.about_bytes) or 0 for file in files
        )
        text = sum((file.unpacked_about_bytes or file.about_bytes) or 0 for file in files)
        sizes = (packed, text, 160 * sum(file.rows or 0 for file in files))
        assert [round(size / 1e9) for size in sizes] == [int(size) for size in row], recipe


def test_verdicts_advise_existing_flags(flags: dict[str, set[str]]) -> None:
    advised = set(
        re.findall(
            r"--[a-z][\w.-]*\w", (ROOT / "src" / "rayrec" / "observe" / "bottleneck.py").read_text()
        )
    )
    assert len(advised) > 5
    assert advised <= flags["train"]


def test_named_tests_exist() -> None:
    known = {file.name for file in (ROOT / "tests").rglob("test_*.py")} | _test_names()
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py|\.\.\.)?)`", page.read_text())
    }
    named -= {field.name for field in dataclasses.fields(Split)}  # such as test_days
    assert len(named) > 10
    begins = {name for name in named if name.endswith("...")}
    assert named - begins <= known
    assert [name for name in begins if not any(test.startswith(name[:-3]) for test in known)] == []


def test_cookbook_scripts_are_short() -> None:
    files = {
        (page.name, block.line): block
        for page in PAGES
        for block in runnable(page)
        if block.kind == "file"
    }
    cookbook = {
        place: block
        for place, block in files.items()
        if (ROOT / "docs" / "cookbook" / place[0]).exists()
    }
    assert len(cookbook) >= 6
    assert [place for place, block in cookbook.items() if block.text.count("\n") > 40] == []


INDEX = ROOT / "docs" / "index.md"
TOPICS = dict(
    re.findall(
        r"^\| \[[^\]]+\]\(([^)#]+)\) \| (.+) \|$",
        INDEX.read_text(),
        re.MULTILINE,
    )
)
"""Topic of each page below docs/, from the tables of the index."""
STATUS = {
    "index.md": "(guarantees.md)",
    "architecture.md": "(guarantees.md#test-status)",
    "guarantees.md": "(#test-status)",
}
"""Pages without limits of their own, and their link to the test status of all parts."""


def _opening_faults(text: str, topic: str, limits: str) -> list[str]:
    """Check a page's first paragraph: five lines at most that give a task, the page's topic and a
    link to its limits.
    """
    title, _, rest = text.partition("\n")
    opening = rest.strip("\n").partition("\n\n")[0]
    prose = re.sub(r"\]\([^)]*\)", "]", opening)
    stems = {word[:5] for word in re.findall(r"\w{3,}", f"{title} {topic}".lower())} - {
        "and",
        "the",
    }
    faults = {
        "no task": not re.match(r"(?!(?:An?|The|This|Each|How|What) )[A-Za-z`]", opening)
        or len(prose.split()) < 12,
        "too long": opening.count("\n") > 4,
        "another topic": not any(re.search(rf"\b{stem}", prose.lower()) for stem in stems),
        "no limits": limits not in opening,
    }
    return [fault for fault, is_true in faults.items() if is_true]


@pytest.mark.parametrize(
    "page",
    [ROOT_PAGES[0], *PAGES[len(ROOT_PAGES) :]],
    ids=_name,
)
def test_pages_begin_and_end_with_their_limits(page: Path) -> None:
    name = page.relative_to(ROOT / "docs" if page.parent != ROOT else ROOT).as_posix()
    text = page.read_text()
    assert (
        _opening_faults(
            text,
            TOPICS.get(name, ""),
            STATUS.get(name, "(#limitations)"),
        )
        == []
    )
    heading, _, limits = _prose(page).rpartition("\n## ")[2].partition("\n")
    assert name in STATUS or (heading == "Limitations" and len(limits.split()) > 4)


def test_opening_check_reports_each_fault() -> None:
    good = (
        "# Tune\n\nSearch the best hyperparameters of a model on one log, in turn. No GPU\nran "
        "([limits](#limitations)).\n\n"
    )
    for old, new, fault in (
        ("", "", None),
        ("Search the", "| Search | the", "no task"),
        ("Search", "The search of", "no task"),
        (" of a model on one log, in turn", "", "no task"),
        (" on one log,", "\non\none\nlog,\n", "too long"),
        ("Search", "Find", "another topic"),
        ("([limits](#limitations))", "by us", "no limits"),
        ("No GPU\nran (", "\n\nNo GPU ran (", "no limits"),  # in the second paragraph
    ):
        assert _opening_faults(
            good.replace(old, new),
            "search of settings",
            "(#limitations)",
        ) == [fault] * (fault is not None)


def test_index_lists_each_page_once() -> None:
    listed = re.findall(
        r"^\| \[[^\]]+\]\(([^)#]+)\) \|",
        INDEX.read_text(),
        re.MULTILINE,
    )
    assert sorted(INDEX.parent / name for name in [*listed, INDEX.name]) == PAGES[len(ROOT_PAGES) :]


@pytest.fixture(scope="module")
def site(pages: Pages, made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The folder of the site, built strictly: a link, an anchor or a page of the navigation that
    does not exist is an error.
    """

    def build(folder: Path) -> None:
        command = [
            "build",
            "--strict",
            "--config-file",
            str(ROOT / "mkdocs.yml"),
            "--site-dir",
            str(folder / "built"),
        ]
        code = f"from mkdocs.__main__ import cli\ncli({command!r}, standalone_mode=False)\n"
        pages.run("mkdocs.yml", [Block("python", 0, code)], folder, NO_MKDOCS_2_WARNING="1")

    return made_once("site", build) / "built"


@pytest.mark.parametrize(
    "remote",
    ["https://me:word@git.org/a/b.git", "git@git.org:a/b.git", "ssh://git@git.org:22/a/b/"],
)
def test_site_links_to_origin(remote: str) -> None:
    web_address = script("tools", "site_hooks").web_address
    assert [web_address(name) for name in (remote, "/srv/a/b.git", "")] == [
        "https://git.org/a/b",
        None,
        None,
    ]


@pytest.mark.slow
def test_site_describes_code(site: Path) -> None:
    """Every command, public name and kind of event, and fields, metrics and paths of HTTP from
    their tables.
    """
    pages = {page.stem: page.read_text() for page in (site / "reference").glob("*.html")}
    assert [verb for verb in COMMANDS if f'id="rayrec-{verb}"' not in pages["commands"]] == []
    assert "<code>--min-count</code>" in pages["commands"]
    assert [
        name
        for name in set(rayrec.__all__) - {"recipes"}
        if f'id="rayrec.{name}"' not in pages["python"]
    ] == []
    assert [kind for kind in KINDS if f"<code>{kind}</code>" not in pages["events"]] == []
    named = {
        "configuration": "max_outage_s",
        "recipes": "criteo_kaggle",
        "metrics": "ray_rayrec_blocked_fraction",
        "exit-statuses": "143",
        "formats": "manifest.json",
        "http": "POST /v1/score",
    }
    assert [page for page, name in named.items() if name not in pages[page]] == []
    assert "rayrec_serve_rows_total" in pages["metrics"]


def _search(entries: list[dict[str, Any]], query: str) -> list[str]:
    """Rank the pages of a search index as the site does (Material's lunr), best first.

    BM25 of the words that begin with a word of the query, 1,000-fold in titles. Entries are pages
    and, with an anchor, their sections; a page ranks as its best entry, times its boost, and a
    page's own entry counts more.
    """

    def words(text: str) -> list[str]:
        return re.split(r"[\s\-]+", re.sub(r"<[^>]+>", " ", text).lower())

    fields = [(words(entry["title"]), words(entry["text"])) for entry in entries]
    scores = [0.0] * len(entries)
    matches = [0] * len(entries)
    terms = words(query)
    for term in terms:
        counts = [
            [sum(word.startswith(term) for word in field) for field in pair] for pair in fields
        ]
        having = sum(map(any, counts))
        rarity = math.log(1 + (len(entries) - having + 0.5) / (having + 0.5))
        for number, (title, text) in enumerate(counts):
            scores[number] += rarity * 2.2 * (1000 * title / (title + 1.2) + text / (text + 1.2))
            matches[number] += bool(title or text)
    best: dict[str, float] = {}
    for entry, score, matched in zip(entries, scores, matches, strict=True):
        page, anchor, _ = entry["location"].partition("#")
        score *= entry.get("boost", 1)
        best[page] = max(
            best.get(page, 0), score * (1 + ((not anchor) + matched / len(terms)) ** 2)
        )
    return sorted(
        (page for page, score in best.items() if score), key=best.__getitem__, reverse=True
    )


def test_search_prefers_titles_to_headings_to_text() -> None:
    titles = {
        "b.html": "Other",
        "a.html": "Atomic files",
        "c.html#s": "Is atomic",
        "d.html": "Empty",
    }
    entries = [
        {"location": at, "title": name, "text": f"<p>{'atomic' * (name != 'Empty')}</p>"}
        for at, name in titles.items()
    ]
    assert _search(entries, "Atomic") == ["a.html", "c.html", "b.html"]


SEARCHES = {
    "CTR": "models",
    "click-through rate": "models",
    "hyperparameter": "tune",
    "recommend": "recommend",
    "multi-task": "models/labels",
    "fine-tune": "vision",
    "incremental": "warm-start",
    "atomic": "checkpoints",
    "idempotent": "cookbook/daily",
    "initialization": "configure",
    "resume": "checkpoints",
    "fault tolerance": "faults",
    "quantize": "export",
    "optimizer": "configure",
    "learning rate": "configure",
    "categories": "your-file",
    "metrics": "predict",
    "AUC": "predict",
}
"""The field's words, and the page that a search for each must find first."""


@pytest.mark.slow
def test_searches_find_their_page_first(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {
        query: _search(entries, query)[0].removesuffix(".html") for query in SEARCHES
    } == SEARCHES


@pytest.mark.slow
def test_site_is_readable_in_browser(site: Path) -> None:
    """Pictures follow the site's own switch of dark and light, wide enough to be read, and the
    search answers.
    """
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names = (
            "index",
            "faults",
            "observe",
            "life-of-a-batch",
            "reference/configuration",
        )
        for name, scheme, width in itertools.product(names, SCHEMES, WIDTHS):
            url = f"http://127.0.0.1:{server.server_port}/{name}.html"
            with opened(browser, url, width=width, scheme="light") as page:
                if scheme == "dark":
                    page.click("label[title=Dark]")
                shown = page.evaluate(
                    "[...document.images].filter(image => image.offsetWidth > 500).map(image => "
                    "image.src)"
                )
                assert all(f"-{scheme}.svg" in source for source in shown)
                assert shown or name.startswith("reference")
        with opened(browser, url, width=1280, scheme="light") as page:
            page.fill(".md-search__input", "hyperparameter")
            assert "tune.html" in page.wait_for_selector(".md-search-result__link").get_attribute(
                "href"
            )
        server.shutdown()


def test_site_loads_no_external_resources(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)|<link[^>]+href=\"(https?:[^\"]+)"
    )
    assert not [
        match[0] for page in site.rglob("*.html") for match in loaded.finditer(page.read_text())
    ]


def test_every_kind_of_event_is_described() -> None:
    assert {kind for kind, _ in script("tools", "reference").logged_events()} | {
        INCOMPLETE_LINE
    } == set(KINDS)


def flag_names(flags: list[Flag]) -> list[str]:
    return [name for flag in flags for name in (*flag.names, *flag.negative_names)]


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Every flag of a command; `train` stands for those that take the same."""
    found = {
        name: {*flag_names(command_flags(command)), *SWITCHES}
        for name, command in COMMANDS.items()
        if not command.recipe
    }
    kinds = ("criteo_demo", "mnist_resnet18", "image_folder", "gpt2_tiny")  # of each workload one
    found["train"] = {"--config", *SWITCHES}.union(
        *(flag_names(recipe_flags(recipes.ALL[name]())) for name in kinds)
    )
    kinds_of_models = [models.config_class(name) for name in models.names()]
    settings = [
        field
        for model in kinds_of_models
        if model is not None
        for field in dataclasses.fields(model)
    ]
    fields = {field.name for field in settings} | {
        f"no-{field.name}" for field in settings if field.type in (bool, "bool")
    }
    places = ("model", "model.models.0", "model.models.1")  # the latter two of --model ensemble
    found["train"] |= {
        f"--workload.{place}.{name.replace('_', '-')}" for place in places for name in fields
    }
    names = [field.name.replace("_", "-") for field in dataclasses.fields(TuneConfig)]
    found["tune"] = (
        found["train"] | {f"--tune.{name}" for name in (*names, "no-stop-early")} | {"--search"}
    )
    found["plan"] = found["train"] | {"--cluster", "--tables"}
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_flags_exist(page: Path, flags: dict[str, set[str]]) -> None:
    text = page.read_text().replace("\\\n", " ")
    # Of a configuration within the configuration:
    nested = set(re.findall(r"--[a-z][a-z0-9-]*\.[a-z0-9.-]*[a-z0-9]", text))
    known = set().union(*flags.values())
    assert nested <= known, nested - known
    for verb, line in re.findall(
        r"rayrec (train|tune|config|plan|vocabulary|preprocess|validate|fetch|compare) ([^`\n]*)",
        text,
    ):
        named = set(re.findall(r"--[a-z][\w.-]*", line.partition("#")[0]))
        valid_flags = flags.get(verb, flags["train"])
        assert named <= {*valid_flags, "--help", "--help-all"}, (verb, named - valid_flags)
