"""Exported click models, which must score like their checkpoint."""

import csv
import dataclasses
import functools
import importlib
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import click_models
from builders.click_models import (
    SMALL,
    Saved,
    bucketed_preprocessor,
    lists_preprocessor,
    multi_hot_preprocessor,
    save_clicks,
)
from builders.exports import (
    ROWS,
    changed,
    export_of,
    reseal,
    scored_by_strangers,
    write_criteo_rows,
)
from builders.faults import Trap, fails_with, flip, rejects
from builders.own_click_model import OwnConfig
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

import rayrec
from rayrec import cli, models, recipes
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.index import Segment, SegmentRange
from rayrec.data.logs.text_parser import parse
from rayrec.inference.config import ExportConfig
from rayrec.inference.export import parity
from rayrec.inference.export.manifest import read_manifest
from rayrec.inference.export.onnx import MAX_BATCH_ROWS, config_pbtxt, onnx_inputs
from rayrec.inference.export.parity import ParityRows, compare, compare_encoder, spread
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.inference.export.write import FROM_RAW, LOADER, encoder_program, export
from rayrec.inference.model import open_served
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import Quantization
from rayrec.schema import Feature, Schema
from rayrec.serve.requests import RequestBody, RequestError, open_body
from rayrec.serve.row_readers import make_reader

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("run")
    return save_clicks(
        folder, scale=3.0, train_data={"path": write_criteo_rows(folder / "log.tsv", ROWS)}
    )


