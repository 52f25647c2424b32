"""Benchmark of training on JPEG files in class folders, compared with torchvision's ImageFolder and
a DataLoader.

A light network, so that decoding decides: images/s of both on the same cores, in turn. Then a run
that stops halfway and is resumed must have the weights of one that does not. `--data DIR`: folder
with one subfolder per class. Default: 20,000 synthetic JPEG files of 256 x 256 pixels in 10
classes.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))

from plain_image_folder import LightNetwork
from rows import emit, part
from run_metrics import interleaved_rates, measured_run
from samples import synthetic_images
from subprocesses import child, run_child, run_task

from rayrec.workloads.vision import ImageFilesWorkload

PLAIN = Path(__file__).parent / "peers" / "plain_image_folder.py"
BATCH_SIZE = 64
LEARNING_RATE = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightImages(ImageFilesWorkload):
    """Images for a light network."""

    def build(self, prepared: Any) -> Any:
        return LightNetwork(self.model.num_classes)


def config_of(*, path: str, image_size: int, steps: int) -> Any:
    """Return the recipe image_folder with the settings of the plain script."""
    from rayrec.recipes import image_folder

    config = image_folder(path)
    workload = LightImages(
        **{
            field.name: getattr(config.workload, field.name)
            for field in dataclasses.fields(config.workload)
        }
    )
    return dataclasses.replace(config, workload=workload).replace(
        steps=steps,
        batch_size=BATCH_SIZE,
        eval_rows=64,
        evaluate_every=10**9,
        checkpoint={"every": 100},
        workload={
            "model": {"num_classes": len(next(os.walk(path))[1])},
            "images": {"size": image_size, "resize": image_size * 8 // 7},
            "validation_rows": 256,
            "optimizer": {"kind": "sgd", "learning_rate": LEARNING_RATE, "weight_decay": 0.0},
            "schedule": {"warmup_fraction": 0.0, "decay_fraction": 0.0},
        },
        scaling={"num_workers": 1},
        cluster={"address": "none"},
    )


def ours(*, warm_steps: int, **arguments: Any) -> dict[str, Any]:
    """Measure images/s after the warm-up."""
    return measured_run(config_of(**arguments).replace(log_every=10), warm_steps=warm_steps)


def resumed(*, path: str, image_size: int) -> dict[str, Any]:
    """Return whether 20 steps have the same weights with and without a stop after the tenth."""
    import rayrec
    from rayrec.observe.console import Console

    with tempfile.TemporaryDirectory() as storage:

        def weights(name: str, steps: int) -> str:
            config = config_of(path=path, image_size=image_size, steps=steps)
            result = rayrec.train(
                config.replace(storage_path=storage, name=name), console=Console(quiet=True)
            )
            return str(result.summary["weights_sha256"])

        weights("stopped", 10)
        return {"equal": weights("stopped", 20) == weights("straight", 20)}


def plain(*, loader_workers: int, **arguments: Any) -> dict[str, Any]:
    """Run the plain script."""
    arguments |= {
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "seed": 0,
        "loader_workers": loader_workers,
    }
    result: dict[str, Any] = run_child(PLAIN, json.dumps(arguments))
    return result


def compare_speed(*, repeats: int, equal: Any, **common: Any) -> None:
    """Compare images/s, with the candidates in turn."""
    cpus = os.cpu_count() or 1
    rates, last = interleaved_rates(
        repeats,
        ours=lambda: child(__file__, "ours", **common),
        **{
            f"plain_{count}": lambda count=count: plain(loader_workers=count, **common)
            for count in range(cpus + 1)
        },
    )
    best = max(range(cpus + 1), key=lambda count: rates[f"plain_{count}"])
    emit(
        "images",
        peer=(
            f"torchvision's ImageFolder and a DataLoader with {best} workers, the best of 0 to "
            f"{cpus}"
        ),
        workload=(
            f"JPEG files of class folders to {common['image_size']} pixels, light network, batch "
            f"{BATCH_SIZE}, {cpus} CPUs"
        ),
        unit="images_per_s",
        value=rates["ours"],
        ratio=rates["ours"] / rates[f"plain_{best}"],
        repeats=repeats,
        config_hash=last["ours"]["config_hash"],
        peer_images_per_s=round(rates[f"plain_{best}"], 1),
        blocked_fraction=round(last["ours"]["blocked_fraction"], 4),
        resumes_to_equal_weights=equal["equal"],
    )


def main(*, quick: bool) -> None:
    arguments = sys.argv[1:]
    path = (
        arguments[arguments.index("--data") + 1]
        if "--data" in arguments
        else synthetic_images(2_000 if quick else 20_000)
    )
    for image_size in (224, 64):
        with part("images", f"{image_size} pixels"):
            common: dict[str, Any] = {"path": os.path.abspath(path), "image_size": image_size}
            equal = child(__file__, "resumed", **common)
            steps, warm_steps, repeats = (30, 10, 1) if quick else (312, 20, 3)
            compare_speed(
                repeats=repeats, equal=equal, steps=steps, warm_steps=warm_steps, **common
            )


if __name__ == "__main__":
    run_task(ours, resumed)
