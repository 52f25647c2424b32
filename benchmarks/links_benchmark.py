"""Training on several hosts with slow links between them: torchrun on 1, 2 and 4 hosts, which are network namespaces on this
machine with one worker of one thread each, on preprocessed data. The machine's cores bound what all hosts compute together."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from logs import preprocessor_of, synthetic_log
from nodes import Network, missing
from rows import emit, say

import rayrec
from rayrec.config import InputError

ROWS, STEPS = 400_000, 120
LINKS_GBIT = (None, 10.0, 1.0)
PORT = 29500


def main(*, quick: bool) -> None:
    if lacks := missing():
        raise InputError(f"rayrec benchmark links: {lacks}")
    path, steps = synthetic_log(ROWS), 40 if quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        rayrec.preprocess(path, out=data, format="binary", preprocessor=preprocessor_of(path))
        alone = _trained(folder, data, hosts=1, gbit=None, steps=steps)["rows_per_s"]
        say(f"  1 host: {alone:,.0f} rows/s")
        for hosts in (2,) if quick else (2, 4):
            for gbit in LINKS_GBIT:
                found = _trained(folder, data, hosts=hosts, gbit=gbit, steps=steps)
                link = "links without a limit" if gbit is None else f"links of {gbit:g} Gbit/s"
                rate, cores = found["rows_per_s"], min(hosts, os.cpu_count() or 1)
                say(
                    f"  {hosts} hosts, {link}: {rate:,.0f} rows/s, {rate / alone / cores:.2f} of {cores} times one host, "
                    f"{found['sent_bytes_per_row']:,.0f} bytes sent a row"
                )
                emit(
                    "links",
                    peer=f"one host, times {cores} (the machine's cores)",
                    workload=f"criteo_kaggle network, batch 2048 over all, {hosts} hosts of one thread, {link}, torchrun",
                    value=rate,
                    ratio=rate / alone / cores,
                    repeats=1,
                    peer_rows_per_s=round(alone),
                    sent_bytes_per_row=round(found["sent_bytes_per_row"]),
                )


def _trained(folder: str, data: str, *, hosts: int, gbit: float | None, steps: int) -> dict[str, Any]:
    """`rows_per_s` of training, and what all hosts sent for a row."""
    name = f"hosts-{hosts}-{gbit or 'free'}"
    with Network() as network:
        nodes = [network.add() for _ in range(hosts)]
        for node in nodes if gbit else ():
            node.limit(gbit_per_s=gbit or 0)
        commands = [
            node.start(
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--node-rank", str(rank)),
                *("--nproc-per-node", "1", "--master-addr", nodes[0].address, "--master-port", str(PORT)),
                *("-m", "rayrec", "train", "criteo_kaggle", "--train-data.path", data, "--steps", str(steps)),
                *("--storage-path", os.path.join(folder, "runs"), "--name", name, "--evaluate-every", "100000000"),
                OMP_NUM_THREADS="1",
            )
            for rank, node in enumerate(nodes)
        ]
        done = [command.wait(timeout_s=600) for command in commands]
        for one in done:
            if one.status:
                raise InputError(f"rayrec benchmark links: {hosts} hosts: {one.err.strip().splitlines()[-1:]}")
        sent = sum(node.sent_bytes() for node in nodes)
    with open(os.path.join(folder, "runs", name, "summary.json")) as file:
        summary = json.load(file)
    return {"rows_per_s": summary["rows_per_s"], "sent_bytes_per_row": sent / summary["rows"]}
