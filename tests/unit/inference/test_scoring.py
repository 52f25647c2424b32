"""Scoring plans, and scoring by threads of this process: order, model loads, thread counts."""

import functools
import gzip
import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import click_models
from builders.click_models import SMALL, hashed_preprocessor, save_clicks
from builders.faults import fails_with, flip, raising, rejects

from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.job import JobFolder
from rayrec.data.log_source import LogSource
from rayrec.inference import predict as module
from rayrec.inference.config import EvaluationConfig
from rayrec.inference.evaluate import ScoredRows
from rayrec.inference.model import open_served
from rayrec.inference.predict import Parts
from rayrec.inference.result_tables import evaluation_text
from rayrec.inference.row_slices import slices_of
from rayrec.inference.scoring import Pool, plan_pool, scored_tables
from rayrec.metrics.binary import sigmoid
from rayrec.schema import Schema
from rayrec.workloads.recsys.scoring import cache_folder
from rayrec.workloads.scoring import Device, Scoring

GIB = 1 << 30
SCHEMA = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("i",),
    sparse=("c",),
)


def _node(cpus: float, memory: int = 64 * GIB, gpus: float = 0) -> Node:
    return Node("n", {"CPU": cpus, "memory": memory, **({"GPU": gpus} if gpus else {})})


def test_pool_size_fits_memory_and_cores() -> None:
    for nodes, weight_bytes, blocks, spare_cpus, expected in (
        ([_node(2)], GIB, 100, 0, Pool(2, 1, 0)),
        ([_node(2)], GIB, 100, 1, Pool(1, 1, 0)),
        ([_node(1)], GIB, 100, 0, Pool(1, 1, 0)),
        ([_node(1)], GIB, 100, 1, Pool(1, 0.5, 0)),
        (
            [_node(0.5)],
            GIB,
            100,
            0,
            Pool(1, 0.5, 0),
        ),
        ([_node(8)], GIB, 3, 0, Pool(3, 1, 0)),
        (
            [_node(16)],
            15 * GIB,
            100,
            0,
            Pool(4, 4, 0),
        ),  # memory holds four copies of the weights
        (
            [_node(16)],
            15 * GIB,
            100,
            1,
            Pool(3, 4, 0),
        ),
        (
            [_node(16)],
            60 * GIB,
            100,
            1,
            Pool(1, 15, 0),
        ),
        (
            [_node(8), _node(4), _node(0)],
            GIB,
            100,
            0,
            Pool(12, 1, 0),
        ),
        # the second holds none, the first six
        (
            [_node(8), _node(8, 2 * GIB)],
            9 * GIB,
            100,
            0,
            Pool(4, 2, 0),
        ),
    ):
        pool = plan_pool(
            nodes,
            weight_bytes=weight_bytes,
            blocks=blocks,
            spare_cpus=spare_cpus,
            device="cpu",
        )
        assert pool == expected
        assert pool.num_actors * pool.cpus_per_actor <= sum(node.resources["CPU"] for node in nodes)
    # Threads share the weights: 61 GB hold one copy.
    shared = {
        "weight_bytes": 60 * GIB,
        "spare_cpus": 0,
        "device": "cpu",
        "shared_weights": True,
    }
    for cpus, memory, blocks, threads in (
        (8, 64, 100, 8),
        (8, 61, 100, 8),
        (8, 64, 3, 3),
        (1, 64, 100, 1),
        (8, 64, 0, 1),
    ):
        assert plan_pool([_node(cpus, memory * GIB)], blocks=blocks, **shared) == Pool(
            threads,
            1,
            0,
        )


def test_pool_needs_cores() -> None:
    rejects(
        "got at most 0 B from Ray",
        plan_pool,
        [_node(0)],
        weight_bytes=GIB,
        blocks=9,
        spare_cpus=0,
        device="cpu",
    )


def test_pool_has_one_process_per_gpu() -> None:
    nodes = [_node(8, gpus=2), _node(8)]
    assert plan_pool(
        nodes,
        weight_bytes=GIB,
        blocks=9,
        spare_cpus=1,
        device="cuda",
    ) == Pool(2, 1, 1)
    assert plan_pool(
        nodes,
        weight_bytes=GIB,
        blocks=1,
        spare_cpus=1,
        device="cuda",
    ) == Pool(1, 1, 1)
    rejects(
        "GPU for cuda not found",
        plan_pool,
        [_node(8)],
        weight_bytes=GIB,
        blocks=1,
        spare_cpus=0,
        device="cuda",
    )


