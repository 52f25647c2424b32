"""encode.py of an export, which must encode raw rows like the Preprocessor."""

import csv
import dataclasses
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import Saved, lists_preprocessor, save_clicks
from builders.exports import export_of, scored_by_strangers
from builders.faults import fails_with, rejects

from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.inference.export.parity import ParityRows, _encoder_failure, compare_encoder
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.inference.export.write import encoder_program
from rayrec.inference.model import open_served
from rayrec.models.ranking.din import DINConfig
from rayrec.schema import Feature, Schema
from rayrec.serve.requests import RequestBody, RequestError
from rayrec.serve.row_readers import make_reader


def _own_log(folder: Path) -> Saved:
    """Save a model of a text log with one hashed column, with mixed bits of categories."""
    schema = Schema(label="click", dense=("age",), sparse=("user", "tags"), lists=("tags",), tokens="any", delimiter=",")
    preprocessor = Preprocessor(
        "test", schema, (DenseColumn(),), (SparseColumn(100, None, mixed=True), SparseColumn(4, 2)), np.array([1, 2], np.uint64)
    )
    lines = [f"{row % 3 // 2},{row % 40},u{row % 150},{row % 4}|{row % 3}" for row in range(300)]
    log = folder / "log.csv"
    log.write_text("\n".join(["click,age,user,tags", *lines]) + "\n")
    return save_clicks(folder / "run", preprocessor=preprocessor, train_data={"path": str(log)})


def test_encode_py_is_compared_on_raw_log(tmp_path: Path) -> None:
    report = export_of(_own_log(tmp_path), tmp_path / "out", max_auroc_loss=0.05)
    assert report["encoder_parity"] == {"rows": 300, "origin": report["parity"]["origin"], "failure": None}
    program = runpy.run_path(str(tmp_path / "out" / "encode.py"))
    _check_strangers(tmp_path, program["Encoder"](str(tmp_path / "out" / "preprocessor")))


def _check_strangers(folder: Path, encoder: Any) -> EncodedRows:
    """Check that encoder and README of an export score log.csv like the served export. Returns the encoded log."""
    served, log = open_served(str(folder / "out")), folder / "log.csv"
    with log.open() as file:
        rows = list(csv.DictReader(file))
    raw, _ = make_reader(served.preprocessor.schema).read([RequestBody("csv", len(rows), 0, text=log.read_bytes())])
    encoded = served.preprocessor.encode(raw)
    logits = served.score(encoded)
    assert np.std(logits) > 0
    np.testing.assert_allclose(scored_by_strangers(folder / "out")(*encoder.encode(rows)), logits, rtol=0, atol=1e-5)
    return encoded


