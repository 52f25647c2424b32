"""The tests that docs/five-systems.md cites assert what its rows claim: their sources have the
words of the rows.

five_systems.yaml lists these words: names of the settings, functions and values without which a row
cannot be shown. They are looked up in the cited tests, and in the constants, fixtures and helpers
of their modules that they name.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from builders.scripts import ROOT

PAGE = ROOT / "docs" / "five-systems.md"
WORDS = yaml.safe_load(Path(__file__).with_name("five_systems.yaml").read_text())


def _rows() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the section, the name and the cited tests of each row with tests."""
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = re.fullmatch(r"\| (.+) \| (.+) \| (.+) \|", line)
        tests = re.findall(r"`(test_\w+)`", cells[3]) if cells else []
        if cells and tests:
            yield section, cells[1], tests


@functools.cache
def _modules() -> list[dict[str, tuple[ast.stmt, str]]]:
    """Return the top-level definitions of each test module, and their sources, by name."""
    return [_definitions(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def _definitions(path: Path) -> dict[str, tuple[ast.stmt, str]]:
    text = path.read_text()
    lines = text.splitlines()
    definitions: dict[str, tuple[ast.stmt, str]] = {}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = (node, source)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            ]
            definitions |= dict.fromkeys(names, (node, source))
    return definitions


def _sources(test: str) -> list[tuple[str, str]]:
    """Return the source of each test with this name, and the sources of module names in it."""
    sources = []
    for module in _modules():
        if test not in module:
            continue
        node, source = module[test]
        assert isinstance(node, ast.FunctionDef)
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        names |= {argument.arg for argument in node.args.args}
        used = [module[name][1] for name in sorted(names & module.keys() - {test})]
        sources.append((source, "\n".join(used)))
    assert sources, test
    return sources


def lacking(section: str, row: str, tests: list[str]) -> list[str]:
    """Return the words of a row that its tests do not have, and the tests that may be skipped for a
    missing package or file.
    """
    sources = [source for test in tests for source in _sources(test)]
    text = "\n".join(part for source in sources for part in source)
    missing = [word for word in WORDS[section][row] if word not in text]
    return missing + [
        source
        for source, _ in sources
        if re.search(r"pytest\.(skip|importorskip)\(|mark\.skipif", source)
    ]


def test_cited_tests_contain_row_words() -> None:
    rows = list(_rows())
    assert len(rows) > 140
    assert {(section, row) for section, row, _ in rows} == {
        (section, row) for section in WORDS for row in WORDS[section]
    }
    assert [
        (section, row, lacking(section, row, tests))
        for section, row, tests in rows
        if lacking(section, row, tests)
    ] == []


def test_each_row_has_words() -> None:
    rows = [words for section in WORDS.values() for words in section.values()]
    assert all(rows)
    assert all(isinstance(word, str) and len(word) > 1 for words in rows for word in words)


@pytest.mark.parametrize(
    ("section", "row", "test"),
    [
        ("Ray's DLRM notebook", "the template's settings", "test_published_recipes_match_settings"),
        (
            "Ray's DLRM notebook",
            "MLPs, embedding 128, dcn, original",
            "test_published_recipes_match_settings",
        ),
        (
            "Ray's DLRM notebook",
            "value counts to mapping tables",
            "test_preset_roundtrip_keeps_constants",
        ),
        ("Ray's DLRM notebook", "batch sizes, 4096 and 8192", "test_batch_size_follows_policy"),
        ("Ray's DLRM notebook", "`max_failures=2`", "test_run_survives_repeated_faults"),
        ("e2eAIOK", "dictionary of all rows", "test_mlperf_v1_applies_token_modulo"),
        ("torchrec_dlrm", "`dlrm_main.py`'s flags", "test_torchx_line_of_torchrec_dlrm"),
        ("torchrec_dlrm", "CUDA, NCCL, EFA", "test_aws_accepts_machines_and_efa_has_every_card"),
        (
            "Ray's DDP tutorial",
            "rank, world size, name",
            "test_custom_optimizer_and_schedule_are_used",
        ),
        ("Spot instances, GPT-2", "`max_failures=-1`", "test_run_survives_repeated_faults"),
        ("Spot instances, GPT-2", "wait for workers", "test_busy_cluster_is_waited_for"),
        ("Spot instances, GPT-2", "Kubernetes", "test_manifests_match_kuberay_schema"),
    ],
)
def test_unrelated_citation_lacks_words(section: str, row: str, test: str) -> None:
    assert lacking(section, row, [test])
