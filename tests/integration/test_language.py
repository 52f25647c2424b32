"""Text from end to end: prepared, trained by either loop with one worker and two, DDP and FSDP,
killed and resumed, and used.
"""

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.runs import (
    QUIET,
    TWO_WORKERS,
    check_no_rows_lost,
    check_same_run,
    events_of,
    losses,
    short_run,
    threads_of,
    train,
)
from hosts.processes import Run, finished

import rayrec
from rayrec.checkpoint import Checkpoint, committed, weights_sha256
from rayrec.recipes.gpt2 import gpt2, gpt2_tiny
from rayrec.training.result import Result
from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

BLOCK = 16
STEPS = 60
LOOPS = ("rayrec", "huggingface")


def write_text(path: Path, *, sentences: int, seed: int) -> None:
    """Sentences of few words, so that there is something to learn in a minute."""
    chance = np.random.default_rng(seed)
    subjects = ("the cat", "a dog", "my horse")
    verbs = ("sees", "hears", "follows")
    objects = ("it.", "us.", "them.")
    words = [
        [group[index] for index in chance.integers(3, size=sentences)]
        for group in (subjects, verbs, objects)
    ]
    path.write_text("\n".join(map(" ".join, zip(*words, strict=True))) + "\n")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder / "text.txt", sentences=1200, seed=0)
    return preprocessed(
        folder,
        tokenizer="characters",
        block_size=BLOCK,
        shard_bytes=1 << 13,
    )


def preprocessed(folder: Path, **options: Any) -> Path:
    rayrec.preprocess(
        str(folder / "text.txt"), out=str(folder / "tokens"), format="mds", console=QUIET, **options
    )
    return folder / "tokens"


def small(
    tokens: Path, storage_path: Path, *, workload: dict[str, Any] | None = None, **changes: Any
) -> TrainConfig:
    own: dict[str, Any] = {"optimizer": {"learning_rate": 0.01}, "max_new_tokens": 24}
    own |= {
        "model": {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "n_positions": BLOCK,
            "dropout": 0.1,
        },
        **(workload or {}),
    }
    fields = {
        **TWO_WORKERS,
        "batch_size": 8,
        "eval_batch_size": 20,
        "evaluate_every": 20,
        "log_every": 1,
    }
    return short_run(
        gpt2_tiny(str(tokens)),
        storage_path,
        **{
            "steps": STEPS,
            **fields,
            "workload": own,
            **changes,
        },
    )


