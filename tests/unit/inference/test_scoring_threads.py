"""Scoring by threads of this process: order, how often the model is loaded, and that the process is as it was before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
import torch

from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.inference.scoring import Pool, plan_pool, scored_tables
from rayrec.workloads.scoring import Device, Scoring

GIB = 1 << 30
BLOCKS = 12


@dataclass
class Model:
    """Counts its loads, and notes which thread scored what, with how many threads for operators."""

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
        def no_totals() -> None:
            raise AssertionError("nothing is evaluated")

        return Scoring((1,) * BLOCKS, self.load, no_totals, {}, thread_safe=thread_safe)  # type: ignore[arg-type]


@pytest.mark.parametrize(("thread_safe", "num_loads"), [(True, 1), (False, 3)])
def test_blocks_come_in_order_and_the_model_is_loaded_no_more_often_than_needed(
    thread_safe: bool, num_loads: int
) -> None:
    model, threads, before = Model(num_threads=3), torch.get_num_threads(), {*threading.enumerate()}
    pool = Pool(3, threads + 1, 0.0)
    tables = scored_tables(model.scoring(thread_safe=thread_safe), pool=pool, device="cpu")
    assert [table["block"][0].as_py() for table in tables] == [*range(BLOCKS)]
    assert len(model.loads) == num_loads
    assert len({thread for _, thread, _ in model.scored}) == 3
    assert {number for _, _, number in model.scored} == {threads + 1}
    assert torch.get_num_threads() == threads
    assert {*threading.enumerate()} <= before


def test_scoring_resumes_at_a_block() -> None:
    model = Model(num_threads=1)
    tables = scored_tables(model.scoring(thread_safe=True), pool=Pool(1, 1.0, 0.0), device="cpu", first_block=9)
    assert [table["block"][0].as_py() for table in tables] == [9, 10, 11]
    assert [number for number, _, _ in model.scored] == [9, 10, 11]


def test_an_error_comes_in_its_place() -> None:
    model, threads = Model(num_threads=1, broken=2), torch.get_num_threads()
    tables = scored_tables(model.scoring(thread_safe=False), pool=Pool(1, threads + 1, 0.0), device="cpu")
    assert [next(tables)["block"][0].as_py() for _ in range(2)] == [0, 1]
    with pytest.raises(InputError, match=r"^the log changed$"):
        next(tables)
    assert {number for number, _, _ in model.scored} <= {0, 1, 3, 4}  # those that ran ahead
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("cpus", "memory", "blocks", "expected"),
    [
        (8, 64 * GIB, 100, Pool(8, 1, 0)),
        (8, 61 * GIB, 100, Pool(8, 1, 0)),  # one copy of the weights fits
        (8, 64 * GIB, 3, Pool(3, 1, 0)),
        (1, 64 * GIB, 100, Pool(1, 1, 0)),
        (8, 64 * GIB, 0, Pool(1, 1, 0)),
    ],
)
def test_threads_that_share_the_weights_are_as_many_as_cores(
    cpus: float, memory: int, blocks: int, expected: Pool
) -> None:
    node = Node("this machine", {"CPU": float(cpus), "memory": float(memory)})
    found = plan_pool([node], weight_bytes=60 * GIB, blocks=blocks, spare_cpus=0, device="cpu", shared_weights=True)
    assert found == expected


def test_shared_weights_that_do_not_fit_are_refused() -> None:
    node = Node("this machine", {"CPU": 8.0, "memory": 60.5 * GIB})
    with pytest.raises(
        InputError, match=r"scoring needs 65\.5 GB of memory for the weights, this machine has 65 GB free"
    ):
        plan_pool([node], weight_bytes=60 * GIB, blocks=9, spare_cpus=0, device="cpu", shared_weights=True)
