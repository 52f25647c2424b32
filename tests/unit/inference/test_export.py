"""An exported click model: it scores as its checkpoint does, or is not written; and it runs nothing that lies in its folder."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import SMALL, Saved, bucketed_preprocessor, lists_preprocessor, save_clicks

import rayrec
from rayrec import cli, models, recipes
from rayrec.checkpoint.format import seal
from rayrec.config import InputError
from rayrec.data.encoded import Bags
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.index import Part, Segment
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawList
from rayrec.inference.config import ExportConfig
from rayrec.inference.export.manifest import read_manifest
from rayrec.inference.export.parity import ParityRows, compare, compare_encoder, spread
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.inference.export.readme import FROM_RAW, LOADER
from rayrec.inference.export.write import encoder_program, export
from rayrec.inference.model import open_served
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import Quantization
from rayrec.schema import Feature, Schema
from rayrec.serve.requests import Body, RequestError
from rayrec.serve.row_readers import make_reader

ROWS = 600


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("run")
    return save_clicks(folder, scale=3.0, train_data={"path": _log(folder / "log.tsv", ROWS)})


def _log(path: Path, rows: int, *, labelled: bool = True) -> str:
    rng, lines = np.random.default_rng(0), []
    for row in range(rows):
        columns = [str(row % 3 // 2)] if labelled else []
        columns += [str(value) for value in rng.integers(0, 50, 13)]
        columns += [f"{token:08x}" for token in rng.integers(0, 1 << 32, 26)]
        lines.append("\t".join(columns))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _export(saved: Saved, out: Path, **settings: Any) -> dict[str, Any]:
    return export(
        str(saved.run), str(out), config=saved.config, settings=ExportConfig(parity_rows=ROWS).replace(**settings)
    )


@pytest.fixture(scope="module")
def exports(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind of tables."""
    folder = tmp_path_factory.mktemp("exports")
    for quantize in (None, "fp16", "int8", "int4"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)
            patch.setenv("RAYREC_CACHE", str(folder / "cache"))
            _export(saved, folder / (quantize or "fp32"), quantize=quantize, max_auroc_loss=0.05)
    return {name: folder / name for name in ("fp32", "fp16", "int8", "int4")}


@pytest.mark.parametrize(("quantization", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3), ("int8", 0.03), ("int4", 0.5)])
def test_scores_are_the_checkpoints(
    saved: Saved, exports: dict[str, Path], quantization: Quantization, tolerance: float
) -> None:
    served, checkpoint = open_served(str(exports[quantization])), open_served(str(saved.run))
    assert (served.kind, served.quantization) == ("export", quantization)
    assert served.version == checkpoint.version.removesuffix("fp32") + quantization
    assert served.preprocessor_hash == checkpoint.preprocessor_hash
    rows = saved.rows(300)
    logits, expected = served.score(rows), saved.logits(rows)
    assert np.abs(logits - expected).max() <= tolerance
    assert quantization == "fp32" or (logits != expected).any()
    assert np.std(expected) > 10 * np.abs(logits - expected).mean()
    width = {"fp32": 32, "fp16": 16, "int8": 16, "int4": 8}[quantization]  # bytes of 8 values
    dense = sum(p.nbytes for name, p in saved.model.named_parameters() if "embedding_bags" not in name)
    assert served.weight_bytes == width * sum(saved.preprocessor.num_embeddings) + dense