def test_oversized_weights_are_rejected_and_sigmoid_is_exact() -> None:
    plan = functools.partial(
        plan_pool,
        blocks=9,
        spare_cpus=0,
        device="cpu",
    )
    rejects(r"108 GB.*got at most 68\.7 GB from Ray", plan, [_node(8)], weight_bytes=100 * GIB)
    message = r"scoring needs 65\.5 GB of memory for the weights, got 65 GB of free memory"
    nodes = [_node(8, int(60.5 * GIB))]
    rejects(message, plan, nodes, weight_bytes=60 * GIB, shared_weights=True)
    scores = sigmoid(np.array([-200, -1, 0, 1, 200], np.float32))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [0, 0.26894143, 0.5, 0.7310586, 1], atol=1e-7)


LABELLED = b"1\t3\t0000000a\n"
UNLABELLED = b"3\t0000000a\n"


def test_has_labels_detects_label_column(tmp_path: Path) -> None:
    labelled = [
        LABELLED,
        LABELLED[:-1],
        b"\n" + LABELLED + UNLABELLED,
        b"nothing of the kind\n",
        b"",
    ]
    unlabelled = [
        UNLABELLED,
        UNLABELLED[:-1],
        b"\t\n",
        b"a header\n" + UNLABELLED,
        UNLABELLED * 20_000,
    ]
    for text in (*labelled, *unlabelled):
        for path, data in (
            (tmp_path / "log.tsv", text),
            (tmp_path / "log.gz", gzip.compress(text)),
        ):
            path.write_bytes(data)
            assert LogSource.at(str(path)).is_labelled(SCHEMA) is (text in labelled)


def test_empty_file_has_no_labels_and_cache_is_near_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.tsv").touch()
    (tmp_path / "b.tsv").write_bytes(UNLABELLED)
    assert LogSource.at(str(tmp_path)).is_labelled(SCHEMA) is False
    monkeypatch.delenv("RAYREC_CACHE", raising=False)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert cache_folder(str(checkpoint)).endswith(".cache/rayrec")
    (tmp_path / ".cache").mkdir()
    assert cache_folder(str(checkpoint)) == str(tmp_path / ".cache")
    monkeypatch.setenv("RAYREC_CACHE", "/elsewhere")
    assert cache_folder(str(checkpoint)) == "/elsewhere"


BLOCKS = 12


@dataclass
class Model:
    """Model that counts its loads, and records thread and operator threads of each block."""

    num_threads: int
    loads: list[str] = field(default_factory=list)
    scored: list[tuple[int, str, int]] = field(default_factory=list)
    broken: int | None = None

    def __post_init__(self) -> None:
        self._all_work = threading.Barrier(self.num_threads)

    def load(self, device: Device) -> Callable[[int], pa.Table]:
        assert device == "cpu"
        self.loads.append(threading.current_thread().name)

        def score(number: int) -> pa.Table:
            if number < self.num_threads:
                self._all_work.wait(60)  # each thread has one of the first blocks
            if number == self.broken:
                raise InputError("the log changed")
            self.scored.append((number, threading.current_thread().name, torch.get_num_threads()))
            return pa.table({"block": [number]})

        return score

    def scoring(self, *, thread_safe: bool) -> Scoring:
        return Scoring(
            (1,) * BLOCKS,
            self.load,
            raising(AssertionError("nothing is evaluated")),
            {},
            thread_safe=thread_safe,
        )


@pytest.mark.parametrize(("thread_safe", "num_loads"), [(True, 1), (False, 3)])
def test_blocks_are_ordered_and_model_loads_are_minimal(thread_safe: bool, num_loads: int) -> None:
    model = Model(num_threads=3)
    threads = torch.get_num_threads()
    before = {*threading.enumerate()}
    tables = scored_tables(
        model.scoring(thread_safe=thread_safe),
        pool=Pool(3, threads + 1, 0.0),
        device="cpu",
    )
    assert [table["block"][0].as_py() for table in tables] == [*range(BLOCKS)]
    assert len(model.loads) == num_loads
    assert len({thread for _, thread, _ in model.scored}) == 3
    assert {number for _, _, number in model.scored} == {threads + 1}
    assert torch.get_num_threads() == threads
    assert {*threading.enumerate()} <= before


