#!/usr/bin/env python3
"""Write the package's folders, files and layers into the documentation.

usage: layout.py [--check]

Replaces the text between two marks of a page. CONTRIBUTING.md has `layout` (folders with the first
sentence of their docstrings and their files, and the other files with theirs), docs/architecture.md
has `layers` (from .importlinter). `--check` writes nothing and exits with status 1 if a text
differs. Standard library only.
"""

import ast
import configparser
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rayrec"
INDENT = 24
WIDTH = 130


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring in one line, without a period at its
    end.
    """
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[\w`)])[.](?= |$)", text)[0]


def entry(name: str, text: str, depth: int) -> Iterator[str]:
    """Yield the lines of one file or folder."""
    head = "  " * depth + name
    first = head.ljust(INDENT - 1) + " "
    rest = " " * INDENT
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def folder(path: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a folder, its files and the folders in it."""
    yield from entry(f"{path.name}/", sentence(path / "__init__.py"), depth)
    names = sorted(file.stem for file in path.glob("*.py") if file.stem != "__init__")
    yield from textwrap.wrap(
        ", ".join(names),
        WIDTH,
        initial_indent=" " * (INDENT + 2),
        subsequent_indent=" " * (INDENT + 2),
    )
    for inner in sorted(file.parent for file in path.glob("*/__init__.py")):
        yield from folder(inner, depth + 1)


def layout() -> str:
    """Return the tree of the package."""
    lines = ["src/rayrec/"]
    for path in sorted(PACKAGE.glob("*.py")):
        lines += entry(path.name, sentence(path), 1)
    for path in sorted(file.parent for file in PACKAGE.glob("*/__init__.py")):
        lines += folder(path, 1)
    return "\n".join(line.rstrip() for line in lines)


def layers() -> str:
    """Return the layers that imports follow, from the top."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser["importlinter:contract:layers"]["layers"].strip()


def fill_page(path: Path, texts: dict[str, str]) -> str:
    """Return a page with the blocks of the given marks replaced."""
    page = path.read_text()
    for mark, text in texts.items():
        pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        page, count = pattern.subn(
            lambda match, text=text: f"{match[1]}\n```text\n{text}\n```\n\n{match[2]}", page
        )
        if count != 1:
            raise SystemExit(
                f"{path.relative_to(ROOT)}: needs one block <!-- {mark} -->, has {count}"
            )
    return page


def main(arguments: list[str]) -> int:
    """Write or check both pages."""
    pages = {
        ROOT / "docs" / "architecture.md": {"layers": layers()},
        ROOT / "CONTRIBUTING.md": {"layout": layout()},
    }
    stale = []
    for path, texts in pages.items():
        text = fill_page(path, texts)
        if text != path.read_text():
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(text)
    if "--check" in arguments and stale:
        print(
            f"{', '.join(stale)}: not as the code is; run python tools/layout.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