@pytest.mark.parametrize("quantization", ["fp32", "fp16", "int8", "int4"])
def test_the_loader_for_strangers_gives_the_same(
    saved: Saved, exports: dict[str, Path], quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exports[quantization]
    assert LOADER in (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(LOADER, names)
    for count in (100, 1):
        rows = saved.rows(count)
        logits = open_served(str(folder)).score(rows)
        np.testing.assert_allclose(names["score"](rows.dense, list(rows.ids)), logits, rtol=0, atol=2e-5)


class _NoRayrec(MetaPathFinder):
    """Before all other finders, it hides the package."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == "rayrec":
            raise ModuleNotFoundError(name)


def test_raw_rows_are_scored_without_rayrec(
    saved: Saved, exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the README's own program, while Python finds no rayrec."""
    folder = shutil.copytree(exports["fp32"], tmp_path / "moved")
    assert saved.config.train_data.path is not None
    lines = Path(saved.config.train_data.path).read_text().splitlines()[:50]
    assert FROM_RAW in (folder / "README.md").read_text()
    rows = "rows = encoder.parse(open('lines.tsv').read().splitlines())"
    program = f"{LOADER}{FROM_RAW}".replace("rows = [{}, {}]", rows).replace("print(", "result = (")
    (folder / "lines.tsv").write_text("\n".join(lines))
    result: dict[str, Any] = {}
    with monkeypatch.context() as hidden:
        hidden.chdir(folder)
        hidden.setattr(sys, "path", [*sys.path])
        hidden.setattr(sys, "meta_path", [_NoRayrec(), *sys.meta_path])
        for name in [name for name in sys.modules if name.partition(".")[0] in ("rayrec", "encode")]:
            hidden.delitem(sys.modules, name)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("rayrec")
        exec(program, result)
        encode = Path(sys.modules["encode"].__file__ or "")
        assert encode.resolve().parent == folder.resolve()  # it is the export's
        assert not any(name.partition(".")[0] == "rayrec" for name in sys.modules)
        hidden.delitem(sys.modules, "encode")
    served = open_served(str(exports["fp32"]))
    raw, faults = parse(served.preprocessor.schema, "".join(f"{line}\n" for line in lines).encode())
    assert not faults.total
    expected = served.score(served.preprocessor.encode(raw))
    assert np.std(expected) > 0
    np.testing.assert_allclose(result["result"], expected, rtol=0, atol=1e-5)


def test_the_report_says_what_it_is_worth(saved: Saved, exports: dict[str, Path]) -> None:
    report = json.loads((exports["int8"] / "report.json").read_text())
    assert report["parity"]["rows"] == ROWS
    assert report["parity"]["origin"] == f"rows of {saved.config.train_data.path}"
    assert report["parity"]["failure"] is None
    assert 0 < report["parity"]["max_logit_difference"] < 0.05
    assert 0 < report["parity"]["auroc_checkpoint"] < 1
    assert 0 < report["size"]["ratio"] < 1
    assert report["speed"]["rows_per_s"] > 0
    report = json.loads((exports["fp32"] / "report.json").read_text())
    assert report["parity"]["max_logit_difference"] < 1e-6
    assert report["program_parity"]["max_logit_difference"] <= 1e-5


def test_the_manifest_names_every_file(exports: dict[str, Path]) -> None:
    folder = exports["int8"]
    files = read_manifest(str(folder))["files"]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == set(files) | {"manifest.json"}
    assert all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())


def test_loading_needs_neither_torchrec_nor_ray_and_unpickles_nothing(saved: Saved, exports: dict[str, Path]) -> None:
    code = (
        "import os, sys, pickle, torch\n"
        "def refuse(*_, **__): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = torch.load = torch.export.load = refuse\n"
        "from rayrec.inference.model import open_served\n"
        f"print([open_served(path).kind for path in ({str(exports['int8'])!r}, {str(saved.run)!r})])\n"
        "unneeded = {'torchrec', 'fbgemm_gpu', 'ray', 'tensordict', 'torchmetrics', 'torch.distributed.checkpoint'}\n"
        "loaded = unneeded & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"  # to take the interpreter apart takes more than a second
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['export', 'checkpoint']\n"


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.abort, ()  # type: ignore[return-value]


@pytest.fixture
def copied(exports: dict[str, Path], tmp_path: Path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(exports["int8"], tmp_path / "copied"))


@pytest.mark.parametrize(
    "name", ["tables.safetensors", "dense.safetensors", "dense.pt2", "preprocessor/preprocessor.json", "README.md"]
)
def test_damage_is_found(copied: Path, name: str) -> None:
    path = copied / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged, its checksum does not fit"):
        open_served(str(copied))
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match="missing or of another size"):
        open_served(str(copied))
    path.unlink()
    with pytest.raises(InputError, match="missing or of another size"):
        open_served(str(copied))


def test_a_pickle_beside_it_is_refused(copied: Path) -> None:
    (copied / "preprocessor" / "weights").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(InputError, match=r"copied/preprocessor/weights: is a pickle, .*; remove it"):
        open_served(str(copied))


def test_a_checkpoint_with_a_pickle_is_not_exported(tmp_path: Path) -> None:
    """Of whatever kind."""
    saved = save_clicks(tmp_path / "run")
    (saved.checkpoint / "weights.pt").touch()
    with pytest.raises(InputError, match=r"weights\.pt: is a pickle"):
        export(str(saved.run), str(tmp_path / "out"), config=recipes.mnist_resnet18())


def test_a_changed_manifest_is_found(copied: Path) -> None:
    path = copied / "manifest.json"
    path.write_text(path.read_text().replace('"int8"', '"int4"'))
    with pytest.raises(InputError, match="damaged, its checksum"):
        open_served(str(copied))
    path.write_text("{}")
    with pytest.raises(InputError):
        open_served(str(copied))


def _resealed(folder: Path, change: Any) -> None:
    """As an attacker would: sound checksums over what was changed."""
    from rayrec.checkpoint.format import seal, sha256_of

    manifest = json.loads((folder / "manifest.json").read_text())
    for name, file in manifest["files"].items():
        file.update(bytes=(folder / name).stat().st_size, sha256=sha256_of(str(folder / name)))
    del manifest["checksum"]
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["model"]["num_embeddings"].__setitem__(0, 10**9), "Preprocessor is not the one"),
        (lambda m: m["model"]["model"].update(top_mlp=[10**9, 1]), "network does not fit the"),
        (lambda m: m["model"]["model"].update(no_field=1), "not the manifest of an export"),
        (lambda m: m["model"].update(quantization="int2"), "not the manifest of an export"),
        (lambda m: m["files"].update({"../outside": {"bytes": 1, "sha256": ""}}), "outside of it"),
        (lambda m: m["files"].pop("tables.safetensors"), r"names no tables\.safetensors"),
        (lambda m: m.pop("model"), "field model is invalid"),
        (lambda m: m.update(version=99), "version 99"),
    ],
)
def test_a_forged_manifest_is_refused(copied: Path, change: Any, message: str) -> None:
    _resealed(copied, change)
    with pytest.raises(InputError, match=message):
        open_served(str(copied))