def test_scoring_resumes_at_block_and_raises_errors_in_order() -> None:
    model = Model(num_threads=1)
    tables = scored_tables(
        model.scoring(thread_safe=True),
        pool=Pool(1, 1.0, 0.0),
        device="cpu",
        first_block=9,
    )
    assert [table["block"][0].as_py() for table in tables] == [9, 10, 11]
    assert [number for number, _, _ in model.scored] == [9, 10, 11]
    model = Model(num_threads=1, broken=2)
    threads = torch.get_num_threads()
    tables = scored_tables(
        model.scoring(thread_safe=False),
        pool=Pool(1, threads + 1, 0.0),
        device="cpu",
    )
    assert [next(tables)["block"][0].as_py() for _ in range(2)] == [0, 1]
    rejects(r"^the log changed$", next, tables)
    assert {number for number, _, _ in model.scored} <= {0, 1, 3, 4}  # those that ran ahead
    assert torch.get_num_threads() == threads


# -- Served model of every kind, which must score like the trained network and needs no training
# code
def _wide_ids() -> Preprocessor:
    preprocessor = hashed_preprocessor([40] * 26)
    preprocessor.__dict__["id_dtype"] = np.dtype(np.int64)
    return preprocessor


MAKES: dict[str, dict[str, Any]] = {
    "dot": {},
    "cross": {"model": SMALL.replace(interaction="cross")},
    "projection": {"model": SMALL.replace(interaction="projection")},
    "bf16": {"model": SMALL.replace(interaction="cross"), "precision": "bf16"},
    "multi-hot": {"preprocessor": click_models.multi_hot_preprocessor()},
    "bags": {"preprocessor": click_models.lists_preprocessor()},
    "no dense columns": {"preprocessor": click_models.bucketed_preprocessor()},
    "64-bit ids": {"preprocessor": _wide_ids()},
}


@pytest.mark.parametrize("make", MAKES)
def test_logits_match_network(make: str, tmp_path: Path) -> None:
    saved = save_clicks(tmp_path, **MAKES[make])
    served = open_served(str(tmp_path))
    assert (served.kind, served.scorer.quantization, served.source) == (
        "checkpoint",
        "fp32",
        str(saved.checkpoint),
    )
    assert served.preprocessor_hash == saved.preprocessor.hash()
    assert served.scorer.weight_bytes == sum(
        parameter.nbytes for parameter in saved.model.parameters()
    )
    for count in (200, 1, 0):
        rows = saved.rows(count)
        logits = served.score(rows)
        assert (logits.dtype, logits.shape) == (np.float32, (count,))
        np.testing.assert_allclose(logits, saved.logits(rows), rtol=0, atol=1e-6)


def test_version_depends_on_weights(tmp_path: Path) -> None:
    runs = [
        save_clicks(tmp_path / folder, seed=seed).run
        for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    one, same, other = (open_served(str(run)).version for run in runs)
    assert one == same != other
    assert re.fullmatch("step_00000007-[0-9a-f]{12}-fp32", one)


def test_concurrent_threads_score_equally(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path)
    served = open_served(str(tmp_path))
    batches = [saved.rows(64, seed=seed) for seed in range(20)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(served.score, batches))
    np.testing.assert_allclose(
        together,
        [served.score(batch) for batch in batches],
        rtol=0,
        atol=1e-6,
    )


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    rejects("contains no complete checkpoint", open_served, str(tmp_path))
    saved = save_clicks(tmp_path)
    (saved.checkpoint / "config.yaml").write_text("recipe: mnist_resnet18\n")
    rejects(r"config.yaml: damaged", open_served, str(tmp_path))
    shutil.rmtree(saved.checkpoint / "preprocessor")
    rejects(
        r"preprocessor/ not found.*Only click and retrieval models can be served",
        open_served,
        str(tmp_path),
    )


# -- Parquet files of predictions, with equal bytes for all table sizes and after kills
ROWS = 2300


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 1000)
    monkeypatch.setattr(module, "GROUP_ROWS", 300)


def _table() -> pa.Table:
    logits = np.random.default_rng(0).normal(size=ROWS).astype(np.float32)
    text = [f"text {n % 7}" for n in range(ROWS)]
    return pa.table(
        {
            "row": np.arange(ROWS),
            "logit": logits,
            "label": (logits > 0).astype(np.float32),
            "text": text,
        }
    )


def _pieces(size: int, start: int = 0) -> Iterator[pa.Table]:
    for begin in range(start, ROWS, size):
        yield _table().slice(begin, size)


def _complete(folder: Path, size: int = ROWS, *, start: int = 0) -> dict[str, bytes]:
    with Parts(JobFolder(str(folder))) as parts:
        assert parts.rows == start
        for chunk in _pieces(size, start):
            parts.write(chunk)
        assert parts.rows == ROWS
        parts.finish()
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "expected"
    folder.mkdir()
    result = _complete(folder)
    assert pq.read_table(folder).equals(_table())
    assert list(result) == [f"part-0000{number}.parquet" for number in range(3)]
    assert [pq.read_metadata(folder / name).num_rows for name in result] == [1000, 1000, 300]
    return result


