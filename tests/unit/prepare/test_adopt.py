"""Adopted arrays of TorchRec's scripts: training matches raw rows, and invalid arrays are
rejected.
"""

import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.click_models import make_app
from builders.faults import flip, rejects
from builders.requests import post
from builders.runs import QUIET, events_of, train
from builders.torchrec_scripts import (
    PARTS,
    torchrec_criteo,
    write_contiguous_and_shuffled,
    write_npy,
)

import rayrec
from rayrec import cli, predict, recipes
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.extension import extension_rules
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.materialized import dataset
from rayrec.data.text import mds
from rayrec.data.text.mds import TokenRows
from rayrec.data.text.text_blocks import open_tokens
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer
from rayrec.inference.model import open_served
from rayrec.observe.console import Console
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.language import GPT2Config
from rayrec.workloads.language_model import row_losses

ROWS = [700, 650, 301]
SEGMENT = 128
adopt = functools.partial(rayrec.adopt, console=QUIET)


@pytest.fixture(scope="module")
def npy(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three days like TorchRec's first script: hashed int64 IDs."""
    folder = tmp_path_factory.mktemp("torchrec")
    lines = iter((click_log / "train.txt").read_bytes().splitlines(keepends=True))
    days = [folder / f"day_{number}" for number in range(3)]
    for day, rows in zip(days, ROWS, strict=True):
        day.write_bytes(b"".join(itertools.islice(lines, rows)))
    write_npy(days, folder / "npy")
    return folder / "npy"


@pytest.fixture(scope="module")
def arrays(npy: Path) -> Path:
    """Write three days like all three scripts: contiguous int32 IDs, shuffled except for the last
    day, whose IDs stay int64.
    """
    write_contiguous_and_shuffled(npy, npy.parent / "arrays", rows=ROWS, threshold=2)
    return npy.parent / "arrays"


@pytest.fixture(scope="module")
def adopted(arrays: Path) -> Path:
    """Adopt a copy, because other tests adopt `arrays` themselves."""
    adopt(str(arrays), out=str(arrays.parent / "adopted"), rows_per_segment=SEGMENT)
    return arrays.parent / "adopted"


@pytest.fixture(scope="module")
def raw(arrays: Path, adopted: Path) -> Path:
    """Write the rows of `arrays` as a raw log: a Parquet file per day, with row groups as large as
    the segments of `adopted`.
    """
    folder = arrays.parent / "raw"
    folder.mkdir()
    for number in range(len(ROWS)):
        dense, sparse, labels = loaded(arrays, f"day_{number}")
        write_raw(folder / f"day_{number}.parquet", dense, list(sparse.T), labels)
    return folder


def loaded(folder: Path, day: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dense, sparse, labels = (np.load(folder / f"{day}_{part}.npy") for part in PARTS)
    return dense, sparse, labels


def write_raw(path: Path, dense: np.ndarray, ids: list[np.ndarray], labels: np.ndarray) -> None:
    columns = {"label": labels.reshape(-1)}
    columns |= {f"int_{number}": values for number, values in enumerate(dense.T)}
    columns |= {
        f"cat_{number}": values if values.ndim == 1 else values.tolist()
        for number, values in enumerate(ids)
    }
    pq.write_table(pa.table(columns), path, row_group_size=SEGMENT)


def config_of(path: Path, runs: Path, name: str, **changes: Any) -> TrainConfig:
    settings = {
        "steps": 16,
        "batch_size": 64,
        "evaluate_every": 8,
        "checkpoint": {"every": 8, "num_to_keep": 3},
        "workload": {
            "model": {
                "embedding_dim": 8,
                "bottom_mlp": (16, 8),
                "top_mlp": (16, 1),
                "cross_low_rank": 4,
            },
            "sparse_optimizer": {"learning_rate": 0.1},
        },
        "scaling": {"num_workers": 1, "use_gpu": False},
        "train_data": {"files": (), "block_bytes": 3 << 15, "segments_per_block": 4},
    }
    return recipes.mlperf_dcnv2(str(path)).updated(
        {
            **settings,
            "storage_path": str(runs),
            "name": name,
            **changes,
        }
    )


def from_raw(config: TrainConfig, adopted: Path) -> TrainConfig:
    """Return the counterpart of `config` for the raw log of adopted rows."""
    path = str(adopted / "preprocessor")
    preset = {"multi_hot": None, "split": {"kind": "last_file"}}
    schema = Preprocessor.load(path).schema.to_dict()
    return config.updated({"workload": {"schema": schema, "preprocessor": path, "preset": preset}})


def read(folder: Path, order: np.ndarray | None = None) -> EncodedRows:
    opened = dataset.open_preprocessed(str(folder), verify=True)
    order = np.arange(opened.index.rows, dtype=np.int64) if order is None else order
    return dataset.read(opened.index.segments, order, Preprocessor.load(opened.preprocessor))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.fixture
def folder(arrays: Path, tmp_path: Path) -> Path:
    """Copy the arrays, to change or adopt them."""
    return shutil.copytree(arrays, tmp_path / "arrays")


# -- what is written
def test_adopt_writes_only_manifest_and_preprocessor(folder: Path) -> None:
    before = contents(folder)
    made = adopt(str(folder))
    assert contents(folder) == before
    assert {path.name for path in folder.iterdir()} == {*before, "dataset.json", "preprocessor"}
    assert (made["rows"], made["bad_rows"], made["format"], made["labelled"]) == (
        sum(ROWS),
        0,
        "npy",
        True,
    )
    assert made["sets"] == {"train": [0, 1350], "validation": [1350, 1501], "test": [1501, 1651]}
    dense, ids, labels = map(
        np.concatenate,
        zip(*(loaded(folder, f"day_{day}") for day in range(3)), strict=True),
    )
    assert (made["num_embeddings"], made["modulo"]) == ((ids.max(axis=0) + 1).tolist(), [])
    rows = read(folder)
    for found, expected in (
        (np.array(rows.ids), ids.T),
        (rows.dense, dense),
        (rows.label, labels[:, 0]),
    ):
        np.testing.assert_array_equal(found, expected)
    rejects(r"already has a dataset\.json, .*Remove its dataset\.json", adopt, str(folder))


def test_adopt_splits_last_day_like_torchrec(arrays: Path, adopted: Path) -> None:
    sets = dataset.open_preprocessed(str(adopted)).sets
    paths = [[str(arrays / f"day_2_{part}.npy")] for part in PARTS]
    with torchrec_criteo() as criteo:
        for stage, name in (("val", "validation"), ("test", "test")):
            batches = [
                *criteo.InMemoryBinaryCriteoIterDataPipe(
                    stage,
                    *paths,
                    batch_size=64,
                    rank=0,
                    world_size=1,
                )
            ]
            rows = read(adopted, np.arange(*sets[name], dtype=np.int64))
            np.testing.assert_array_equal(
                np.concatenate([b.dense_features.numpy() for b in batches]),
                rows.dense,
            )
            got = np.concatenate([b.sparse_features["cat_9"].values().numpy() for b in batches])
            np.testing.assert_array_equal(got, rows.ids[9])


def test_adopt_reads_mixed_types_and_takes_large_ids_modulo(
    adopted: Path,
    npy: Path,
    tmp_path: Path,
) -> None:
    order = np.random.default_rng(0).permutation(sum(ROWS))
    rows = read(adopted)
    ordered = read(adopted, order)
    assert ordered.ids[0].dtype == np.int32
    np.testing.assert_array_equal(np.array(ordered.ids), np.array(rows.ids)[:, order])
    np.testing.assert_array_equal(ordered.dense, rows.dense[order])
    folder = shutil.copytree(npy, tmp_path / "npy")
    negative = np.load(folder / "day_1_sparse.npy")
    negative[5, 3] = -17
    np.save(folder / "day_1_sparse.npy", negative)
    sizes = [100 + number for number in range(26)]
    rejects(r"column 3 has ID -17. .*--num-embeddings-per-feature", adopt, str(folder))
    made = adopt(str(folder), num_embeddings_per_feature=sizes)
    assert made["num_embeddings"] == sizes
    assert len(made["modulo"]) > 20
    with torchrec_criteo() as criteo:
        paths = [
            [str(folder / f"day_{number}_{part}.npy") for number in range(3)] for part in PARTS
        ]
        read_batches = criteo.InMemoryBinaryCriteoIterDataPipe
        (batch,) = read_batches(
            "train",
            *paths,
            batch_size=sum(ROWS),
            rank=0,
            world_size=1,
            hashes=sizes,
        )
    expected = batch.sparse_features.values().numpy().reshape(26, -1)
    np.testing.assert_array_equal(np.array(read(folder).ids), expected)
    assert expected[3, ROWS[0] + 5] == -17 % 103


def test_adopt_notes_hashed_ids(
    npy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        max(rayrec.adopt(str(npy), out=str(tmp_path / "out"), console=Console())["num_embeddings"])
        > 2**31
    )
    assert "columns have IDs above the number of rows" in capsys.readouterr().err


# -- training and after
@pytest.fixture(scope="module")
def runs(adopted: Path, raw: Path) -> tuple[Path, Path]:
    """Train on adopted arrays, and on the same raw rows."""
    folder = adopted.parent / "runs"
    train(config_of(adopted, folder, "adopted"))
    train(from_raw(config_of(raw, folder, "raw"), adopted))
    return folder / "adopted", folder / "raw"


def find_summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_adopted_training_matches_raw_training(
    runs: tuple[Path, Path],
    adopted: Path,
    tmp_path: Path,
) -> None:
    adopted_run, other = map(find_summary, runs)
    assert adopted_run["weights_sha256"] == other["weights_sha256"]
    for name in (
        "preprocessor",
        "rows_of_sets",
        "metrics",
        "validation",
        "rows",
    ):
        assert adopted_run[name] == other[name], name
    # Resumes from the second last checkpoint, in the middle of the epoch.
    run = shutil.copytree(runs[0], tmp_path / "adopted")
    shutil.rmtree(run / "checkpoints" / "step_00000016")
    (run / "summary.json").unlink()
    assert (
        train(config_of(adopted, tmp_path, "adopted")).summary["weights_sha256"]
        == find_summary(runs[0])["weights_sha256"]
    )
    assert [event["step"] for event in events_of(run, "start")] == [0, 8]


def test_adopted_scores_match_raw_scores(
    runs: tuple[Path, Path],
    adopted: Path,
    raw: Path,
    arrays: Path,
    tmp_path: Path,
) -> None:
    """Compares evaluate, predict, an export of the model, and HTTP, with unchanged numbers and IDs
    in the request.
    """
    run = str(runs[0])
    assert rayrec.evaluate(run, str(adopted)) == rayrec.evaluate(run, str(raw))
    for name, path in (("of-adopted", adopted), ("of-raw", raw)):
        predict(run, str(path), out=str(tmp_path / name))
    scores = pq.read_table(tmp_path / "of-adopted")
    assert scores == pq.read_table(tmp_path / "of-raw")
    rayrec.export(run, out=str(tmp_path / "export"))
    dense, sparse, _ = loaded(arrays, "day_0")
    names = [*(f"int_{number}" for number in range(13)), *(f"cat_{number}" for number in range(26))]
    rows = [
        dict(zip(names, [*dense[row].tolist(), *sparse[row].tolist()], strict=True))
        for row in range(40)
    ]
    for source in (run, str(tmp_path / "export")):
        app = make_app(open_served(source))
        found = post(app, {"rows": rows}).json()
        np.testing.assert_allclose(
            found["logits"],
            scores["logit"][:40].to_numpy(),
            rtol=1e-5,
            atol=1e-6,
        )
        wrong = post(app, {"rows": [{**rows[0], "cat_3": "7e0ccccf"}]})
        assert (wrong.status, wrong.json()["error"]["field"]) == (400, "cat_3")


def test_adopt_reuses_preprocessor_of_run_and_plans_tables(
    runs: Any,
    arrays: Path,
    adopted: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(arrays, tmp_path / "more", ignore=shutil.ignore_patterns("day_[01]*"))
    assert adopt(str(folder), out=str(tmp_path / "own"))["preprocessor"]
    rejects(
        r"adopt it with the model's: --preprocessor RUN --out DIR",
        rayrec.evaluate,
        str(runs[0]),
        str(tmp_path / "own"),
    )
    assert (
        adopt(str(folder), preprocessor=str(runs[0]))["preprocessor"]
        == find_summary(runs[0])["preprocessor"]
    )
    assert rayrec.evaluate(str(runs[0]), str(folder))["rows"] == ROWS[2]
    changed = config_of(adopted, tmp_path, "two").updated(
        {"eval_data": {"path": str(folder), "files": ()}}
    )
    assert train(changed).summary["rows_of_sets"] == {"train": sum(ROWS), "validation": ROWS[2]}
    size = Preprocessor.load(str(adopted / "preprocessor")).num_embeddings[9]
    assert re.search(
        rf"^cat_9 +{size:,} ",
        rayrec.plan(config_of(adopted, tmp_path, "planned")),
        re.MULTILINE,
    )


# -- bags of ids
def test_multi_hot_arrays_match_lists(arrays: Path, tmp_path: Path) -> None:
    """Archives like those of materialize_synthetic_multihot_dataset.py, without labels and dense
    features.
    """
    bags = tmp_path / "bags"
    raw = tmp_path / "raw"
    bags.mkdir()
    raw.mkdir()
    rng = np.random.default_rng(1)
    for number, rows in enumerate(ROWS):
        dense, sparse, labels = loaded(arrays, f"day_{number}")
        sizes = enumerate((3, 1, *(1,) * 23, 2))
        ids = [
            np.c_[sparse[:, [n]], rng.integers(0, 50, (rows, size - 1))].astype(np.int32)
            for n, size in sizes
        ]
        np.savez(
            bags / f"day_{number}_sparse_multi_hot.npz",
            **{str(column): each for column, each in enumerate(ids)},
        )
        plain = [each[:, 0] if each.shape[1] == 1 else each for each in ids]
        write_raw(raw / f"day_{number}.parquet", dense, plain, labels)
    both = {"sparse_path": str(bags), "ids": "sparse_multi_hot", "rows_per_segment": SEGMENT}
    rejects(r"^sparse_path: must be used with --out DIR", adopt, str(arrays), **both)
    made = adopt(str(arrays), out=str(tmp_path / "out"), **both)
    assert (made["format"], made["rows"], made["num_embeddings"][0] >= 50) == (
        "npz",
        sum(ROWS),
        True,
    )
    adopted_run = train(config_of(tmp_path / "out", tmp_path, "mine", steps=6))
    other = from_raw(config_of(raw, tmp_path, "other", steps=6), tmp_path / "out")
    assert train(other).summary["weights_sha256"] == adopted_run.summary["weights_sha256"]
    adopted = rayrec.evaluate(adopted_run.checkpoint, str(tmp_path / "out"))
    assert 0 < adopted["training_rows"] < sum(ROWS)
    assert rayrec.evaluate(adopted_run.checkpoint, str(raw)) == adopted
    rows = pq.read_table(raw / "day_0.parquet").slice(0, 1).to_pylist()
    assert (
        len(post(make_app(open_served(adopted_run.checkpoint)), {"rows": rows}).json()["scores"])
        == 1
    )


# -- what is faulty
def changed(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    array = np.load(folder / name)
    result = change(array)
    np.save(folder / name, array if result is None else result)


def test_adopt_skips_invalid_rows(folder: Path) -> None:
    """Invalid: an infinite number, which TorchRec's scripts before June 2025 write for -3, and a
    label other than 0 and 1.
    """
    dense, labels = (np.load(folder / f"day_0_{part}.npy") for part in ("dense", "labels"))
    dense[[0, 131, 132], 2] = (-np.inf, np.nan, np.inf)
    labels[[200, 0]] = 2
    np.save(folder / "day_0_dense.npy", dense)
    np.save(folder / "day_0_labels.npy", labels)
    rejects(
        r"4 invalid rows \(3 x a number is not finite, 1 x label is not 0 or 1\); first: .*at row "
        r"0",
        adopt,
        str(folder),
    )
    made = adopt(str(folder), max_bad_fraction=0.01, rows_per_segment=100)
    assert (made["bad_rows"], made["rows"]) == (4, sum(ROWS) - 4)
    kept = np.delete(dense, [0, 131, 132, 200], axis=0)
    expected = np.concatenate([kept, *(np.load(folder / f"day_{day}_dense.npy") for day in (1, 2))])
    np.testing.assert_array_equal(read(folder).dense, expected)


def test_unlabelled_arrays_are_scored_but_not_evaluated(
    runs: tuple[Path, Path],
    folder: Path,
    tmp_path: Path,
) -> None:
    changed(folder, "day_2_labels.npy", lambda labels: np.full_like(labels, -1))
    rejects(
        r"^day_2: all labels are -1, .* Exclude it with --files day_0 day_1\.$",
        adopt,
        str(folder),
    )
    assert not adopt(str(folder), files=("day_2",), preprocessor=str(runs[0]))["labelled"]
    rejects("has no labels to evaluate against", rayrec.evaluate, str(runs[0]), str(folder))
    assert predict(str(runs[0]), str(folder), out=str(tmp_path / "scores"))["rows"] == ROWS[2]


def as_bags(folder: Path, name: str, save: Callable[..., None]) -> None:
    for day in range(3):
        (folder / f"day_{day}_sparse.npy").unlink()
        save(
            folder / f"day_{day}_sparse_multi_hot.npz",
            **{name: np.zeros((ROWS[day], 2), np.int32)},
        )


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (
            lambda f: (f / "day_1_labels.npy").unlink(),
            {},
            r"day_1_labels\.npy not found\. .*--files",
        ),
        (
            lambda f: os.truncate(f / "day_1_sparse.npy", 1000),
            {},
            r"by its header, got 1,000\. Copy it again",
        ),
        (
            lambda f: changed(f, "day_1_dense.npy", lambda x: x[:-1]),
            {},
            r"day_1_labels\.npy: must have 649 rows .* got 650",
        ),
        (
            lambda f: changed(f, "day_1_dense.npy", lambda x: x[:, 1:]),
            {},
            r"array dense must have 13 columns .* got 12",
        ),
        (
            lambda f: changed(f, "day_0_dense.npy", lambda x: x.astype(np.float64)),
            {},
            "must be float of 32 bits, got float64",
        ),
        (
            lambda f: changed(f, "day_0_sparse.npy", lambda x: x.astype(np.float32)),
            {},
            "int of 32 or 64 bits, got float32",
        ),
        (
            lambda f: changed(f, "day_1_dense.npy", np.asfortranarray),
            {},
            "must be stored row by row. Write it again with",
        ),
        (
            lambda f: (f / "day_1_labels.npy").write_bytes(b"nothing of the kind"),
            {},
            r"day_1_labels\.npy: not a NumPy array",
        ),
        (
            lambda f: as_bags(f, "0", np.savez_compressed),
            {},
            "is compressed and cannot be mapped. Write it with",
        ),
        (lambda f: as_bags(f, "1", np.savez), {}, "arrays must be 0, 1, 2, ..., got 1.npy"),
        (
            lambda f: (f / "day_0_sparse_multi_hot.npz").write_bytes(b"PK"),
            {},
            r"Choose one with --ids sparse\.$",
        ),
        (
            lambda f: [
                changed(
                    f,
                    f"day_{n}_labels.npy",
                    lambda x: np.resize(np.arange(1, 6, dtype=x.dtype), x.shape),
                )
                for n in range(3)
            ],
            {},
            r"found 1, 2, 3, 4, 5 in column labels; derive one, such as labels >= 4$",
        ),
        (
            lambda f: None,
            {"num_embeddings_per_feature": (5, 6)},
            "must match the 26 columns of day_0_sparse.npy, got 2",
        ),
        (lambda f: None, {"files": ("day_7",)}, r"day_7_dense\.npy not found"),
        (
            lambda f: None,
            {"split": "days", "parts": {"validation_days": 2, "test_days": 2}},
            "leave none for training",
        ),
    ],
)
def test_adopt_rejects_invalid_arrays_in_one_line(
    folder: Path,
    spoil: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    spoil(folder)
    rejects(message, adopt, str(folder), **options)
    assert not (folder / "dataset.json").exists()


def test_training_rejects_changed_array(folder: Path, tmp_path: Path) -> None:
    adopt(str(folder))
    changed(folder, "day_1_sparse.npy", lambda ids: ids[::-1])
    rejects(
        r"day_1_sparse\.npy: checksum does not match",
        train,
        config_of(folder, tmp_path, "run"),
    )


def test_unadopted_arrays_name_command_and_extend_nothing(
    npy: Path,
    tmp_path: Path,
    adopted: Path,
) -> None:
    rejects(
        r"of TorchRec's scripts; `rayrec adopt [^`]*npy` checks",
        train,
        config_of(npy, tmp_path, "run"),
    )
    rejects(
        "so it has no vocabulary to extend",
        extension_rules,
        Preprocessor.load(str(adopted / "preprocessor")),
        "here",
    )


def test_adopt_command_returns_summary(
    arrays: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.run(
            [
                "adopt",
                str(arrays),
                "--out",
                str(tmp_path / "out"),
                "--num-embeddings-per-feature",
                ",".join(["40"] * 26),
                "--files",
                "day_1",
                "day_2",
                "--split",
                "none",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert (made["days"], made["sets"], made["num_embeddings"]) == (
        ["day_1", "day_2"],
        {},
        [40] * 26,
    )
    assert (tmp_path / "out" / "day_1_dense.npy").is_symlink()


def test_adopt_rejects_ids_above_table_limit(folder: Path) -> None:
    def put_id(value: int) -> None:
        changed(
            folder,
            "day_0_sparse.npy",
            lambda ids: np.where(np.indices(ids.shape).sum(0), ids.astype(np.int64), value),
        )

    put_id(2**40)
    rejects(
        r"IDs of column 0 must be below 1,099,511,627,776, got 1,099,511,627,776\. Use",
        adopt,
        str(folder),
    )
    assert not (folder / "dataset.json").exists()
    sizes = (2**40 + 1,) * 26
    rejects(
        "must be from 1 to 1,099,511,627,776, got 1,099,511,627,777",
        adopt,
        str(folder),
        num_embeddings_per_feature=sizes,
    )
    put_id(2**40 - 1)
    adopt(str(folder))
    assert Preprocessor.load(str(folder / "preprocessor")).num_embeddings[0] == 2**40


# -- Adopted shards of MosaicML's writer: training matches rayrec's, and invalid shards are rejected
BLOCK = 16
TOKEN_ROWS = np.random.default_rng(0).integers(0, 260, (60, BLOCK))
Sample = Callable[[np.ndarray], dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer with IDs below 260."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(bytes_bpe(["the cat and the hat and the bat"] * 4, 260), str(folder))
    return folder


def cells(name: str, dtype: str, **others: Any) -> Sample:
    """Return the function of a row's cells: its tokens as a type, and other columns."""
    return lambda row: {name: row.astype(dtype), **others}


FIXED = {"tokens": "ndarray:uint16:16"}
fixed = cells("tokens", "uint16")
OTHERS = {"attention_mask": "ndarray:uint8", "input_ids": "ndarray:int64", "label": "int"}
others = cells("input_ids", "int64", attention_mask=np.ones(BLOCK, np.uint8), label=3)


def write(
    folder: Path,
    columns: dict[str, str],
    sample: Sample,
    rows: Iterable[np.ndarray] = TOKEN_ROWS,
    **options: Any,
) -> Path:
    with mds.load_streaming().MDSWriter(
        out=str(folder),
        columns=columns,
        size_limit=1200,
        **options,
    ) as writer:
        for row in rows:
            writer.write(sample(row))
    return folder


def adopted_rows(place: str, cache: Path) -> np.ndarray:
    tokens = open_tokens(place)
    rows = TokenRows(
        tokens.set_path("train"),
        column=tokens.columns["train"],
        cache_folder=str(cache),
    )
    assert len(rows.chunk_rows) > 1
    order = np.random.default_rng(1).permutation(len(rows))
    rows.will_read(order[:7])
    found = rows.read(order)["tokens"]
    rows.close()
    assert found.dtype == np.int64
    return found[np.argsort(order)]


@pytest.mark.parametrize(
    ("columns", "sample", "options"),
    [
        (
            {"tokens": "ndarray:int32:16"},
            cells("tokens", "int32"),
            {},
        ),
        (
            {"tokens": "ndarray:int32"},
            cells("tokens", "int32"),
            {"hashes": ["sha1", "xxh64"]},
        ),
        (
            {"input_ids": "ndarray"},
            cells("input_ids", "uint16"),
            {"compression": "zstd:7"},
        ),
        (
            {"tokens": "bytes"},
            lambda row: {"tokens": row.astype(np.int64).tobytes()},
            {"compression": "gz"},
        ),
        (OTHERS, others, {"compression": "br:2", "hashes": ["md5"]}),
        (
            {"ids": "ndarray:uint32:16"},
            cells("ids", "uint32"),
            {"compression": "snappy"},
        ),
        (
            {"ids": "ndarray:uint16:16"},
            cells("ids", "uint16"),
            {"compression": "bz2"},
        ),
    ],
    ids=[
        "fixed",
        "dynamic",
        "any-zstd",
        "bytes-gz",
        "others-br",
        "snappy",
        "bz2",
    ],
)
def test_adopted_shards_keep_rows(
    tmp_path: Path,
    tokenizer: Path,
    columns: dict[str, str],
    sample: Sample,
    options: Any,
) -> None:
    folder = write(tmp_path / "set", columns, sample, **options)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = adopt(str(folder), tokenizer=str(tokenizer))
    assert (made["block_size"], made["sets"]["train"]["blocks"]) == (BLOCK, 60)
    for place in (str(folder), f"file://{folder}"):  # the latter takes the way of a store's
        np.testing.assert_array_equal(adopted_rows(place, tmp_path / "cache"), TOKEN_ROWS)
    assert {path.name for path in folder.iterdir()} == {*before, "manifest.json", "tokenizer"}
    assert all((folder / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_adopt_writes_next_to_shards_at_url(
    tmp_path: Path,
    tokenizer: Path,
    compression: str | None,
) -> None:
    columns = {"tokens": "ndarray:int32"}
    sample = cells("tokens", "int32")
    folder = write(tmp_path / "set", columns, sample, compression=compression, hashes=["xxh64"])
    url = f"file://{folder}"
    rejects(
        f"`rayrec adopt {url} --tokenizer DIR`",
        train,
        recipes.gpt2_tiny(url),
        name="advised",
        storage_path=str(tmp_path),
    )
    rejects(
        "use a local --out",
        adopt,
        str(folder),
        tokenizer=str(tokenizer),
        out=f"file://{tmp_path}/out",
    )
    rejects(
        "MDS shards not found, no index.json",
        adopt,
        f"file://{tmp_path}",
        tokenizer=str(tokenizer),
    )
    rejects(r"no MDS shards .* arrays must be on a file system", adopt, f"file://{tmp_path}")
    assert (
        adopt(url, tokenizer=str(tokenizer), out=f"file://{tmp_path}/out")["out"]
        == f"file://{tmp_path}/out"
    )
    assert not (folder / "manifest.json").exists()
    assert adopt(url, tokenizer=str(tokenizer))["out"] == url
    for path in (url, str(tmp_path / "out")):
        np.testing.assert_array_equal(adopted_rows(path, tmp_path / "cache"), TOKEN_ROWS)


def test_adopted_shards_match_rayrec_shards_in_training(tmp_path: Path, tokenizer: Path) -> None:
    """Equal tokens, written by rayrec and by MosaicML's writer, compressed and with other columns.
    Linked, not copied.
    """
    for name, rows in (("train", TOKEN_ROWS[:48]), ("val", TOKEN_ROWS[48:])):
        write(tmp_path / "theirs" / name, OTHERS, others, rows, compression="zstd")
    out = tmp_path / "adopted"
    adopt(str(tmp_path / "theirs"), out=str(out), tokenizer=str(tokenizer))
    assert (out / "val").is_symlink()
    theirs = json.loads((out / "manifest.json").read_text())
    assert {name: found["blocks"] for name, found in theirs["sets"].items()} == {
        "train": 48,
        "validation": 12,
    }
    own = tmp_path / "own"
    for name, rows in (("train", TOKEN_ROWS[:48]), ("validation", TOKEN_ROWS[48:])):
        mds.write_index(
            str(own / name),
            [mds.write_shard(rows.astype(np.uint16), str(own / name / "shard.00000.mds"))],
        )
    write_tokenizer(
        {path.name: path.read_bytes() for path in tokenizer.iterdir()},
        str(own / "tokenizer"),
    )
    sets = {name: {"blocks": found["blocks"]} for name, found in theirs["sets"].items()}
    (own / "manifest.json").write_text(json.dumps({**theirs, "sets": sets}))
    found = [
        trained(path, tmp_path / "runs", train_data={"shuffle": "none"}) for path in (out, own)
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert rayrec.evaluate(str(tmp_path / "runs" / "adopted"), str(out))["loss"] == pytest.approx(
        found[0]["metrics"]["loss"]
    )


def trained(path: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    config = recipes.gpt2_tiny(str(path)).replace(
        workload={
            "model": {
                "n_layer": 1,
                "n_head": 2,
                "n_embd": 16,
                "n_positions": BLOCK,
            },
            "max_new_tokens": 2,
        },
        scaling={"num_workers": 1},
        train_data={"shuffle": "window", "segments_per_block": 2},
        steps=6,
        batch_size=8,
    )
    return train(
        config,
        storage_path=str(runs),
        name=path.name,
        **changes,
    ).summary


@pytest.mark.parametrize("layout", ["pack", "pad"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_unequal_length_are_packed_or_padded(
    tmp_path: Path,
    tokenizer: Path,
    layout: str,
    compression: Any,
) -> None:
    rows = [
        row[: 2 + number % 20]
        for number, row in enumerate(np.random.default_rng(2).integers(1, 260, (60, 22)))
    ]
    columns = {"attention_mask": "ndarray:uint8", "input_ids": "ndarray:int64"}

    def sample(row: np.ndarray) -> dict[str, Any]:
        return {"attention_mask": np.ones(len(row), np.uint8), "input_ids": row.astype(np.int64)}

    folder = write(tmp_path / "set", columns, sample, rows, compression=compression)
    made = adopt(
        str(folder),
        tokenizer=str(tokenizer),
        rows=layout,
        block_size=BLOCK,
    )
    expected: list[np.ndarray] = []
    rest = iter(rows)
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        shard_rows = [*itertools.islice(rest, shard["samples"])]
        if layout == "pack":
            joined = np.concatenate([np.append(row, made["end_token"]) for row in shard_rows])
            expected += [
                joined[start : start + BLOCK] for start in range(0, len(joined) - BLOCK + 1, BLOCK)
            ]
        else:
            expected += [np.pad(row[:BLOCK], (0, BLOCK - len(row[:BLOCK]))) for row in shard_rows]
    np.testing.assert_array_equal(adopted_rows(str(folder), tmp_path / "cache"), np.stack(expected))
    train_set = made["sets"]["train"]
    inserted = len(rows) if layout == "pack" else 0
    assert train_set["blocks"] == len(expected)
    assert train_set["tokens"] + train_set["tokens_left_out"] in range(
        sum(map(len, rows)),
        sum(map(len, rows)) + inserted + 1,
    )
    summary = trained(folder, tmp_path / "runs", eval_data={"path": str(folder)})
    assert summary["rows_of_sets"]["train"] == len(expected)
    assert 4 < summary["metrics"]["loss"] < 6  # near log(260)


def test_padded_loss_matches_loss_of_rows() -> None:
    model = (
        GPT2Config(
            n_layer=1,
            n_head=2,
            n_embd=16,
            n_positions=BLOCK,
            dropout=0.0,
        )
        .build(260)
        .eval()
    )
    tokens = torch.from_numpy(TOKEN_ROWS[:4].copy())
    lengths = torch.tensor([16, 7, 2, 1])
    losses = row_losses(model, tokens * (torch.arange(BLOCK) < lengths[:, None]), lengths)
    for row, length, loss in zip(tokens[:3], lengths.tolist()[:3], losses[:3], strict=True):
        torch.testing.assert_close(loss, row_losses(model, row[None, :length])[0])
    assert losses[3] == 0


def flipped(folder: Path) -> Path:
    """Flip a bit of the second shard."""
    flip(sorted(folder.glob("shard*"))[1], -9, bit=4)
    return folder


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda f: write(f, FIXED, fixed),
            {"tokenizer": None},
            r"Specify the tokenizer .* --tokenizer DIR$",
        ),
        (
            lambda f: write(f, {"text": "str"}, lambda row: {"text": "a cat"}),
            {},
            r"is text, not tokens\. .*--format mds",
        ),
        (
            lambda f: write(f, {"a": "ndarray:uint16:16", "b": "int"}, cells("a", "uint16", b=1)),
            {},
            r"its rows have a \(ndarray:uint16:16\), b \(int\)\. Name the token column with "
            r"--column\.$",
        ),
        (lambda f: write(f, FIXED, fixed), {"column": "ids"}, r"with --column, ids not found\.$"),
        (
            lambda f: write(f, {"tokens": "json"}, lambda row: {"tokens": row.tolist()}),
            {},
            "integers or bytes, got json",
        ),
        (
            lambda f: write(
                f,
                {"tokens": "ndarray:int32"},
                lambda row: {"tokens": row[: 5 + row[0] % 2].astype(np.int32)},
            ),
            {},
            r"all rows must have \d tokens of int32\. Adopt them with --rows pack",
        ),
        (
            lambda f: write(f, {"tokens": "ndarray"}, cells("tokens", "float32")),
            {},
            "must be arrays of integers",
        ),
        (
            lambda f: write(
                f,
                {"tokens": "bytes"},
                lambda row: {"tokens": row.astype(np.int32).tobytes()},
            ),
            {},
            r"below 260, the size of the tokenizer, .*another --token-dtype",
        ),
        (
            lambda f: write(f, FIXED, lambda row: fixed(row + 3)),
            {},
            r"tokens must be below 260, .*, got \d+ to 262",
        ),
        (
            lambda f: flipped(write(f, FIXED, fixed, hashes=["sha1"])),
            {},
            r"shard\.00001\.mds: damaged: sha1 must be",
        ),
        (
            lambda f: flipped(write(f, FIXED, fixed, compression="zstd", hashes=["md5"])),
            {},
            r"\.zstd: damaged: md5 must be",
        ),
        (
            lambda f: write(f, FIXED, fixed),
            {"split": "sevenths"},
            r"^--split: an option for arrays .*not for MDS shards",
        ),
    ],
)
def test_adopt_rejects_invalid_shards_in_one_line(
    tmp_path: Path,
    tokenizer: Path,
    make: Any,
    options: Any,
    message: str,
) -> None:
    folder = make(tmp_path / "set")
    rejects(message, adopt, str(folder), **{"tokenizer": str(tokenizer), **options})
    assert not (folder / "manifest.json").exists()


def test_unadopted_shards_error_names_command(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "set", FIXED, fixed))
    rejects(
        r"`rayrec adopt [^`]*set --tokenizer DIR`",
        train,
        recipes.gpt2_tiny(folder),
        scaling={"num_workers": 1},
    )
    rejects(
        r"must contain plain text, got MDS shards.*`rayrec adopt [^`]*set --tokenizer DIR`",
        rayrec.preprocess,
        folder,
        out=str(tmp_path / "out"),
        format="mds",
        console=QUIET,
    )
