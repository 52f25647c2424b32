"""Size, density and shape of Python code, and the places that are hard to read.

    python tools/house.py src/rayrec            # the counts of a folder
    python tools/house.py src/rayrec parallel   # and the places of one kind

Size is counted in statements and tokens, which line breaks do not change. Density is tokens per
line. The kinds of places are those of `KINDS`.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_COLUMNS = 100
MAX_COMPLEXITY = 15
MAX_LINES = 60
MAX_PARAMETERS = 8
"""Limit of a function, without self and cls."""
MAX_FILES = 15
"""Limit of a folder, without its __init__.py."""
KINDS = {
    "wide": "lines of more than 100 columns",
    "parallel": "assignments of several values that do not depend on each other",
    "nested": "conditional expressions inside one another",
    "complex": "functions with a cyclomatic complexity over 15",
    "long": "functions of more than 60 lines",
    "parameters": "functions with more than 8 parameters",
    "ignores": "type errors that are ignored",
    "crowded": "folders with more than 15 files",
}
_COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.comprehension,
    ast.match_case,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def num_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def num_tokens(source: str) -> int:
    """Return the number of names, numbers, strings and operators."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in _COUNTED for token in tokens)


def hard_lines(source: str) -> Iterator[tuple[str, int]]:
    """Yield the kind and line number of each place in a file that is hard to read."""
    for number, line in enumerate(source.splitlines(), start=1):
        if len(line) > MAX_COLUMNS:
            yield "wide", number
        if "# type: ignore" in line:
            yield "ignores", number
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _is_parallel(node):
            yield "parallel", node.lineno
        elif isinstance(node, ast.IfExp) and _is_nested(node):
            yield "nested", node.lineno
        elif isinstance(node, _FUNCTIONS):
            yield from ((kind, node.lineno) for kind in _function_kinds(node))


def _is_parallel(node: ast.Assign) -> bool:
    """Return whether an assignment has several values that do not depend on each other. Values
    that use a target, as in a swap, need one statement.
    """
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    if len(node.targets) > 1 or len(target.elts) != len(node.value.elts):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    used = {
        ast.unparse(part)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Name | ast.Attribute)
    }
    return not assigned & used


def _is_nested(node: ast.IfExp) -> bool:
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def _function_kinds(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if complexity(node) > MAX_COMPLEXITY:
        yield "complex"
    if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_LINES:
        yield "long"
    arguments = node.args
    named = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if len(named - {"self", "cls"}) > MAX_PARAMETERS:
        yield "parameters"


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function, without the functions inside it."""
    count = 1
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        count += isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        pending += ast.iter_child_nodes(node)
    return count


def measure(folder: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the size and density of the code below a folder, and the places of each kind."""
    paths = sorted(folder.rglob("*.py"))
    sources = {path: path.read_text() for path in paths}
    num_lines = sum(len(source.splitlines()) for source in sources.values())
    tokens = sum(map(num_tokens, sources.values()))
    size = {
        "files": len(paths),
        "lines": num_lines,
        "statements": sum(num_statements(ast.parse(source)) for source in sources.values()),
        "tokens": tokens,
        "density": round(tokens / max(1, num_lines), 2),
    }
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path, source in sources.items():
        for kind, line in hard_lines(source):
            by_kind[kind].append(f"{path}:{line}")
    folders = Counter(path.parent for path in paths if path.name != "__init__.py")
    by_kind["crowded"] = [
        f"{folder} {files}" for folder, files in folders.items() if files > MAX_FILES
    ]
    return size, by_kind


def main(folder: str, kind: str | None = None) -> None:
    size, by_kind = measure(Path(folder))
    for name, value in size.items():
        print(f"{name:12} {value:,}")
    for name, counted in by_kind.items():
        print(f"{name:12} {len(counted):,}   {KINDS[name]}")
    if kind is not None:
        print(*by_kind[kind], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
