"""Benchmark of serving criteo_kaggle's network over HTTP: raw rows in, as TSV and as JSON, scores
out.

Measures latency and requests/s at 1, 16 and 64 connections, with 1, 256 and 2048 rows per request.
The load comes from a separate process. Peers: bare Ray Serve handlers (the same forward over
preprocessed rows, and a small MLP), which are the limit of Ray Serve's proxy. rayrec's server also
runs without that proxy (--ingress direct), and behind Ray Serve's HAProxy
(RAY_SERVE_ENABLE_HA_PROXY=1). Within one process, it is compared with the bare forward and ONNX
Runtime.

`--soak MINUTES` instead: 70 % of the peak by either ingress, with swaps to the export and back,
rejected swaps, rollbacks, shadow models and killed replicas in turn. Reports failures and memory.
"""

import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from logs import synthetic_log
from memory import memory_bytes
from rows import attempt, emit, in_turn, interleaved, median_of, note, part
from subprocesses import FOLDER, child, run_child, run_task

SIZES = (1, 256, 2048)
CONNECTIONS = (1, 16, 64)
FORMATS = {"tsv": "raw TSV", "json": "JSON"}
"""Request formats and their names in workloads."""
TARGETS = {
    "ours": "/v1/score",
    "bare handler, same forward over preprocessed rows": "/forward",
    "bare handler, small MLP": "/mlp",
}
CHANGE_EVERY_S = 5.0
DEATH_S = 3.0
"""How long requests may fail after a replica was killed."""
QUEUE_LIMITS: dict[str, Any] = {
    "max_waiting_rows": 2 * max(SIZES) * max(CONNECTIONS),
    "max_held_bytes": 8 << 30,
}
"""Request queue limits, sized for simultaneous requests of all connections, also as JSON."""


def load_rows(path: str, checkpoint: str, size: int) -> tuple[Any, bytes, Any]:
    """Return (model, first rows of the log as text, the same rows encoded)."""
    from rayrec.data.logs.text_parser import parse
    from rayrec.inference.model import open_served

    model = open_served(checkpoint)
    with open(path, "rb") as file:
        text = b"".join(next(file) for _ in range(size))
    raw, faults = parse(model.preprocessor.schema, text)
    assert not faults.total
    return model, text, model.preprocessor.encode(raw)


def parse_reply(text: bytes) -> bytes:
    """Convert lines in Criteo's format to the JSON body of a request."""
    from rayrec.datasets.criteo import SCHEMA

    dense = set(SCHEMA.dense)
    rows = []
    for line in text.decode().splitlines():
        named = zip(SCHEMA.columns, line.split("\t"), strict=True)
        rows.append(
            {
                name: int(value) if name in dense else value
                for name, value in named
                if value and name != "label"
            }
        )
    return json.dumps({"rows": rows}).encode()


# -- measured functions, each in a separate process