def _zipped_tokens(folder: Path) -> None:
    np.savez(folder / "preprocessor" / "tokens.npz", tokens=np.zeros(3, np.uint32))
    (folder / "preprocessor" / "tokens.npz").rename(folder / "preprocessor" / "tokens.npy")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "change"),
    [
        (None, lambda m: m.pop("version")),
        (None, lambda m: m.update(version="1")),
        (None, lambda m: m.pop("files")),
        (None, lambda m: m.update(files=None)),
        (None, lambda m: m["files"]["README.md"].pop("bytes")),
        (None, lambda m: m["files"]["README.md"].pop("sha256")),
        (None, lambda m: m["files"]["README.md"].update(bytes=-1)),
        (None, lambda m: m["files"].update({"a": 5})),
        (None, lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}})),
        (None, lambda m: m.update(model=[])),
        (None, lambda m: m["model"].update(model=[])),
        (None, lambda m: m["model"].update(model=5)),
        (None, lambda m: m["model"].update(features=7)),
        (None, lambda m: m["model"]["model"].update(top_mlp=[2**63, 1])),
        (None, lambda m: m["model"]["model"].update(top_mlp=[2**62, 2**62, 1])),
        (None, lambda m: m["model"]["model"].update(members=2**31)),
        (None, lambda m: m["model"]["model"].update(interaction="cross", cross_layers=2**31)),
        (_zipped_tokens, lambda m: None),
        (lambda folder: (folder / "preprocessor" / "tokens.npy").write_bytes(b"\x93NUMPY"), lambda m: None),
        (lambda folder: (folder / "preprocessor" / "preprocessor.json").write_text("[]"), lambda m: None),
        (lambda folder: (folder / "preprocessor" / "preprocessor.json").write_text("[" * 10**5), lambda m: None),
        (
            lambda folder: (folder / "preprocessor" / "preprocessor.json").write_text(
                '{"version": 2, "profile": 1, "schema": []}'
            ),
            lambda m: None,
        ),
        (
            lambda folder: (folder / "tables.safetensors").write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5),
            lambda m: None,
        ),
        (lambda folder: _link(folder / "README.md", "/etc/hostname"), lambda m: None),
        (lambda folder: _link(folder / "preprocessor" / "tokens.npy", "/dev/zero"), None),
        (lambda folder: _pipe(folder / "README.md"), None),
        (lambda folder: _pipe(folder / "manifest.json"), None),
        (lambda folder: _link(folder / "manifest.json", "/dev/zero"), None),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), None),
        (lambda folder: (folder / "manifest.json").write_text('{"format":' + '{"a":' * 10**5), None),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), None),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), None),
    ],
)
def test_open_served_rejects_spoiled_exports_in_one_line(copied: Path, damage: Any, change: Any) -> None:
    if damage is not None:
        damage(copied)
    if change is not None:
        _resealed(copied, change)
    with pytest.raises(InputError) as raised:
        open_served(str(copied))
    assert re.fullmatch(r"[^\n]{10,600}", str(raised.value))


