"""Words in back quotes, in docstrings and documentation, are names that exist."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rayrec"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
QUOTED = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*\w)(?:\(\))?`")
WORD = re.compile(r"[A-Za-z_]\w*")
FOREIGN = {
    "yaml",
    "Dataset",
    "named_parameters",
    "autoscaling",
    "t10k",
    "DataContext",
    "execution_options",
    "preserve_order",
    "init_process_group",
    "distributed",
    "LRPolicyScheduler",
    "TorchTrainer",
    "manual_seed",
    "torchvision",
    "resnet18",
    "init",
    "dims",
    "dynamic_batching",
    "apply_optimizer_in_backward",
    "load_state_dict",
    "_fields_",
    "gomp_throttled_spin_count_var",
    "to_numpy",
    "npy_preproc_criteo",
    "scheduler",
    "pt",
    "contiguous_preproc_criteo",
    "shuffle_preproc_criteo",
    "materialize_synthetic_multihot_dataset",
    "weights_only",
    "rayrec_kernel",
}
"""Names of other projects that docstrings quote."""
PATTERN = re.compile(
    r"(^|\.)([A-Z]|[A-Z_]+(?=\.)|(?<=\.)[A-Z]+|\w*[a-z]_([A-Z]+|s)?|[A-Z]_\w+)(\.|$)"
)
"""Part of a pattern such as ndcg_at_K, optimizer.PARAMETER.STATE, L.auroc, id_s, or a prefix."""


def quoted_names(text: str) -> Iterator[str]:
    """Yield names in back quotes, without patterns."""
    for name in QUOTED.findall(text):
        if not PATTERN.search(name):
            yield name


def split_words(tree: ast.AST) -> set[str]:
    """Return all identifiers in code, and words of short texts without blanks, such as keys."""
    words: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                words.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                words.add(name)
            case ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                words.add(name)
            case ast.alias(name=name):
                words.update(name.split("."))
            case ast.Constant(value=str(text)) if len(text) < 60 and not re.search(r"\s", text):
                words.update(WORD.findall(text))
    return words


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield names that other modules may quote: functions, classes and their fields, attributes,
    constants and keys. Parameters belong to their module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name, body=body):
                yield name
                for each in body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        yield each.target.id
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.Dict(keys=keys):
                yield from (str(each.value) for each in keys if isinstance(each, ast.Constant))
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                yield key
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            yield from split_words(statement)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def defined_names() -> frozenset[str]:
    """Return names that any docstring may quote."""
    defined = {*dir(builtins), "rayrec", "src", *FOREIGN}
    for path, tree in trees().items():
        defined.update(definitions(tree))
        defined.update(path.relative_to(SOURCE).with_suffix("").parts)
    return frozenset(defined)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts of docstrings, those of fields and constants included."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize("path", trees(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_docstrings_quote_existing_names(path: Path) -> None:
    tree = trees()[path]
    defined = defined_names() | split_words(tree)
    assert [
        f"{line}: {name}"
        for line, text in docstrings(tree)
        for name in quoted_names(text)
        if not defined.issuperset(name.split("."))
    ] == []


# -- documentation
PROJECT = ("src", "tests", "deploy", "examples", "benchmarks", "tools", "packaging")
TEXT = {".py", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".json", ".ipynb", ".service", ".timer"}
FOREIGN_IN_PAGES = {
    "RAY_worker_oom_score_adjustment",
    "CLOUD",
    "IterableDataset",
    "LD_PRELOAD",
    "PIP_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "Secret",
    "StratifiedKFold",
    "UV_EXTRA_INDEX_URL",
    "aws.remote_identity",
    "breakpoint",
    "embedding_regularizer",
    "https_proxy",
    "num_experts",
    "on_failure_callback",
    "p4d.24xlarge",
    "rule_files",
    "score_bought",
    "logit_bought",
    "streaming_split",
    "torch._inductor.aoti_compile_and_package",
    "wget",
}
"""Names of other projects, and of columns after a label, that the documentation quotes."""


@cache
def project_words() -> frozenset[str]:
    """Return the words of the project's files, without its documentation and results."""
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "deploy" / "Dockerfile"]
    for folder in PROJECT:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    words: set[str] = set()
    for path in files:
        words.update(WORD.findall(path.read_text()))
        words.update(WORD.findall(path.name))
    return frozenset(words)


# The pages for users of another project quote that project's names.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith("from-")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_pages_quote_existing_names(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"```.*?```", text, flags=re.DOTALL)
    defined = project_words() | set(WORD.findall("\n".join(blocks)))
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [
        name
        for name in quoted_names(prose)
        if name not in FOREIGN_IN_PAGES and not defined.issuperset(name.split("."))
    ] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("`run_kernel` of `a.b()`", ["run_kernel", "a.b"], id="names"),
        pytest.param("`ndcg_at_K`, `L.auroc`, `id_s`, `ray_`", [], id="patterns"),
        pytest.param("``code`` and `two words`", [], id="not-names"),
    ],
)
def test_back_quotes_contain_names(text: str, names: list[str]) -> None:
    assert list(quoted_names(text)) == names


def test_old_parameter_name_is_unknown() -> None:
    tree = ast.parse('def f(max_ticks):\n    """Return at most `most`."""\n')
    (quoted,) = (name for _, text in docstrings(tree) for name in quoted_names(text))
    assert quoted not in defined_names() | split_words(tree)
