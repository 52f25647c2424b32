"""Train, score and export tiny models of every kind, and print one JSON line for each: `python
tools/bits.py [NAME ...]`.

A line has the losses of all steps, the metrics from the last evaluation and from `rayrec evaluate`,
and three SHA-256 digests. `weights_sha256` covers the last checkpoint, `predict_sha256` the content
of the predictions, `export_sha256` the export's weights, tables and program. A change that must not
alter results keeps all of them:

    python tools/bits.py --save /tmp/before.json       # before the change, on this machine
    python tools/bits.py --against /tmp/before.json    # after it: prints differences, exit status 1
    if there are any

NAME is a run, or `quick`: the runs within this process, which need no Ray and no torchrun. A run
that needs others (`distilled` needs its teacher) includes them. The tool uses only public
functions, commands and formats, so that it runs on the code of other commits, too:
PYTHONPATH=OTHER/src python tools/bits.py. On another machine, or with another torch, floating point
may have other bits. `--against` then reports this and compares only the losses, which must agree
within 2e-4 in any case.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

ENVIRONMENT: Final = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Sums depend on the number of threads; set before torch is loaded."""
TOLERANCE: Final = 2e-4
"""Relative difference of losses that floating point of another machine may cause."""
HASHES: Final = ("weights_sha256", "predict_sha256", "export_sha256")
NO_RESULT: Final = ("report.json", "manifest.json", "README.md", "encode.py", "dense.pt2")
"""Export files with times, prose or code. The operations of dense.pt2 are hashed instead of the
file.
"""
VECTOR_FLAGS: Final = ("sse", "avx", "fma", "amx", "bf16", "asimd", "sve")
PACKAGES: Final = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "transformers")


def write_clicks() -> None:
    """Write a log in Criteo's format."""
    import rayrec

    rayrec.generate("clicks", rows=1500, days=7, seed=1)


def custom_rows(seed: int, rows: int) -> list[dict[str, Any]]:
    """Return rows of clicks with a list of earlier items, a list with weights, a row's weight and
    three labels.
    """
    chance = random.Random(seed)
    records = []
    for number in range(rows):
        user = chance.randrange(40)
        item = chance.randrange(30)
        tags = chance.sample(("red", "green", "blue", "grey"), chance.randrange(4))
        records.append(
            {
                "label": int((user * 7 + item * 13) % 10 + chance.random() * 4 > 7),
                "bought": chance.choice((0, 1, None)),
                "seconds": round(chance.random() * 3, 2),
                "age": 20 + user % 40 if number % 9 else None,
                "user": f"u{user}",
                "item": item,
                "history": [chance.randrange(30) for _ in range(chance.randrange(6))],
                "tags": tags,
                "tag_weights": [round(chance.random() * 2, 2) for _ in tags],
                "weight": chance.choice((0.5, 1, 2)),
            }
        )
    return records


def write_custom() -> None:
    """Write a log of own columns as CSV, and another one as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = custom_rows(seed=2, rows=600)
    lines = [",".join(rows[0])]
    lines += [",".join(_csv(value) for value in row.values()) for row in rows]
    Path("own.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.Table.from_pylist(custom_rows(seed=3, rows=600)), "own.parquet")


def _csv(value: Any) -> str:
    return (
        "|".join(map(str, value))
        if isinstance(value, list)
        else ""
        if value is None
        else str(value)
    )


def write_digits() -> None:
    """Write images in MNIST's format: a bar, the lower the larger the digit, in noise."""
    import numpy as np

    chance = np.random.default_rng(4)
    Path("digits").mkdir()
    for part, rows in (("train", 80), ("t10k", 16)):
        labels = chance.integers(0, 10, rows).astype(np.uint8)
        images = chance.integers(0, 60, (rows, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 6 + 2 * label, 4:24] = 220
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">i4").tobytes()
            Path("digits", f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())


def write_tokens() -> None:
    """Write blocks of 16 characters of a text."""
    import rayrec

    chance = random.Random(5)
    words = (
        ("the cat", "a dog", "my horse"),
        ("sees", "hears", "follows"),
        ("it.", "us.", "them."),
    )
    Path("text.txt").write_text(
        "".join(" ".join(map(chance.choice, words)) + "\n" for _ in range(300))
    )
    Path("prompts.txt").write_text("the cat sees\na dog\n")
    rayrec.preprocess("text.txt", out="tokens", format="mds", tokenizer="characters", block_size=16)


DATA: dict[str, Callable[[], None]] = {
    "clicks": write_clicks,
    "own.csv": write_custom,
    "own.parquet": write_custom,
    "digits": write_digits,
    "tokens": write_tokens,
}


