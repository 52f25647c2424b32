"""Benchmark of slow links between hosts, compared with the forecast of `rayrec plan`.

Torchrun trains on 1, 2 and 4 hosts, which are network namespaces on this machine with one core and
one worker each (4 hosts share 2 cores), on preprocessed data.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial

from hosts.nodes import Network, missing, missing_tbf
from logs import build_preprocessor, synthetic_log
from rows import attempt, emit, interleaved, note, part
from run_metrics import warm_speed
from subprocesses import check_ended

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.observe.events import read_events
from rayrec.sharding.communication import CommunicationVolume, LinkBandwidth
from rayrec.workloads.base import Target
from rayrec.workloads.recsys.planning import local_memory, tables_of
from rayrec.workloads.recsys.workload import ClickWorkload

ROWS = 400_000
STEPS = 120
FEW_STEPS = 20
WARM_STEPS = 20
REPEATS = 3
LINKS_GBIT = (None, 10.0, 1.0)
PORT = 29500


@dataclass(frozen=True)
class Trained:
    """A run on several hosts."""

    rows_per_s: float
    """Behind the warm-up."""
    batch_size: int
    """Rows of a worker in a step."""
    rows: int
    sent_bytes: int
    """Bytes sent by all hosts, from start to end of the processes, with Ethernet, IP and TCP
    headers.
    """


def main(*, quick: bool) -> None:
    if lacks := missing() or missing_tbf():
        raise InputError(f"links: {lacks}")
    path = synthetic_log(ROWS)
    steps = 40 if quick else STEPS
    cores = os.cpu_count() or 1
    repeats = 1 if quick else REPEATS
    preprocessor = build_preprocessor(path)
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        rayrec.preprocess(path, out=data, format="binary", preprocessor=preprocessor)
        last: dict[tuple[int, float | None], Trained] = {}

        def rate(hosts: int, gbit: float | None = None, workers: int = 1) -> float:
            last[hosts, gbit] = _trained(
                folder, data, hosts=hosts, workers=workers, gbit=gbit, steps=steps
            )
            return last[hosts, gbit].rows_per_s

        cases = [(hosts, gbit) for hosts in ((2,) if quick else (2, 4)) for gbit in LINKS_GBIT]
        rates = interleaved(
            repeats,
            one_host=lambda: rate(1),
            two_workers_on_one_host=lambda: rate(1, workers=2),
            **{_name(*case): partial(rate, *case) for case in cases},
        )
        # What the start, an evaluation and the end send is the same in a shorter run.
        short = {
            hosts: attempt(
                f"{hosts} hosts, few steps",
                partial(_trained, folder, data, hosts=hosts, gbit=None, steps=FEW_STEPS),
            )
            for hosts, _ in cases
        }
    alone = rates["one_host"]
    pair = rates["two_workers_on_one_host"]
    note(f"  1 host: {alone:,.0f} rows/s; 2 workers on 1 host of 2 cores: {pair:,.0f} rows/s")
    for hosts, gbit in cases:
        with part("links", _name(hosts, gbit)):
            run = last[hosts, gbit]
            before = short[hosts]
            times = min(hosts, cores)
            sent = (run.sent_bytes - before.sent_bytes) / (run.rows - before.rows)
            traffic = _forecast(preprocessor, hosts=hosts, batch_size=run.batch_size)
            (_, forecast_sent), (forecast, limit) = (
                traffic.bytes_per_row(),
                traffic.limit(pair * times / 2, LinkBandwidth(gbit)),
            )
            speed = rates[_name(hosts, gbit)]
            link = "links without a limit" if gbit is None else f"links of {gbit:g} Gbit/s"
            note(
                f"  {hosts} hosts, {link}: {speed:,.0f} rows/s, forecast {forecast:,.0f} "
                f"({limit}); {speed / alone / times:.2f} of {times} times one host; {sent:,.0f} "
                f"bytes sent a row, forecast {forecast_sent:,.0f}"
            )
            emit(
                "links",
                peer=f"one host, times {times} (the machine's cores)",
                workload=(
                    f"criteo_kaggle network, batch {run.batch_size} a host, {hosts} hosts of one "
                    f"core, {link}"
                ),
                value=speed,
                ratio=speed / alone / times,
                repeats=repeats,
                peer_rows_per_s=round(alone * times),
                two_workers_one_host_rows_per_s=round(pair),
                forecast_rows_per_s=round(forecast),
                forecast_limit=limit,
                sent_bytes_per_row=round(sent),
                forecast_bytes_per_row=round(forecast_sent),
            )


def _name(hosts: int, gbit: float | None) -> str:
    return f"hosts_{hosts}_free" if gbit is None else f"hosts_{hosts}_gbit_{gbit:g}"


def _forecast(preprocessor: str, *, hosts: int, batch_size: int) -> CommunicationVolume:
    """Forecast the communication of hosts with one worker each, as `rayrec plan` does."""
    config = recipes.criteo_kaggle()
    loaded = Preprocessor.load(preprocessor)
    config = config.replace(
        batch_size=batch_size, min_steps_per_epoch=1, scaling={"num_workers": hosts}
    )
    assert isinstance(config.workload, ClickWorkload)
    return tables_of(
        config.workload,
        config,
        loaded.num_embeddings,
        inputs=loaded.inputs,
        target=Target(hosts, 1),
        memory_bytes=local_memory(config, workers=hosts),
        hotness=loaded.hotness,
    ).traffic


def _trained(
    folder: str, data: str, *, hosts: int, workers: int = 1, gbit: float | None, steps: int
) -> Trained:
    """Train on network namespaces as hosts. `workers`: per host, with one core each."""
    cores = os.cpu_count() or 1
    with Network() as network, tempfile.TemporaryDirectory(dir=folder) as runs:
        nodes = [network.add() for _ in range(hosts)]
        for node in nodes if gbit else ():
            node.limit(gbit_per_s=gbit or 0)
        commands = [
            node.start(
                *(
                    "taskset",
                    "--cpu-list",
                    ",".join(str((rank * workers + one) % cores) for one in range(workers)),
                ),
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    str(hosts),
                    "--node-rank",
                    str(rank),
                ),
                *(
                    "--nproc-per-node",
                    str(workers),
                    "--master-addr",
                    nodes[0].address,
                    "--master-port",
                    str(PORT),
                ),
                *(
                    "-m",
                    "rayrec",
                    "train",
                    "criteo_kaggle",
                    "--train-data.path",
                    data,
                    "--steps",
                    str(steps),
                ),
                *("--storage-path", runs, "--name", "run", "--evaluate-every", "100000000"),
                *("--log-every", "10"),
                OMP_NUM_THREADS="1",
            )
            for rank, node in enumerate(nodes)
        ]
        done = [command.wait(timeout_s=600) for command in commands]
        for one in done:
            if one.status:
                check_ended(f"{hosts} hosts: rayrec train", one.status, one.err)
        sent = sum(node.sent_bytes() for node in nodes)
        with open(os.path.join(runs, "run", "summary.json")) as file:
            rows = json.load(file)["rows"]
        events = read_events(os.path.join(runs, "run", "events.jsonl"), kinds={"step"})
    speed = warm_speed(events, warm_steps=min(WARM_STEPS, steps // 2))["rows_per_s"]
    return Trained(speed, round(rows / steps / hosts / workers), rows, sent)
