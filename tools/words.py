"""Checks the project's prose against a list of words: `python tools/words.py [FILE...]`, by default every file of the tree.

Prose is all text of Markdown, YAML, shell, C and make files, the cells of notebooks, and the comments and string literals of
Python files (docstrings, help texts, messages), never identifiers. Each line of `words.tsv` has a pattern, its replacement, and
why. Prints one line for each hit; the exit status is 1 if there is one.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_name("words.tsv")
TEXT = {".md", ".c", ".h", ".yaml", ".yml", ".toml", ".sh", ".j2", ".html"}
TEXT_NAMES = {"Makefile", "Dockerfile"}
SPACE = r"(?:\s*\n\s*(?:#|//|\*)\s*|\s+)"
"""White space, or the end of a line of a comment with the mark that begins the next one."""


LOOSE_SPACE = r"(?:[\W_]|\\n)+(?:[rfbu]{1,2}\W+)?"
"""What may take the place of a space in the source of a file, such as the end of a string literal and the start of the next."""


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    in_source: re.Pattern[str]
    """Matches in the source of every file whose prose `pattern` matches; tells files apart that need not be parsed."""
    replacement: str
    why: str


class Prose(NamedTuple):
    line: int
    """The first line, counted from 1."""
    text: str


def read_rules(text: str) -> list[Rule]:
    """Rules of a list: `pattern<tab>replacement<tab>why` on each line; empty lines and lines that begin with # are skipped.

    A pattern is a regular expression that matches whole words of either case. A space in it also matches the end of a line.
    Raises ValueError for a line that is no rule.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 3 or not all(field.strip() for field in fields):
            raise ValueError(f"line {number} of the list is not pattern<tab>replacement<tab>why: {line!r}")
        pattern, replacement, why = (field.strip() for field in fields)
        try:
            compiled = re.compile(rf"(?<!\w)(?:{pattern.replace(' ', SPACE)})(?!\w)", re.IGNORECASE)
            in_source = re.compile(pattern.replace(" ", LOOSE_SPACE), re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"line {number} of the list: {error}: {pattern!r}") from None
        rules.append(Rule(compiled, in_source, replacement, why))
    return rules


def prose_of_python(source: str) -> Iterator[Prose]:
    """Comments, those of adjacent lines as one text, and string literals, with `{}` for what an f-string inserts."""
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
    yield from _strings(ast.parse(source))


def _strings(node: ast.AST) -> Iterator[Prose]:
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield Prose(node.lineno, "".join(parts))
        inserted: Iterable[ast.AST] = (part for part in node.values if not isinstance(part, ast.Constant))
    else:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Prose(node.lineno, node.value)
        inserted = ast.iter_child_nodes(node)
    for child in inserted:
        yield from _strings(child)


def prose_of_notebook(source: str) -> Iterator[Prose]:
    """Each cell; a line is counted from the start of its cell, as notebooks show it."""
    for cell in json.loads(source)["cells"]:
        yield Prose(1, "".join(cell["source"]))


def hits(path: Path, rules: Iterable[Rule]) -> Iterator[tuple[int, str, Rule]]:
    """Line, phrase and rule of each hit in the prose of a file; nothing if files of this kind have none."""
    if path.suffix not in {".py", ".ipynb"} | TEXT and path.name not in TEXT_NAMES:
        return
    source = path.read_text()
    candidates = [rule for rule in rules if rule.in_source.search(source)]
    if not candidates:
        return
    kinds = {".py": prose_of_python, ".ipynb": prose_of_notebook}
    for line, text in kinds[path.suffix](source) if path.suffix in kinds else [Prose(1, source)]:
        for rule in candidates:
            for match in rule.pattern.finditer(text):
                yield line + text.count("\n", 0, match.start()), re.sub(SPACE, " ", match[0]), rule


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; all files if this is no checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    hidden = {path for path in ROOT.iterdir() if path.name.startswith(".")}
    return [path for path in ROOT.rglob("*") if path.is_file() and hidden.isdisjoint(path.parents)]


def main(arguments: list[str]) -> int:
    rules = read_rules(WORDS.read_text())
    found = 0
    for path in sorted(Path(name).resolve() for name in arguments) or sorted(tracked_files()):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, phrase, rule in sorted(hits(path, rules), key=lambda hit: hit[:2]):
            print(f"{shown}:{line}: {phrase!r}: write {rule.replacement} ({rule.why})")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