def test_links_inside_an_export_are_followed(copied: Path) -> None:
    """As in a mounted ConfigMap, and where the folder itself is a link."""
    (copied / "README.md").rename(copied / "data")
    (copied / "README.md").symlink_to("data")
    (copied.parent / "alias").symlink_to(copied)
    assert open_served(str(copied.parent / "alias")).kind == "export"


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"chosen_step": "1"}', '{"chosen_step": -1}', "[" * 10**5, '{"chosen_step": 9}']
)
def test_open_served_rejects_a_damaged_summary(saved: Saved, tmp_path: Path, content: str) -> None:
    run = shutil.copytree(saved.run, tmp_path / "run")
    (run / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"^[^\n]{10,600}$"):
        open_served(str(run))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.pop("score"),
        lambda m: m.update(score="high"),
        lambda m: m.update(block_bytes=0),
        lambda m: m.pop("tensors"),
        lambda m: next(iter(m["tensors"].values())).update(dtype="F8"),
        lambda m: next(iter(m["tensors"].values())).update(shape=[2**63]),
        lambda m: next(iter(m["tensors"].values())).update(chunks=None),
        lambda m: next(iter(m["tensors"].values()))["chunks"][0].update(file="../data"),
        lambda m: next(iter(m["tensors"].values()))["chunks"][0].pop("sha256"),
        lambda m: m.pop("version"),
    ],
)
def test_open_served_rejects_a_resealed_checkpoint(saved: Saved, tmp_path: Path, change: Any) -> None:
    folder = shutil.copytree(saved.checkpoint, tmp_path / saved.checkpoint.name)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))
    with pytest.raises(InputError, match=r"^[^\n]{10,600}$"):
        open_served(str(folder))


