"""What is decided before scoring: the processes and their cores, and whether a log has labels."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.log_source import LogSource
from rayrec.inference.scoring import Pool, plan_pool
from rayrec.metrics.binary import sigmoid
from rayrec.schema import Schema
from rayrec.workloads.recsys.scoring import cache_folder

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
def test_pool(nodes: list[Node], weight_bytes: int, blocks: int, spare_cpus: int, expected: Pool) -> None:
    pool = plan_pool(nodes, weight_bytes=weight_bytes, blocks=blocks, spare_cpus=spare_cpus, device="cpu")
    assert pool == expected
    assert pool.num_actors * pool.cpus_per_actor <= sum(node.resources["CPU"] for node in nodes)


def test_pool_on_gpus() -> None:
    nodes = [_node(8, gpus=2), _node(8)]
    assert plan_pool(nodes, weight_bytes=GIB, blocks=9, spare_cpus=1, device="cuda") == Pool(2, 1, 1)
    assert plan_pool(nodes, weight_bytes=GIB, blocks=1, spare_cpus=1, device="cuda") == Pool(1, 1, 1)
    with pytest.raises(InputError, match="and there is none"):
        plan_pool([_node(8)], weight_bytes=GIB, blocks=1, spare_cpus=0, device="cuda")


def test_weights_larger_than_any_node() -> None:
    with pytest.raises(InputError, match=r"108 GB.*offers Ray 68\.7 GB"):
        plan_pool([_node(8)], weight_bytes=100 * GIB, blocks=1, spare_cpus=0, device="cpu")


def test_sigmoid() -> None:
    logits = np.array([-200, -1, 0, 1, 200], np.float32)
    scores = sigmoid(logits)
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
def test_has_labels(tmp_path: Path, text: bytes, expected: bool) -> None:
    (tmp_path / "log.tsv").write_bytes(text)
    assert LogSource.at(str(tmp_path / "log.tsv")).is_labelled(SCHEMA) is expected
    (tmp_path / "log.gz").write_bytes(gzip.compress(text))
    assert LogSource.at(str(tmp_path / "log.gz")).is_labelled(SCHEMA) is expected


def test_has_labels_looks_past_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    (tmp_path / "b.tsv").write_bytes(UNLABELLED)
    assert LogSource.at(str(tmp_path)).is_labelled(SCHEMA) is False


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYREC_CACHE", raising=False)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert cache_folder(str(checkpoint)).endswith(".cache/rayrec")
    (tmp_path / ".cache").mkdir()
    assert cache_folder(str(checkpoint)) == str(tmp_path / ".cache")
    monkeypatch.setenv("RAYREC_CACHE", "/elsewhere")
    assert cache_folder(str(checkpoint)) == "/elsewhere"
