"""Benchmark of one worker's training speed next to a busy process, relative to idle CPUs.

Trains in one process, and on a local Ray, whose workers have a lower priority. Quiet and busy runs
alternate.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial

from logs import synthetic_log
from rows import emit, interleaved
from subprocesses import child, run_task


def train(*, path: str, on_ray: bool, busy: bool) -> float:
    """Train criteo_demo with one worker and its default threads -> rows/s."""
    from rayrec.observe.console import Console
    from rayrec.recipes import criteo_demo
    from rayrec.training.trainer import train as run

    loop = [sys.executable, "-c", "while True: pass"]
    other = subprocess.Popen(loop) if busy else None
    try:
        with tempfile.TemporaryDirectory() as storage:
            cluster = {"address": "local", "num_cpus": os.cpu_count()} if on_ray else {}
            config = criteo_demo(path).replace(
                storage_path=storage, scaling={"num_workers": 1}, cluster=cluster
            )
            result = run(config, console=Console(quiet=True))
            with open(os.path.join(result.folder, "summary.json")) as file:
                return float(json.load(file)["rows_per_s"])
    finally:
        if other is not None:
            other.kill()
            other.wait()


def main(*, quick: bool) -> None:
    rows = 110_000
    repeats = 1 if quick else 3
    path = synthetic_log(rows)
    for on_ray in (False, True):
        trained = {
            name: partial(child, __file__, "train", path=path, on_ray=on_ray, busy=name == "busy")
            for name in ("quiet", "busy")
        }
        rates = interleaved(repeats, **trained)
        location = "on a local Ray" if on_ray else "in one process"
        emit(
            "busy",
            peer="the same on idle CPUs",
            workload=f"criteo_demo, {rows:,} rows, 1 worker {location}, beside one busy process",
            value=rates["busy"],
            ratio=rates["busy"] / rates["quiet"],
            repeats=repeats,
            peer_rows_per_s=round(rates["quiet"]),
        )


if __name__ == "__main__":
    run_task(train)
