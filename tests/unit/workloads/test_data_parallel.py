"""Tests of data-parallel training: DDP and FSDP match one worker and resume from each other's
checkpoints.
"""

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.faults import flip, raising, rejects
from builders.runs import QUIET
from builders.scored_rows import Net, rows_file, scored, trained
from ranks import data_parallel
from ranks.checkpoint import run_ranks, same
from torch.nn import functional

from rayrec import recipes
from rayrec.batch import StepOutput
from rayrec.checkpoint import Checkpoint, drop_tied_tensors, full_tensors, weights_sha256
from rayrec.config import InputError
from rayrec.layers import mlp
from rayrec.metrics.means import RowMetrics
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, NamedOptimizer
from rayrec.recipes.mnist import mnist_resnet18
from rayrec.training.session import check_settings
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.data_parallel.scoring import load_model
from rayrec.workloads.data_parallel.worker import multiply_adds_per_row
from rayrec.workloads.scoring import Scoring
from rayrec.workloads.worker_setup import seed_generators, step_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRates(DenseOptimizerConfig):
    bias_rate: float = 0.1

    def build_named(self, named_parameters: Mapping[str, torch.nn.Parameter]) -> NamedOptimizer:
        matrices = [value for value in named_parameters.values() if value.dim() > 1]
        biases = [value for value in named_parameters.values() if value.dim() <= 1]
        return NamedOptimizer(
            torch.optim.RMSprop(
                [
                    {"params": matrices},
                    {"params": biases, "lr": self.bias_rate},
                ],
                lr=self.learning_rate,
            ),
            named_parameters,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(LearningRateSchedule):
    every: int = 50

    def factor(self, step: int) -> float:
        return 0.5 ** (step // self.every)


def test_custom_optimizer_and_schedule_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = data_parallel.config(1, batch_norm=True)
    workload = plain.workload.replace(
        optimizer=TwoRates(learning_rate=0.01, bias_rate=0.04), schedule=Halving(every=4)
    )
    configuration = plain.replace(workload=workload)
    rates: list[list[float]] = []
    step = NamedOptimizer.step

    def noted(self: NamedOptimizer) -> None:
        rates.append([group["lr"] for group in self.param_groups])
        step(self)

    monkeypatch.setattr(NamedOptimizer, "step", noted)
    losses = [
        event["loss"]
        for event in data_parallel.train(str(tmp_path), 0, configuration)
        if event["kind"] == "step"
    ]
    assert losses[-1] < losses[0]
    assert rates == [
        [0.01 * 0.5 ** (number // 4), 0.04 * 0.5 ** (number // 4)] for number in range(12)
    ]
    whole = weights_sha256(Checkpoint(str(tmp_path / "12")))
    # RMSprop's state is in the checkpoint
    data_parallel.train(str(tmp_path), 0, configuration, from_step=6)
    assert weights_sha256(Checkpoint(str(tmp_path / "12"))) == whole


class _Uncountable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise TypeError("no dispatch here")
        return x * 2


def test_uncountable_model_trains(caplog: pytest.LogCaptureFixture) -> None:
    workload: Any = data_parallel.config(1).workload
    sets = {"validation": workload.open_set(None, None, "validation")}
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    # four layers of 6 by 6
    assert multiply_adds_per_row(workload, workload.build(None), sets, context) == 4 * 36
    model = _Uncountable()
    with caplog.at_level(logging.WARNING):
        assert multiply_adds_per_row(workload, model, sets, context) is None
    assert "Cannot count the multiply-adds of a step: no dispatch here" in caplog.text
    assert model.training


def test_cpu_without_bfloat16_trains_in_float32(
    alone: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mlp, "onednn_has_bfloat16", lambda: False)
    with caplog.at_level(logging.WARNING):
        data_parallel.train(str(tmp_path), 0, data_parallel.config(1).replace(precision="bf16"))
    assert caplog.text.count("bf16 is computed in fp32") == 1
    assert same(_tensors(tmp_path / "12"), _tensors(alone[0] / "12"))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(full_tensors(Checkpoint(str(folder))))


def _close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].float(), other[name].float(), atol=1e-6) for name in one
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Run one worker for 12 steps of 16 rows, saved at steps 6 and 12. Returns the folder and its
    events.
    """
    folder = tmp_path_factory.mktemp("alone")
    return folder, data_parallel.train(str(folder), 0, data_parallel.config(1))


def test_one_worker_matches_plain_torch(
    alone: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, events = alone
    configuration = data_parallel.config(1)
    torch.manual_seed(configuration.seed)
    model = data_parallel.Net(batch_norm=False)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.02,
        weight_decay=0.0,
        fused=True,
    )
    rows = configuration.workload.open_set(None, None, "train")  # type: ignore[attr-defined]
    losses = []
    epochs = [
        torch.randperm(101, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)
    ]
    order = [batch for epoch in epochs for batch in epoch.split(16)]
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (step + 1) / 3)
        arrays = rows.read(order[step].numpy())
        loss = functional.cross_entropy(
            model(torch.from_numpy(arrays["x"])), torch.from_numpy(arrays["label"])
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert [event["loss"] for event in events if event["kind"] == "step"] == pytest.approx(
        losses, abs=1e-6
    )
    stored = _tensors(folder / "12")
    assert {"model.inner.weight", "optimizer.inner.weight.exp_avg"} <= stored.keys()
    assert "model.outer.weight" not in stored  # tied to the inner one
    for name, value in drop_tied_tensors(model.state_dict()).items():
        assert torch.equal(stored[f"model.{name}"], value), name


def test_one_worker_evaluates_all_rows(alone: tuple[Path, list[dict[str, Any]]]) -> None:
    _, events = alone
    evaluations = [event for event in events if event["kind"] == "evaluate"]
    assert [event["step"] for event in evaluations] == [6, 12]
    assert evaluations[-1]["accuracy"] * 37 == pytest.approx(
        round(evaluations[-1]["accuracy"] * 37)
    )
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] < 2.0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_match_one(
    kind: str, alone: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_ranks(getattr(data_parallel, kind), 2, str(tmp_path))
    assert _close(_tensors(alone[0] / "12"), _tensors(tmp_path / "12"))


def test_parallel_options_keep_training(
    alone: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_ranks(data_parallel.parallel_options, 2, str(tmp_path))
    expected = _tensors(alone[0] / "12")
    for name in ("graph", "unused", "unsharded"):
        assert _close(expected, _tensors(tmp_path / name / "12")), name
    rounded = _tensors(tmp_path / "rounded" / "12")
    assert all(value.dtype == torch.float32 for value in rounded.values())
    assert not _close(expected, rounded)
    weights = [name for name in expected if name.startswith("model.")]
    assert all(torch.allclose(expected[name], rounded[name], atol=0.1) for name in weights)


def test_parallel_options_reject_other_kind() -> None:
    ddp = data_parallel.config(1).workload
    fsdp = ddp.replace(parallel="fsdp")
    for workload, options in (
        (ddp, {"cpu_offload": True}),
        (fsdp, {"bucket_cap_mb": 1.0}),
        (fsdp, {"static_graph": True}),
    ):
        [name] = options
        rejects(
            f"workload.parallel_options.{name}: must be", workload.replace, parallel_options=options
        )
    rejects(
        "static_graph: requires workload.accumulate 1",
        ddp.replace,
        accumulate=2,
        parallel_options={"static_graph": True},
    )
    rejects("bucket_cap_mb: must be above 0", ddp.replace, parallel_options={"bucket_cap_mb": 0.0})
    offloaded = mnist_resnet18("digits").replace(
        workload={"parallel": "fsdp", "parallel_options": {"cpu_offload": True}}
    )
    rejects("cpu_offload: requires scaling.use_gpu", check_settings, offloaded)


@pytest.mark.extended
def test_fsdp_with_onednn_matches_without_full_parameters(tmp_path: Path) -> None:
    workload = data_parallel.config(1).workload
    for kind in ("lamb", "lars"):
        workload.replace(optimizer={"kind": kind})
        rejects(
            f"kind: {kind} requires norms of full parameters",
            workload.replace,
            optimizer={"kind": kind},
            parallel="fsdp",
        )
    # FSDP shards and gathers the oneDNN layers of a GPT-2.
    data_parallel.train(str(tmp_path / "alone"), 0, data_parallel.next_token_config(1))
    run_ranks(data_parallel.fsdp_by_onednn, 2, str(tmp_path / "fsdp"))
    assert _close(_tensors(tmp_path / "alone" / "6"), _tensors(tmp_path / "fsdp" / "6"))


def test_fsdp_checkpoint_resumes_on_one_worker_and_back(
    alone: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_ranks(data_parallel.fsdp, 2, str(tmp_path))
    data_parallel.train(str(tmp_path), 0, data_parallel.config(1), from_step=6)
    assert _close(_tensors(alone[0] / "12"), _tensors(tmp_path / "12"))
    resumed = tmp_path / "resumed"  # other tests read the saves of `alone`
    shutil.copytree(alone[0] / "6", resumed / "6")
    run_ranks(data_parallel.fsdp_goes_on, 2, str(resumed))
    assert _close(_tensors(resumed / "12"), _tensors(tmp_path / "12"))


def test_repeated_or_no_steps_keep_weights_and_statistics(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]]
) -> None:
    run_ranks(data_parallel.noisy, 2, str(tmp_path))
    run_ranks(data_parallel.statistics, 2, str(tmp_path))
    again = tmp_path / "again"
    shutil.copytree(alone[0] / "12", again / "12")
    before = weights_sha256(Checkpoint(str(again / "12")))
    data_parallel.train(str(again), 0, data_parallel.config(1), from_step=12)
    assert weights_sha256(Checkpoint(str(again / "12"))) == before
    metrics = RowMetrics(lambda means: {**means, "double": 2 * means["loss"]})
    for values in ([1.0, 1.0, 1.0], [5.0], []):
        tensor = torch.tensor(values)
        metrics.update(StepOutput(tensor.sum(), measures={"loss": tensor}))
    assert metrics.compute() == {"loss": 2.0, "double": 4.0}
    rejects("accumulate: must be at least 1, got 0", data_parallel.Small, accumulate=0)
    rejects("loop: must be rayrec for recipe", data_parallel.config(1).replace, loop="huggingface")


def test_step_seeds_differ_and_seed_generators_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = {
        step_seed(seed, step, rank) for seed in range(3) for step in range(5) for rank in range(2)
    }
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(1, 2, 0) == step_seed(1, 2, 0)
    number = step_seed(3, 7, 1)
    draws = []
    for seed in (torch.manual_seed, lambda number: seed_generators(number, torch.device("cpu"))):
        seed(number)
        draws.append(
            [
                torch.rand(5),
                torch.randperm(20),
                torch.nn.functional.dropout(torch.ones(50)),
            ]
        )
        monkeypatch.setattr(
            "traceback.format_stack", lambda *_: pytest.fail("a stack trace in every step")
        )
    assert all(torch.equal(*pair) for pair in zip(*draws, strict=True))


# -- Data-parallel scoring: row order, saved weights and exact means
Saved = tuple[str, Net]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return trained(tmp_path_factory.mktemp("run"))


def _open(checkpoint: str, path: str, **changes: Any) -> Scoring:
    context: dict[str, Any] = {
        "config": scored(),
        "evaluating": False,
        "batch_rows": None,
        "console": QUIET,
        **changes,
    }
    never = raising(AssertionError("opening rows needs no data tasks"))
    return context["config"].workload.open_scoring(
        ScoringContext(
            checkpoint=checkpoint,
            path=path,
            engine=never,
            **context,
        )
    )


def _tables(scoring: Scoring) -> list[pa.Table]:
    score = scoring.load("cpu")
    return [score(block) for block in range(scoring.num_blocks)]


def _metrics(scoring: Scoring, rows: int) -> dict[str, float]:
    totals = scoring.make_totals()
    for table in _tables(scoring):
        totals.update(table)
    assert totals.rows == rows
    return totals.compute()


@pytest.mark.parametrize(
    ("rows", "batch", "blocks"),
    [
        (1, None, 1),
        (10, None, 1),
        (11, None, 2),
        (1000, 10, 17),
        (1000, 3, 42),
    ],
)
def test_rows_are_predicted_once_in_order(
    saved: Saved, tmp_path: Path, rows: int, batch: int | None, blocks: int
) -> None:
    path = rows_file(tmp_path, rows, labelled=False)
    scoring = _open(saved[0], path, batch_rows=batch)
    assert (scoring.rows, scoring.num_blocks) == (rows, blocks)
    table = pa.concat_tables(_tables(scoring))
    assert (table.column("row").to_pylist(), table.column("row").type) == (
        list(range(rows)),
        pa.int64(),
    )
    with torch.no_grad():
        expected = saved[1](torch.from_numpy(np.load(path)["x"])).numpy()
    logits = np.array(table.column("logits").to_pylist())
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    best = logits.argmax(axis=1)
    assert table.column("best").to_pylist() == best.tolist()
    assert table.column("named").to_pylist() == [f"class {number}" for number in best]


@pytest.mark.parametrize(("has_bfloat16", "bits"), [(True, 16), (False, 32)])
def test_scoring_uses_bfloat16_if_supported(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, bits: int
) -> None:
    monkeypatch.setattr(mlp, "onednn_has_bfloat16", lambda: has_bfloat16)
    scoring = _open(
        saved[0], rows_file(tmp_path, 5), evaluating=True, config=scored().replace(precision="bf16")
    )
    assert _metrics(scoring, 5)["bits"] == bits


def test_loaded_model_matches_saved_and_means_cover_all_rows(saved: Saved, tmp_path: Path) -> None:
    path = rows_file(tmp_path, 1003)
    arrays = np.load(path)
    with torch.no_grad():
        logits = saved[1](torch.from_numpy(arrays["x"]))
        losses = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(arrays["label"]), reduction="none"
        )
    metrics = _metrics(_open(saved[0], path, evaluating=True), 1003)
    assert metrics["loss"] == pytest.approx(losses.double().mean().item(), rel=1e-7)
    assert (metrics["perplexity"], metrics["bits"]) == (pytest.approx(np.exp(metrics["loss"])), 32)
    rejects(
        "has no labels", _open, saved[0], rows_file(tmp_path, 5, labelled=False), evaluating=True
    )
    rejects("has no rows to score", _open, saved[0], rows_file(tmp_path, 0))
    model = load_model(scored().workload, scored(), checkpoint=saved[0])  # type: ignore[arg-type]
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.outer.weight is model.inner.weight
    assert same(model.state_dict(), saved[1].state_dict())
    assert not any(
        name.startswith("model.outer.weight") for name in Checkpoint(saved[0]).manifest()["tensors"]
    )


@pytest.mark.parametrize(
    ("part", "module", "message"),
    [
        ("norm", torch.nn.BatchNorm1d(9), r": norm.bias: shape must be \[9\], got \[4\]"),
        ("more", torch.nn.Linear(2, 2), r": more.bias: shape must be \[2\], got absent"),
        ("outer", torch.nn.Linear(4, 4), r": outer.weight: shape must be \[4, 4\], got absent"),
    ],
)
def test_model_rejects_other_weights(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, part: str, module: Any, message: str
) -> None:
    config = scored()
    other = Net()
    setattr(other, part, module)
    monkeypatch.setattr(type(config.workload), "build_from", lambda *_, **__: other)
    rejects(message, load_model, config.workload, config, checkpoint=saved[0])


def test_damaged_weights_and_click_models_are_rejected(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    chunk = Checkpoint(checkpoint).manifest()["tensors"]["model.inner.weight"]["chunks"][0]
    flip(f"{checkpoint}/{chunk['file']}", chunk["start"])
    rejects("damaged, the checksum", load_model, scored().workload, scored(), checkpoint=checkpoint)
    config = recipes.criteo_demo()
    with pytest.raises(
        InputError, match=r"recipe criteo_demo cannot be exported. Use `rayrec predict`"
    ):
        config.workload.export(config, checkpoint="run", out=str(tmp_path))