@pytest.mark.parametrize("content", ["[" * 10**5, "a: &a [1]\nworkload: 5\n", "workload: {model: []}", "\xff"])
def test_open_served_rejects_a_damaged_configuration(saved: Saved, tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(saved.checkpoint, tmp_path / saved.checkpoint.name)
    (folder / "config.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"^[^\n]{10,600}$"):
        open_served(str(folder))


@pytest.mark.parametrize(
    "head",
    [
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{}",
        pickle.dumps(_Trap()),
        b"",
    ],
)
def test_forged_weights_are_refused(copied: Path, head: bytes) -> None:
    (copied / "tables.safetensors").write_bytes(head)
    _resealed(copied, lambda _: None)
    with pytest.raises(InputError, match="safetensors"):
        open_served(str(copied))


def test_tensors_beyond_the_file_are_refused(copied: Path) -> None:
    path = copied / "tables.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    for entry in table.values():
        entry["data_offsets"] = [place + 10**6 for place in entry["data_offsets"]]
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    _resealed(copied, lambda _: None)
    with pytest.raises(InputError, match="outside of the file"):
        open_served(str(copied))


# -- the gate


def test_the_runs_own_rows_are_compared(tmp_path: Path) -> None:
    path = _log(tmp_path / "log.tsv", 700)
    saved = save_clicks(tmp_path / "run", train_data={"path": path})
    told = _export(saved, tmp_path / "out", parity_rows=40)
    assert told["parity"]["origin"] == f"test rows of {path}"
    assert told["parity"]["rows"] == 40  # of 50, the last 14th
    told = _export(saved, tmp_path / "more", parity_rows=60)
    assert (told["parity"]["origin"], told["parity"]["rows"]) == (f"rows of {path}", 60)  # the test rows are too few
    elsewhere = _log(tmp_path / "other.tsv", 90)
    told = _export(saved, tmp_path / "two", parity_path=elsewhere, quantize="fp16", max_auroc_loss=0.1)
    assert (told["parity"]["origin"], told["parity"]["rows"]) == (f"rows of {elsewhere}", 90)


def test_without_the_runs_log_nothing_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "moved.tsv")
    saved = save_clicks(tmp_path / "run", train_data={"path": path})
    with monkeypatch.context() as patch:
        patch.setattr(
            "rayrec.inference.export.write.open_served", None
        )  # the log is looked for before weights are read
        with pytest.raises(
            InputError, match=rf"no rows of the run's log, {path}, .* labelled log as --parity-path, or"
        ):
            _export(saved, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    told = _export(saved, tmp_path / "out", ignore_parity=True)["parity"]
    assert "drawn at random" in told["origin"]
    assert path in told["failure"]
    assert 0.5 < told["auroc_checkpoint"] <= 1
    assert _export(saved, tmp_path / "two", parity_path=_log(tmp_path / "log.tsv", 60))["parity"]["failure"] is None


def test_an_export_that_scores_otherwise_leaves_nothing(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"an AUROC that differs by .*more than 0, on .*; choose another --quantize"):
        _export(saved, tmp_path / "out", quantize="int4", max_auroc_loss=0.0)
    assert not list(tmp_path.glob("out*"))
    told = _export(saved, tmp_path / "out", quantize="int4", max_auroc_loss=0.0, ignore_parity=True)
    assert "AUROC" in told["parity"]["failure"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["parity"] == told["parity"]
    with pytest.raises(InputError, match="exists already"):
        _export(saved, tmp_path / "out")


def test_the_command_prints_the_report(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quantize", "fp16", "--parity-rows", "50", "--max-auroc-loss", "0.2", "--out", str(tmp_path / "out")]
    assert cli.run(["export", str(saved.run), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["quantization"] == "fp16"
    assert (told["out"], told["checkpoint"]) == (str(tmp_path / "out"), str(saved.checkpoint))
    assert (told["parity"]["rows"], told["parity"]["auroc_limit"]) == (50, 0.2)


def test_an_export_is_not_taken_for_a_checkpoint(exports: dict[str, Path], tmp_path: Path) -> None:
    out = str(next(iter(exports.values())))
    for ask in (
        lambda: rayrec.evaluate(out, "log.tsv"),
        lambda: rayrec.predict(out, "log.tsv", out=str(tmp_path / "x")),
    ):
        with pytest.raises(InputError, match="no checkpoint, but an export; give the checkpoint that it was made of"):
            ask()


def test_unusable_requests_are_told_in_one_line(saved: Saved, tmp_path: Path) -> None:
    unlabelled = _log(tmp_path / "log.tsv", 5, labelled=False)
    with pytest.raises(InputError, match="holds no labels"):
        _export(saved, tmp_path / "out", parity_path=unlabelled)
    with pytest.raises(InputError, match=r"absent\.tsv"):
        _export(saved, tmp_path / "out", parity_path=str(tmp_path / "absent.tsv"))
    with pytest.raises(InputError, match="trains no click model"):
        export(
            str(saved.run), str(tmp_path / "out"), config=recipes.mnist_resnet18(), settings=ExportConfig(triton=True)
        )

    with pytest.raises(InputError, match="parity_rows"):
        ExportConfig(parity_rows=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", ["bags", "no dense columns", "bf16"])
def test_other_makes_are_exported_too(make: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "bags": {"preprocessor": lists_preprocessor()},
        "no dense columns": {"preprocessor": bucketed_preprocessor()},
        "bf16": {"model": SMALL.replace(interaction="cross"), "precision": "bf16"},
    }[make]
    saved = save_clicks(tmp_path / "run", **arguments)
    told = _export(saved, tmp_path / "out", quantize="int8", max_auroc_loss=0.01, ignore_parity=True)
    assert told["parity"]["failure"].startswith("no rows of the run's log")  # and nothing else
    served, rows = open_served(str(tmp_path / "out")), saved.rows(100)
    np.testing.assert_allclose(served.score(rows), saved.logits(rows), rtol=0, atol=0.02)


def test_values_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path / "run", scale=float("nan"))
    with pytest.raises(InputError, match=r"table cat_0: has a value of nan"):
        _export(saved, tmp_path / "out", quantize="int8", ignore_parity=True)
    with pytest.raises(InputError, match="not finite"):
        _export(saved, tmp_path / "out", parity_path=_log(tmp_path / "log.tsv", 60))


def _own_log(folder: Path) -> Saved:
    """A model of a log of texts, whose one column is hashed, with the bits of categories mixed."""
    schema = Schema(
        label="click", dense=("age",), sparse=("user", "tags"), lists=("tags",), tokens="any", delimiter=","
    )
    preprocessor = Preprocessor(
        "test",
        schema,
        (DenseColumn(),),
        (SparseColumn(100, None, mixed=True), SparseColumn(4, 2)),
        np.array([1, 2], np.uint64),
    )
    lines = [f"{row % 3 // 2},{row % 40},u{row % 150},{row % 4}|{row % 3}" for row in range(300)]
    log = folder / "log.csv"
    log.write_text("\n".join(["click,age,user,tags", *lines]) + "\n")
    return save_clicks(folder / "run", preprocessor=preprocessor, train_data={"path": str(log)})


def test_encode_py_is_compared_on_an_own_log(tmp_path: Path) -> None:
    made = _own_log(tmp_path)
    told = _export(made, tmp_path / "out", max_auroc_loss=0.05)
    assert told["encoder_parity"] == {"rows": 300, "origin": told["parity"]["origin"], "failure": None}
    names: dict[str, Any] = {}
    exec(LOADER.replace('"."', repr(str(tmp_path / "out"))), names)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    own = runpy.run_path(str(tmp_path / "out" / "encode.py"))["Encoder"](str(tmp_path / "out" / "preprocessor"))
    served = open_served(str(tmp_path / "out"))
    raw, _ = make_reader(made.preprocessor.schema).read([Body("csv", 300, 0, text=(tmp_path / "log.csv").read_bytes())])
    logits = served.score(served.preprocessor.encode(raw))
    assert np.std(logits) > 0
    np.testing.assert_allclose(names["score"](*own.encode(rows)), logits, rtol=0, atol=1e-5)


def test_aligned_lists_are_exported_and_served(tmp_path: Path) -> None:
    """DIN with items and their shops in one attention unit, and rows that give a shop to no item."""
    features = (
        Feature(name="items", vocabulary="item", max_length=3),
        Feature(name="shops", vocabulary="shop", max_length=3, aligned_with="items"),
    )
    sparse, lists = ("item", "shop", "items", "shops"), ("items", "shops")
    schema = Schema(label="click", sparse=sparse, lists=lists, features=features, tokens="any", delimiter=",")
    preprocessor = Preprocessor("test", schema, (), (SparseColumn(30, None),) * 4, np.zeros(0, np.uint64))
    items = [[f"i{(row + number) % 40}" for number in range(row % 6)] for row in range(200)]
    lines = [
        f"{row % 3 // 2},i{row % 40},s{row % 7},{'|'.join(of_row)},{'|'.join('s' + item[-1] for item in of_row)}"
        for row, of_row in enumerate(items)
    ]
    header, log = "click,item,shop,items,shops", tmp_path / "log.csv"
    log.write_text("\n".join([header, *lines]) + "\n")
    model = DINConfig(embedding_dim=4, attention=(8,), mlp=(8,))
    settings: dict[str, Any] = {"preprocessor": preprocessor, "train_data": {"path": str(log)}}
    made = save_clicks(tmp_path / "run", model=model, scale=3.0, **settings)
    told = _export(made, tmp_path / "out", max_auroc_loss=0.05)
    assert told["encoder_parity"]["failure"] is None
    names: dict[str, Any] = {}
    exec(LOADER.replace('"."', repr(str(tmp_path / "out"))), names)
    encoder, served = Encoder(str(tmp_path / "out" / "preprocessor")), open_served(str(tmp_path / "out"))
    reader = make_reader(schema)
    raw, _ = reader.read([Body("csv", 200, 0, text=log.read_bytes())])
    logits = served.score(served.preprocessor.encode(raw))
    assert np.std(logits) > 0
    np.testing.assert_allclose(open_served(str(made.run)).score(served.preprocessor.encode(raw)), logits, atol=1e-5)
    with open(log) as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose(names["score"](*encoder.encode(rows)), logits, rtol=0, atol=1e-5)
    assert compare_encoder(encoder, preprocessor, ParityRows("rows", ()))["failure"] is None  # drawn lists
    ragged = {"item": "i1", "shop": "s1", "items": ["i1", "i2"], "shops": ["s1"]}
    with pytest.raises(ValueError, match="row 0: the categories of shops are not at the places of those of items"):
        encoder.encode([ragged])
    good = {**ragged, "shops": ["s1", "s2"]}
    raw, (first, second) = reader.read([Body("json", 1, 0, rows=[row]) for row in (ragged, good)])
    assert isinstance(first, RequestError)
    assert "categories are not at the places of the list that it is aligned with" in str(first)
    assert not isinstance(second, RequestError)
    assert raw.rows == 1


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ("tokens = mix64(tokens)", "pass", r"its ids of column user differ"),
        ("np.log1p(np.abs(x))", "np.abs(x)", r"it encodes b'1' of age as 1\.0 instead of 0\.69\d+"),
        ("return xxh64(text.encode())", 'raise ValueError("x")', r"it refuses a row \(x\)"),
        ("def __init__(self, folder: str) -> None:", "def __init__(self, folder):\n        raise ValueError('y')", "y"),
    ],
)
def test_export_rejects_an_encoder_that_differs(
    old: str, new: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, program = _own_log(tmp_path), encoder_program()
    assert old in program
    monkeypatch.setattr("rayrec.inference.export.write.encoder_program", lambda: program.replace(old, new))
    with pytest.raises(InputError, match=rf"^export: encode\.py does not encode rows as [^\n]*: {failure}, on [^\n]*$"):
        _export(made, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    told = _export(made, tmp_path / "out", ignore_parity=True)
    assert re.search(failure, told["encoder_parity"]["failure"])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == {
        key: value for key, value in told.items() if key not in ("out", "checkpoint")
    }


@pytest.mark.parametrize("kind", ["vocabulary", "hashed", "buckets", "file minimum", "uniform", "pareto"])
def test_drawn_values_compare_encode_py_without_a_raw_log(kind: str, tmp_path: Path) -> None:
    """As for a run on preprocessed data."""
    preprocessor = _varied_criteo(kind)
    preprocessor.save(str(tmp_path))
    none = ParityRows("rows", ())
    found = compare_encoder(Encoder(str(tmp_path)), preprocessor, none)
    assert found == {"rows": 2000, "origin": "drawn values", "failure": None}
    lists = lists_preprocessor()
    other = dataclasses.replace(lists, schema=lists.schema.replace(features=()))
    other.save(str(tmp_path))
    assert compare_encoder(Encoder(str(tmp_path)), other, none)["failure"] is None
    changed = dataclasses.replace(
        preprocessor,
        sparse=(*preprocessor.sparse[:-1], dataclasses.replace(preprocessor.sparse[-1], missing_id=0, unknown_id=1)),
    )
    preprocessor.save(str(tmp_path))
    assert compare_encoder(Encoder(str(tmp_path)), changed, none)["failure"] == "its ids of column z differ"


def test_compare_counts_the_worst_row() -> None:
    labels = np.array([0, 1, 0, 1], np.float32)
    logits = np.array([-1, 1, -2, 2], np.float32)
    same = compare("rows", labels, logits, logits)
    assert same.failure("fp32", auroc_limit=0.0) is None
    moved = compare("rows", labels, logits, logits + np.array([0, 0, 2e-5, 0], np.float32))
    assert "a logit that differs by 2e-05" in str(moved.failure("fp32", auroc_limit=1.0))
    assert moved.failure("int8", auroc_limit=0.0) is None
    large = compare("rows", labels, 30 * logits, 30 * logits + np.array([0, 0, 4e-5, 0], np.float32))
    assert large.failure("fp32", auroc_limit=1.0) is not None
    assert large.failure("fp32", auroc_limit=1.0, relative=True) is None
    flipped = compare("rows", labels, logits, -logits)
    assert flipped.auroc_difference == 1.0
    assert "AUROC" in str(flipped.failure("int8", auroc_limit=0.1))
    one_class = compare("rows", np.zeros(4, np.float32), logits, logits)
    assert one_class.to_dict()["auroc_difference"] is None
    assert one_class.failure("fp32", auroc_limit=0.0) is None
    assert "of one class" in str(one_class.failure("int8", auroc_limit=1.0))


def test_rows_are_spread_over_the_log() -> None:
    found = [Part(Segment("a", 0, 1, 100 * n, 100), 0, 100) for n in range(50)]
    parts = spread(found, rows=1000)
    assert sum(part.stop - part.start for part in parts) == 1000
    assert [part.segment.first_row for part in parts] == list(range(0, 5000, 500))
    assert sum(part.stop - part.start for part in spread(found, rows=10**6)) == 5000
    assert sum(part.stop - part.start for part in spread(found, rows=7)) == 7


def _varied_criteo(kind: str) -> Preprocessor:
    """Each way in which a Preprocessor makes ids and numbers of a log like Criteo's."""
    schema = Schema(tokens="hexadecimal", label="label", dense=("a", "b", "c"), sparse=("x", "y", "z"))
    tokens = np.array([[7, 3, 900], [1, 2**32 - 1, 5], [11, 4, 6]], np.uint32)
    dense = (
        DenseColumn(mean=0.5, scale=0.3, missing_value=-1.5),
        DenseColumn(kind="log", shift=2.0, lowest=0),
        DenseColumn(kind="identity", lowest=-2),
    )
    sparse: tuple[SparseColumn, ...] = (
        SparseColumn(5, 3),
        SparseColumn(4, 3, first_id=1, unknown_id=0, missing_id=2, gap=2),
        SparseColumn(20, 3, token_modulo=13),
    )
    changes: dict[str, Any] = {}
    if kind == "hashed":
        sparse = (SparseColumn(50, None), SparseColumn(1000, None, murmur3=True), SparseColumn(3, None, first_id=0))
        tokens = tokens[:0]
    if kind == "buckets":
        buckets = (np.arange(5, dtype=np.uint32) + np.uint32(2**31)).repeat(3).reshape(5, 3).T
        sparse = (*(SparseColumn(7, 5) for _ in range(3)), *sparse)
        return Preprocessor("test", schema, (), sparse, np.concatenate([*buckets, *tokens]), integer_buckets=True)
    if kind == "file minimum":
        changes["file_minimum"] = {"": -4, "day_0": -9}
    if kind in ("uniform", "pareto"):
        changes["multi_hot"] = MultiHot(sizes=(3, 1, 40), distribution=kind, seed=9)
    return Preprocessor("test", schema, dense, sparse, tokens.reshape(-1), **changes)


def test_encoder_names_the_row_that_it_refuses(tmp_path: Path) -> None:
    """What it makes of rows: test_golden_outputs.py."""
    _varied_criteo("vocabulary").save(str(tmp_path))
    encoder = Encoder(str(tmp_path))
    with pytest.raises(ValueError, match="row 1: x is not 8 hexadecimal digits"):
        encoder.encode([{}, {"x": "12"}])
    with pytest.raises(ValueError, match="row 0: a is not a number"):
        encoder.encode([{"a": 1.5}])
    with pytest.raises(ValueError, match="row 0 has 2 columns, not 6"):
        encoder.parse(["1\t2"])


def test_the_encoder_reads_categories_of_any_kind(tmp_path: Path) -> None:
    """Texts of every length, numbers in several forms, lists, also empty ones."""
    schema = Schema(
        label="click",
        dense=("age",),
        sparse=("user", "tags", "shop"),
        lists=("tags",),
        integers=("shop",),
        tokens="any",
        delimiter=",",
    )
    users = [
        None,
        "",
        *("é" + "x" * length for length in range(70)),
        "7",
        "07",
        "-7",
        "true",
        "nan",
        " a",
        7,
        True,
        3.0,
    ]
    users += [2**63 - 1, 2**64 - 1, -(2**63), "18446744073709551615", "-0", "0", "1.0"]
    rows = [
        {
            "age": [None, 1.5, -3, 10**9, True][number % 5],
            "user": user,
            "tags": [None, [], ["a", None, "b"], [7, "7", "x" * 40]][number % 4],
            "shop": [None, "7", " 07", "+7.0", 7, "true", "nan"][number % 7],
        }
        for number, user in enumerate(users)
    ]
    raw, outcomes = make_reader(schema).read([Body("json", len(rows), 0, rows=rows)])
    assert outcomes == [slice(0, len(rows))]
    columns = [
        np.unique(column.categories if isinstance(column, RawList) else column)[::2]
        for column in map(raw.column, schema.sparse)
    ]
    sparse = tuple(SparseColumn(len(tokens) + 2, len(tokens)) for tokens in columns)
    hashed = (SparseColumn(1000, None), sparse[1], sparse[2])
    for own, tokens in ((sparse, columns), (hashed, columns[1:])):
        preprocessor = Preprocessor("test", schema, (DenseColumn(),), own, np.concatenate(tokens))
        preprocessor.save(str(tmp_path))
        expected = preprocessor.encode(raw)
        dense, ids = Encoder(str(tmp_path)).encode(rows)
        np.testing.assert_array_equal(dense, expected.dense)
        for found, wanted in zip(ids, expected.ids, strict=True):
            if isinstance(wanted, Bags):
                assert isinstance(found, tuple)
                np.testing.assert_array_equal(found[0], wanted.values)
                np.testing.assert_array_equal(found[1], wanted.lengths)
            else:
                np.testing.assert_array_equal(found, wanted)
    for row in ({"user": 1.5}, {"user": 2**64}, {"age": "x"}, {"age": 1e19}, {"shop": "x"}, {"tags": [["a"]]}):
        with pytest.raises(ValueError, match=f"row 1: {next(iter(row))} is"):
            Encoder(str(tmp_path)).encode([{}, row])


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in models.names("ranking") if name != "din"])  # which needs lists
def test_every_model_is_exported(tmp_path: Path, saved: Saved, name: str) -> None:
    """Its program, int8 tables and, with two members, tables wider than an embedding."""
    cls = models.config_class(name)
    assert cls is not None
    like = DLRMConfig(embedding_dim=8, bottom_mlp=(8,), members=2)
    config: ClickModelConfig = cls.in_place_of(like)
    made = save_clicks(
        tmp_path / "run", model=config, preprocessor=saved.preprocessor, train_data=saved.config.train_data
    )
    told = _export(made, tmp_path / "out", quantize="int8", max_auroc_loss=0.05)
    assert told["parity"]["failure"] is None
    rows = made.rows(50)
    names: dict[str, Any] = {}
    exec(LOADER.replace('"."', repr(str(tmp_path / "out"))), names)
    served = open_served(str(tmp_path / "out"))
    np.testing.assert_allclose(names["score"](rows.dense, list(rows.ids)), served.score(rows), rtol=0, atol=1e-4)
