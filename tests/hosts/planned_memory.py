"""Memory of one CPU worker that trains a click model and saves it, forecast by `rayrec plan` and
measured in a process.

The process is not connected to Ray, so its own size without data is measured, and not the constant
for a worker of Ray's.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

DIM = 64
TRAIN_ROWS = 4096
EVAL_ROWS = 8192
STEPS = 4
SIZES = (100_000, 1_500_000, 4_000_000)
"""Rows of all tables together: 26 MB, 390 MB and 1 GB of weights."""


def measured(rows: int) -> dict[str, int]:
    """Bytes: `forecast` and `peak`, the most that was resident, with tables of so many rows in
    all.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-m", "hosts.planned_memory", str(rows)]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def _table_sizes(rows: int) -> list[int]:
    """26 tables, as unequal as those of real logs."""
    shares = [2.0**-number for number in range(26)]
    return [max(10, int(rows * share / sum(shares))) for share in shares]


def _resident_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))


def _run(rows: int, folder: str) -> dict[str, int]:
    import torch
    from builders.savers import Run
    from ranks import click
    from torch import distributed

    import rayrec.training.worker  # noqa: F401  # what a worker has loaded, Ray among it
    from rayrec.checkpoint.state import all_tensors
    from rayrec.models.ranking.dlrm import DLRMConfig
    from rayrec.native import keep_freed_memory
    from rayrec.training.loop import drain
    from rayrec.workloads.base import Target, TrainConfig
    from rayrec.workloads.recsys.planning import tables_of
    from rayrec.workloads.recsys.workload import ClickWorkload

    keep_freed_memory()
    torch.set_num_threads(2)
    tables = _table_sizes(rows)
    schema = click.schema(tables)
    model = DLRMConfig(
        interaction="dot", embedding_dim=DIM, bottom_mlp=(512, 256, DIM), top_mlp=(512, 512, 256, 1)
    )
    workload = ClickWorkload(schema=schema, model=model).replace(
        sparse_optimizer={"kind": "rowwise_adagrad"}, dense_optimizer={"kind": "adam"}
    )
    config = TrainConfig(
        recipe="memory", workload=workload, batch_size=TRAIN_ROWS, eval_batch_size=EVAL_ROWS
    )
    process = _resident_bytes("VmRSS")
    forecast = tables_of(
        workload, config, tables, inputs=schema, target=Target(1, 1), memory_bytes=1 << 50
    ).memories[0]
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
    )
    prepared = click.prepared(tables)
    prepared.sets = {"train": SimpleNamespace(rows=100 * TRAIN_ROWS)}
    setup = workload.set_up(click.context(config, 0, 1), prepared)
    saver = Run(f"{folder}/run").saver(max_outage_s=60.0)

    def train(steps: range) -> None:
        batches = iter([click.batch(tables, step, 0, 1, rows=TRAIN_ROWS) for step in steps])
        for step in steps:
            setup.begin_step(step, 1000)
            setup.pipeline.progress(batches)
        drain(setup.pipeline, batches)

    train(range(STEPS))
    setup.model.eval()
    with torch.no_grad():
        scored = iter([click.batch(tables, 99, 0, 1, rows=EVAL_ROWS)])
        setup.pipeline.progress(scored)
        drain(setup.pipeline, scored)
    setup.model.train()
    assert saver.begin(STEPS, all_tensors(setup.model, setup.optimizer), state={}, score=None)
    train(range(STEPS, 2 * STEPS))  # while a thread writes
    saver.wait()
    saver.close()
    distributed.destroy_process_group()
    forecast = dataclasses.replace(forecast, process=process)
    return {"forecast": forecast.host_bytes("cpu"), "peak": _resident_bytes("VmHWM")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rayrec-memory-") as place:
        print(json.dumps(_run(int(sys.argv[1]), place)))
