"""Check the project's prose: `python tools/prose.py [FILE...]`, by default every file of the tree.

Words: `words.tsv` lists phrases for all text in Markdown, YAML, shell, C and make files, notebook
cells, and comments and strings in Python files (docstrings, help, messages), never identifiers.
Each hit is printed, and fails.

Docstrings and help in Python files: openings with a fragment, long sentences, clauses, chains of
"of". Identifiers: a part in `names.tsv`, or no noun before "of". Names of tests. `LIMITS` is the
number of each that a tree may have. Prints the hits of a kind above its number. The exit status is
1 if anything fails. Ruff checks the imperative verb of functions.
"""

import ast
import inspect
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_name("words.tsv")
NAMES = Path(__file__).with_name("names.tsv")
LIMITS: dict[str, dict[str, int]] = {
    "src": {"opening": 4, "long": 22, "clauses": 0, "of": 15, "name": 47, "genitive": 1},
    "benchmarks": {"opening": 0, "long": 0, "clauses": 0, "of": 0, "name": 0},
    "tools": {"opening": 0, "long": 0, "clauses": 0, "of": 0, "name": 0},
    "tests": {
        "opening": 102,
        "long": 3,
        "clauses": 6,
        "of": 22,
        "name": 1107,
        "test": 53,
        "genitive": 114,
    },
}
"""Maximum hits of each kind in a tree. These only fall: lower a number in the commit that lowers
its count.
"""
_FRAGMENT = re.compile(
    r"(of|what|how|where|for|in|which|as|that|on|by|from|with|between|its|those|why|at|who|raises"
    r"|see|whether)(?![\w'])",
    re.IGNORECASE,
)
_OPENINGS = re.compile(r"whether |how (often|many|much|long|to) |which \w+ to ", re.IGNORECASE)
"""Fragments that may open field help."""
_CLAUSES = re.compile(r"(?<!so )\b(?:that|which|what|who|whose|where)\b", re.IGNORECASE)
_GENITIVE = re.compile(r"_*of(_|$)")
_TALE = re.compile(r"_(?:an?|the|that|which|whose|who|they|its?|those)_")
MAX_WORDS = 30
MAX_CLAUSES = 2
MAX_OF = 2
MAX_TEST_NAME = 60
TEXT = {".md", ".c", ".h", ".yaml", ".yml", ".toml", ".sh", ".j2", ".html"}
TEXT_NAMES = {"Makefile", "Dockerfile"}
SPACE = r"(?:\s*\n\s*(?:#|//|\*)\s*|\s+)"
"""White space, or the end of a line of a comment with the mark that begins the next one."""


LOOSE_SPACE = r"(?:[\W_]|\\n)+(?:[rfbu]{1,2}\W+)?"
"""Pattern for a space in a source file, such as the end of a string literal and the start of the
next.
"""


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    in_source: re.Pattern[str]
    """Matches in the source of every file whose prose `pattern` matches; skips files that need no
    parsing.
    """
    replacement: str
    why: str


class Prose(NamedTuple):
    line: int
    """The first line, counted from 1."""
    text: str


def read_rules(text: str) -> list[Rule]:
    """Read the rules of a list: `pattern<tab>replacement<tab>why` on each line. Skips empty lines
    and lines that start with #.

    A pattern is a regular expression for whole words of either case. A space in it also matches the
    end of a line. Raises ValueError for an invalid line.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 3 or not all(field.strip() for field in fields):
            raise ValueError(
                f"line {number} of the list is not pattern<tab>replacement<tab>why: {line!r}"
            )
        pattern, replacement, why = (field.strip() for field in fields)
        try:
            compiled = re.compile(rf"(?<!\w)(?:{pattern.replace(' ', SPACE)})(?!\w)", re.IGNORECASE)
            in_source = re.compile(pattern.replace(" ", LOOSE_SPACE), re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"line {number} of the list: {error}: {pattern!r}") from None
        rules.append(Rule(compiled, in_source, replacement, why))
    return rules


def prose_of_python(source: str) -> Iterator[Prose]:
    """Yield comments and string literals, with `{}` for each value of an f-string."""
    yield from comments_of_python(source)
    yield from _strings(ast.parse(source))


def comments_of_python(source: str) -> Iterator[Prose]:
    """Yield comments. Comments of adjacent lines are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        wraps = token.start[0] == last + 1 and token.line.lstrip().startswith("#")
        if block and not wraps:
            yield Prose(first, "\n".join(block))
            block = []
        first, last = (first, token.start[0]) if block else (token.start[0], token.start[0])
        block.append(token.string)
    if block:
        yield Prose(first, "\n".join(block))


def _strings(node: ast.AST) -> Iterator[Prose]:
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        ]
        yield Prose(node.lineno, "".join(parts))
        inserted: Iterable[ast.AST] = (
            part for part in node.values if not isinstance(part, ast.Constant)
        )
    else:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Prose(node.lineno, node.value)
        inserted = ast.iter_child_nodes(node)
    for child in inserted:
        yield from _strings(child)


def prose_of_cells(source: str) -> Iterator[Prose]:
    """Yield each cell. Lines count from the start of the cell, as in a notebook."""
    for cell in json.loads(source)["cells"]:
        yield Prose(1, "".join(cell["source"]))


