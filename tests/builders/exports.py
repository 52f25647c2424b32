"""Exports of small click models, forged manifests, and scoring without rayrec."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from builders.click_models import Saved
from builders.golden_inputs import criteo_lines
from builders.logs import unlabelled

from rayrec.checkpoint.format import compute_sha256, seal
from rayrec.inference.config import ExportConfig
from rayrec.inference.export.write import LOADER, export

ROWS = 600


def write_criteo_rows(path: Path, rows: int, *, labelled: bool = True) -> str:
    """Write random rows of Criteo's columns."""
    lines = criteo_lines(rows, seed=0)
    path.write_bytes(b"".join(lines) if labelled else unlabelled(lines))
    return str(path)


def export_of(saved: Saved, out: Path, **settings: Any) -> dict[str, Any]:
    """Export a saved model, compared on the rows of `write_criteo_rows`. Returns the report."""
    options = ExportConfig(parity_rows=ROWS).replace(**settings)
    return export(str(saved.run), str(out), config=saved.config, settings=options)


def scored_by_strangers(out: Path) -> Callable[..., np.ndarray]:
    """Return the function `score` in the README of an export, which needs no rayrec."""
    assert LOADER in (out / "README.md").read_text()
    names: dict[str, Any] = {}
    exec(LOADER.replace('"."', repr(str(out))), names)
    return names["score"]  # type: ignore[no-any-return]


def changed(place: str, value: Any = ...) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets, or removes, a manifest field such as files>README.md>bytes. * is
    the first key.
    """

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        *above, last = place.split(">")
        for name in above:
            if name == "*":
                name = next(iter(node))
            node = node[int(name) if isinstance(node, list) else name]
        if value is ...:
            del node[last]
        else:
            node[last] = value

    return change


def reseal(
    folder: Path,
    change: Callable[[dict[str, Any]], None] = lambda manifest: None,
    *,
    files: bool = True,
) -> None:
    """Change a manifest like an attacker, with valid checksums, also of an export's files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, file in manifest["files"].items() if files else ():
        file.update(bytes=(folder / name).stat().st_size, sha256=compute_sha256(str(folder / name)))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))