def test_aligned_lists_are_exported_and_served(tmp_path: Path) -> None:
    """DIN with items and shops in one attention unit. Some rows have no shop for an item."""
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
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["click,item,shop,items,shops", *lines]) + "\n")
    model = DINConfig(embedding_dim=4, attention=(8,), mlp=(8,))
    built = save_clicks(tmp_path / "run", model=model, scale=3.0, preprocessor=preprocessor, train_data={"path": str(log)})
    assert export_of(built, tmp_path / "out", max_auroc_loss=0.05)["encoder_parity"]["failure"] is None
    encoder = Encoder(str(tmp_path / "out" / "preprocessor"))
    encoded = _check_strangers(tmp_path, encoder)
    trained, exported = (open_served(str(path)).score(encoded) for path in (built.run, tmp_path / "out"))
    np.testing.assert_allclose(trained, exported, atol=1e-5)
    assert compare_encoder(encoder, preprocessor, ParityRows("rows", ()))["failure"] is None  # drawn lists
    ragged = {"item": "i1", "shop": "s1", "items": ["i1", "i2"], "shops": ["s1"]}
    fails_with(ValueError, "row 0: categories of shops are not aligned with items", encoder.encode, [ragged])
    good = {**ragged, "shops": ["s1", "s2"]}
    raw, (first, second) = make_reader(schema).read([RequestBody("json", 1, 0, rows=[row]) for row in (ragged, good)])
    assert isinstance(first, RequestError)
    assert "categories are not at the places of the list that it is aligned with" in str(first)
    assert not isinstance(second, RequestError)
    assert raw.rows == 1


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ("tokens = mix64(tokens)", "pass", r"its ids of column user differ"),
        ("np.log1p(np.abs(x))", "np.abs(x)", r"it encodes b'1' of age as 1\.0 instead of 0\.69\d+"),
        ("return xxh64(text.encode())", 'raise ValueError("x")', r"it rejects a row \(x\)"),
        ("def __init__(self, folder: str) -> None:", "def __init__(self, folder):\n        raise ValueError('y')", "y"),
    ],
)
def test_export_rejects_different_encoder(
    old: str, new: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, program = _own_log(tmp_path), encoder_program()
    assert old in program
    monkeypatch.setattr("rayrec.inference.export.write.encoder_program", lambda: program.replace(old, new))
    rejects(rf"^export: encode\.py does not encode rows as [^\n]*: {failure}, on [^\n]*$", export_of, built, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    report = export_of(built, tmp_path / "out", ignore_parity=True)
    assert re.search(failure, report["encoder_parity"]["failure"])
    stored = {key: value for key, value in report.items() if key not in ("out", "checkpoint")}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == stored


@pytest.mark.parametrize("kind", ["vocabulary", "hashed", "buckets", "file minimum", "uniform", "pareto"])
def test_encode_py_is_compared_on_random_values(kind: str, tmp_path: Path) -> None:
    """The run was trained on preprocessed data."""
    preprocessor = _varied_criteo(kind)
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
    assert compare_encoder(Encoder(str(tmp_path)), changed, none)["failure"] == "its ids of column z differ"


def _varied_criteo(kind: str) -> Preprocessor:
    """Yield all kinds of Preprocessors for a log in Criteo's format."""
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


def test_encoder_error_has_row_number(tmp_path: Path) -> None:
    """test_golden_outputs.py has the encoded values."""
    _varied_criteo("vocabulary").save(str(tmp_path))
    encoder = Encoder(str(tmp_path))
    rejected = (([{}, {"x": "12"}], "row 1: x must be 8 hexadecimal digits"), ([{"a": 1.5}], "row 0: a must be a number"))
    for rows, message in rejected:
        fails_with(ValueError, message, encoder.encode, rows)
    fails_with(ValueError, "row 0 must have 6 columns, got 2", encoder.parse, ["1\t2"])


def test_encoder_reads_all_category_types(tmp_path: Path) -> None:
    """Texts of all lengths, several number formats, lists, also empty ones."""
    sparse = ("user", "tags", "shop")
    schema = Schema(
        label="click", dense=("age",), sparse=sparse, lists=("tags",), integers=("shop",), tokens="any", delimiter=","
    )
    users = [None, "", *("é" + "x" * length for length in range(70)), "7", "07", "-7", "true", "nan", " a", 7, True, 3.0]
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
    raw, outcomes = make_reader(schema).read([RequestBody("json", len(rows), 0, rows=rows)])
    assert outcomes == [slice(0, len(rows))]
    found = map(raw.column, schema.sparse)
    columns = [np.unique(column.values if isinstance(column, JaggedIds) else column)[::2] for column in found]
    counted = tuple(SparseColumn(len(tokens) + 2, len(tokens)) for tokens in columns)
    for custom, tokens in ((counted, columns), ((SparseColumn(1000, None), *counted[1:]), columns[1:])):
        preprocessor = Preprocessor("test", schema, (DenseColumn(),), custom, np.concatenate(tokens))
        preprocessor.save(str(tmp_path))
        assert _encoder_failure(Encoder(str(tmp_path)), preprocessor, raw, rows) is None
    for row in ({"user": 1.5}, {"user": 2**64}, {"age": "x"}, {"age": 1e19}, {"shop": "x"}, {"tags": [["a"]]}):
        fails_with(ValueError, f"row 1: {next(iter(row))} must be", Encoder(str(tmp_path)).encode, [{}, row])
