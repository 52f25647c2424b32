"""Additions to a copy of the package by edits of only the files in their rows in docs/extend.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Edit(NamedTuple):
    """Insertion of `text` into a file of the copy, after the pattern `after`, whose groups it may
    use. Without a pattern, it creates the file or extends it at its end.
    """

    file: str
    after: str
    text: str


MODEL = '''"""Logistic regression on the sum of all numbers."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class SumOfNumbersConfig(ClickModelConfig):
    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        return SumOfNumbers(inputs)


class SumOfNumbers(nn.Module):
    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.label = inputs.label
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self.label: self.scale * dense.sum(1) + embedded.stacked().sum((1, 2))}
'''
PLAN = """
    if format == "raw":
        ids = preprocessor.id_dtype.newbyteorder("<").str
        matrices = [
            Matrix("dense", f"{stem}_dense.raw", 0, "<f4", num_dense),
            Matrix("labels", f"{stem}_labels.raw", 0, "<i4", 1),
            Matrix("sparse", f"{stem}_sparse.raw", 0, ids, len(hotness)),
        ]
        return [FilePlan(each.file, rows * each.row_bytes, rows, (each,)) for each in matrices]
"""
FORMAT = '''"""Lines of a click and a user in one word, such as 1u7."""

from typing import ClassVar

import pyarrow as pa

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.row_faults import FAULT


class Pairs(LineFormat):
    name: ClassVar[str] = "pairs"

    def recognizes(self, start: bytes) -> bool:
        return start[1:2] == b"u"

    def parse(self, text, columns, lists):
        lines = text.decode().split()
        found = {"click": [line[0] for line in lines], "user": [line[1:] for line in lines]}
        kept = {name: found[name] for name in columns or found}
        return pa.table({**kept, FAULT: pa.array([0] * len(lines), pa.uint8())})
'''
METRIC = """
    Metric(
        name="brier",
        compute=lambda totals: totals.sums["brier"] / totals.rows,
        row_values=lambda rows: (rows.probabilities - rows.labels) ** 2,
        better="lower",
        has_interval=True,
    ),
"""
STORE = '''

@dataclass(frozen=True)
class R2Location(GcsLocation):
    """Location of an r2:// URL."""
'''
HANDLER = """
    async def _limits(self, request: Request) -> Response:
        return _response(orjson.dumps({"rows": self._config.max_rows}))

"""
DESCRIPTION = """
    "/v1/limits": {"get": {"summary": "Return limits.", "operationId": "limits", "responses": {}}},
"""
OPTION = '''    label_selector: dict[str, str] = field(default_factory=dict)
    """Labels of nodes for workers."""
'''
COMMAND = '''

@command("Watch", show=lambda greeting: Shown({"greeting": greeting}))
def greet(name: Annotated[str, Argument("name to greet", "NAME")]) -> str:
    """Greet a user."""
    return f"Hello {name}"
