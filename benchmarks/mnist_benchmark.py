"""Benchmark of ResNet18 on MNIST with recipe mnist_resnet18, compared with a plain PyTorch DDP
script.

Compares the losses of each step, and images/s. `--data DIR`: folder of MNIST's files. Default:
synthetic digits.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from rows import emit, part
from run_metrics import emit_losses, interleaved_rates, matrix_peak, measured_run
from samples import synthetic_digits
from subprocesses import child, run_child, run_task

PLAIN = Path(__file__).parent / "peers" / "plain_ddp.py"
BATCH_SIZE = 128
"""Global batch size, as in Ray's tutorial."""
LEARNING_RATE = 1e-5


def recipe(*, path: str, workers: int, steps: int, precision: str) -> Any:
    """Return the recipe with the settings of the plain script."""
    from rayrec.recipes import mnist_resnet18

    return mnist_resnet18(path).replace(
        precision=precision,
        steps=steps,
        batch_size=BATCH_SIZE // workers,
        evaluate_every=10**9,
        checkpoint={"every": 10**9},
        workload={"optimizer": {"kind": "adam", "learning_rate": LEARNING_RATE}},
        scaling={"num_workers": workers},
        cluster={"num_cpus": 2},
    )


def ours(*, log_every: int, warm_steps: int, **arguments: Any) -> dict[str, Any]:
    """Measure the global mean losses of the logged steps, and images/s of all workers after the
    warm-up.
    """
    return measured_run(recipe(**arguments).replace(log_every=log_every), warm_steps=warm_steps)


def plain(*, loader_workers: int, **arguments: Any) -> dict[str, Any]:
    """Run the plain script."""
    arguments |= {
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "seed": 0,
        "loader_workers": loader_workers,
    }
    output = run_child(PLAIN, json.dumps(arguments))
    return {
        "losses": [statistics.fmean(step) for step in output["losses"]],
        "rows_per_s": output["rows_per_s"],
    }


def compare_losses(*, steps: int, **common: Any) -> None:
    """Compare both loss curves."""
    peer = plain(loader_workers=0, steps=steps, warm_steps=0, **common)["losses"]
    result = child(__file__, "ours", steps=steps, warm_steps=0, log_every=1, **common)
    emit_losses(
        "mnist",
        peer="plain PyTorch DDP script",
        workload=workload(**common),
        result=result,
        peer_losses=peer,
    )


def workload(*, workers: int, precision: str, path: str) -> str:
    return (
        f"mnist_resnet18, {precision}, global batch {BATCH_SIZE}, {workers} "
        f"worker{'s' * (workers > 1)}, 2 CPUs"
    )


def compare_speed(*, repeats: int, steps: int, warm_steps: int, peak: float, **common: Any) -> None:
    """Compare the images/s of all workers, with the candidates in turn."""
    length = {"steps": steps, "warm_steps": warm_steps}
    rates, last = interleaved_rates(
        repeats,
        ours=lambda: child(__file__, "ours", log_every=10, **length, **common),
        plain_0=lambda: plain(loader_workers=0, **length, **common),
        plain_1=lambda: plain(loader_workers=1, **length, **common),
    )
    best = max((0, 1), key=lambda loader_workers: rates[f"plain_{loader_workers}"])
    flop = flop_per_image()
    for peer, rate in (
        (
            f"plain PyTorch DDP script, {best} DataLoader workers, the better of 0 and 1",
            rates[f"plain_{best}"],
        ),
        (
            f"matrix-product peak {peak / 1e9:.0f} GFLOP/s at {flop / 1e6:.0f} MFLOP a trained "
            "image",
            peak / flop,
        ),
    ):
        emit(
            "mnist",
            peer=peer,
            workload=workload(**common),
            unit="images_per_s",
            value=rates["ours"],
            ratio=rates["ours"] / rate,
            repeats=repeats,
            config_hash=last["ours"]["config_hash"],
            peer_images_per_s=round(rate, 1),
            gflop_per_s=round(rates["ours"] * flop / 1e9, 1),
            blocked_fraction=round(last["ours"]["blocked_fraction"], 4),
        )


def flop_per_image() -> float:
    """Return the FLOP per image of a training step: the backward pass costs twice the forward pass,
    minus the gradient of the image.
    """
    import torch

    from rayrec.layers.operation_count import counted
    from rayrec.workloads.vision import ResNetConfig
    from rayrec.workloads.vision_model import STAGE_WIDTHS

    model = ResNetConfig().build()
    cost = counted(model, lambda: model(torch.zeros(1, 1, 28, 28)))
    assert cost is not None
    first_layer = STAGE_WIDTHS[0] * 7 * 7 * 14 * 14
    return 6 * cost - 2 * first_layer


def main(*, quick: bool) -> None:
    arguments = sys.argv[1:]
    path = (
        arguments[arguments.index("--data") + 1]
        if "--data" in arguments
        else synthetic_digits(20_000, 1_000)
    )
    path = os.path.abspath(path)
    peak = matrix_peak("fp32")
    for workers in (1, 2):
        common: dict[str, Any] = {"path": path, "workers": workers, "precision": "fp32"}
        with part("mnist", f"{workload(**common)}: losses"):
            compare_losses(steps=10 if quick else 100, **common)
        compare_speed(
            repeats=1 if quick else 3,
            steps=20 if quick else 120,
            warm_steps=5 if quick else 20,
            peak=peak,
            **common,
        )


if __name__ == "__main__":
    run_task(ours)
