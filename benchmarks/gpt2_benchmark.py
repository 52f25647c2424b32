"""Benchmark of GPT-2 with recipe gpt2_tiny on both loops, compared with a plain script for
HuggingFace's Trainer.

Compares the losses of each step, and tokens/s, on the same shards. `--data FILE`: text file.
Default: a synthetic text.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import emit, part
from run_metrics import emit_losses, interleaved_rates, matrix_peak, measured_run
from samples import synthetic_text
from subprocesses import child, run_child, run_task

PLAIN = Path(__file__).parent / "peers" / "plain_huggingface.py"
LOOPS = ("rayrec", "huggingface")


def recipe(*, path: str, workers: int, steps: int, precision: str, loop: str) -> Any:
    """Return the recipe with a constant learning rate, which both sides interpret alike."""
    from rayrec.optim.config import LearningRateSchedule
    from rayrec.recipes import gpt2_tiny

    config = gpt2_tiny(path)
    return config.replace(
        precision=precision,
        loop=loop,
        steps=steps,
        batch_size=config.worker_batch_size * config.scaling.max_workers // workers,
        evaluate_every=10**9,
        checkpoint={"every": 10**9},
        workload={"schedule": LearningRateSchedule(), "max_new_tokens": 1},
        scaling={"num_workers": workers},
        cluster={"num_cpus": 2},
    )


def ours(*, log_every: int, warm_steps: int, **arguments: Any) -> dict[str, Any]:
    """Measure the global mean losses of the logged steps, and blocks/s of all workers after the
    warm-up.
    """
    return measured_run(recipe(**arguments).replace(log_every=log_every), warm_steps=warm_steps)


def plain(*, loader_workers: int, steps: int, warm_steps: int, **arguments: Any) -> dict[str, Any]:
    """Run the plain script with the recipe's settings."""
    from rayrec.data.text.text_blocks import open_tokens

    config = recipe(**arguments, steps=steps, loop="huggingface")
    tokens = open_tokens(arguments["path"])
    optimizer = config.workload.optimizer
    assert optimizer.kind == "adamw"
    settings = {
        "path": tokens.set_path("train"),
        "model": config.workload.model.to_huggingface(
            tokens.vocabulary_size, end_of_text=tokens.end_token
        ),
        "workers": arguments["workers"],
        "steps": steps,
        "warm_steps": warm_steps,
        "seed": config.seed,
        "arguments": {
            "per_device_train_batch_size": config.worker_batch_size,
            "learning_rate": optimizer.learning_rate,
            "lr_scheduler_type": "constant",
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.max_gradient_norm or 0.0,
            "bf16": config.precision == "bf16",
            "dataloader_num_workers": loader_workers,
        },
    }
    output = run_child(PLAIN, json.dumps(settings))
    return {
        "losses": [statistics.fmean(step) for step in output["losses"]],
        "rows_per_s": output["rows_per_s"],
    }


def prepare(*, text: str, out: str) -> None:
    """Preprocess the text to MDS shards."""
    from rayrec import preprocess

    preprocess(text, out=out, format="mds", tokenizer="characters", block_size=128)


def workload(*, workers: int, precision: str, loop: str, rows: int, block_size: int) -> str:
    return (
        f"gpt2_tiny, loop {loop}, {precision}, {rows} blocks of {block_size} tokens a step, "
        f"{workers} worker{'s' * (workers > 1)}, 2 CPUs"
    )


def compare_losses(*, steps: int, about: dict[str, Any], **common: Any) -> None:
    """Compare the loss curves of both loops with the plain script's."""
    peer = plain(loader_workers=0, steps=steps, warm_steps=0, **common)["losses"]
    for loop in LOOPS:
        result = child(
            __file__, "ours", steps=steps, warm_steps=0, log_every=1, loop=loop, **common
        )
        described = workload(loop=loop, **about)
        emit_losses(
            "gpt2",
            peer="plain HuggingFace Trainer script",
            workload=described,
            result=result,
            peer_losses=peer,
        )