'''
EDITS: dict[str, list[Edit]] = {
    "click model": [Edit("models/ranking/sum_of_numbers.py", "", MODEL)],
    "format of files": [
        Edit("data/formats/pairs.py", "", FORMAT),
        Edit(
            "data/formats/registry.py",
            r"from rayrec\.data\.formats\.parquet import Parquet\n",
            "from rayrec.data.formats.pairs import Pairs\n",
        ),
        Edit("data/formats/registry.py", r"    SlotValue\(\),\n", "    Pairs(),\n"),
    ],
    "format of preprocessed data": [
        Edit("data/logs/index.py", r'WritableFormat = Literal\[.*"binary"', ', "raw"'),
        Edit("data/logs/index.py", r'MAPPED = \("binary",', ' "raw",'),
        Edit("data/materialized/formats.py", r"    hotness = preprocessor\.hotness\n", PLAN),
    ],
    "store": [
        Edit("storage/urls.py", r'    "gcs": (.*),\n', '    "r2": \\1,\n'),
        Edit("storage/stores.py", "", STORE),
        Edit(
            "storage/filesystems.py",
            r"from rayrec\.storage\.stores import (?=AzureLocation)",
            "R2Location, ",
        ),
        Edit(
            "storage/filesystems.py", r'    "gcs": GcsLocation(.*),\n', '    "r2": R2Location\\1,\n'
        ),
    ],
    "metric": [
        Edit(
            "metrics/registry.py", r"BINARY_METRICS: Final = \((?s:.*?)\n    \),\n(?=\)\n)", METRIC
        )
    ],
    "schedule": [
        Edit("optim/config.py", r'decay: Literal\["quadratic", "linear", "cosine"', ', "halved"'),
        Edit(
            "optim/config.py",
            r"        match self\.decay:\n",
            '            case "halved":\n                shape = 0.5\n',
        ),
    ],
    "endpoint": [
        Edit(
            "serve/app.py",
            r"            Route\(SCORE.*\n",
            '            Route("/v1/limits", self._limits),\n',
        ),
        Edit("serve/app.py", r"    # -- paths\n", HANDLER),
        Edit("serve/openapi.json", r'  "paths": \{\n', DESCRIPTION),
    ],
    "Ray option": [
        Edit(
            "workloads/run_config.py",
            r'    """Ray placement strategy for workers\."""\n',
            OPTION,
        ),
        Edit(
            "training/launchers/ray_launcher.py",
            r"        placement_strategy=scaling\.placement_strategy,\n",
            "        label_selector=scaling.label_selector,\n",
        ),
        Edit(
            "training/resume.py",
            r'    "scaling\.placement_strategy",\n',
            '    "scaling.label_selector",\n',
        ),
    ],
    "command": [
        Edit("commands/runs.py", "", COMMAND),
        Edit("__init__.py", r"    from rayrec\.commands\.runs import ", "greet, "),
        Edit("__init__.py", r'    "generate",\n', '    "greet",\n'),
    ],
}
EXPECTED: dict[str, Any] = {
    "click model": {"listed": True, "stored": True},
    "format of files": ["click", "user"],
    "format of preprocessed data": ["raw", True],
    "store": ["R2Location", "bucket/folder/file", "r2://bucket/file"],
    "metric": {
        **dict.fromkeys(("run", "evaluation", "interval", "report", "comparison"), True),
        "significance": ["difference", "high", "low", "method", "p_value"],
    },
    "schedule": 0.5,
    "endpoint": [{"rows": 8192}, True],
    "Ray option": {"zone": "a"},
    "command": [{"greeting": "Hello Ada"}, "Hello Ada"],
}


def rows_of_table() -> dict[str, list[str]]:
    """Return the files in each row of the table, below src/rayrec or the project's root."""
    page = (ROOT / "docs" / "extend.md").read_text()
    table = page.partition("## What to touch\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!to add |---)([^|]+) \| (.*) \|$", table, re.MULTILINE)
    return {name: re.findall(r"`([\w/]+\.\w+)`", files) for name, files in rows}


def apply(edit: Edit, package: Path) -> None:
    path = package / edit.file
    text = path.read_text() if path.exists() else ""
    if not edit.after:
        path.write_text(text + edit.text)
        return
    assert len(re.findall(edit.after, text)) == 1, edit
    path.write_text(re.sub(edit.after, lambda match: match[0] + match.expand(edit.text), text))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of tests/hosts/extended_package.py with all additions."""
    folder = tmp_path_factory.mktemp("extended")
    package = folder / "src" / "rayrec"
    shutil.copytree(ROOT / "src" / "rayrec", package, ignore=shutil.ignore_patterns("__pycache__"))
    for edits in EDITS.values():
        for edit in edits:
            apply(edit, package)
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hosts" / "extended_package.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", EDITS)
def test_row_names_all_edited_files(name: str) -> None:
    files = rows_of_table()[name]
    edited = {re.sub(r"(sum_of_numbers|pairs)(?=\.py$)", "NAME", edit.file) for edit in EDITS[name]}
    assert edited <= set(files)
    assert len(files) <= 3


def test_rows_name_existing_files() -> None:
    assert rows_of_table().keys() == EDITS.keys()
    files = {file for row in rows_of_table().values() for file in row if "NAME" not in file}
    assert [
        file
        for file in sorted(files)
        if not any((folder / file).exists() for folder in (ROOT, ROOT / "src" / "rayrec"))
    ] == []


@pytest.mark.extended
@pytest.mark.parametrize("name", EDITS)
def test_addition_works_in_copy(name: str, results: dict[str, Any]) -> None:
    assert results[name] == EXPECTED[name]