def host_ray(*, path: str, checkpoint: str, port: int) -> None:
    """Host our server and the bare handlers on one Ray Serve, until standard input ends."""
    import ray
    from ray import serve

    import rayrec
    from rayrec.observe.console import Console

    sys.path.append(str(FOLDER))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    class Forward:
        def __init__(self) -> None:
            self.rows = {size: load_rows(path, checkpoint, size) for size in SIZES}

        async def __call__(self, request: Any) -> list[float]:
            model, _, rows = self.rows[int(request.query_params["rows"])]
            await request.body()
            return model.score(rows).tolist()

    class Mlp:
        def __init__(self) -> None:
            import torch
            from torch import nn

            self.model = nn.Sequential(
                nn.Linear(39, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
            )
            self.rows = {size: torch.rand(size, 39) for size in SIZES}

        async def __call__(self, request: Any) -> list[float]:
            import torch

            await request.body()
            with torch.inference_mode():
                return self.model(self.rows[int(request.query_params["rows"])])[:, 0].tolist()

    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    quiet = Console(quiet=True)
    with rayrec.serving(
        checkpoint, port=port, ingress="serve", cpus_per_replica=0.5, **QUEUE_LIMITS, console=quiet
    ):
        for handler in (Forward, Mlp):
            name = handler.__name__.lower()
            deployment: Any = serve.deployment(
                handler, ray_actor_options=options, max_ongoing_requests=1000
            )
            serve.run(deployment.bind(), name=name, route_prefix=f"/{name}")
        print("ready", flush=True)
        sys.stdin.read()


def host_direct(*, path: str, checkpoint: str, port: int) -> None:
    """Host our server without Ray Serve's proxy, until standard input ends."""
    import rayrec
    from rayrec.observe.console import Console

    quiet = Console(quiet=True)
    with rayrec.serving(
        checkpoint, port=port, ingress="direct", cpus_per_replica=0.5, **QUEUE_LIMITS, console=quiet
    ):
        print("ready", flush=True)
        sys.stdin.read()


def host_haproxy(*, path: str, checkpoint: str, port: int) -> None:
    """Host our server behind Ray Serve's HAProxy, until standard input ends."""
    import rayrec
    from rayrec.observe.console import Console

    quiet = Console(quiet=True)
    with rayrec.serving(
        checkpoint, port=port, ingress="serve", cpus_per_replica=0.5, **QUEUE_LIMITS, console=quiet
    ):
        print("ready", flush=True)
        sys.stdin.read()


def host_changing(
    *, path: str, checkpoint: str, export: str, damaged: str, ingress: Any, port: int
) -> None:
    """Host two replicas and change them in turn every CHANGE_EVERY_S: swap, rejected swap,
    rollback, shadow model, killed replica.

    Prints changes, times of kills and memory as JSON at the end.
    """

    import psutil

    import rayrec
    from rayrec.config import InputError
    from rayrec.observe.console import Console
    from rayrec.serve.control import change_shadow, revert_model, swap_model

    changes: dict[str, int] = {}
    killed: list[float] = []
    memory: list[int] = []
    stop = threading.Event()
    options = {"port": port, "ingress": ingress, "replicas": 2, "cpus_per_replica": 0.5}
    with rayrec.serving(checkpoint, **options, console=Console(quiet=True)) as server:

        def kill() -> None:
            children = psutil.Process().children(recursive=True)
            killed.append(time.time())
            next(child for child in children if child.name().startswith("ray::ServeRepl")).kill()

        def make(changed: Any) -> None:
            server.control.change(changed)

        events = {
            "swap to the export": lambda: make(partial(swap_model, path=export)),
            "refused swap": lambda: make(partial(swap_model, path=damaged)),
            "rollback": lambda: make(revert_model),
            "shadow": lambda: make(partial(change_shadow, path=export)),
            "replica killed": kill,
            "swap to the checkpoint": lambda: make(partial(swap_model, path=checkpoint)),
            "no shadow": lambda: make(partial(change_shadow, path=None)),
        }

        def change() -> None:
            for name in itertools.cycle(events):
                if stop.wait(CHANGE_EVERY_S):
                    return
                try:
                    events[name]()
                    outcome = "accepted" if name == "refused swap" else "done"
                except InputError as error:
                    outcome = "done" if name == "refused swap" else str(error)
                except Exception as error:
                    outcome = repr(error)
                counted = name if outcome == "done" else f"{name}: {outcome}"
                changes[counted] = changes.get(counted, 0) + 1
                memory.append(memory_bytes(os.getpid()))

        thread = threading.Thread(target=change)
        thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        stop.set()
        thread.join()
    print(json.dumps({"changes": changes, "killed": killed, "memory_bytes": memory}), flush=True)


def in_process(
    *, path: str, checkpoint: str, export: str, format: Any, size: int, repeats: int
) -> dict[str, float]:
    """Measure the batches/s of scoring in one thread: a full answer without HTTP, the bare forward,
    and ONNX Runtime.
    """
    import numpy as np
    import torch
    from peers.onnx_model import load

    from rayrec.serve.counters import Counters
    from rayrec.serve.replica_models import BatchScorer
    from rayrec.serve.requests import open_body

    torch.set_num_threads(1)
    model, text, rows = load_rows(path, checkpoint, size)
    answerer = BatchScorer(model, Counters())
    onnx = load(export, num_threads=1)
    ids = np.stack(rows.ids, axis=1).astype(np.int64)
    np.testing.assert_allclose(onnx(rows.dense, ids), model.score(rows), atol=1e-4)

    body = parse_reply(text) if format == "json" else text

    def answer() -> None:
        answers, _, _ = answerer.answer(
            [open_body(body, format, schema=model.preprocessor.schema, max_rows=size)]
        )
        answers[0].to_json(columns=False)  # type: ignore[union-attr]

    def rate(function: Any) -> float:
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < 1.0:
            function()
            count += 1
        return count / (time.perf_counter() - start)

    return interleaved(
        repeats,
        answer=lambda: rate(answer),
        forward=lambda: rate(lambda: model.score(rows)),
        onnx=lambda: rate(lambda: onnx(rows.dense, ids)),
    )


def prepare(*, path: str, export: str) -> str:
    """Return the checkpoint's folder, after exporting it."""
    from predict_rows import checkpoint_of

    import rayrec

    checkpoint = checkpoint_of(path)
    rayrec.export(checkpoint, out=export)
    return checkpoint


# -- measuring


@contextlib.contextmanager
def hosted(role: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Run a serving process and yield a dict, which contains its last output after the exit."""
    output: dict[str, Any] = {}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if role == "host_haproxy":
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    process = subprocess.Popen(
        [sys.executable, __file__, role, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line == "ready\n":
                break
        else:
            raise RuntimeError(f"{role} did not start")
        yield output
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):
                output.update(json.loads(line))
        process.wait(timeout=120)
    finally:
        process.kill()


def measure(
    port: int, path: str, *, body: str, connections: int, seconds: float, rate: float | None = None
) -> dict[str, Any]:
    arguments = {
        "port": port,
        "path": path,
        "body": body,
        "connections": connections,
        "seconds": seconds,
    }
    return run_child(
        FOLDER / "load_generator.py",
        json.dumps({**arguments, "warm_s": min(1.0, seconds), "rate": rate}),
    )


def percentiles_ms(results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the latency percentiles over all requests of these measurements, or {} if they
    failed.
    """
    ordered = sorted(latency_s for one in results for latency_s in one["taken_s"])
    if not ordered:
        return {}
    at = {
        name: ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
        for name, fraction in PERCENTILES.items()
    }
    return {name: round(1e3 * value, 2) for name, value in at.items()}


PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}


def compare_http(
    ports: dict[str, int],
    body: str,
    *,
    format: str,
    size: int,
    connections: int,
    seconds: float,
    repeats: int,
) -> None:
    """Measure all targets in turn, in `repeats` rounds."""
    targets = {
        name: (ports["ray"], f"{path}?rows={size}" if name != "ours" else path)
        for name, path in TARGETS.items()
    }
    targets["ours with --ingress direct"] = (ports["direct"], TARGETS["ours"])
    targets["ours behind Ray Serve's HAProxy"] = (ports["haproxy"], TARGETS["ours"])

    def requests(port: int, path: str) -> dict[str, Any]:
        result = measure(port, path, body=body, connections=connections, seconds=seconds)
        if result["failures"]:
            raise RuntimeError(f"{result['failures']} requests failed")
        return {**result, "requests_per_s": len(result["taken_s"]) / result["seconds"]}

    calls = {name: partial(requests, *target) for name, target in targets.items()}
    results = in_turn(
        repeats,
        lambda number: calls,
        shown=lambda result: f"{result['requests_per_s']:,.0f} requests/s",
    )
    rates = {
        name: median_of(rounds, lambda result: result["requests_per_s"])
        for name, rounds in results.items()
    }
    times = {name: percentiles_ms(rounds) for name, rounds in results.items()}
    note(
        f"  {FORMATS[format]}, {size} rows, {connections} connections: {rates['ours']:,.0f} "
        f"requests/s, {times['ours']}"
    )
    for name in targets:
        if name == "ours":
            continue
        note(f"    {name}: {rates[name]:,.0f} requests/s, {times[name]}")
        emit(
            "serve",
            peer=name,
            workload=(
                f"criteo_kaggle, {FORMATS[format]}, {size} rows a request, {connections} "
                "connections"
            ),
            unit="requests_per_s",
            value=rates["ours"],
            ratio=rates["ours"] / rates[name],
            repeats=repeats,
            **times["ours"],
            peer_requests_per_s=round(rates[name], 1),
            **{f"peer_{key}": value for key, value in times[name].items()},
        )


def compare_in_process(*, format: str, size: int, repeats: int, **common: Any) -> None:
    rates = child(__file__, "in_process", format=format, size=size, repeats=repeats, **common)
    for peer, name in (
        ("bare forward over preprocessed rows", "forward"),
        ("ONNX Runtime over preprocessed arrays", "onnx"),
    ):
        emit(
            "serve",
            peer=peer,
            workload=(
                f"criteo_kaggle, in process, {FORMATS[format]} to JSON, {size} rows a batch, 1 "
                "thread"
            ),
            unit="rows_per_s",
            value=rates["answer"] * size,
            ratio=rates["answer"] / rates[name],
            repeats=repeats,
            overhead_ms=round(1e3 / rates["answer"] - 1e3 / rates[name], 3),
            forward_ratio=round(rates["forward"] / rates[name], 4),
        )


def soak(body: str, *, minutes: float, ingress: str, export: str, **common: Any) -> None:
    """Send 70 % of the peak rate, with 256 rows over 16 connections, while models change and
    replicas are killed. Requests may fail only on a killed replica.
    """
    # of tests/, which only the process that runs benchmarks finds
    from hosts.ports import free_ports

    port = free_ports(1)
    damaged = f"{export}-damaged"
    if not os.path.exists(damaged):
        shutil.copytree(export, damaged)
        largest = max(
            (file for file in Path(damaged).rglob("*") if file.is_file()),
            key=lambda file: file.stat().st_size,
        )
        os.truncate(largest, largest.stat().st_size // 2)
    with hosted(
        "host_changing", **common, export=export, damaged=damaged, ingress=ingress, port=port
    ) as output:
        path = TARGETS["ours"]
        peak = measure(port, path, body=body, connections=16, seconds=min(8.0, 60 * minutes))
        rate = 0.7 * len(peak["taken_s"]) / peak["seconds"]
        result = measure(port, path, body=body, connections=16, seconds=60 * minutes, rate=rate)
    memory = output["memory_bytes"]
    quarter = max(1, len(memory) // 4)
    elsewhere = [
        failure
        for failure in result["failed"]
        if not any(0 <= failure[0] - at < DEATH_S for at in output["killed"])
    ]
    emit(
        "serve",
        peer=None,
        workload=f"criteo_kaggle, raw TSV, 256 rows a request, {minutes:g} minutes at 70 % of the "
        f"peak, --ingress {ingress}, a "
        f"change or the death of a replica every {CHANGE_EVERY_S:g} s",
        unit="requests_per_s",
        value=len(result["taken_s"]) / result["seconds"],
        ratio=None,
        repeats=1,
        failures=result["failures"],
        failures_without_a_death=len(elsewhere),
        **percentiles_ms([result]),
        changes=output["changes"],
        deaths=len(output["killed"]),
        memory_first_quarter_bytes=round(statistics.median(memory[:quarter])) if memory else None,
        memory_last_quarter_bytes=round(statistics.median(memory[-quarter:])) if memory else None,
    )
    if elsewhere:
        raise RuntimeError(f"requests failed though no replica died: {elsewhere[:8]}")


def main(*, quick: bool) -> None:
    from hosts.ports import free_ports

    arguments = sys.argv[1:]
    path = (
        os.path.abspath(arguments[arguments.index("--data") + 1])
        if "--data" in arguments
        else synthetic_log(200_000)
    )
    with tempfile.TemporaryDirectory() as scratch:
        export = os.path.join(scratch, "export")
        checkpoint = child(__file__, "prepare", path=path, export=export)
        common = {"path": path, "checkpoint": checkpoint}
        bodies = {}
        with open(path, "rb") as file:
            lines = [next(file) for _ in range(max(SIZES))]
        for size in SIZES:
            text = b"".join(lines[:size])
            for format, content in (("tsv", text), ("json", parse_reply(text))):
                bodies[format, size] = os.path.join(scratch, f"{size}.{format}")
                Path(bodies[format, size]).write_bytes(content)
        if "--soak" in arguments:
            minutes = float(arguments[arguments.index("--soak") + 1])
            for ingress in ("serve", "direct"):
                soak(bodies["tsv", 256], minutes=minutes, ingress=ingress, export=export, **common)
            return
        repeats = 1 if quick else 3
        for format, size in itertools.product(FORMATS, SIZES):
            with part("serve", f"in process, {FORMATS[format]}, {size} rows a batch"):
                compare_in_process(
                    format=format, size=size, repeats=repeats, export=export, **common
                )
        ports = {"ray": free_ports(1), "direct": free_ports(1), "haproxy": free_ports(1)}
        with contextlib.ExitStack() as servers:
            for name, port in ports.items():
                host = hosted(f"host_{name}", **common, port=port)
                # requests to its port fail then
                attempt(f"host_{name}", partial(servers.enter_context, host))
            for (format, size), connections in itertools.product(bodies, CONNECTIONS):
                compare_http(
                    ports,
                    bodies[format, size],
                    format=format,
                    size=size,
                    connections=connections,
                    seconds=1.0 if quick else 3.0,
                    repeats=repeats,
                )


if __name__ == "__main__":
    run_task(prepare, in_process, host_ray, host_direct, host_haproxy, host_changing)