def worker_settings(workers: int) -> dict[str, Any]:
    return {"scaling": threads_of(workers), "batch_size": 16 // workers}


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.exhaustive)],
    ids=["one worker", "two workers"],
)
def runs(
    request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """The same run under each loop: in this process, or in two workers on Ray."""
    if request.param > 1:
        request.getfixturevalue("local_ray")
    folder = tmp_path_factory.mktemp("runs")
    return {
        loop: train(
            small(
                tokens,
                folder,
                name=loop,
                loop=loop,
                **worker_settings(request.param),
            )
        )
        for loop in LOOPS
    }


def test_run_learns_and_writes_complete_folder(runs: dict[str, Result]) -> None:
    for result in runs.values():
        summary = result.summary
        assert summary["rows_of_sets"]["train"] > 1000
        assert (summary["rows"], summary["tokens_per_row"]) == (STEPS * 16, BLOCK)
        check_no_rows_lost(summary, restarts=0)
        assert summary["weights_sha256"] == weights_sha256(Checkpoint(summary["checkpoint"]))
        [start] = events_of(result.folder, "start")
        assert start["num_parameters"] == summary["num_parameters"]
        curve = losses(result.folder)
        assert len(curve) == STEPS
        assert abs(curve[0] - math.log(summary["vocabulary_size"])) < 1
        assert summary["metrics"]["loss"] < 0.5 * curve[0]
        assert summary["metrics"]["perplexity"] == pytest.approx(
            math.exp(summary["metrics"]["loss"])
        )
        [samples] = [event["samples"] for event in events_of(result.folder, "samples")]
        assert [(sample["kind"], len(sample["text"])) for sample in samples] == [("text", 24)] * 3


def test_both_loops_match(runs: dict[str, Result]) -> None:
    own, other = (runs[loop] for loop in LOOPS)
    assert losses(own.folder) == losses(other.folder)
    check_same_run(own.summary, other.summary, "metrics")
    saved = [
        [event["step"] for event in events_of(run.folder, "checkpoint")] for run in (own, other)
    ]
    assert saved[0] == saved[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("loop", LOOPS)
def test_fsdp_matches_ddp(tokens: Path, tmp_path: Path, loop: str) -> None:
    fields: dict[str, Any] = {
        "steps": 12,
        "evaluate_every": 6,
        "precision": "fp32",
        "loop": loop,
    }
    ddp = train(small(tokens, tmp_path, name="ddp", **fields))
    fsdp = train(
        small(
            tokens, tmp_path, name="fsdp", workload={"parallel": "fsdp", "accumulate": 2}, **fields
        )
    )
    # dropout is drawn for other parts
    assert losses(fsdp.folder)[0] == pytest.approx(losses(ddp.folder)[0], rel=0.05)
    assert losses(fsdp.folder)[-1] == pytest.approx(losses(ddp.folder)[-1], rel=0.2)
    [samples] = [event["samples"] for event in events_of(fsdp.folder, "samples")]
    assert all(len(sample["text"]) == 24 for sample in samples)
    stored, other = (Checkpoint(run.checkpoint).manifest()["tensors"] for run in (ddp, fsdp))
    assert {name: tensor["shape"] for name, tensor in stored.items()} == {
        name: tensor["shape"] for name, tensor in other.items()
    }


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "loop", [pytest.param("rayrec", marks=pytest.mark.exhaustive), "huggingface"]
)
def test_kills_preserve_weights(tokens: Path, tmp_path: Path, loop: str, workers: int) -> None:
    """A worker on Ray, then the driver, then SIGTERM; with dropout, and data read from the middle
    of an epoch.
    """
    fields: dict[str, Any] = {
        "steps": 400,
        "evaluate_every": 100,
        "checkpoint": {"every": 20},
        "loop": loop,
    }
    fields |= worker_settings(workers)
    expected = finished(
        small(tokens, tmp_path / "undisturbed", **fields),
        tmp_path / "commands_1",
        cache=tmp_path / "cache",
    )
    killed = small(tokens, tmp_path / "killed", **fields)
    with Run(killed, tmp_path / "commands_2", cache=tmp_path / "cache").start() as run:
        run.wait_for_step(50)
        run.wait_for_save(20)
        if workers > 1:
            run.session.kill("train worker")
            run.wait_for("start", step=20)
        run.wait_for_step(120)
        run.wait_for_save(80)
        run.kill_driver()
        assert not run.events("finish")
        begun = run.start().wait_for("start", step=80)
        run.wait_for_step(begun["step"] + 40, since=begun["time"])
        run.session.process.send_signal(signal.SIGTERM)
        assert run.exit_status(timeout_s=240) == 143, run.session.err
        assert committed(run.path)[-1].step == run.events("stop")[-1]["step"]
        check_same_run(run.start().summary(), expected, "metrics")


@pytest.mark.exhaustive
def test_run_resumes_with_other_loop_and_worker_count(tokens: Path, tmp_path: Path) -> None:
    """The position is in rows of the whole run, and the loop is none of the checkpoint's
    business.
    """
    fields: dict[str, Any] = {"steps": 120, "evaluate_every": 40, "checkpoint": {"every": 20}}
    with Run(
        small(tokens, tmp_path, **fields), tmp_path / "commands", cache=tmp_path / "cache"
    ).start() as run:
        run.wait_for_step(50)
        run.wait_for_save(20)
        run.session.end()
        assert not run.events("finish")
    result = train(
        small(
            tokens,
            tmp_path,
            **fields,
            loop="huggingface",
            **worker_settings(1),
        )
    )
    start = events_of(result.folder, "start")[-1]
    assert (start["world_size"], start["step"] >= 20) == (1, True)
    check_no_rows_lost(result.summary)
    assert result.summary["metrics"]["loss"] < 0.5 * losses(result.folder)[0]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_124_million_parameters_start_and_step(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", sentences=2000, seed=0)
    # every byte, a block of them
    tokens = preprocessed(tmp_path, vocabulary_size=257, block_size=1024)
    fields: dict[str, Any] = {
        "batch_size": 1,
        "eval_batch_size": 1,
        "log_every": 1,
        "cluster": {"num_cpus": 2},
    }
    fields |= {
        "workload": {"accumulate": 1, "max_new_tokens": 1},
        "scaling": {"num_workers": 1, "use_gpu": False},
    }
    result = train(short_run(gpt2(str(tokens)), tmp_path, 2, loop="huggingface", **fields))
    assert result.summary["num_parameters"] == gpt2().workload.model.num_parameters(257)
    assert losses(result.folder)[0] == pytest.approx(math.log(257), abs=1)