def hits(path: Path, rules: Iterable[Rule]) -> Iterator[tuple[int, str, Rule]]:
    """Yield line, phrase and rule of each hit in a file's prose. Files of other kinds have no
    prose.
    """
    if path.suffix not in {".py", ".ipynb"} | TEXT and path.name not in TEXT_NAMES:
        return
    source = path.read_text()
    candidates = [rule for rule in rules if rule.in_source.search(source)]
    if not candidates:
        return
    kinds = {".py": prose_of_python, ".ipynb": prose_of_cells}
    for line, text in kinds[path.suffix](source) if path.suffix in kinds else [Prose(1, source)]:
        for rule in candidates:
            for match in rule.pattern.finditer(text):
                yield line + text.count("\n", 0, match.start()), re.sub(SPACE, " ", match[0]), rule


class Fault(NamedTuple):
    kind: str
    """Key of `LIMITS`."""
    line: int
    text: str


def documented(tree: ast.Module) -> Iterator[tuple[str, Prose]]:
    """Yield ("help" or "docstring", text) of each docstring and each string below a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        has_docstring = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        for before, line in itertools.pairwise([None, *body]):
            value = getattr(getattr(line, "value", None), "value", None)
            if not isinstance(line, ast.Expr) or not isinstance(value, str):
                continue
            if before is None and has_docstring:
                yield "docstring", Prose(line.lineno, inspect.cleandoc(value))
            elif isinstance(before, ast.Assign | ast.AnnAssign):
                yield "help", Prose(line.lineno, inspect.cleandoc(value))


def _sentences(text: str) -> Iterator[str]:
    """Yield sentences. A row of a table, which a comment indents, is one by itself."""
    for paragraph in re.split(
        r"\n\s*\n|\n\s*[-*>]\s|\n\s*\w+ ?(?:\([^)\n]*\))?:\s|\n#[ \t]*(?=\n)|\n# {2,}",
        re.sub(r"`[^`]*`", "X", text),
    ):
        yield from (
            " ".join(sentence.split())
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph)
            if sentence.strip()
        )


def _names(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, name, whether it is a function's) of each definition, argument and assigned
    variable.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, not isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False


def faults(source: str, parts: frozenset[str]) -> Iterator[Fault]:
    """Yield the faults of a Python file's docstrings, help and names. `parts`: parts of identifiers
    that are not used.
    """
    tree = ast.parse(source)
    texts = list(comments_of_python(source))
    for kind, prose in documented(tree):
        texts.append(prose)
        opening = prose.text.lstrip("`\"'(*[")
        is_fragment = _FRAGMENT.match(opening) and not (kind == "help" and _OPENINGS.match(opening))
        if is_fragment or re.match(r"(?!rayrec\b)[a-z]+\b", prose.text):
            yield Fault("opening", prose.line, prose.text.partition("\n")[0])
    for prose in texts:
        for sentence in _sentences(prose.text):
            words = sentence.split()
            if len(words) > MAX_WORDS:
                yield Fault("long", prose.line, sentence)
            if len(_CLAUSES.findall(sentence)) > MAX_CLAUSES:
                yield Fault("clauses", prose.line, sentence)
            if words.count("of") > MAX_OF:
                yield Fault("of", prose.line, sentence)
    for line, name, is_function in _names(tree):
        is_listed = not parts.isdisjoint(
            re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
        )
        is_test = is_function and name.startswith("test_")
        if is_test and (is_listed or len(name) > MAX_TEST_NAME or _TALE.search(f"{name}_")):
            yield Fault("test", line, name)
        elif is_listed and not is_test:
            yield Fault("name", line, name)


def genitives(source: str) -> Iterator[Fault]:
    """Yield identifiers that begin with "of", such as of_rows."""
    for line, name, _ in _names(ast.parse(source)):
        if _GENITIVE.match(name):
            yield Fault("genitive", line, name)


def tracked_files() -> list[Path]:
    """Return the files that git tracks or would track, or all files outside a checkout."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        if shutil.which("git")
        else None
    )
    if listed is not None and listed.returncode == 0:
        return [
            path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()
        ]
    hidden = {path for path in ROOT.iterdir() if path.name.startswith(".")}
    return [path for path in ROOT.rglob("*") if path.is_file() and hidden.isdisjoint(path.parents)]


def read_names(text: str) -> frozenset[str]:
    """Read the first column of a list. Skips empty lines and lines that start with #."""
    return frozenset(
        line.split("\t")[0]
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    )


def main(arguments: list[str]) -> int:
    rules = read_rules(WORDS.read_text())
    parts = read_names(NAMES.read_text())
    by_kind: dict[tuple[str, str], list[str]] = {}
    has_failed = False
    for path in sorted(Path(name).resolve() for name in arguments) or sorted(tracked_files()):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, phrase, rule in sorted(hits(path, rules), key=lambda hit: hit[:2]):
            print(f"{shown}:{line}: {phrase!r}: write {rule.replacement} ({rule.why})")
            has_failed = True
        if path.suffix == ".py" and shown.parts[0] in LIMITS:
            source = path.read_text()
            for fault in (*faults(source, parts), *genitives(source)):
                by_kind.setdefault((shown.parts[0], fault.kind), []).append(
                    f"{shown}:{fault.line}: {fault.kind}: {fault.text}"
                )
    for (tree, kind), lines in by_kind.items():
        limit = LIMITS[tree].get(kind, 0)
        if len(lines) > limit:
            has_failed = True
            print(
                *lines,
                f"{tree}: {len(lines)} of kind {kind}, at most {limit} are allowed",
                sep="\n",
            )
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
