"""Bottlenecks planted in a real loop with real loaders, to be diagnosed from its events."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.logs import learn, open_index
from builders.loops import StopSignal, fake_setup
from ranks.data_parallel import Small, config

from rayrec import recipes, storage
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import InProcess, ThreadEngine
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.text_parser import TextParser
from rayrec.data.numbered_rows import ArrayRows
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.batches import ClickBatches
from rayrec.ingest.block_order import BatchSharding, BlockOrder
from rayrec.ingest.loader import Loader
from rayrec.ingest.stream import TaskSource
from rayrec.observe.bottleneck import Diagnosis, diagnose
from rayrec.observe.run_summary import RunSummary
from rayrec.training import loop, step_log
from rayrec.training.progress import Progress, Training
from rayrec.training.step_log import multiply_adds_per_s
from rayrec.workloads.base import TrainConfig, WorkerContext, WorkerSetup
from rayrec.workloads.step_timer import HostTimer

DELAY_S = 0.03


@pytest.fixture(autouse=True)
def _every_log_tells_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "_MIN_EVENT_S", 0.0)


def spin(seconds: float) -> None:
    """Compute without the interpreter lock, which would also slow down the model."""
    end_s = time.thread_time() + seconds
    block = bytes(1 << 18)
    while time.thread_time() < end_s:
        hashlib.sha256(block).digest()


def train(
    configuration: TrainConfig, setup: WorkerSetup, loader: Any, *, save_s: float = 0.0
) -> tuple[Diagnosis, list[Any]]:
    events: list[dict[str, Any]] = [{"time": time.time(), "kind": "start", "step": 0, "rows": 0}]

    def log(kind: str, fields: dict[str, Any]) -> None:
        events.append({"time": time.time(), "kind": kind, **fields})

    def save(progress: Progress, state: dict[str, Any], **_: Any) -> None:
        time.sleep(save_s)
        log(
            "checkpoint",
            {"step": progress.step, "stall_s": save_s, "bytes": 1000, "write_s": save_s or 1.0},
        )

    loop.run(
        Training(
            config=configuration,
            setup=setup,
            loader=loader,
            progress=Progress(),
            log=log,
            save=save,
            stop_signal=StopSignal(),
        )
    )
    loader.close()
    # Beside so few steps the evaluation at the end would be the largest part.
    return diagnose(RunSummary(event for event in events if event["kind"] != "evaluate")), events


class SlowRows(ArrayRows):  # type: ignore[misc]  # final for others
    delay: Callable[[], None] = staticmethod(lambda: None)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.delay()
        return super().read(indices)


@dataclass(frozen=True, kw_only=True)
class Slow(Small):
    model_s: float = 0.0

    def open_set(self, context: WorkerContext, prepared: Any, name: str) -> Any:
        rows = super().open_set(context, prepared, name)
        if name != "train":
            return rows
        slow = SlowRows(rows.read(np.arange(len(rows))))  # type: ignore[arg-type]
        slow.delay = prepared["read"]
        return slow

    def measure(self, model: torch.nn.Module, tensors: Any) -> dict[str, torch.Tensor]:
        if model.training:
            time.sleep(self.model_s)
        return super().measure(model, tensors)


def small_run(
    *, read: Callable[[], None] = lambda: None, model_s: float = 0.0, save_s: float = 0.0
) -> Any:
    workload = Slow(
        optimizer=config(1).workload.optimizer,  # type: ignore[attr-defined]
        model_s=model_s,
    )
    configuration = config(1).replace(workload=workload)
    context = WorkerContext(configuration, 0, 1, torch.device("cpu"), ThreadEngine(1))
    prepared = {"read": read}
    loader = workload.make_loader(context, prepared, state=None, step=0)
    return train(configuration, workload.set_up(context, prepared), loader, save_s=save_s)


@pytest.mark.parametrize(("work", "cause"), [(time.sleep, "storage"), (spin, "read")])
def test_bottleneck_detects_slow_row_source(work: Callable[[float], None], cause: str) -> None:
    found, _ = small_run(read=lambda: work(5 * DELAY_S))
    assert (found.bottleneck, found.cause) == ("data", cause)


def test_bottleneck_detects_slow_model_and_checkpoint_storage() -> None:
    found, events = small_run(model_s=5 * DELAY_S)
    assert found.bottleneck == "model"
    for before, event in pairwise([event for event in events if event["kind"] == "step"]):
        assert event["times_s"]["forward"] >= 5 * DELAY_S
        assert event["multiply_adds_per_s"] > 0
        assert sum(event["times_s"].values()) == pytest.approx(
            (event["rows"] - before["rows"]) / event["rows_per_s"]
        )
    found, _ = small_run(save_s=0.5)
    assert found.bottleneck == "checkpoint"


Prepared = tuple[LogIndex, Preprocessor]


@pytest.fixture(scope="module")
def prepared(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("planted") / "log.txt"
    path.write_bytes(
        b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:800])
    )
    index = open_index(path, segment_bytes=9_000)
    return index, learn(index)


def click_run(prepared: Prepared) -> Diagnosis:
    (index, preprocessor), clock = prepared, HostTimer()

    def progress(batches: Iterator[Any]) -> Any:
        next(batches)
        with clock.phase("forward"):
            time.sleep(0.002)
        return SimpleNamespace(loss=torch.tensor(1.0))

    order = BlockOrder(tuple(SegmentRange(s, 0, s.rows) for s in index.segments), "window", 0, 3)
    source = TaskSource(
        InProcess(preprocessor), ThreadEngine(1), SCHEMA, order.max_block_rows, prefetch_blocks=1
    )
    loader = Loader(order, ClickBatches(source, SCHEMA), BatchSharding(0, 1, 32), epochs=1)
    configuration = recipes.criteo_demo("none").replace(
        log_every=4, evaluate_every=10**6, early_stopping={"patience": 0}
    )
    return train(
        configuration,
        fake_setup(SimpleNamespace(progress=progress, reset=lambda: None), clock=clock),
        loader,
    )[0]


SLOW_STAGES = {
    "storage": (storage, "read_into"),
    "parse": (TextParser, "parse"),
    "encode": (Preprocessor, "encode"),
}
"""Functions that take long, by the cause of the bottleneck."""


@pytest.mark.parametrize("cause", SLOW_STAGES)
def test_bottleneck_detects_slow_data_stage(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    (owner, name), work = SLOW_STAGES[cause], time.sleep if cause == "storage" else spin
    plain: Any = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (work(DELAY_S), plain(*a, **k))[1])
    found = click_run(prepared)
    assert (found.bottleneck, found.cause) == ("data", cause)
    assert cause != "parse" or "more CPU" in found.text


def test_measured_peak_matches_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least as fast as one product of this shape, and a billion multiply-adds per second, which
    any core reaches.
    """
    monkeypatch.setattr("rayrec.training.step_log._WINDOW_S", 0.5)
    assert multiply_adds_per_s(torch.device("cpu"), precision="fp32") > 1e9
    assert multiply_adds_per_s(torch.device("cpu"), precision="bf16") > 1e8
