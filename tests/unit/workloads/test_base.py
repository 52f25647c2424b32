"""Tests of run configurations: effective batch sizes, learning rate factors and validation."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders.faults import rejects
from ranks.checkpoint import run_ranks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from rayrec import recipes
from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.finalmlp import FinalMLPConfig
from rayrec.observe.timing import PHASES
from rayrec.schema import Schema
from rayrec.workloads import step_timer
from rayrec.workloads.base import Workload
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import ScalingConfig
from rayrec.workloads.worker_setup import learning_rate_factor, memory_errors


@pytest.mark.parametrize(
    ("policy", "world_size", "expected"),
    [
        ("global", 4, 100),
        ("global", 2, 200),
        ("global", 3, 134),
        ("per_worker", 3, 100),
        ("per_worker", 4, 100),
    ],
)
def test_batch_size_follows_policy(policy: str, world_size: int, expected: int) -> None:
    config = recipes.criteo_demo().replace(
        batch_size=100, scaling={"num_workers": (1, 4), "batch_policy": policy}
    )
    assert config.effective_batch_size(rows=1_000_000, world_size=world_size) == expected
    assert (
        config.replace(scaling={"num_workers": 4}).effective_batch_size(
            rows=1_000_000, world_size=4
        )
        == 100
    )


def test_global_batch_size_is_shared_by_workers() -> None:
    config = recipes.criteo_demo().replace(global_batch_size=120, scaling={"num_workers": 4})
    assert (config.batch_size, config.worker_batch_size) == (None, 30)
    assert recipes.load_config(config.to_yaml()) == config
    assert config.replace(scaling={"num_workers": 2}).worker_batch_size == 60
    elastic = config.replace(scaling={"num_workers": (2, 4)})
    assert [
        elastic.effective_batch_size(rows=1_000_000, world_size=size) for size in (2, 3, 4)
    ] == [60, 40, 30]
    assert (
        config.replace(batch_size=7).worker_batch_size,
        config.replace(batch_size=7).global_batch_size,
    ) == (7, None)
    rejects(
        "batch_size and global_batch_size: set only one, got 1 and 4",
        config.replace,
        batch_size=1,
        global_batch_size=4,
    )
    rejects(
        "global_batch_size: must be a multiple of the 4 workers, got 6. Use 8.",
        config.replace,
        global_batch_size=6,
    )
    rejects(
        "scaling.batch_policy: must be global with global_batch_size",
        config.replace,
        scaling={"batch_policy": "per_worker"},
    )


def test_small_data_shrinks_batches() -> None:
    config = recipes.criteo_demo().replace(
        batch_size=100, min_steps_per_epoch=10, scaling={"num_workers": 2}
    )
    assert config.effective_batch_size(rows=400, world_size=2) == 20
    assert config.effective_batch_size(rows=3, world_size=2) == 1


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("constant", 1.0),
        ("linear", 0.25),
        ("sqrt", 0.5),
    ],
)
def test_learning_rate_factor_follows_policy(policy: Any, expected: float) -> None:
    scaling = ScalingConfig(
        num_workers=(1, 4), batch_policy="per_worker", learning_rate_policy=policy
    )
    assert learning_rate_factor(scaling, world_size=1) == expected
    assert learning_rate_factor(scaling, world_size=4) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"num_workers": 0}, "must be at least 1", id="num_workers-0"),
        pytest.param({"num_workers": (3, 2)}, "min at most max", id="num_workers-3-2"),
        pytest.param({"num_workers": (0, 2)}, "must be at least 1", id="num_workers-0-2"),
        pytest.param(
            {"learning_rate_policy": "linear"},
            "must be constant with batch_policy global",
            id="learning_rate_policy-linear",
        ),
    ],
)
def test_scaling_config_rejects_invalid_values(changes: dict[str, Any], message: str) -> None:
    rejects(message, ScalingConfig, **changes)


@pytest.mark.parametrize("recipe", ["criteo_demo", "mnist_resnet18"])
def test_evaluation_may_have_fewer_rows(recipe: str) -> None:
    assert recipes.find(recipe)().replace(eval_rows=9).eval_rows == 9


def test_configs_reject_early_stopping_plateau_and_schema(tmp_path: Path) -> None:
    rejects(
        "must be at least 1, because early stopping uses the best weights",
        recipes.criteo_demo().replace,
        checkpoint={"keep_best": 0},
        early_stopping={"patience": 2},
    )
    assert not Workload.SHORT_EVALUATIONS
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ClickWorkload, "SHORT_EVALUATIONS", False)
        rejects(
            "eval_rows: recipe criteo_demo can only evaluate all rows, got 9",
            recipes.criteo_demo().replace,
            eval_rows=9,
        )
    for factor in (0.0, 1.0):
        rejects("above 0 and below 1", recipes.criteo_demo().replace, plateau={"factor": factor})
    config = recipes.clicks(
        str(tmp_path), Schema(dense=("age", "price"), tokens="any", delimiter=",")
    )
    config.workload.check(config)  # numbers alone
    with_lists = config.replace(workload={"model": DINConfig()})
    rejects(
        r"must have a sparse column for DINConfig. Name a column of categories",
        with_lists.workload.check,
        with_lists,
    )
    buckets = config.replace(workload={"preset": {"dense": "buckets"}})
    buckets.workload.check(buckets)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DINConfig(), "DINConfig: the schema must have a list"),
        (
            FinalMLPConfig(feature_gates=True, first_context=("city",)),
            "FinalMLPConfig.first_context: feature 'city' not found",
        ),
    ],
)
def test_click_workload_rejects_unsupported_columns(
    tmp_path: Path, model: ClickModelConfig, message: str
) -> None:
    config = recipes.clicks(
        str(tmp_path),
        Schema(
            dense=("age",),
            sparse=("shop",),
            tokens="any",
            delimiter=",",
        ),
    )
    config.workload.check(config)
    refused = config.replace(workload={"model": model})
    rejects(f"^{message}", refused.workload.check, refused)


# -- GPU out-of-memory errors
CUDA = torch.device("cuda", 3)
FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.11 GiB."
)


def placed(name: str, rows: int, *, ranks: dict[int, int], share: float = 1.0) -> dict[str, Any]:
    return {
        "table": name,
        "num_embeddings": rows,
        "embedding_dim": 128,
        "bytes_of_rank": ranks,
        "device_share": share,
    }


def reported(described: dict[str, Any], error: Exception = FULL) -> str:
    with pytest.raises(InputError) as found, memory_errors(described, rank=1, device=CUDA):
        raise error
    assert found.value.__cause__ is error
    return str(found.value)


def test_out_of_memory_error_names_tables_cache_and_remedies() -> None:
    tables = [
        placed("small", 1_000, ranks={1: 512_000}),
        placed("elsewhere", 90_000_000, ranks={0: 46_080_000_000}),
        placed("items", 40_000_000, ranks={1: 20_480_000_000}),
        placed("users", 10_000_000, ranks={0: 1, 1: 5_120_000_000}),
        placed("third", 2_000, ranks={1: 1_024_000}),
    ]
    assert reported({"tables": tables, "batch_size": 65_536}) == (
        "worker 1: cuda:3 is out of memory for 20.00 GiB more; its tables take 25.6 GB, the "
        "largest items (40,000,000 x 128) 20.5 GB, users (10,000,000 x 128) 5.12 GB, third (2,000 "
        "x 128) 1.02 MB. Try to lower --batch-size (now 65,536), or shard the tables over more "
        "workers (--scaling.num-workers), or store tables in host memory "
        "(--workload.sharding.uvm-caching), or shrink them (embedding_dim, min_count, "
        "max_num_embeddings)."
    )
    text = reported({"tables": [placed("items", 40_000_000, ranks={1: 20_480_000_000}, share=0.1)]})
    assert "its tables take 2.05 GB" in text
    assert "--workload.sharding.uvm-cache-fraction" in text
    assert "--workload.sharding.uvm-caching)" not in text
    assert "--workload.parallel fsdp" in reported({"parallel": "ddp", "batch_size": 8})
    assert reported({}).endswith(
        "cuda:3 is out of memory for 20.00 GiB more. Try to use a GPU with more memory."
    )
    # of a library under torch
    assert "is out of memory. " in reported({}, RuntimeError("CUDA error: out of memory"))
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory_errors({}, rank=0, device=CUDA):
        raise RuntimeError("shapes")


# -- Times of a step
SHORT_S = 0.02
ROUNDING_S = 1e-6


@pytest.fixture
def clock() -> step_timer.HostTimer:
    return step_timer.HostTimer()


def test_phases_are_exclusive_and_add_up(clock: step_timer.HostTimer) -> None:
    outer_s = time.perf_counter()
    clock.start()
    inner_s = time.perf_counter()
    with clock.phase("backward"):
        time.sleep(SHORT_S)
        with clock.phase("collectives"):
            time.sleep(2 * SHORT_S)
        time.sleep(SHORT_S)
    time.sleep(SHORT_S)
    last_s = time.perf_counter()
    clock.cut()
    end_s = time.perf_counter()
    times_s = clock.read()
    assert list(times_s) == list(PHASES)
    assert last_s - inner_s - ROUNDING_S <= sum(times_s.values()) <= end_s - outer_s + ROUNDING_S
    assert min(times_s["backward"], times_s["collectives"]) >= 2 * SHORT_S
    assert times_s["other"] >= SHORT_S
    assert times_s["data"] == 0.0
    clock.cut()
    next_s = time.perf_counter() - last_s
    assert sum(clock.read().values()) <= next_s + ROUNDING_S  # the next interval begins at the cut


def test_time_outside_start_and_stop_and_errors_do_not_count(clock: step_timer.HostTimer) -> None:
    begin_s = time.perf_counter()
    clock.start()
    clock.stop()
    first_s = time.perf_counter() - begin_s
    with clock.phase("forward"):
        time.sleep(SHORT_S)
    begin_s = time.perf_counter()
    clock.start()
    clock.cut()
    assert sum(clock.read().values()) <= first_s + time.perf_counter() - begin_s + ROUNDING_S
    with pytest.raises(StopIteration), clock.phase("data"):
        raise StopIteration
    assert clock.now == "other"


class FakeEvent:
    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = float("nan")

    def record(self, stream: object) -> None:
        assert stream == "computing"
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_device_timer_uses_events_in_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computing")
    monkeypatch.setattr(torch.cuda, "Event", made := Mock(side_effect=FakeEvent))
    clock = step_timer.DeviceTimer(torch.device("cuda"))

    def passes(milliseconds: float) -> None:
        FakeEvent.now_ms += milliseconds

    for _ in range(3):  # stretches; what lies between them, evaluation say, is not marked
        clock.enter("forward")
        clock.enter("other")
        passes(1000)
        clock.start()
        for interval in range(1, 3):
            passes(1)
            with clock.phase("backward"):
                passes(10 * interval)
                with clock.phase("collectives"):
                    passes(5)
                passes(10)
            passes(2)
            clock.cut()
            times_s = clock.read()
            assert {name: seconds for name, seconds in times_s.items() if seconds} == pytest.approx(
                {"other": 3e-3, "backward": (10 * interval + 10) / 1e3, "collectives": 5e-3}
            )
        clock.stop()
    assert made.call_count < 15  # they are used again


def test_model_and_optimizer_phases_are_timed_unless_disabled(clock: step_timer.HostTimer) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = step_timer.TimedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clock)
    step_timer.time_forward(model, clock)
    clock.start()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    clock.cut()
    times_s = clock.read()
    assert times_s["forward"] > 0
    assert times_s["optimizer"] > 0
    assert not torch.equal(before, model.weight)
    clock = step_timer.make_step_timer(torch.device("cpu"), measure=False)
    assert type(clock) is step_timer.StepTimer
    model = torch.nn.Linear(4, 1)
    step_timer.time_forward(model, clock)
    assert not model._forward_hooks
    plain = distributed.Work.wait
    with step_timer.time_collective_waits(clock):
        assert distributed.Work.wait is plain
    assert clock.read() == {}


def test_collective_waits_exclude_saving_thread(
    single_rank: None, clock: step_timer.HostTimer
) -> None:
    plain = distributed.Work.wait
    with step_timer.time_collective_waits(clock):
        clock.start()
        distributed.all_reduce(torch.ones(3))
        clock.cut()
        assert clock.read()["collectives"] > 0
        thread = threading.Thread(target=lambda: distributed.all_reduce(torch.ones(3)))
        thread.start()
        thread.join()
        clock.cut()
        assert clock.read()["collectives"] == 0.0
    assert distributed.Work.wait is plain


SLEEP_S = 1.5


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SLEEP_S if distributed.get_rank() == 1 else 0.0)
        return gradient


def backward_passes(folder: str, rank: int) -> None:
    """Run a rank and write the phase times of its second step to FOLDER/RANK.json."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    clock = step_timer.HostTimer()
    with step_timer.time_collective_waits(clock):
        for work in (torch.neg, Slow.apply):
            clock.start()
            loss = work(model(torch.ones(2, 4))).sum()
            step_timer.time_gradient_exchange(clock, loss)
            with clock.phase("backward"):
                loss.backward()
            clock.cut()
    Path(folder, f"{rank}.json").write_text(json.dumps(clock.read()))


def test_backward_end_waits_for_slowest_worker(tmp_path: Path) -> None:
    """A longer computation on rank 1 counts as backward there, and as collectives on rank 0, though
    DDP waits in C++.
    """
    run_ranks(backward_passes, 2, str(tmp_path))
    quick, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert quick["collectives"] > SLEEP_S / 2
    assert quick["backward"] < SLEEP_S / 2
    assert slow["backward"] >= SLEEP_S * 0.93
    assert slow["collectives"] < SLEEP_S / 2