@dataclass(frozen=True)
class Run:
    """Run and the uses of its weights. Paths are relative to the common working folder of all
    runs.
    """

    recipe: str
    data: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe, on top of `SMALL`."""
    start: Literal["here", "ray", "torchrun"] = "here"
    workers: int = 1
    needs: tuple[str, ...] = ()
    """Runs whose folders `changes` names."""
    goes_on: str | None = None
    """The run that is resumed, in its own folder."""
    predict: str | None = None
    """Path of the rows to score. None: `data`."""
    exports: dict[str, Any] | None = field(default_factory=dict)
    """Options of the export. None: no export."""


SMALL: dict[str, Any] = {
    "storage_path": "runs",
    "steps": 8,
    "batch_size": 32,
    "min_steps_per_epoch": 1,
    "eval_batch_size": 64,
    "evaluate_every": 4,
    "log_every": 1,
    "early_stopping": {"patience": 0},
    "train_data": {"block_bytes": 1 << 16, "segments_per_block": 2},
}
CLUSTER: dict[str, dict[str, Any]] = {
    "here": {"num_cpus": 2, "address": "none"},
    "torchrun": {"num_cpus": 2},
    "ray": {"num_cpus": 2, "address": "local", "object_store_bytes": 100_000_000},
}
DEMO_MODEL: dict[str, Any] = {
    "embedding_dim": 8,
    "bottom_mlp": [16, 8],
    "top_mlp": [16, 1],
    "first_order": False,
}
DEMO: dict[str, Any] = {"workload": {"model": DEMO_MODEL}}
GPT2: dict[str, Any] = {
    "precision": "fp32",
    "workload": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "dropout": 0.1},
        "max_new_tokens": 8,
    },
}
CUSTOM_SCHEMA: dict[str, Any] = {
    "label": "label",
    "labels": [{"name": "bought"}, {"name": "seconds", "kind": "number", "missing": "fault"}],
    "dense": ["age"],
    "sparse": ["user", "item", "history", "tags"],
    "lists": ["history", "tags"],
    "features": [
        {"name": "history", "vocabulary": "item", "max_length": 4},
        {"name": "tags", "weights": "tag_weights"},
    ],
    "weight": "weight",
}
ADAM_TABLES = {"kind": "adam", "learning_rate": 0.01, "eps": 1e-8, "weight_decay": 1e-4}

RUNS: dict[str, Run] = {
    "criteo": Run("criteo_demo", "clicks", DEMO),
    "bf16": Run("criteo_demo", "clicks", {**DEMO, "precision": "bf16"}, exports=None),
    "own": Run("clicks", "own.csv", {"workload": {"schema": CUSTOM_SCHEMA}}, exports=None),
    "din": Run(
        "clicks_din",
        "own.parquet",
        {
            "workload": {
                "schema": {"dense": ["age"], "sparse": ["user", "item", "history"]},
                "model": {"embedding_dim": 8, "attention": [8], "mlp": [16]},
            }
        },
    ),
    "finalnet": Run(
        "criteo_finalnet",
        "clicks",
        {
            "train_data": {"files": []},
            "workload": {
                "model": {"embedding_dim": 4, "first_tower": [16], "second_tower": [16]},
                "sparse_optimizer": ADAM_TABLES,
                "max_gradient_norm": 0.05,
            },
            "evaluate_every": 2,
            "plateau": {"patience": 1, "factor": 0.5, "min_improvement": 1.0},
        },
        exports={"quantize": "int8"},
    ),
    "ensemble": Run(
        "criteo_demo",
        "clicks",
        {
            "workload": {
                "model": {
                    "class": "ensemble",
                    "models": [
                        {"class": "dlrm", **DEMO_MODEL, "members": 2},
                        {
                            "class": "finalnet",
                            "embedding_dim": 4,
                            "first_tower": [16],
                            "second_tower": [16],
                        },
                    ],
                }
            }
        },
    ),
    "distilled": Run(
        "criteo_demo",
        "clicks",
        {
            "workload": {
                "model": {
                    **DEMO_MODEL,
                    "embedding_dim": 4,
                    "bottom_mlp": [8, 4],
                    "top_mlp": [8, 1],
                },
                "teacher": {"checkpoint": "runs/criteo", "weight": 0.5},
            }
        },
        needs=("criteo",),
        exports=None,
    ),
    "warm_start": Run(
        "criteo_demo",
        "clicks",
        {
            "workload": {"model": DEMO_MODEL, "preset": {"min_count": 4}},
            "init_from": "runs/criteo",
            "seed": 1,
        },
        needs=("criteo",),
        exports=None,
    ),
    "huggingface": Run(
        "gpt2_tiny", "tokens", {**GPT2, "loop": "huggingface"}, predict="prompts.txt"
    ),
    "ray_2": Run("criteo_demo", "clicks", DEMO, start="ray", workers=2, exports=None),
    "torchrun_2": Run("criteo_demo", "clicks", DEMO, start="torchrun", workers=2, exports=None),
    "resumed_3": Run(
        "criteo_demo",
        "clicks",
        {**DEMO, "steps": 16},
        start="torchrun",
        workers=3,
        goes_on="torchrun_2",
        exports=None,
    ),
    "torchrun_3": Run(
        "clicks",
        "own.csv",
        {"workload": {"schema": CUSTOM_SCHEMA}},
        start="torchrun",
        workers=3,
        exports=None,
    ),
    "mnist_ddp": Run(
        "mnist_resnet18",
        "digits",
        {
            "batch_size": 8,
            "steps": 4,
            "evaluate_every": 4,
            "workload": {"model": {"blocks": [1, 1, 1, 1]}},
        },
        start="torchrun",
        workers=2,
    ),
    "gpt2_fsdp": Run(
        "gpt2_tiny",
        "tokens",
        {**GPT2, "workload": {**GPT2["workload"], "parallel": "fsdp"}},
        start="torchrun",
        workers=2,
        predict="prompts.txt",
    ),
}
QUICK: Final = tuple(name for name, run in RUNS.items() if run.start == "here")


def select_runs(names: Iterable[str]) -> list[str]:
    """Return the runs that are asked for, none being all of them, and those that they need, in the
    order of `RUNS`.
    """
    selected = {run for name in names for run in (QUICK if name == "quick" else (name,))} or set(
        RUNS
    )
    for name in reversed(RUNS):
        if name in selected:
            selected |= {*RUNS[name].needs, *filter(None, [RUNS[name].goes_on])}
    return [name for name in RUNS if name in selected]


def logged(name: str, log: Path) -> dict[str, Any]:
    """Return the run's line; what it writes to standard error is shown only if it fails."""
    started_s = time.monotonic()
    try:
        with open(log, "a") as err, contextlib.redirect_stderr(err):
            line = measure(name, log)
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    print(f"{name}: {time.monotonic() - started_s:.1f} s", file=sys.stderr)
    return line