@pytest.mark.parametrize("size", [1, 7, 300, 999, 1000, 1001, 2300])
def test_bytes_are_independent_of_table_sizes(
    tmp_path: Path,
    expected: dict[str, bytes],
    size: int,
) -> None:
    assert _complete(tmp_path, size) == expected


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("cut_bytes", [0, 1, 5, 400])
def test_interrupted_writer_resumes(
    tmp_path: Path,
    expected: dict[str, bytes],
    killed_after: int,
    cut_bytes: int,
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    killed = Parts(JobFolder(str(folder)))
    for chunk in itertools.islice(_pieces(400), killed_after):
        killed.write(chunk)
    (journal,) = folder.glob("_job/journal-*")
    size = journal.stat().st_size
    os.truncate(journal, max(0, size - cut_bytes))
    with Parts(JobFolder(str(folder))) as parts:
        written = min(killed_after * 400, ROWS)
        assert written - 400 <= parts.rows <= written
        assert (parts.rows == written) == (not cut_bytes or not size)
    assert _complete(folder, 350, start=parts.rows) == expected
    killed.__exit__()


def test_damaged_entry_ends_journal(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with Parts(JobFolder(str(tmp_path))) as parts:
        for chunk in itertools.islice(_pieces(100), 5):
            parts.write(chunk)
    journal = tmp_path / "_job" / "journal-00000"
    flip(journal, journal.stat().st_size * 3 // 5)  # in the fourth table
    assert _complete(tmp_path, 100, start=300) == expected


def test_resumes_after_kill_between_file_and_journal(
    tmp_path: Path,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module._Journal, "remove", raising(KeyboardInterrupt()))
        killed = Parts(JobFolder(str(tmp_path)))
        fails_with(KeyboardInterrupt, "", killed.write, _table())
        killed.__exit__()
    assert (tmp_path / "_job" / "journal-00000").exists()
    assert (tmp_path / "part-00000.parquet").exists()
    assert _complete(tmp_path, start=1000) == expected


def test_resumes_after_kill_behind_last_file(tmp_path: Path, expected: dict[str, bytes]) -> None:
    _complete(tmp_path)
    assert _complete(tmp_path, start=ROWS) == expected


# -- Metrics by slices: one slice per row, with the log's names, and their report
HEXADECIMAL = pa.chunked_array(
    [pa.array([0xA, 0xB, 0xA, None], pa.uint32()), pa.array([0xC, 0xA, 0xB], pa.uint32())]
)
TEXT = pa.chunked_array(
    [pa.array(part, pa.large_string()).dictionary_encode() for part in ([*"xyx", None], [*"zxy"])]
)


def _found(by: str, values: pa.ChunkedArray, maximum: int = 10) -> dict[str, list[int]]:
    result = slices_of(by, values, max_values=maximum)
    assert sorted(np.concatenate([chunk.rows for chunk in result]).tolist()) == list(
        range(len(values))
    )
    return {chunk.name: chunk.rows.tolist() for chunk in result}


def test_slices_by_value_frequency_and_day_keep_order() -> None:
    by_count = [
        ("0000000a", [0, 2, 5]),
        ("0000000b", [1, 6]),
        ("0000000c", [4]),
        ("(missing)", [3]),
    ]
    assert list(_found("c", HEXADECIMAL).items()) == by_count
    assert _found("c", HEXADECIMAL, maximum=1) == {
        "0000000a": [0, 2, 5],
        "(others)": [1, 4, 6],
        "(missing)": [3],
    }
    assert _found("c", TEXT, maximum=2) == {
        "x": [0, 2, 5],
        "y": [1, 6],
        "(others)": [4],
        "(missing)": [3],
    }
    assert _found("i", pa.chunked_array([pa.array([-3, 10**17, -3, None])])) == {
        "-3": [0, 2],
        str(10**17): [1],
        "(missing)": [3],
    }
    names = pa.array(["1", "2-9", "(not in the vocabulary)"], pa.large_string())
    blocks = [[2, None, 1], [0, 2]]
    values = pa.chunked_array(
        [pa.DictionaryArray.from_arrays(pa.array(block, pa.int32()), names) for block in blocks]
    )
    assert list(_found("frequency:c", values).items()) == [
        ("1", [3]),
        ("2-9", [2]),
        ("(not in the vocabulary)", [0, 4]),
        ("(missing)", [1]),
    ]

    def days(codes: list[int]) -> pa.Array:
        names = pa.array(["day_9", "day_10", "day_11"], pa.large_string())
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), names)

    assert list(_found("day", pa.chunked_array([days([0, 0, 1]), days([2])]))) == [
        "day_9",
        "day_10",
        "day_11",
    ]
    assert list(_found("day", pa.chunked_array([days([1, 1])]))) == ["day_10"]


def _sliced(rows: slice) -> pa.Table:
    return pa.table(
        {
            "row": np.arange(7)[rows],
            "logit": np.linspace(-1, 1, 7, dtype=np.float32)[rows],
            "label": np.array([0, 1, 0, 1, 1, 0, 1], np.float32)[rows],
            "key:c": HEXADECIMAL.combine_chunks()[rows],
            "key:t": TEXT.unify_dictionaries().combine_chunks()[rows],
        }
    )


def test_scored_rows_are_independent_of_table_sizes() -> None:
    full = ScoredRows(["c", "t"])
    chunks = ScoredRows(["c", "t"])
    other = ScoredRows()
    full.update(_sliced(slice(0, 7)))
    for start, stop in [(0, 3), (3, 4), (4, 7)]:
        chunks.update(_sliced(slice(start, stop)))
    other.update(_sliced(slice(1, 7)))
    assert (full.rows, full.checksums) == (chunks.rows, chunks.checksums)
    assert other.checksums != full.checksums
    np.testing.assert_array_equal(full.logits, chunks.logits)
    np.testing.assert_array_equal(full.labels, chunks.labels)
    for name, expected in (("c", HEXADECIMAL), ("t", TEXT)):
        assert (
            full.sliced.values(name).to_pylist()
            == chunks.sliced.values(name).to_pylist()
            == expected.to_pylist()
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"slice_top": 0}, "slice_top: must be at least 1, got 0", id="slice_top-0"),
        pytest.param(
            {"slice_by": ("day", "day")},
            "slice_by: values must be unique",
            id="slice_by-day-day",
        ),
        pytest.param(
            {"confidence": 1.5},
            "confidence: must be between 0 and 1, such as 0.95, got 1.5",
            id="confidence-1.5",
        ),
        pytest.param({"resamples": 1}, "resamples: must be at least 2, got 1", id="resamples-1"),
    ],
)
def test_evaluation_options_are_checked(options: dict[str, Any], message: str) -> None:
    rejects(message, EvaluationConfig().updated, options)


