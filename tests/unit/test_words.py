"""The check of words reads prose, and prose only, in files of each kind."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "words.py"
RULES = "old word\tword\tclearer\nquux(es)?\tthing\tits name\n"


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(words: ModuleType, path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text)
    return sorted((line, phrase) for line, phrase, _ in words.hits(path, words.read_rules(RULES)))


def test_comments_and_strings_of_python_are_prose_and_names_are_not(words: ModuleType, tmp_path: Path) -> None:
    text = '''"""Module.

An old word."""
quux = 1  # Quux
# A comment that wraps: the old
# word.
message = (
    f"an {quux} old "
    "word"
)
quuxes_seen = message
'''
    assert found(words, tmp_path / "module.py", text) == [(3, "old word"), (4, "Quux"), (5, "old word"), (8, "old word")]


@pytest.mark.parametrize("name", ["page.md", "Makefile", "values.yaml"])
def test_all_text_of_other_kinds_is_prose(words: ModuleType, tmp_path: Path, name: str) -> None:
    assert found(words, tmp_path / name, "One\nold\nword, two quuxes.\n") == [(2, "old word"), (3, "quuxes")]


def test_comments_of_c_wrap(words: ModuleType, tmp_path: Path) -> None:
    assert found(words, tmp_path / "kernel.c", "/* An old\n * word. */\nint quux_count;\n") == [(1, "old word")]


def test_cells_of_notebooks_are_prose_and_data_files_are_not(words: ModuleType, tmp_path: Path) -> None:
    cells = {"cells": [{"cell_type": "markdown", "source": ["Fine.\n", "An old word."]}]}
    assert found(words, tmp_path / "notebook.ipynb", json.dumps(cells)) == [(2, "old word")]
    assert found(words, tmp_path / "data.jsonl", "old word\n") == []


@pytest.mark.parametrize("line", ["only a pattern", "pattern\treplacement", "pattern\t\twhy", "(\tword\twhy"])
def test_a_line_that_is_no_rule_is_refused(words: ModuleType, line: str) -> None:
    with pytest.raises(ValueError, match="line 2 of the list"):
        words.read_rules(f"# comment\n{line}\n")


def test_a_hit_is_one_line_and_fails(
    words: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, page = tmp_path / "words.tsv", tmp_path / "page.md"
    rules.write_text(RULES)
    page.write_text("The quux.\n")
    monkeypatch.setattr(words, "WORDS", rules)
    assert words.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:1: 'quux': write thing (its name)\n"
    page.write_text("The thing.\n")
    assert words.main([str(page)]) == 0