def measure(name: str, log: Path) -> dict[str, Any]:
    """Train, predict and export in the current folder, and return the run's line."""
    import rayrec

    run = RUNS[name]
    folder = Path("runs", RUNS[name].goes_on or name)
    if not Path(run.data).exists():
        DATA[run.data]()
    train(run, folder.name, log)
    summary = json.loads((folder / "summary.json").read_text())
    checkpoint = summary["checkpoint"]
    evaluated = rayrec.evaluate(checkpoint, run.data, cluster_address="none")
    line = {
        "name": name,
        "losses": losses(folder),
        "metrics": numbers(summary["metrics"]) | numbers(evaluated, prefix="evaluate."),
        "weights_sha256": summary["weights_sha256"],
    }
    out = Path("predictions", name)
    rayrec.predict_to(checkpoint, run.predict or run.data, out=str(out), cluster_address="none")
    line["predict_sha256"] = content_sha256(out)
    if run.exports is not None:
        out = Path("exports", name)
        rayrec.export(checkpoint, out=str(out), **run.exports)
        line["export_sha256"] = export_sha256(out)
    return line


def train(run: Run, name: str, log: Path) -> None:
    """Train in this process, or by a command with a fresh Ray or under torchrun."""
    import rayrec

    changes = merged(SMALL, run.changes)
    changes |= {
        "name": name,
        "train_data": {**changes["train_data"], "path": run.data},
        "cluster": CLUSTER[run.start],
    }
    changes |= {"scaling": {"num_workers": run.workers, "threads_per_worker": 1}}
    if run.start == "here":
        rayrec.train(getattr(rayrec.recipes, run.recipe)().replace(**changes))
        return
    Path("config.json").write_text(json.dumps({"recipe": run.recipe, **changes}))  # JSON is YAML
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.workers))
    start = torchrun if run.start == "torchrun" else ()
    with open(log, "ab") as err:
        command = [sys.executable, *start, "-m", "rayrec", "train", "--config", "config.json"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=err, stderr=err)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return `first` with `second` laid over it, nested dicts too."""
    nested = {
        key: merged(first[key], value)
        for key, value in second.items()
        if isinstance(first.get(key), dict)
    }
    return {**first, **second, **nested}


def losses(folder: Path) -> list[float]:
    """Return the loss of every step, in order."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