def compare_speed(
    *, repeats: int, steps: int, warm_steps: int, peak: float, about: dict[str, Any], **common: Any
) -> None:
    """Compare the tokens/s of all workers, with the candidates in turn.

    With several processes, the plain script reads without DataLoader workers: StreamingDataset
    ended with status 1 in the only run with two processes and DataLoader workers.
    """
    readers = (0, 1) if about["workers"] == 1 else (0,)
    length = {"steps": steps, "warm_steps": warm_steps}
    rates, last = interleaved_rates(
        repeats,
        **{
            loop: lambda loop=loop: child(
                __file__, "ours", log_every=10, loop=loop, **length, **common
            )
            for loop in LOOPS
        },
        **{
            f"plain_{count}": lambda count=count: plain(loader_workers=count, **length, **common)
            for count in readers
        },
    )
    best = max(readers, key=lambda loader_workers: rates[f"plain_{loader_workers}"])
    flop = flop_per_token(common["path"])
    block_size = about["block_size"]
    for loop in LOOPS:
        ours_per_s = rates[loop] * block_size
        for peer, rate in (
            (
                f"plain HuggingFace Trainer script, {best} DataLoader workers, the best of "
                f"{readers}",
                rates[f"plain_{best}"] * block_size,
            ),
            (
                f"matrix-product peak {peak / 1e9:.0f} GFLOP/s at {flop / 1e6:.2f} MFLOP a "
                "trained token",
                peak / flop,
            ),
        ):
            emit(
                "gpt2",
                peer=peer,
                workload=workload(loop=loop, **about),
                unit="tokens_per_s",
                value=ours_per_s,
                ratio=ours_per_s / rate,
                repeats=repeats,
                config_hash=last[loop]["config_hash"],
                peer_tokens_per_s=round(rate),
                gflop_per_s=round(ours_per_s * flop / 1e9, 1),
                blocked_fraction=round(last[loop]["blocked_fraction"], 4),
            )


def flop_per_token(path: str) -> float:
    """Return the FLOP per token of a training step: six per weight of a matrix product, plus
    attention's two products.
    """
    from rayrec.data.text.text_blocks import open_tokens
    from rayrec.recipes import gpt2_tiny

    workload: Any = gpt2_tiny().workload
    tokens = open_tokens(path)
    model = workload.model
    weights = 12 * model.n_layer * model.n_embd**2 + tokens.vocabulary_size * model.n_embd
    attention = 2 * model.n_layer * tokens.block_size * model.n_embd
    return 6 * (weights + attention)


def main(*, quick: bool) -> None:
    arguments = sys.argv[1:]
    text = (
        arguments[arguments.index("--data") + 1]
        if "--data" in arguments
        else synthetic_text(1_000_000)
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "tokens")
        child(__file__, "prepare", text=os.path.abspath(text), out=path)
        for workers in (1, 2):
            for precision in ("fp32", "bf16"):
                with part("gpt2", f"{workers} workers, {precision}"):
                    compare(quick=quick, path=path, workers=workers, precision=precision)


def compare(*, quick: bool, **common: Any) -> None:
    config = recipe(**common, steps=1, loop="rayrec")
    about = {
        "workers": common["workers"],
        "precision": common["precision"],
        "rows": config.worker_batch_size * common["workers"],
        "block_size": config.workload.model.n_positions,
    }
    if common["precision"] == "fp32":
        with part("gpt2", f"{workload(loop='any', **about)}: losses"):
            compare_losses(steps=10 if quick else 200, about=about, **common)
    peak = matrix_peak(common["precision"])
    length = {"steps": 30, "warm_steps": 10} if quick else {"steps": 300, "warm_steps": 50}
    compare_speed(repeats=1 if quick else 3, peak=peak, about=about, **length, **common)


if __name__ == "__main__":
    run_task(prepare, ours)
