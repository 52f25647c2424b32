"""Damaged or forged exports and checkpoints, which are rejected in one line and run no code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import Saved, save_clicks
from builders.exports import changed, reseal
from builders.faults import flip, rejects

from rayrec import recipes
from rayrec.config import InputError
from rayrec.inference.export.write import export
from rayrec.inference.model import open_served


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.abort, ()  # type: ignore[return-value]


@pytest.fixture
def copied(exported: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported("int8"), tmp_path / "copied"))


def _refused(folder: Path, message: str = "") -> None:
    assert 10 <= len(rejects(message, open_served, str(folder))) <= 600


@pytest.mark.parametrize(
    "name", ["tables.safetensors", "dense.safetensors", "dense.pt2", "preprocessor/preprocessor.json", "README.md"]
)
def test_damaged_export_is_rejected(copied: Path, name: str) -> None:
    path = copied / name
    flip(path)
    _refused(copied, "damaged, checksum does not match")
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1]), path.unlink):
        damage()
        _refused(copied, "missing, or its size does not match")


def test_pickles_in_export_are_rejected(copied: Path, tmp_path: Path) -> None:
    (copied / "preprocessor" / "weights").write_bytes(pickle.dumps(_Trap()))
    _refused(copied, r"copied/preprocessor/weights: must not be a pickle, .*\. Remove it")
    saved = save_clicks(tmp_path / "run")
    (saved.checkpoint / "weights.pt").touch()
    with pytest.raises(InputError, match=r"weights\.pt: must not be a pickle"):  # of whatever kind the model is
        export(str(saved.run), str(tmp_path / "out"), config=recipes.mnist_resnet18())


def test_changed_manifest_is_rejected(copied: Path) -> None:
    path = copied / "manifest.json"
    path.write_text(path.read_text().replace('"int8"', '"int4"'))
    _refused(copied, "damaged, its checksum")
    path.write_text("{}")
    _refused(copied)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        *(("version", value, "") for value in (..., "1")),
        ("version", 99, "got 99"),
        *(("files", value, "") for value in (..., None)),
        *(("files>README.md>bytes", value, "") for value in (..., -1)),
        ("files>README.md>sha256", ..., ""),
        ("files>a", 5, ""),
        ("files>/etc/passwd", {"bytes": 1, "sha256": ""}, ""),
        ("files>../outside", {"bytes": 1, "sha256": ""}, "outside of the folder"),
        ("files>tables.safetensors", ..., r"tables\.safetensors not found in the manifest"),
        ("model", ..., "field model is invalid"),
        ("model", [], ""),
        ("model>quantization", "int2", "not the manifest of an export"),
        ("model>features", 7, "Preprocessor does not match"),
        ("model>num_embeddings", [10**9], "Preprocessor does not match"),
        ("model>more", 1, "Preprocessor does not match"),
        *(("model>model", value, "") for value in ([], 5, {"interaction": "cross", "cross_layers": 2**31})),
        ("model>model>no_field", 1, "not the manifest of an export"),
        ("model>model>top_mlp", [10**9, 1], "network does not match the"),
        *(("model>model>top_mlp", value, "") for value in ([2**63, 1], [2**62, 2**62, 1])),
        ("model>model>members", 2**31, ""),
    ],
)
def test_forged_manifest_is_rejected(copied: Path, place: str, value: Any, message: str) -> None:
    reseal(copied, changed(place, value))
    _refused(copied, message)


def _zipped_tokens(folder: Path) -> None:
    np.savez(folder / "preprocessor" / "tokens.npz", tokens=np.zeros(3, np.uint32))
    (folder / "preprocessor" / "tokens.npz").rename(folder / "preprocessor" / "tokens.npy")


def _bytes(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _in_place(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def _head_of_nothing(folder: Path) -> None:
    """Return a file of tensors beyond its end."""
    path = folder / "tables.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    for entry in table.values():
        entry["data_offsets"] = [place + 10**6 for place in entry["data_offsets"]]
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_zipped_tokens, ""),
        (_bytes("preprocessor/tokens.npy", b"\x93NUMPY"), ""),
        *((_bytes("preprocessor/preprocessor.json", data), "") for data in (b"[]", b"[" * 10**5)),
        (_bytes("preprocessor/preprocessor.json", b'{"version": 2, "profile": 1, "schema": []}'), ""),
        *((_bytes("tables.safetensors", data), "safetensors") for data in (b"\xff" * 8, b"", pickle.dumps(_Trap()))),
        *((_bytes("tables.safetensors", b"\x02\0\0\0\0\0\0\0" + data), "safetensors") for data in (b"[]", b"{}")),
        (_bytes("tables.safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5), "safetensors"),
        (_head_of_nothing, "outside of the file"),
        (_in_place("README.md", lambda path: path.symlink_to("/etc/hostname")), ""),
    ],
)
def test_forged_files_are_rejected(copied: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copied)
    reseal(copied)
    _refused(copied, message)


@pytest.mark.parametrize(
    "damage",
    [
        *(_in_place(name, lambda path: path.symlink_to("/dev/zero")) for name in ("preprocessor/tokens.npy", "manifest.json")),
        *(_in_place(name, os.mkfifo) for name in ("README.md", "manifest.json")),
        *(_bytes("manifest.json", data) for data in (b"[" * 10**5, b'{"format":' + b'{"a":' * 10**5, b"[1]", b"\xff\xfe")),
    ],
)
def test_foreign_files_are_rejected(copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied)
    _refused(copied)


def test_links_in_export_are_followed(copied: Path) -> None:
    """As in a mounted ConfigMap, or if the folder is a link."""
    (copied / "README.md").rename(copied / "data")
    (copied / "README.md").symlink_to("data")
    (copied.parent / "alias").symlink_to(copied)
    assert open_served(str(copied.parent / "alias")).kind == "export"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("../../summary.json", text) for text in ("{}", "[]", '{"chosen_step": "1"}', '{"chosen_step": -1}')),
        *(("../../summary.json", text) for text in ("[" * 10**5, '{"chosen_step": 9}')),
        *(("config.yaml", text) for text in ("[" * 10**5, "a: &a [1]\nworkload: 5\n", "workload: {model: []}", "\xff")),
    ],
)
def test_damaged_run_is_rejected(saved: Saved, tmp_path: Path, name: str, content: str) -> None:
    run = Path(shutil.copytree(saved.run, tmp_path / "run"))
    (run / saved.checkpoint.relative_to(saved.run) / name).write_text(content, encoding="latin-1")
    _refused(run)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((place, ...) for place in ("files", "score", "version", "tensors", "tensors>*>chunks>0>sha256")),
        *(("score", "high"), ("block_bytes", 0), ("tensors>*>dtype", "F8"), ("tensors>*>shape", [2**63])),
        *(("tensors>*>chunks", None), ("tensors>*>chunks>0>file", "../data")),
    ],
)
def test_forged_checkpoint_is_rejected(saved: Saved, tmp_path: Path, place: str, value: Any) -> None:
    folder = Path(shutil.copytree(saved.checkpoint, tmp_path / saved.checkpoint.name))
    reseal(folder, changed(place, value), files=False)
    _refused(folder)
