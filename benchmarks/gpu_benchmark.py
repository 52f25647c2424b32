"""Benchmark of one GPU: training speed, utilization, checkpoint stalls, memory, device syncs,
scoring latency.

Training reads raw and preprocessed data. Utilization is the share of memory bandwidth and tensor
core peak. Memory is compared with its forecast, and tables also run in host memory.

`rayrec benchmark gpu [--quick] [--parts train,dcnv2,...] [--out FOLDER]`. `RAYREC_GPU_TESTS_ON=cpu`
tries all of it on the CPU, in tiny sizes. Its rows then have the device `cpu` and do not measure
speed. Every measurement is a separate process.
"""

import gzip
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from logs import synthetic_log
from rows import emit, note, part
from run_metrics import interleaved_rates, warm_speed
from subprocesses import child, run_task

from rayrec.config import InputError
from rayrec.models.ensemble import build_network
from rayrec.workloads.recsys.scorer import load_scorer

PARTS: Final = ("train", "dcnv2", "checkpoint", "memory", "uvm", "trace", "scores")
PRECISIONS: Final[dict[str, dict[str, Any]]] = {
    "fp32": {"precision": "fp32", "tf32": False},
    "tf32": {"precision": "fp32", "tf32": True},
    "bf16": {"precision": "bf16", "tf32": True},
}
TRAINED: Final = tuple(PRECISIONS)
"""Precisions of the part `train`."""
SCORED_ROWS: Final = 2048
_CATEGORIES: Final = "synthetic log, at most 100,000 categories a column"


@dataclass(frozen=True)
class Sizes:
    """Row, step and repeat counts of all parts."""

    log_rows: int
    table_rows: int
    """Maximum rows of a table. Larger MLPerf sizes are reduced to it."""
    batch_size: int
    steps: int
    warm_steps: int
    repeats: int
    calls: int
    """Number of timed scorer calls."""
    large_table_rows: int
    """Maximum rows of a table in the parts `checkpoint`, `memory` and `uvm`."""


FULL: Final = Sizes(8_000_000, 1_000_000, 65_536, 600, 100, 3, 2_000, 4_000_000)
QUICK: Final = Sizes(2_000_000, 1_000_000, 65_536, 200, 60, 1, 500, 2_000_000)
TINY: Final = Sizes(6_000, 500, 32, 10, 4, 1, 5, 600)


def device() -> str:
    """Return "cuda", or "cpu" if requested. Raises InputError without a GPU, unless the CPU was
    requested.
    """
    import torch

    if os.environ.get("RAYREC_GPU_TESTS_ON") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise InputError(
            "rayrec benchmark gpu: torch sees no GPU here (`rayrec doctor` says why); "
            "RAYREC_GPU_TESTS_ON=cpu tries it on the CPU"
        )
    return "cuda"


def usual(on: str) -> str:
    """Return the precision of parts that do not compare precisions. Many CPUs have no bf16
    products.
    """
    return "bf16" if on == "cuda" else "fp32"


