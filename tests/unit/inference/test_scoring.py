"""Scoring plans, and scoring by threads of this process: order, model loads, thread counts."""

import functools
import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.faults import raising, rejects

from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.log_source import LogSource
from rayrec.inference.scoring import Pool, plan_pool, scored_tables
from rayrec.metrics.binary import sigmoid
from rayrec.schema import Schema
from rayrec.workloads.recsys.scoring import cache_folder
from rayrec.workloads.scoring import Device, Scoring

GIB = 1 << 30
SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("i",), sparse=("c",))


def _node(cpus: float, memory: int = 64 * GIB, gpus: float = 0) -> Node:
    return Node("n", {"CPU": cpus, "memory": memory, **({"GPU": gpus} if gpus else {})})


@pytest.mark.parametrize(
    ("nodes", "weight_bytes", "blocks", "spare_cpus", "expected"),
    [
        ([_node(2)], GIB, 100, 0, Pool(2, 1, 0)),
        ([_node(2)], GIB, 100, 1, Pool(1, 1, 0)),
        ([_node(1)], GIB, 100, 0, Pool(1, 1, 0)),
        ([_node(1)], GIB, 100, 1, Pool(1, 0.5, 0)),
        ([_node(0.5)], GIB, 100, 0, Pool(1, 0.5, 0)),
        ([_node(8)], GIB, 3, 0, Pool(3, 1, 0)),
        ([_node(16)], 15 * GIB, 100, 0, Pool(4, 4, 0)),  # memory holds four copies of the weights
        ([_node(16)], 15 * GIB, 100, 1, Pool(3, 4, 0)),
        ([_node(16)], 60 * GIB, 100, 1, Pool(1, 15, 0)),
        ([_node(8), _node(4), _node(0)], GIB, 100, 0, Pool(12, 1, 0)),
        ([_node(8), _node(8, 2 * GIB)], 9 * GIB, 100, 0, Pool(4, 2, 0)),  # the second holds none, the first six
    ],
)
def test_pool_size_fits_memory_and_cores(
    nodes: list[Node], weight_bytes: int, blocks: int, spare_cpus: int, expected: Pool
) -> None:
    pool = plan_pool(nodes, weight_bytes=weight_bytes, blocks=blocks, spare_cpus=spare_cpus, device="cpu")
    assert pool == expected
    assert pool.num_actors * pool.cpus_per_actor <= sum(node.resources["CPU"] for node in nodes)


def test_pool_has_one_process_per_gpu() -> None:
    nodes = [_node(8, gpus=2), _node(8)]
    assert plan_pool(nodes, weight_bytes=GIB, blocks=9, spare_cpus=1, device="cuda") == Pool(2, 1, 1)
    assert plan_pool(nodes, weight_bytes=GIB, blocks=1, spare_cpus=1, device="cuda") == Pool(1, 1, 1)
    rejects("GPU for cuda not found", plan_pool, [_node(8)], weight_bytes=GIB, blocks=1, spare_cpus=0, device="cuda")


@pytest.mark.parametrize(
    ("cpus", "memory", "blocks", "expected"),
    [(8, 64, 100, 8), (8, 61, 100, 8), (8, 64, 3, 3), (1, 64, 100, 1), (8, 64, 0, 1)],  # 61: one copy of the weights fits
)
def test_threads_match_cores(cpus: float, memory: int, blocks: int, expected: int) -> None:
    nodes = [_node(cpus, memory * GIB)]
    result = plan_pool(nodes, weight_bytes=60 * GIB, blocks=blocks, spare_cpus=0, device="cpu", shared_weights=True)
    assert result == Pool(expected, 1, 0)


def test_oversized_weights_are_rejected() -> None:
    plan = functools.partial(plan_pool, blocks=9, spare_cpus=0, device="cpu")
    rejects(r"108 GB.*got at most 68\.7 GB from Ray", plan, [_node(8)], weight_bytes=100 * GIB)
    with pytest.raises(InputError, match=r"scoring needs 65\.5 GB of memory for the weights, got 65 GB of free memory"):
        plan([_node(8, int(60.5 * GIB))], weight_bytes=60 * GIB, shared_weights=True)


def test_sigmoid_is_exact() -> None:
    scores = sigmoid(np.array([-200, -1, 0, 1, 200], np.float32))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [0, 0.26894143, 0.5, 0.7310586, 1], atol=1e-7)


LABELLED, UNLABELLED = b"1\t3\t0000000a\n", b"3\t0000000a\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LABELLED, True),
        (UNLABELLED, False),
        (b"\t\n", False),
        (LABELLED[:-1], True),
        (UNLABELLED[:-1], False),
        (b"a header\n" + UNLABELLED, False),
        (b"\n" + LABELLED + UNLABELLED, True),
        (b"nothing of the kind\n", True),
        (b"", True),
        (UNLABELLED * 20_000, False),
    ],
)
def test_has_labels_detects_label_column(tmp_path: Path, text: bytes, expected: bool) -> None:
    for path, data in ((tmp_path / "log.tsv", text), (tmp_path / "log.gz", gzip.compress(text))):
        path.write_bytes(data)
        assert LogSource.at(str(path)).is_labelled(SCHEMA) is expected


def test_has_labels_skips_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    (tmp_path / "b.tsv").write_bytes(UNLABELLED)
    assert LogSource.at(str(tmp_path)).is_labelled(SCHEMA) is False


def test_cache_folder_depends_on_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        no_totals = raising(AssertionError("nothing is evaluated"))
        return Scoring((1,) * BLOCKS, self.load, no_totals, {}, thread_safe=thread_safe)


@pytest.mark.parametrize(("thread_safe", "num_loads"), [(True, 1), (False, 3)])
def test_blocks_are_ordered_and_model_loads_are_minimal(thread_safe: bool, num_loads: int) -> None:
    model, threads, before = Model(num_threads=3), torch.get_num_threads(), {*threading.enumerate()}
    pool = Pool(3, threads + 1, 0.0)
    tables = scored_tables(model.scoring(thread_safe=thread_safe), pool=pool, device="cpu")
    assert [table["block"][0].as_py() for table in tables] == [*range(BLOCKS)]
    assert len(model.loads) == num_loads
    assert len({thread for _, thread, _ in model.scored}) == 3
    assert {number for _, _, number in model.scored} == {threads + 1}
    assert torch.get_num_threads() == threads
    assert {*threading.enumerate()} <= before


def test_scoring_resumes_at_block_and_raises_errors_in_order() -> None:
    model = Model(num_threads=1)
    tables = scored_tables(model.scoring(thread_safe=True), pool=Pool(1, 1.0, 0.0), device="cpu", first_block=9)
    assert [table["block"][0].as_py() for table in tables] == [9, 10, 11]
    assert [number for number, _, _ in model.scored] == [9, 10, 11]
    model, threads = Model(num_threads=1, broken=2), torch.get_num_threads()
    tables = scored_tables(model.scoring(thread_safe=False), pool=Pool(1, threads + 1, 0.0), device="cpu")
    assert [next(tables)["block"][0].as_py() for _ in range(2)] == [0, 1]
    rejects(r"^the log changed$", next, tables)
    assert {number for number, _, _ in model.scored} <= {0, 1, 3, 4}  # those that ran ahead
    assert torch.get_num_threads() == threads
