"""Check of words, docstrings and names (tools/prose.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.faults import fails_with
from builders.scripts import script

prose = script("tools", "prose")
RULES = "old word\tword\tclearer\nquux(es)?\tthing\tits name\n"


def found(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text)
    return sorted((line, phrase) for line, phrase, _ in prose.hits(path, prose.read_rules(RULES)))


def test_comments_texts_and_notebook_cells_match(tmp_path: Path) -> None:
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
    assert found(tmp_path / "module.py", text) == [
        (3, "old word"),
        (4, "Quux"),
        (5, "old word"),
        (8, "old word"),
    ]
    assert found(tmp_path / "kernel.c", "/* An old\n * word. */\nint quux_count;\n") == [
        (1, "old word")
    ]
    cells = {"cells": [{"cell_type": "markdown", "source": ["Fine.\n", "An old word."]}]}
    assert found(tmp_path / "notebook.ipynb", json.dumps(cells)) == [(2, "old word")]
    assert found(tmp_path / "data.jsonl", "old word\n") == []  # data


@pytest.mark.parametrize("name", ["page.md", "Makefile", "values.yaml"])
def test_all_text_of_other_files_matches(tmp_path: Path, name: str) -> None:
    assert found(tmp_path / name, "One\nold\nword, two quuxes.\n") == [
        (2, "old word"),
        (3, "quuxes"),
    ]


@pytest.mark.parametrize(
    "line", ["only a pattern", "pattern\treplacement", "pattern\t\twhy", "(\tword\twhy"]
)
def test_read_rules_rejects_invalid_line(line: str) -> None:
    fails_with(ValueError, "line 2 of the list", prose.read_rules, f"# comment\n{line}\n")


def test_main_prints_each_hit_and_fails_above_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rules = tmp_path / "words.tsv"
    page = tmp_path / "page.md"
    rules.write_text(RULES)
    page.write_text("The quux.\n")
    monkeypatch.setattr(prose, "WORDS", rules)
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:1: 'quux': write thing (its name)\n"
    page.write_text("The thing.\n")
    assert prose.main([str(page)]) == 0
    (tmp_path / "src").mkdir()
    module = tmp_path / "src" / "module.py"
    module.write_text('"""Of rows."""\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "LIMITS", {"src": {"opening": 1}})
    assert prose.main([str(module)]) == 0
    monkeypatch.setattr(prose, "LIMITS", {"src": {"opening": 0}})
    assert prose.main([str(module)]) == 1
    assert capsys.readouterr().out.startswith(
        "src/module.py:1: opening: Of rows.\nsrc: 1 of kind opening, at most 0 are allowed"
    )


@pytest.mark.parametrize(
    ("kind", "source"),
    {
        "opening": '"""Of embeddings and attention alike."""',
        "opening of help": 'size: int\n"""in bytes."""',
        "long": f'"""Word {"word " * 30}."""',
        "clauses": '"""The row that has what the table which is read needs."""',
        "of": "# The size of a row of the table of a model.\nx = 1",
        "name": "found = 1",
        "name of a class": "class Seat: ...",
        "test": "def test_the_rows_match(): ...",
        "test of many letters": f"def test_{'rows_' * 12}match(): ...",
    }.items(),
)
def test_faults_include(kind: str, source: str) -> None:
    assert [fault.kind for fault in prose.faults(source, frozenset({"found", "seat"}))] == [
        kind.partition(" of ")[0]
    ]


def test_faults_allow_plain_prose() -> None:
    source = '''"""Reader of rows."""
size: int
"""Whether to read all rows."""
def read(rows: int) -> int:
    """Return the rows that match, of all `found` ones."""
def test_read_returns_rows() -> None: ...
'''
    assert list(prose.faults(source, frozenset({"found"}))) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        pytest.param("of_rows = _of_size = of = 1", ["of_rows", "_of_size", "of"], id="no-noun"),
        pytest.param("rows_of = offset = office_of_x = 1", [], id="noun"),
    ],
)
def test_genitives_have_no_noun(source: str, names: list[str]) -> None:
    assert [fault.text for fault in prose.genitives(source)] == names