@pytest.fixture(scope="session")
def exported(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the export with a quantization, created on first use."""

    @functools.cache
    def make(quantization: str) -> Path:
        out = tmp_path_factory.mktemp("exports") / quantization
        export_of(
            saved,
            out,
            quantize=None if quantization == "fp32" else quantization,
            max_auroc_loss=0.05,
        )
        return out

    return make


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [
        ("fp32", 1e-6),
        ("fp16", 2e-3),
        ("int8", 0.03),
        ("int4", 0.5),
    ],
)
def test_export_scores_match_checkpoint(
    saved: Saved, exported: Any, quantization: Quantization, tolerance: float
) -> None:
    folder = exported(quantization)
    served = open_served(str(folder))
    checkpoint = open_served(str(saved.run))
    assert (served.kind, served.scorer.quantization) == ("export", quantization)
    assert served.version == checkpoint.version.removesuffix("fp32") + quantization
    assert served.preprocessor_hash == checkpoint.preprocessor_hash
    rows = saved.rows(300)
    logits = served.score(rows)
    expected = saved.logits(rows)
    assert np.abs(logits - expected).max() <= tolerance
    assert quantization == "fp32" or (logits != expected).any()
    assert np.std(expected) > 10 * np.abs(logits - expected).mean()
    width = {
        "fp32": 32,
        "fp16": 16,
        "int8": 16,
        "int4": 8,
    }[quantization]  # bytes of 8 values
    dense = sum(
        p.nbytes for name, p in saved.model.named_parameters() if "embedding_bags" not in name
    )
    assert served.scorer.weight_bytes == width * sum(saved.preprocessor.num_embeddings) + dense
    score = scored_by_strangers(folder)
    for some in (rows, saved.rows(1)):
        np.testing.assert_allclose(
            score(some.dense, list(some.ids)), served.score(some), rtol=0, atol=2e-5
        )


def test_raw_rows_are_scored_without_rayrec(
    saved: Saved, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(exported("fp32"), tmp_path / "moved")
    assert saved.config.train_data.path is not None
    lines = Path(saved.config.train_data.path).read_text().splitlines()[:50]
    assert FROM_RAW in (folder / "README.md").read_text()
    program = f"{LOADER}{FROM_RAW}".replace(
        "rows = [{}, {}]", "rows = encoder.parse(open('lines.tsv').read().splitlines())"
    ).replace("print(", "result = (")
    (folder / "lines.tsv").write_text("\n".join(lines))
    result: dict[str, Any] = {}
    with monkeypatch.context() as hidden:
        hidden.chdir(folder)
        hidden.setattr(sys, "path", [*sys.path])
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("rayrec", "encode")
        ]:
            hidden.delitem(sys.modules, name)
        hidden.setitem(sys.modules, "rayrec", None)
        fails_with(ModuleNotFoundError, "", importlib.import_module, "rayrec")
        exec(program, result)
        # it is the export's
        assert Path(sys.modules["encode"].__file__ or "").resolve().parent == folder.resolve()
        assert [name for name in sys.modules if name.partition(".")[0] == "rayrec"] == ["rayrec"]
        hidden.delitem(sys.modules, "encode")
    served = open_served(str(exported("fp32")))
    raw, faults = parse(served.preprocessor.schema, "".join(f"{line}\n" for line in lines).encode())
    assert not faults.total
    expected = served.score(served.preprocessor.encode(raw))
    assert np.std(expected) > 0
    np.testing.assert_allclose(result["result"], expected, rtol=0, atol=1e-5)


def test_report_and_manifest_describe_export(saved: Saved, exported: Callable[[str], Path]) -> None:
    report = json.loads((exported("int8") / "report.json").read_text())
    parity = report["parity"]
    assert (parity["rows"], parity["origin"], parity["failure"]) == (
        ROWS,
        f"rows of {saved.config.train_data.path}",
        None,
    )
    assert 0 < parity["max_logit_difference"] < 0.05
    assert 0 < parity["auroc_checkpoint"] < 1
    assert 0 < report["size"]["ratio"] < 1
    assert report["speed"]["rows_per_s"] > 0
    report = json.loads((exported("fp32") / "report.json").read_text())
    assert report["parity"]["max_logit_difference"] < 1e-6
    assert report["program_parity"]["max_logit_difference"] <= 1e-5
    folder = exported("int8")
    files = read_manifest(str(folder))["files"]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == set(files) | {"manifest.json"}
    assert all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())


def test_loading_imports_no_ray_and_unpickles_no_file(
    saved: Saved, exported: Callable[[str], Path]
) -> None:
    code = (
        "import os, sys, pickle, torch\n"
        "def refuse(*_, **__): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = torch.load = torch.export.load = refuse\n"
        "from rayrec.inference.model import open_served\n"
        "kinds = [open_served(path).kind for path in sys.argv[1:]]\n"
        "unneeded = {'torchrec', 'fbgemm_gpu', 'ray', 'tensordict', 'torchmetrics', "
        "'torch.distributed.checkpoint'}\n"
        "print(kinds, unneeded & set(sys.modules), flush=True)\n"
        "os._exit(0)\n"  # to take the interpreter apart takes more than a second
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(exported("int8")),
        str(saved.run),
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "['export', 'checkpoint'] set()\n", run.stderr


def test_run_rows_are_compared(tmp_path: Path) -> None:
    path = write_criteo_rows(tmp_path / "log.tsv", 700)
    saved = save_clicks(tmp_path / "run", train_data={"path": path})
    other = write_criteo_rows(tmp_path / "other.tsv", 90)
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"parity_rows": 40}, f"test rows of {path}", 40),  # of 50, the last 14th
        ({"parity_rows": 60}, f"rows of {path}", 60),  # the test rows are too few
        ({"parity_path": other, "quantize": "fp16", "max_auroc_loss": 0.1}, f"rows of {other}", 90),
    ]
    for options, origin, rows in cases:
        parity = export_of(saved, tmp_path / f"out-{rows}", **options)["parity"]
        assert (parity["origin"], parity["rows"]) == (origin, rows)


def test_missing_run_log_is_rejected_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "moved.tsv")
    saved = save_clicks(tmp_path / "run", train_data={"path": path})
    with monkeypatch.context() as patch:
        # the log is looked for before weights are read
        patch.setattr("rayrec.inference.export.write.open_served", None)
        rejects(
            rf"no rows of the run's log {path}, .* Set --parity-path to a labelled log",
            export_of,
            saved,
            tmp_path / "out",
        )
    assert not list(tmp_path.glob("out*"))
    reported = export_of(saved, tmp_path / "out", ignore_parity=True)["parity"]
    assert "drawn at random" in reported["origin"]
    assert path in reported["failure"]
    assert 0.5 < reported["auroc_checkpoint"] <= 1
    elsewhere = write_criteo_rows(tmp_path / "log.tsv", 60)
    assert export_of(saved, tmp_path / "two", parity_path=elsewhere)["parity"]["failure"] is None


def test_export_with_different_scores_leaves_no_folder(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "an AUROC that differs by .*more than 0, on .*. Choose another --quantize"
    options = {"quantize": "int4"}
    rejects(message, export_of, saved, tmp_path / "out", max_auroc_loss=0.0, **options)
    assert not list(tmp_path.glob("out*"))
    reported = export_of(
        saved,
        tmp_path / "out",
        max_auroc_loss=0.0,
        ignore_parity=True,
        **options,
    )
    assert "AUROC" in reported["parity"]["failure"]
    assert (
        json.loads((tmp_path / "out" / "report.json").read_text())["parity"] == reported["parity"]
    )
    rejects("exists already", export_of, saved, tmp_path / "out")


def test_export_command_prints_report(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--quantize",
        "fp16",
        "--parity-rows",
        "50",
        "--max-auroc-loss",
        "0.2",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.run(["export", str(saved.run), *flags]) == 0
    reported = json.loads(capsys.readouterr().out)
    expected = {
        "quantization": "fp16",
        "out": str(tmp_path / "out"),
        "checkpoint": str(saved.checkpoint),
    }
    assert reported.items() >= expected.items()
    assert (reported["parity"]["rows"], reported["parity"]["auroc_limit"]) == (50, 0.2)


def test_export_is_not_a_checkpoint(exported: Callable[[str], Path], tmp_path: Path) -> None:
    out = str(exported("int8"))
    for submit in (
        lambda: rayrec.evaluate(out, "log.tsv"),
        lambda: rayrec.predict(out, "log.tsv", out=str(tmp_path / "x")),
    ):
        rejects(
            r"must be a checkpoint, got an export \(for `rayrec serve`\)\. Use the exported "
            r"checkpoint",
            submit,
        )


def test_invalid_exports_raise_one_line(saved: Saved, tmp_path: Path) -> None:
    unlabelled = write_criteo_rows(tmp_path / "log.tsv", 5, labelled=False)
    for path, message in (
        (unlabelled, "labels not found"),
        (str(tmp_path / "absent.tsv"), r"absent\.tsv"),
    ):
        rejects(message, export_of, saved, tmp_path / "out", parity_path=path)
    rejects(
        "is not for click models",
        export,
        str(saved.run),
        str(tmp_path / "out"),
        config=recipes.mnist_resnet18(),
        settings=ExportConfig(triton=True),
    )
    rejects("parity_rows", ExportConfig, parity_rows=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"preprocessor": lists_preprocessor()},
        {"preprocessor": bucketed_preprocessor()},
        {"model": SMALL.replace(interaction="cross"), "precision": "bf16"},
    ],
    ids=["bags", "no dense columns", "bf16"],
)
def test_other_workloads_are_exported(arguments: dict[str, Any], tmp_path: Path) -> None:
    saved = save_clicks(tmp_path / "run", **arguments)
    reported = export_of(
        saved, tmp_path / "out", quantize="int8", max_auroc_loss=0.01, ignore_parity=True
    )
    assert reported["parity"]["failure"].startswith("no rows of the run's log")  # and nothing else
    served = open_served(str(tmp_path / "out"))
    rows = saved.rows(100)
    np.testing.assert_allclose(served.score(rows), saved.logits(rows), rtol=0, atol=0.02)


def test_nonfinite_values_are_rejected(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path / "run", scale=float("nan"))
    rejects(
        "cat_0: values must fit into int8, got nan",
        export_of,
        saved,
        tmp_path / "out",
        quantize="int8",
        ignore_parity=True,
    )
    rejects(
        "not finite",
        export_of,
        saved,
        tmp_path / "out",
        parity_path=write_criteo_rows(tmp_path / "log.tsv", 60),
    )


def test_comparison_reports_worst_row() -> None:
    labels = np.array([0, 1, 0, 1], np.float32)
    logits = np.array([-1, 1, -2, 2], np.float32)
    assert compare("rows", labels, logits, logits).failure("fp32", auroc_limit=0.0) is None
    moved = compare("rows", labels, logits, logits + np.array([0, 0, 2e-5, 0], np.float32))
    assert "a logit that differs by 2e-05" in str(moved.failure("fp32", auroc_limit=1.0))
    assert moved.failure("int8", auroc_limit=0.0) is None
    large = compare(
        "rows", labels, 30 * logits, 30 * logits + np.array([0, 0, 4e-5, 0], np.float32)
    )
    assert large.failure("fp32", auroc_limit=1.0) is not None
    assert large.failure("fp32", auroc_limit=1.0, relative=True) is None
    flipped = compare("rows", labels, logits, -logits)
    assert flipped.auroc_difference == 1.0
    assert "AUROC" in str(flipped.failure("int8", auroc_limit=0.1))
    one_class = compare("rows", np.zeros(4, np.float32), logits, logits)
    assert one_class.to_dict()["auroc_difference"] is None
    assert one_class.failure("fp32", auroc_limit=0.0) is None
    assert "of one class" in str(one_class.failure("int8", auroc_limit=1.0))


def test_parity_rows_are_evenly_spaced() -> None:
    found = [SegmentRange(Segment("a", 0, 1, 100 * n, 100), 0, 100) for n in range(50)]
    assert [part.segment.first_row for part in spread(found, rows=1000)] == list(
        range(0, 5000, 500)
    )
    for rows, expected in ((1000, 1000), (10**6, 5000), (7, 7)):
        assert sum(part.stop - part.start for part in spread(found, rows=rows)) == expected


@pytest.mark.extended
# which needs lists
@pytest.mark.parametrize("name", [name for name in models.names("ranking") if name != "din"])
def test_every_model_is_exported(tmp_path: Path, saved: Saved, name: str) -> None:
    """With program, int8 tables and, for two ensemble members, tables wider than an embedding."""
    config = models.config_class(name).replacing(
        DLRMConfig(embedding_dim=8, bottom_mlp=(8,), members=2)
    )
    built = save_clicks(
        tmp_path / "run",
        model=config,
        preprocessor=saved.preprocessor,
        train_data=saved.config.train_data,
    )
    assert (
        export_of(built, tmp_path / "out", quantize="int8", max_auroc_loss=0.05)["parity"][
            "failure"
        ]
        is None
    )
    rows = built.rows(50)
    scores = scored_by_strangers(tmp_path / "out")(rows.dense, list(rows.ids))
    np.testing.assert_allclose(
        scores, open_served(str(tmp_path / "out")).score(rows), rtol=0, atol=1e-4
    )


# -- Damaged or forged exports and checkpoints, which are rejected in one line and run no code
@pytest.fixture
def copied(exported: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported("int8"), tmp_path / "copied"))


def _refused(folder: Path, message: str = "") -> None:
    assert 10 <= len(rejects(message, open_served, str(folder))) <= 600


@pytest.mark.parametrize(
    "name",
    [
        "tables.safetensors",
        "dense.safetensors",
        "dense.pt2",
        "preprocessor/preprocessor.json",
        "README.md",
    ],
)
def test_damaged_export_is_rejected(copied: Path, name: str) -> None:
    path = copied / name
    flip(path)
    _refused(copied, "damaged, checksum does not match")
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1]), path.unlink):
        damage()
        _refused(copied, "missing, or its size does not match")


def test_pickles_in_export_are_rejected(copied: Path, tmp_path: Path) -> None:
    (copied / "preprocessor" / "weights").write_bytes(pickle.dumps(Trap()))
    _refused(copied, r"copied/preprocessor/weights: must not be a pickle, .*\. Remove it")
    saved = save_clicks(tmp_path / "run")
    (saved.checkpoint / "weights.pt").touch()
    image_settings = recipes.mnist_resnet18()  # of whatever kind the model is
    rejects(
        r"weights\.pt: must not be a pickle",
        export,
        str(saved.run),
        str(tmp_path / "out"),
        config=image_settings,
    )


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
        *(
            ("model>model", value, "")
            for value in (
                [],
                5,
                {"interaction": "cross", "cross_layers": 2**31},
            )
        ),
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
        (
            _bytes("preprocessor/preprocessor.json", b'{"version": 2, "profile": 1, "schema": []}'),
            "",
        ),
        *(
            (_bytes("tables.safetensors", data), "safetensors")
            for data in (b"\xff" * 8, b"", pickle.dumps(Trap()))
        ),
        *(
            (_bytes("tables.safetensors", b"\x02\0\0\0\0\0\0\0" + data), "safetensors")
            for data in (b"[]", b"{}")
        ),
        (_bytes("tables.safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5), "safetensors"),
        (_head_of_nothing, "outside of the file"),
        (_in_place("README.md", lambda path: path.symlink_to(__file__)), ""),
    ],
)
def test_forged_files_are_rejected(
    copied: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copied)
    reseal(copied)
    _refused(copied, message)


@pytest.mark.parametrize(
    "damage",
    [
        *(
            _in_place(name, lambda path: path.symlink_to("/dev/zero"))
            for name in ("preprocessor/tokens.npy", "manifest.json")
        ),
        *(_in_place(name, os.mkfifo) for name in ("README.md", "manifest.json")),
        *(
            _bytes("manifest.json", data)
            for data in (b"[" * 10**5, b'{"format":' + b'{"a":' * 10**5, b"[1]", b"\xff\xfe")
        ),
    ],
)
def test_foreign_files_are_rejected(copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied)
    _refused(copied)


def test_links_in_export_are_followed(copied: Path) -> None:
    (copied / "README.md").rename(copied / "data")
    (copied / "README.md").symlink_to("data")
    (copied.parent / "alias").symlink_to(copied)
    assert open_served(str(copied.parent / "alias")).kind == "export"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("../../summary.json", text)
            for text in ("{}", "[]", '{"chosen_step": "1"}', '{"chosen_step": -1}')
        ),
        *(("../../summary.json", text) for text in ("[" * 10**5, '{"chosen_step": 9}')),
        *(
            ("config.yaml", text)
            for text in ("[" * 10**5, "a: &a [1]\nworkload: 5\n", "workload: {model: []}", "\xff")
        ),
    ],
)
def test_damaged_run_is_rejected(saved: Saved, tmp_path: Path, name: str, content: str) -> None:
    run = Path(shutil.copytree(saved.run, tmp_path / "run"))
    (run / saved.checkpoint.relative_to(saved.run) / name).write_text(content, encoding="latin-1")
    _refused(run)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(
            (place, ...)
            for place in (
                "files",
                "score",
                "version",
                "tensors",
                "tensors>*>chunks>0>xxh3_128",
            )
        ),
        *(
            ("score", "high"),
            ("block_bytes", 0),
            ("tensors>*>dtype", "F8"),
            ("tensors>*>shape", [2**63]),
        ),
        *(("tensors>*>chunks", None), ("tensors>*>chunks>0>file", "../data")),
    ],
)
def test_forged_checkpoint_is_rejected(
    saved: Saved, tmp_path: Path, place: str, value: Any
) -> None:
    folder = Path(shutil.copytree(saved.checkpoint, tmp_path / saved.checkpoint.name))
    reseal(folder, changed(place, value), files=False)
    _refused(folder)


# -- encode.py of an export, which must encode raw rows like the Preprocessor
def _own_log(folder: Path) -> Saved:
    """Save a model of a text log with one hashed column, with mixed bits of categories."""
    schema = Schema(
        label="click",
        dense=("age",),
        sparse=("user", "tags"),
        lists=("tags",),
        tokens="any",
        delimiter=",",
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


def test_encode_py_is_compared_on_raw_log(tmp_path: Path) -> None:
    report = export_of(_own_log(tmp_path), tmp_path / "out", max_auroc_loss=0.05)
    assert report["encoder_parity"] == {
        "rows": 300,
        "origin": report["parity"]["origin"],
        "failure": None,
    }
    program = runpy.run_path(str(tmp_path / "out" / "encode.py"))
    _check_strangers(tmp_path, program["Encoder"](str(tmp_path / "out" / "preprocessor")))


def test_encode_py_is_compared_on_limited_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "_ENCODED_ROWS", 70)
    report = export_of(_own_log(tmp_path), tmp_path / "out", max_auroc_loss=0.05)
    assert (report["parity"]["rows"], report["encoder_parity"]["rows"]) == (300, 70)


def _check_strangers(folder: Path, encoder: Any) -> EncodedRows:
    """Check that encoder and README of an export score log.csv like the served export. Returns the
    encoded log.
    """
    served = open_served(str(folder / "out"))
    log = folder / "log.csv"
    with log.open() as file:
        rows = list(csv.DictReader(file))
    schema = served.preprocessor.schema
    raw, _ = make_reader(schema).read(
        [open_body(log.read_bytes(), "csv", schema=schema, max_rows=len(rows))]
    )
    encoded = served.preprocessor.encode(raw)
    logits = served.score(encoded)
    assert np.std(logits) > 0
    np.testing.assert_allclose(
        scored_by_strangers(folder / "out")(*encoder.encode(rows)), logits, rtol=0, atol=1e-5
    )
    return encoded


def test_aligned_lists_are_exported_and_served(tmp_path: Path) -> None:
    """DIN with items and shops in one attention unit. Some rows have no shop for an item."""
    shops = Feature(
        name="shops",
        vocabulary="shop",
        max_length=3,
        aligned_with="items",
    )
    schema = Schema(
        label="click",
        sparse=("item", "shop", "items", "shops"),
        lists=("items", "shops"),
        features=(Feature(name="items", vocabulary="item", max_length=3), shops),
        tokens="any",
        delimiter=",",
    )
    preprocessor = Preprocessor(
        "test", schema, (), (SparseColumn(30, None),) * 4, np.zeros(0, np.uint64)
    )
    items = [[f"i{(row + number) % 40}" for number in range(row % 6)] for row in range(200)]
    row_terms = [
        f"{'|'.join(row_values)},{'|'.join('s' + item[-1] for item in row_values)}"
        for row_values in items
    ]
    lines = [
        f"{row % 3 // 2},i{row % 40},s{row % 7},{row_values}"
        for row, row_values in enumerate(row_terms)
    ]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["click,item,shop,items,shops", *lines]) + "\n")
    model = DINConfig(embedding_dim=4, attention=(8,), mlp=(8,))
    built = save_clicks(
        tmp_path / "run",
        model=model,
        scale=3.0,
        preprocessor=preprocessor,
        train_data={"path": str(log)},
    )
    assert (
        export_of(built, tmp_path / "out", max_auroc_loss=0.05)["encoder_parity"]["failure"] is None
    )
    encoder = Encoder(str(tmp_path / "out" / "preprocessor"))
    encoded = _check_strangers(tmp_path, encoder)
    trained, exported = (
        open_served(str(path)).score(encoded) for path in (built.run, tmp_path / "out")
    )
    np.testing.assert_allclose(trained, exported, atol=1e-5)
    # drawn lists
    assert compare_encoder(encoder, preprocessor, ParityRows("rows", ()))["failure"] is None
    ragged = {
        "item": "i1",
        "shop": "s1",
        "items": ["i1", "i2"],
        "shops": ["s1"],
    }
    fails_with(
        ValueError,
        "row 0: categories of shops are not aligned with items",
        encoder.encode,
        [ragged],
    )
    good = {**ragged, "shops": ["s1", "s2"]}
    raw, (first, second) = make_reader(schema).read(
        [RequestBody("json", 1, 0, rows=[row]) for row in (ragged, good)]
    )
    assert isinstance(first, RequestError)
    assert "categories are not at the places of the list that it is aligned with" in str(first)
    assert not isinstance(second, RequestError)
    assert raw.rows == 1


def test_numbers_alone_are_exported_and_served(tmp_path: Path) -> None:
    schema = Schema(
        label="click", dense=("age", "price"), tokens="any", delimiter=",", missing=("NA",)
    )
    preprocessor = Preprocessor(
        "test", schema, (DenseColumn(), DenseColumn()), (), np.zeros(0, np.uint64)
    )
    log = tmp_path / "log.csv"
    lines = [
        f"{row % 3 // 2},{'NA' if row % 7 == 0 else row % 40},{row % 11}" for row in range(300)
    ]
    log.write_text("\n".join(["click,age,price", *lines]) + "\n")
    built = save_clicks(tmp_path / "run", preprocessor=preprocessor, train_data={"path": str(log)})
    report = export_of(built, tmp_path / "out", max_auroc_loss=0.05)
    assert report["encoder_parity"]["failure"] is None
    encoded = _check_strangers(tmp_path, Encoder(str(tmp_path / "out" / "preprocessor")))
    trained, exported = (
        open_served(str(path)).score(encoded) for path in (built.run, tmp_path / "out")
    )
    np.testing.assert_allclose(trained, exported, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ("tokens = mix64(tokens)", "pass", r"its ids of column user differ"),
        ("np.log1p(np.abs(x))", "np.abs(x)", r"it encodes b'1' of age as 1\.0 instead of 0\.69\d+"),
        ("return xxh64(text.encode())", 'raise ValueError("x")', r"it rejects a row \(x\)"),
        (
            "def __init__(self, folder: str) -> None:",
            "def __init__(self, folder):\n        raise ValueError('y')",
            "y",
        ),
    ],
)
def test_export_rejects_other_encoder(
    old: str, new: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _own_log(tmp_path)
    program = encoder_program()
    assert old in program
    monkeypatch.setattr(
        "rayrec.inference.export.write.encoder_program", lambda: program.replace(old, new)
    )
    rejects(
        rf"^export: encode\.py does not encode rows as [^\n]*: {failure}, on [^\n]*$",
        export_of,
        built,
        tmp_path / "out",
    )
    assert not list(tmp_path.glob("out*"))
    report = export_of(built, tmp_path / "out", ignore_parity=True)
    assert re.search(failure, report["encoder_parity"]["failure"])
    stored = {key: value for key, value in report.items() if key not in ("out", "checkpoint")}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == stored


def test_encode_py_is_compared_on_random_values(tmp_path: Path) -> None:
    """The run was trained on preprocessed data. unit/data/encoding/test_rules.py compares all
    presets.
    """
    preprocessor = click_models.make_preprocessor()
    preprocessor.save(str(tmp_path))
    none = ParityRows("rows", ())
    result = compare_encoder(Encoder(str(tmp_path)), preprocessor, none)
    assert result == {"rows": 2000, "origin": "drawn values", "failure": None}
    lists = lists_preprocessor()
    other = dataclasses.replace(lists, schema=lists.schema.replace(features=()))
    other.save(str(tmp_path))
    assert compare_encoder(Encoder(str(tmp_path)), other, none)["failure"] is None
    *sparse, last = preprocessor.sparse
    sparse.append(dataclasses.replace(last, missing_id=0, unknown_id=1))
    changed = dataclasses.replace(preprocessor, sparse=tuple(sparse))
    preprocessor.save(str(tmp_path))
    assert (
        compare_encoder(Encoder(str(tmp_path)), changed, none)["failure"]
        == "its ids of column cat_25 differ"
    )


def test_encoder_error_has_row_number(tmp_path: Path) -> None:
    lists = lists_preprocessor()
    integers = dataclasses.replace(lists, schema=lists.schema.replace(integers=("user.id",)))
    rejected: list[tuple[Preprocessor, list[dict[str, Any]], str]] = [
        (
            click_models.make_preprocessor(),
            [{}, {"cat_0": "12"}],
            "row 1: cat_0 must be 8 hexadecimal digits",
        ),
        (
            click_models.make_preprocessor(),
            [{"int_0": 1.5}],
            "row 0: int_0 must be a number",
        ),
        *((lists, [{}, {"user.id": value}], "row 1: user.id must be") for value in (1.5, 2**64)),
        *((lists, [{}, {"age": value}], "row 1: age must be") for value in ("x", 1e19)),
        (lists, [{"keys": [["a"]]}], "row 0: keys must be"),
        (integers, [{"user.id": "x"}], "row 0: user.id must be"),
    ]
    for preprocessor, rows, message in rejected:
        preprocessor.save(str(tmp_path))
        fails_with(ValueError, message, Encoder(str(tmp_path)).encode, rows)
    click_models.make_preprocessor().save(str(tmp_path))
    fails_with(
        ValueError,
        "row 0 must have 39 or 40 columns, got 2",
        Encoder(str(tmp_path)).parse,
        ["1\t2"],
    )


@pytest.mark.parametrize("value", [-(2**63), 2**64 - 1], ids=["lowest", "largest"])
def test_encoder_reads_64_bit_integers_as_text(tmp_path: Path, value: int) -> None:
    lists_preprocessor().save(str(tmp_path))
    _, (ids, _) = Encoder(str(tmp_path)).encode([{"user.id": value}, {"user.id": str(value)}])
    assert isinstance(ids, np.ndarray)
    assert ids[0] == ids[1] > 0


# -- Model repository for Triton
# The part of Triton's model_config.proto (package inference) that a model like ours uses:
# name:number:type, * where repeated.
SCHEMA = {
    "ModelInput": "name:1:string data_type:2:DataType dims:4:int64*",
    "ModelOutput": "name:1:string data_type:2:DataType dims:3:int64*",
    "ModelDynamicBatching": "preferred_batch_size:1:int32* max_queue_delay_microseconds:2:uint64",
    "ModelParameter": "string_value:1:string",
    "Parameters": "key:1:string value:2:ModelParameter",
    "ModelConfig": "name:1:string platform:2:string max_batch_size:4:int32 input:5:ModelInput* "
    "output:6:ModelOutput* "
    "default_model_filename:8:string dynamic_batching:11:ModelDynamicBatching "
    "parameters:14:Parameters* backend:17:string",
}
DATA_TYPES = {
    "TYPE_INVALID": 0,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
}


def _model_config() -> type[Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="triton_part.proto", package="inference", syntax="proto3"
    )
    kinds = file.enum_type.add(name="DataType")
    for name, number in DATA_TYPES.items():
        kinds.value.add(name=name, number=number)
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (text.split(":") for text in fields.split()):
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            added = described.field.add(name=name, number=int(number), label=label)
            kind = kind.rstrip("*")
            scalar = getattr(field, f"TYPE_{kind.upper()}", None)
            added.type = scalar or (field.TYPE_ENUM if kind == "DataType" else field.TYPE_MESSAGE)
            if scalar is None:
                added.type_name = f".inference.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def test_triton_config_fits_schema() -> None:
    config = text_format.Parse(
        config_pbtxt("step_1-abc-int8", num_dense=13, num_ids=214), _model_config()()
    )
    assert (config.name, config.backend, config.max_batch_size) == (
        "click_model",
        "onnxruntime",
        MAX_BATCH_ROWS,
    )
    result = {
        (tensor.name, tensor.data_type, tuple(tensor.dims))
        for tensor in (*config.input, *config.output)
    }
    fp32 = DATA_TYPES["TYPE_FP32"]
    int64 = DATA_TYPES["TYPE_INT64"]
    assert result == {
        ("dense", fp32, (13,)),
        ("ids", int64, (214,)),
        ("logit", fp32, (1,)),
    }
    assert config.HasField("dynamic_batching")
    (parameter,) = config.parameters
    assert (parameter.key, parameter.value.string_value) == ("rayrec_version", "step_1-abc-int8")
    unknown = 'name: "x" no_such_field: 1'  # the schema is one that can be broken
    fails_with(text_format.ParseError, "", text_format.Parse, unknown, _model_config()())


@pytest.mark.parametrize(
    ("quantize", "model", "make"),
    [
        pytest.param(None, SMALL, lambda: None, marks=pytest.mark.extended),
        ("int4", OwnConfig(embedding_dim=8), lambda: multi_hot_preprocessor(5)),
        # without dense columns
        pytest.param("int8", SMALL, bucketed_preprocessor, marks=pytest.mark.extended),
    ],
)
def test_graph_scores_match_export(tmp_path: Path, quantize: Any, model: Any, make: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    saved = save_clicks(tmp_path / "run", model=model, preprocessor=make())
    report = export_of(
        saved,
        tmp_path / "out",
        quantize=quantize,
        triton=True,
        max_auroc_loss=0.1,
        ignore_parity=True,
    )
    assert report["triton"]["max_relative_difference"] < 1e-5
    assert report["parity"]["failure"].startswith("no rows of the run's log")
    folder = tmp_path / "out" / "triton" / "click_model"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), _model_config()())
    session = onnxruntime.InferenceSession(
        str(folder / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    dims = {tensor.name: list(tensor.dims) for tensor in config.input}
    assert {tensor.name: tensor.shape[1:] for tensor in session.get_inputs()} == dims
    assert [(tensor.name, tensor.shape[1:]) for tensor in session.get_outputs()] == [("logit", [1])]
    # its files are in the manifest, and sound
    served = open_served(str(tmp_path / "out"), own=OwnConfig)
    for count in (50, 1):
        rows = saved.rows(count)
        np.testing.assert_allclose(
            session.run(None, onnx_inputs(rows))[0][:, 0], served.score(rows), rtol=0, atol=1e-5
        )


def test_unsupported_graph_is_rejected(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path / "run", preprocessor=lists_preprocessor())
    rejects("column keys has a varying number", export_of, saved, tmp_path / "out", triton=True)
    assert not (tmp_path / "out").exists()