def selected_parts(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the parts selected by `--parts A,B` in the order of PARTS, by default all. Raises
    InputError for an unknown part. Pure.
    """
    if "--parts" not in arguments:
        return PARTS
    index = arguments.index("--parts") + 1
    selected = set(arguments[index].split(",")) if index < len(arguments) else {""}
    if not selected <= set(PARTS):
        raise InputError(
            f"--parts: there are {', '.join(PARTS)}, with commas between them and no spaces"
        )
    return tuple(part for part in PARTS if part in selected)


def main(*, quick: bool) -> None:
    on = device()
    sizes = TINY if on == "cpu" else QUICK if quick else FULL
    arguments = sys.argv[1:]
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments[:-1] else None
    parts: dict[str, Callable[[Sizes, str, str | None], None]] = {
        "train": train,
        "dcnv2": dcnv2,
        "checkpoint": checkpoint,
        "memory": memory,
        "uvm": uvm,
        "trace": trace,
        "scores": scores,
    }
    for name in selected_parts(arguments):
        note(f"gpu: {name}")
        with part("gpu", name):
            parts[name](sizes, on, out)


# -- What is trained


def table_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the row counts of MLPerf's 26 tables, each at most `max_rows`."""
    from rayrec.data.encoding.presets import MLPERF_NUM_EMBEDDINGS

    return tuple(min(rows, max_rows) for rows in MLPERF_NUM_EMBEDDINGS)


def build_preprocessor(path: str, *, table_rows: int, multi_hot: bool) -> str:
    """Create a Preprocessor with tables of these rows and return its folder. Its ids are hashes, so
    that tables are larger than with a vocabulary of the log.
    """
    from rayrec.data.encoding.encoder import MultiHot
    from rayrec.data.encoding.presets import NVT, make_preprocessor
    from rayrec.datasets.criteo import SCHEMA

    folder = os.path.join(
        os.path.dirname(path), f"gpu-{table_rows}-{'multi' if multi_hot else 'one'}"
    )
    if not os.path.exists(os.path.join(folder, "preprocessor.json")):
        preset = NVT.replace(
            num_embeddings=table_sizes(table_rows), multi_hot=MultiHot() if multi_hot else None
        )
        make_preprocessor(preset, SCHEMA, preset.counting(SCHEMA).empty()).save(folder)
    return folder


def preprocessed(path: str, preprocessor: str, *, multi_hot: bool) -> str:
    """Preprocess the rows once, as binary, or as Parquet if multi-hot, and return the folder."""
    from rayrec import preprocess

    form: Literal["parquet", "binary"] = "parquet" if multi_hot else "binary"
    folder = f"{preprocessor}-{form}"
    if not os.path.exists(folder):
        preprocess(path, out=folder, format=form, preprocessor=preprocessor, split="sevenths")
    return folder


def config_of(
    sizes: Sizes,
    *,
    on: str,
    precision: str,
    multi_hot: bool = False,
    ready: bool = False,
    large: bool = False,
    **changes: Any,
) -> Any:
    """Return the configuration of MLPerf's DLRM, or of its DCNv2 with `multi_hot`, on the synthetic
    log. `ready`: from preprocessed data. `large`: with tables of `large_table_rows`.
    """
    from rayrec.data.logs.splits import Split
    from rayrec.recipes import mlperf_dcnv2, mlperf_dlrm

    path = synthetic_log(sizes.log_rows)
    rows = sizes.large_table_rows if large else sizes.table_rows
    preprocessor = build_preprocessor(path, table_rows=rows, multi_hot=multi_hot)
    recipe = mlperf_dcnv2 if multi_hot else mlperf_dlrm
    config = recipe(preprocessed(path, preprocessor, multi_hot=multi_hot) if ready else path)
    workload: Any = config.workload
    rate = {"learning_rate": 0.005}  # no figure measures quality, and a NaN loss would end the run
    return config.replace(
        **PRECISIONS[precision],
        batch_size=sizes.batch_size,
        eval_batch_size=sizes.batch_size,
        steps=sizes.steps,
        evaluate_every=10**9,
        log_every=10 if sizes.steps > 50 else 2,
        checkpoint={"num_to_keep": 1, "keep_best": 0},
        train_data={"files": ()},
        scaling={"num_workers": 1, "use_gpu": on == "cuda"},
        trackers={"prometheus": False, "tensorboard": False},
        workload=workload.replace(
            preprocessor=preprocessor,
            preset=workload.preset.replace(split=Split()),
            sparse_optimizer=rate,
            dense_optimizer=rate,
        ),
    ).replace(**changes)


def trained(config: Any, storage: str) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Train below `storage` and return the run's folder, summary and events. Runs share the index
    of the log.
    """
    import rayrec
    from rayrec.observe.console import Console
    from rayrec.observe.events import read_events

    cache = os.path.join(os.path.dirname(synthetic_log_of(config)), ".cache")
    os.makedirs(cache, exist_ok=True)
    os.symlink(cache, os.path.join(storage, ".cache"))
    result = rayrec.train(
        config.replace(storage_path=storage, name="run"), console=Console(quiet=True)
    )
    return (
        result.folder,
        result.summary,
        list(read_events(os.path.join(result.folder, "events.jsonl"))),
    )


def synthetic_log_of(config: Any) -> str:
    """Return the path of the training log or of its preprocessed files."""
    path: str = config.train_data.path
    return path


def select_kind(events: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [dict(event) for event in events if event["kind"] == kind]


# -- What a process measures


def speed(*, sizes: dict[str, Any], on: str, precision: str, **how: Any) -> dict[str, Any]:
    """Train and return `rows_per_s`, `blocked_fraction`, `multiply_adds_per_row` and
    `config_hash`.
    """
    measured = Sizes(**sizes)
    with tempfile.TemporaryDirectory() as storage:
        _, summary, events = trained(
            config_of(measured, on=on, precision=precision, **how), storage
        )
    return {
        **warm_speed(select_kind(events, "step"), warm_steps=measured.warm_steps),
        "multiply_adds_per_row": select_kind(events, "start")[-1]["multiply_adds_per_row"],
        "config_hash": summary["config_hash"],
    }


def torchrec_speed(*, sizes: dict[str, Any], on: str, precision: str) -> dict[str, float]:
    """Measure the `rows_per_s` of TorchRec's DLRM with MLPerf's network and the same tables, rows,
    batch size and precision, from encoded batches in host memory (pinned for a GPU).
    """
    import torch
    from peers.torchrec_dlrm import MLPERF, build
    from pipelines import begin_group, pipeline_rate, ready_batches, torchrec_batches

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.training.worker import allow_tf32

    measured = Sizes(**sizes)
    config = config_of(measured, on=on, precision=precision)
    device = torch.device("cuda", 0) if on == "cuda" else torch.device("cpu")
    preprocessor = Preprocessor.load(config.workload.preprocessor)
    allow_tf32(config.tf32)
    begin_group(device)
    try:
        batches = ready_batches(
            config.train_data.path,
            preprocessor,
            batch_size=measured.batch_size,
            number=min(measured.steps, measured.log_rows // measured.batch_size),
        )
        pipeline = build(
            preprocessor.num_embeddings,
            precision=config.precision,
            network=MLPERF,
            device=device,
            batch_size=measured.batch_size,
        )
        rate = pipeline_rate(
            pipeline,
            torchrec_batches(batches, pinned=on == "cuda"),
            steps=measured.steps - measured.warm_steps,
            batch_size=measured.batch_size,
            warm_steps=measured.warm_steps,
            wait=torch.cuda.synchronize if on == "cuda" else lambda: None,
        )
    finally:
        torch.distributed.destroy_process_group()
    return {"rows_per_s": rate}


def peaks(*, on: str) -> dict[str, float]:
    """Measure the device's FLOP/s of matrix products by precision, and its bytes/s of
    device-to-device copies (reads plus writes).
    """
    import torch

    from rayrec.training.step_log import multiply_adds_per_s
    from rayrec.training.worker import allow_tf32

    torch_device = torch.device("cuda", 0) if on == "cuda" else torch.device("cpu")
    rates = {}
    for name, settings in PRECISIONS.items():
        allow_tf32(settings["tf32"])
        rates[name] = 2 * multiply_adds_per_s(torch_device, precision=settings["precision"])
    source = torch.ones((1 << 30 if on == "cuda" else 1 << 22) // 4, device=torch_device)
    target = torch.empty_like(source)
    rates["memory"] = 2 * source.nbytes / best_s(lambda: target.copy_(source), on=on)
    return rates


def best_s(call: Callable[[], Any], *, on: str, repeats: int = 20) -> float:
    """Return the seconds of the fastest of `repeats` calls, including device synchronization."""
    import torch

    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if on == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def row_bytes(*, sizes: dict[str, Any], on: str, multi_hot: bool) -> dict[str, float]:
    """Return the minimum device memory traffic per row, in bytes, by purpose."""
    from rayrec.data.encoding.encoder import MLPERF_SIZES
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.models.base import ModelInputs
    from rayrec.models.cost import network_cost

    workload = config_of(Sizes(**sizes), on=on, precision="fp32", multi_hot=multi_hot).workload
    inputs = ModelInputs.from_schema(SCHEMA)
    cost = network_cost(build_network(workload.model, inputs), inputs, workload.model)
    ids = sum(MLPERF_SIZES) if multi_hot else len(SCHEMA.sparse)
    state_values = workload.sparse_optimizer.state_bytes(1, workload.model.table_width) // 4
    return bytes_of_row(
        ids=ids,
        features=len(SCHEMA.sparse),
        width=workload.model.table_width,
        state_values=state_values,
        saved_bytes=cost.saved_bytes_per_row,
    )


def bytes_of_row(
    *, ids: int, features: int, width: int, state_values: int, saved_bytes: float
) -> dict[str, float]:
    """Compute the minimum device memory traffic per row, in bytes, for float32. Pure.

    `tables`: each id's row is read forward, and read and written backward, with its optimizer's
    state (`state_values` a row of a table) read and written. `embeddings`: pooled embeddings and
    their gradients are written once and read once each. `activations`: what the backward pass needs
    is written and read, and its gradient too. Weights and ids are left out: a batch shares the
    weights, and ids are few bytes. An id that a batch has twice counts twice, although a cache may
    have its row.
    """
    return {
        "tables": 4.0 * ids * (3 * width + 2 * state_values),
        "embeddings": 4.0 * features * width * 4,
        "activations": 4.0 * saved_bytes,
    }


def stalls(*, sizes: dict[str, Any], on: str) -> dict[str, Any]:
    """Measure the checkpoint stalls of a run with large tables."""
    measured = Sizes(**sizes)
    saving: dict[str, Any] = {
        "checkpoint": {"num_to_keep": 1, "keep_best": 0, "every": max(1, measured.steps // 4)}
    }
    with tempfile.TemporaryDirectory() as storage:
        config = config_of(measured, on=on, precision=usual(on), ready=True, large=True, **saving)
        _, summary, events = trained(config, storage)
    saves = select_kind(events, "checkpoint")
    return {
        "stall_fraction": summary["checkpoint_stall_fraction"],
        "stall_s": [round(event["stall_s"], 3) for event in saves],
        "write_s": [round(event["write_s"], 3) for event in saves],
        "bytes": saves[-1]["bytes"],
        "train_s": summary["train_s"],
        "config_hash": summary["config_hash"],
    }


def memories(*, sizes: dict[str, Any], on: str) -> dict[str, Any]:
    """Measure a worker's peak device memory in training, a save and an evaluation, and the forecast
    of `rayrec plan`, in bytes. On the CPU, measure the process.
    """
    import torch

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.workloads.base import Target
    from rayrec.workloads.recsys.planning import tables_of

    config = config_of(Sizes(**sizes), on=on, precision="fp32", ready=True, large=True)
    rows = Preprocessor.load(config.workload.preprocessor).num_embeddings
    planned = tables_of(
        config.workload, config, rows, inputs=SCHEMA, target=Target(1, 1), memory_bytes=1 << 50
    )
    with tempfile.TemporaryDirectory() as storage:
        _, summary, events = trained(config, storage)
    field = "device_memory_bytes" if on == "cuda" else "memory_bytes"
    peak = max(event[field] for event in select_kind(events, "step"))
    if on == "cuda":
        peak = max(peak, torch.cuda.max_memory_allocated())
    forecast = planned.memories[0]
    return {
        "forecast": forecast.device_bytes(on) if on == "cuda" else forecast.host_bytes(on),
        "peak": peak,
        "config_hash": summary["config_hash"],
    }


def cached_speed(*, sizes: dict[str, Any], on: str, uvm: bool) -> dict[str, Any]:
    """Measure `speed` with large tables in device memory or, with `uvm`, in a process with too
    little device memory for them.
    """
    import torch

    measured = Sizes(**sizes)
    how: dict[str, Any] = {
        "large": True,
        "ready": True,
        "batch_size": max(1, measured.batch_size // 4),
    }
    if uvm:
        config = config_of(measured, on=on, precision=usual(on), large=True)
        how["workload"] = config.workload.replace(sharding={"uvm_caching": True})
        if on == "cuda":
            tables = (
                4 * config.workload.model.table_width * sum(table_sizes(measured.large_table_rows))
            )
            fraction = 0.7 * tables / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
    return speed(sizes=sizes, on=on, precision=usual(on), **how)


def traced(*, sizes: dict[str, Any], on: str, out: str | None) -> dict[str, Any]:
    """Count the device syncs in a trace of torch's profiler, and copy the trace to `out`."""
    measured = Sizes(**sizes)
    steps = 5
    window = f"{measured.steps // 2}:{measured.steps // 2 + steps}"
    with tempfile.TemporaryDirectory() as storage:
        config = config_of(
            measured,
            on=on,
            precision=usual(on),
            ready=True,
            profile={"steps": window},
            log_every=10**6,
        )
        folder, summary, _ = trained(config, storage)
        (trace_path,) = Path(folder, "profile").glob("*/rank_0/trace.json.gz")
        with gzip.open(trace_path, "rt") as file:
            trace_events = json.load(file)["traceEvents"]
        if out is not None:
            os.makedirs(out, exist_ok=True)
            shutil.copy(trace_path, os.path.join(out, "trace.json.gz"))
    return {
        "syncs": syncs_of(trace_events),
        "steps": steps,
        "kernels": kernels_of(trace_events),
        "config_hash": summary["config_hash"],
    }


def syncs_of(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count the calls of each blocking CUDA function in a trace. Pure.

    Copies to or from pageable memory block too. Traces distinguish them by the name of the copy.
    """
    counts: dict[str, int] = {}
    for event in events:
        name = event.get("name", "")
        waits = event.get("cat") == "cuda_runtime" and "Synchronize" in name
        pageable = event.get("cat") == "gpu_memcpy" and "Pageable" in name
        if waits or pageable:
            counts[name] = counts.get(name, 0) + 1
    return counts


def kernels_of(events: Iterable[Mapping[str, Any]]) -> int:
    return sum(event.get("cat") == "kernel" for event in events)


def latencies(*, sizes: dict[str, Any], on: str) -> dict[str, Any]:
    """Measure the milliseconds to score SCORED_ROWS encoded rows, including the copy to host
    memory.
    """
    import numpy as np

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA

    measured = Sizes(**sizes)
    config = config_of(measured, on=on, precision=usual(on), steps=min(measured.steps, 20))
    path = config.train_data.path
    with open(path, "rb") as file:
        text = file.read(400 * SCORED_ROWS)
    text = text[: text.rindex(b"\n") + 1]
    raw, _ = parse(SCHEMA, text)
    preprocessor = Preprocessor.load(config.workload.preprocessor)
    rows = preprocessor.encode(raw, np.arange(SCORED_ROWS))
    with tempfile.TemporaryDirectory() as storage:
        _, summary, _ = trained(config, storage)
        scorer = load_scorer(
            config.workload.model,
            precision=config.precision,
            checkpoint=summary["checkpoint"],
            preprocessor=preprocessor,
            device=on,
        )
        spent = []
        for _ in range(measured.calls + 20):
            start = time.perf_counter()
            scorer.score(rows)
            spent.append(1e3 * (time.perf_counter() - start))
    ordered = sorted(spent[20:])
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "config_hash": summary["config_hash"],
    }


# -- The parts

TASKS: Final = (
    speed,
    torchrec_speed,
    peaks,
    row_bytes,
    stalls,
    memories,
    cached_speed,
    traced,
    latencies,
)


def run(task: Callable[..., Any], **arguments: Any) -> Any:
    """Run a task in a new process and return its result. On the CPU, where nothing is measured, run
    it in this process.
    """
    if arguments["on"] == "cpu":
        return task(**arguments)
    return child(__file__, task.__name__, **arguments)


def described(on: str) -> dict[str, Any]:
    """Return the fields shared by all rows."""
    import torch

    if on == "cpu":
        return {"device": "cpu"}
    return {
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }


def train(sizes: Sizes, on: str, out: str | None) -> None:
    """Compare DLRM's speed from raw TSV and from preprocessed data, by precision, with TorchRec's
    own DLRM and with the roofline.
    """
    common = {"sizes": asdict(sizes), "on": on}
    peak = run(peaks, on=on)
    moved = run(row_bytes, multi_hot=False, **common)
    for precision in TRAINED:
        rates, last = interleaved_rates(
            sizes.repeats,
            raw=partial(run, speed, precision=precision, ready=False, **common),
            ready=partial(run, speed, precision=precision, ready=True, **common),
            torchrec=partial(run, torchrec_speed, precision=precision, **common),
        )
        bounds = roofline(
            rates["raw"], last["raw"]["multiply_adds_per_row"], moved, peak, precision=precision
        )
        for peer, name in (
            ("preprocessed binary files of the same rows", "ready"),
            ("TorchRec's own DLRM on encoded batches in host memory", "torchrec"),
        ):
            _emit_speed(
                f"MLPerf DLRM, one-hot, {precision}, from raw TSV",
                peer=peer,
                rate=rates["raw"],
                peer_rate=rates[name],
                result=last["raw"],
                roofline=bounds,
                sizes=sizes,
                on=on,
            )


def dcnv2(sizes: Sizes, on: str, out: str | None) -> None:
    """Measure MLPerf's DCNv2 with 214 ids per row, from preprocessed data."""
    common = {"sizes": asdict(sizes), "on": on, "multi_hot": True}
    peak = run(peaks, on=on)
    moved = run(row_bytes, **common)
    for precision in ("tf32", "bf16") if on == "cuda" else ("fp32",):
        rates, last = interleaved_rates(
            sizes.repeats, ready=partial(run, speed, precision=precision, ready=True, **common)
        )
        _emit_speed(
            f"MLPerf DCNv2, multi-hot, {precision}, from preprocessed parquet files",
            peer=None,
            rate=rates["ready"],
            peer_rate=None,
            result=last["ready"],
            roofline=roofline(
                rates["ready"],
                last["ready"]["multiply_adds_per_row"],
                moved,
                peak,
                precision=precision,
            ),
            sizes=sizes,
            on=on,
        )


def roofline(
    rows_per_s: float,
    multiply_adds: float,
    moved: Mapping[str, float],
    peak: Mapping[str, float],
    *,
    precision: str,
) -> dict[str, Any]:
    """Compute the FLOP and bytes per row, and the fractions of the device's measured peaks used at
    this speed. Pure.
    """
    flop = 6 * multiply_adds
    size = sum(moved.values())
    return {
        "flop_per_row": round(flop),
        "bytes_per_row": {name: round(part) for name, part in moved.items()},
        "peak_flop_per_s": round(peak[precision]),
        "peak_bytes_per_s": round(peak["memory"]),
        "flop_share": round(rows_per_s * flop / peak[precision], 4),
        "bytes_share": round(rows_per_s * size / peak["memory"], 4),
        "bound_rows_per_s": round(min(peak[precision] / flop, peak["memory"] / size)),
    }


def _emit_speed(
    case: str,
    *,
    peer: str | None,
    rate: float,
    peer_rate: float | None,
    result: Mapping[str, Any],
    roofline: Mapping[str, Any],
    sizes: Sizes,
    on: str,
) -> None:
    more: dict[str, Any] = {} if peer_rate is None else {"peer_rows_per_s": round(peer_rate)}
    emit(
        "gpu",
        peer=peer,
        workload=(
            f"{case}, batch {sizes.batch_size:,}, tables of at most {sizes.table_rows:,} rows, "
            f"{_CATEGORIES}, 1 worker"
        ),
        value=rate,
        ratio=None if peer_rate is None else rate / peer_rate,
        repeats=sizes.repeats,
        config_hash=result["config_hash"],
        blocked_fraction=round(result["blocked_fraction"], 4),
        **more,
        **roofline,
        **described(on),
    )


def checkpoint(sizes: Sizes, on: str, out: str | None) -> None:
    result = run(stalls, sizes=asdict(sizes), on=on)
    emit(
        "gpu",
        peer=None,
        workload=(
            f"MLPerf DLRM, {usual(on)}, saves of {result['bytes'] / 1e9:.1f} GB while it trains "
            f"for {result['train_s']:.0f} s"
        ),
        unit="stall_fraction",
        value=result["stall_fraction"],
        ratio=None,
        repeats=1,
        config_hash=result["config_hash"],
        stall_s=result["stall_s"],
        write_s=result["write_s"],
        **described(on),
    )


def memory(sizes: Sizes, on: str, out: str | None) -> None:
    result = run(memories, sizes=asdict(sizes), on=on)
    emit(
        "gpu",
        peer="the most that was allocated on the device",
        workload=(
            f"rayrec plan, MLPerf DLRM, fp32, batch {sizes.batch_size:,}, tables of at most "
            f"{sizes.large_table_rows:,} rows"
        ),
        unit="forecast_bytes",
        value=result["forecast"],
        ratio=result["forecast"] / result["peak"],
        repeats=1,
        config_hash=result["config_hash"],
        peak_bytes=result["peak"],
        **described(on),
    )


def uvm(sizes: Sizes, on: str, out: str | None) -> None:
    common = {"sizes": asdict(sizes), "on": on}
    rates, last = interleaved_rates(
        sizes.repeats,
        host=partial(run, cached_speed, uvm=True, **common),
        device=partial(run, cached_speed, uvm=False, **common),
    )
    emit(
        "gpu",
        peer="the same tables in device memory",
        workload=(
            f"MLPerf DLRM, {usual(on)}, batch {max(1, sizes.batch_size // 4):,}, tables of at most "
            f"{sizes.large_table_rows:,} rows, device memory for 0.7 of them, the others by UVM "
            f"caching, {_CATEGORIES}"
        ),
        value=rates["host"],
        ratio=rates["host"] / rates["device"],
        repeats=sizes.repeats,
        config_hash=last["host"]["config_hash"],
        peer_rows_per_s=round(rates["device"]),
        **described(on),
    )


def trace(sizes: Sizes, on: str, out: str | None) -> None:
    result = run(traced, sizes=asdict(sizes), on=on, out=out)
    emit(
        "gpu",
        peer=None,
        workload=(
            f"MLPerf DLRM, {usual(on)}, from preprocessed files: calls that make the host wait "
            "for the device, in a trace"
        ),
        unit="syncs_per_step",
        value=sum(result["syncs"].values()) / result["steps"],
        ratio=None,
        repeats=1,
        config_hash=result["config_hash"],
        syncs=result["syncs"],
        traced_steps=result["steps"],
        kernels=result["kernels"],
        **described(on),
    )


def scores(sizes: Sizes, on: str, out: str | None) -> None:
    result = run(latencies, sizes=asdict(sizes), on=on)
    emit(
        "gpu",
        peer=None,
        workload=(
            f"scoring {SCORED_ROWS:,} encoded rows with MLPerf's DLRM, {usual(on)}, one call "
            "after the other, no HTTP"
        ),
        unit="p99_ms",
        value=result["p99_ms"],
        ratio=None,
        repeats=sizes.calls,
        config_hash=result["config_hash"],
        p50_ms=float(f"{result['p50_ms']:.4g}"),
        **described(on),
    )


if __name__ == "__main__":
    run_task(*TASKS)