def numbers(metrics: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the numbers among metrics, exactly, as text that can be compared where they are NaN,
    too.
    """
    return {
        prefix + name: repr(value)
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }


def content_sha256(folder: Path) -> str:
    """Hash names, types and values of all columns of a folder's Parquet files, however the files
    are cut and packed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables(pq.read_table(file) for file in sorted(folder.glob("*.parquet")))
    assert len(table), folder
    digest = hashlib.sha256()
    for column in table.column_names:
        digest.update(f"{column} {table[column].type} {table[column].to_pylist()}\n".encode())
    return digest.hexdigest()


def export_sha256(folder: Path) -> str:
    """Hash the names and contents of an export's files, but for times and prose, and the operations
    of its program.
    """
    import torch

    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\n".encode())
        if file.name == "dense.pt2":
            digest.update(torch.export.load(file).graph_module.code.encode())
        elif file.name not in NO_RESULT:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Return what the bits of floating point depend on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    info = dict(
        (part.strip() for part in line.split(":", 1))
        for line in (cpuinfo.read_text() if cpuinfo.exists() else "").splitlines()
        if ":" in line
    )
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "cpu": " ".join(info.get(key, "") for key in ("model name", "cpu family", "model")).strip()
        or platform.machine(),
        "vectors": sorted(
            flag for flag in flags if flag.startswith(VECTOR_FLAGS) or "bf16" in flag
        ),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def differences(line: dict[str, Any], before: dict[str, Any] | None, *, bits: bool) -> list[str]:
    """Return what differs from the line of an earlier call, one text each: losses, beyond the
    tolerance or, with `bits`, at all, then also hashes and metrics. Metrics that the earlier call
    did not have are left out.
    """
    name = line["name"]
    if before is None:
        return [f"{name}: is not in the file; save one that has it"]
    now = line["losses"]
    then = before["losses"]
    if len(now) != len(then):
        return [f"{name}: {len(now)} steps, before {len(then)}"]
    difference = max(abs(new - old) / abs(old) for new, old in zip(now, then, strict=True))
    if not all(map(math.isfinite, now)) or difference > TOLERANCE:
        return [
            f"{name}: losses are up to {difference:.2g} (relative) apart, more than {TOLERANCE}: "
            f"{now}, before {then}"
        ]
    texts = (
        [f"{name}: losses are up to {difference:.2g} (relative) apart"]
        if bits and now != then
        else []
    )
    if bits:
        pairs = [(key, line.get(key), before.get(key)) for key in HASHES]
        pairs += [
            (key, line["metrics"].get(key), value) for key, value in before["metrics"].items()
        ]
        texts += [f"{name}: {key} {new}, before {old}" for key, new, old in pairs if new != old]
    return texts


def _code() -> str:
    """Return the folder of the package that runs here, and must run in all commands."""
    import rayrec

    assert rayrec.__file__ is not None
    code = str(Path(rayrec.__file__).absolute().parents[1])
    print(f"code: {code}", file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"quick, or some of {', '.join(RUNS)}; none: all"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="file to write the lines to, with the machine's features",
    )
    group.add_argument(
        "--against", type=Path, metavar="FILE", help="file of an earlier --save to compare with"
    )
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in (*RUNS, "quick")]
    if unknown:
        parser.error(f"no run {unknown[0]}; there are quick, {', '.join(RUNS)}")
    before = json.loads(options.against.read_text()) if options.against else None
    save = options.save and options.save.absolute()
    code = _code()
    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ.update(ENVIRONMENT, RAYREC_CACHE=f"{folder}/cache", PYTHONPATH=code)
        os.environ.pop("RAY_ADDRESS", None)
        for name in select_runs(options.names):
            lines.append(logged(name, Path(folder, "log.txt")))
            print(json.dumps(lines[-1]), flush=True)
    current = machine()
    if save:
        runs = ",\n".join(map(json.dumps, lines))
        save.write_text(f'{{"machine": {json.dumps(current)}, "runs": [\n{runs}\n]}}\n')
    if before is None:
        return 0
    then = {line["name"]: line for line in before["runs"]}
    changed = [key for key in current if current[key] != before["machine"].get(key)]
    if changed:
        print(
            f"made with another {', '.join(changed)}: losses are compared, bits are not",
            file=sys.stderr,
        )
    texts = [
        text
        for line in lines
        for text in differences(line, then.get(line["name"]), bits=not changed)
    ]
    print("\n".join(texts) or f"no difference in {len(lines)} runs", file=sys.stderr)
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