METRICS = {
    "auroc": 0.75,
    "logloss": 0.5,
    "normalized_entropy": None,
    "calibration": 1.01,
    "rows": 20_000,
}
DIFFERENCES = {
    "auroc": {
        "difference": 0.01,
        "low": 0.005,
        "high": 0.015,
        "p_value": 0.001,
        "method": "delong",
    },
    "normalized_entropy": {
        "difference": None,
        "low": None,
        "high": None,
        "p_value": None,
        "method": "bootstrap",
    },
}


def test_evaluation_text_is_readable() -> None:
    plain = evaluation_text({**METRICS, "checkpoint": "runs/a"})
    assert plain.splitlines()[0].split() == ["auroc", "0.75000"]
    assert "runs/a" in plain
    result = {
        **METRICS,
        "label_rate": 0.25,
        "intervals": {"auroc": [0.74, 0.76], "normalized_entropy": [None, None]},
        "resampling": {"confidence": 0.9, "resamples": 1000, "seed": 0},
        "checkpoint": "runs/a",
        "compared": {
            **METRICS,
            "auroc": 0.74,
            "differences": DIFFERENCES,
            "checkpoint": "runs/b",
        },
        "slices": {"cat_5": [{"value": "0000000a", **METRICS, "label_rate": 0.1}]},
    }
    for chunk in result["slices"]["cat_5"]:  # type: ignore[index]
        chunk.update(intervals=result["intervals"], compared=result["compared"])
    lines = evaluation_text(result).splitlines()
    assert (
        "0.75000  0.74000 to 0.76000  0.74000    +0.01000  +0.00500 to +0.01500  0.00100"
        in lines[1]
    )
    assert [word for word in ("intervals of 90%", "runs/b") if word not in "\n".join(lines)] == []
    assert lines[-1].split()[:7] == [
        "0000000a",
        "20,000",
        "0.10000",
        "0.75000",
        "0.74000",
        "to",
        "0.76000",
    ]
    assert evaluation_text({"accuracy": 0.9, "rows": 3}).split() == [
        "accuracy",
        "0.90000",
        "rows",
        "3",
    ]
