"""Outputs that stay as they are: small logs from seeds, and what commands make of them."""

import functools
import hashlib
import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from builders.click_models import DLRM, make_app, make_model, save_clicks

import rayrec
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import ThreadEngine
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.inference.export.write import encoder_program
from rayrec.observe.console import Console
from rayrec.schema import Feature, Label, Schema
from rayrec.serve.app import ScoringApp
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext

QUIET = Console(quiet=True)
SMALL = {"block_bytes": 1 << 16, "segments_per_block": 4, "console": QUIET}
NAMES: dict[str, Any] = {
    "dense": ("age", "price", "since"),
    "lists": ("history", "shops", "tags"),
    "optional": ("price", "flag"),
}
NAMES |= {
    "sparse": ("user", "item", "day", "flag", *NAMES["lists"]),
    "integers": ("item",),
    "timestamp": "at",
}
NAMES["labels"] = (Label(name="like"), Label(name="seconds", kind="number", missing="fault"))
SHOPS = Feature(name="shops", aligned_with="history", max_length=3)
NAMES["features"] = (
    Feature(name="history", vocabulary="item", max_length=3),
    SHOPS,
    Feature(name="tags", weights="tag_weights"),
)
OWN = Schema(
    label="click", weight="importance", nan="missing", tokens="any", delimiter=",", **NAMES
)
"""A log with a column of every kind."""


def digests(folder: Path, *, root: Path) -> dict[str, str]:
    """Hash each file in a folder, without folder `root`, times and what depends
    on a library's version.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_content(path, root)).hexdigest()[:32]
        for path in paths
    }


def _content(path: Path, root: Path) -> bytes:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        types = [(field.name, str(field.type)) for field in table.schema]
        return (
            f"{types}\n{pq.ParquetFile(path).metadata.num_row_groups}\n{table.to_pydict()}".encode()
        )
    if path.suffix != ".json":
        return path.read_bytes()
    values = json.loads(path.read_text().replace(str(root), "FOLDER"))
    for source in values.get("source", ()):
        del source["bytes"]
    if values.get("format") == "parquet":
        values["hash"], values["files"] = "", [file["name"] for file in values["files"]]
    return json.dumps(values).encode()


# -- Logs
def write_criteo_log(folder: Path, *, rows: int, faults: bool = False) -> str:
    """Write three files of a synthetic log, with some damaged and repeated lines if `faults` says
    so.
    """
    rayrec.generate(
        str(folder / "made"),
        rows=rows,
        days=7,
        seed=11,
    )
    lines = (folder / "made" / "train.txt").read_bytes().splitlines(keepends=True)
    if faults:
        lines[7:7] = [
            b"2" + lines[7][1:],
            lines[8][:-2] + b"g\n",
            lines[9].replace(b"\t", b"\t1x\t", 1),
            b"\n",
            lines[3],
        ]
        lines[-9:-9] = [lines[1], lines[2].rpartition(b"\t")[0] + b"\n", b"x" * 300 + b"\n"]
    (folder / "log").mkdir()
    for day in range(3):
        (folder / "log" / f"day_{day}").write_bytes(
            b"".join(lines[day * rows // 3 : (day + 1) * rows // 3])
        )
    return str(folder / "log")


def own_table(rows: int, *, seed: int = 5) -> pa.Table:
    """Rows of `OWN`, with missing values, NaN, empty lists, and numbers of all sizes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rows)
    tags = [[f"tag {n}" for n in rng.zipf(1.6, rng.integers(0, 4)) % 50] for _ in range(rows)]
    shops = ["north", "süd", "9", "009", "true"]

    def some(values: list[Any], share: float = 0.9) -> list[Any]:
        return [
            value if keep else None
            for value, keep in zip(values, rng.random(rows) < share, strict=True)
        ]

    columns: dict[str, Any] = {
        "click": (rng.random(rows) < 0.3).astype(np.int8),
        "like": pa.array(some((rng.random(rows) < 0.5).astype(int).tolist(), 0.6), pa.int8()),
        "seconds": np.round(rng.exponential(20, rows), 2),
        "importance": rng.integers(0, 4, rows) / 2,
        "age": some(rng.integers(-3, 90, rows).tolist()),
        "price": some(
            [float(f"{x:.4g}") if x < 4e3 else math.nan for x in rng.lognormal(2, 3, rows)]
        ),
        "since": pa.array(some(rng.integers(0, 20_000, rows).tolist()), pa.int32()).cast(
            pa.date32()
        ),
        "user": some([f"u{n}" for n in rng.zipf(1.4, rows) % 400]),
        "item": some(rng.integers(-20, 60, rows).tolist()),
        "day": pa.array(some(rng.integers(19_000, 19_030, rows).tolist()), pa.int32()).cast(
            pa.date32()
        ),
        "flag": some((rng.random(rows) < 0.7).tolist()),
        "history": [rng.integers(-20, 60, n).tolist() for n in lengths],
        "shops": [[shops[k] for k in rng.integers(0, 5, n)] for n in lengths],
        "tags": tags,
        "tag_weights": [
            np.round(rng.normal(1, 0.5, len(row_values)), 3).tolist() for row_values in tags
        ],
        "at": pa.array(np.sort(rng.integers(0, 10**6, rows)) * 10**6, pa.timestamp("us")),
    }
    return pa.table(columns)


def write_own_log(folder: Path, *, rows: int, seed: int = 5) -> str:
    folder.mkdir(parents=True)
    table = own_table(rows, seed=seed)
    for number, part in enumerate((table.slice(0, rows // 2), table.slice(rows // 2))):
        pq.write_table(part, folder / f"part_{number}.parquet", row_group_size=200)
    return str(folder)


# -- What is made of them
def output_makers(folder: Path) -> dict[str, Callable[[Path, str], object]]:
    """By name: functions that write an output into a folder, by engine "threads" or "ray"."""
    criteo = write_criteo_log(folder, rows=1500)
    own = write_own_log(folder / "own", rows=900)
    text = folder / "beer.txt"
    lines = (f"{n} bottles of beer on the wall, {n} bottles — hé!\n" for n in range(300, 0, -1))
    text.write_text("".join(lines))

    def preprocess(out: Path, engine: str, *, path: str = criteo, **options: Any) -> object:
        return rayrec.preprocess(
            path,
            out=str(out),
            engine=engine,
            **SMALL,
            **options,
        )

    def split(out: Path, engine: str, *, path: str = own, **options: Any) -> object:
        return rayrec.split(
            path, out=str(out), engine=engine, **{"schema": OWN, **SMALL, **options}
        )

    def tokens(out: Path, engine: str, **options: Any) -> object:
        options = {
            "block_size": 16,
            "part_bytes": 2048,
            "shard_bytes": 4096,
            "console": QUIET,
            **options,
        }
        return rayrec.preprocess(
            str(text),
            out=str(out),
            format="mds",
            **options,
        )

    def criteo_of(preset: str, format: str, **options: Any) -> Callable[[Path, str], object]:
        options = {"split": "last_file", "min_count": 2, **options}
        return functools.partial(
            preprocess,
            preset=preset,
            format=format,
            **options,
        )

    times = {"timestamp": "at", "validation_from": "1970-01-08", "test_from": "1970-01-10"}
    return {
        "npy": criteo_of("mlperf-v1", "npy"),
        "binary": criteo_of("fuxictr-x4", "binary"),
        "binary, shuffled": criteo_of("torchrec", "binary", shuffle="full", seed=3),
        "npy, shuffled": criteo_of("rayrec", "npy", shuffle="full", max_num_embeddings=40),
        "parquet": criteo_of("ray-template", "parquet"),
        "parquet of lists": functools.partial(
            preprocess, path=own, schema=OWN, format="parquet", min_count=3
        ),
        "split by rows": functools.partial(
            split, path=criteo, schema=CRITEO, by="rows", validation=0.2, seed=2
        ),
        "split by group": functools.partial(
            split,
            by="group",
            group="user",
            seed=2,
        ),
        "split by time": functools.partial(split, by="time", **times),
        "split by last-out": functools.partial(
            split,
            by="last-out",
            group="user",
            timestamp="at",
        ),
        "text by BPE": functools.partial(tokens, vocabulary_size=300),
        "text by characters": functools.partial(tokens, tokenizer="characters"),
    }


def predictions(name: str, folder: Path, *, address: str) -> dict[str, Any]:
    """What a model that was not trained predicts for log "criteo" or "own": floats of every tenth
    row, a digest of the rest.
    """
    path = (
        write_criteo_log(folder, rows=900)
        if name == "criteo"
        else write_own_log(folder / "own", rows=600)
    )
    preprocessor = counted(CRITEO if name == "criteo" else OWN, path, folder / "preprocessor")
    saved = save_clicks(
        folder / "run",
        model=DLRM,
        preprocessor=preprocessor,
        seed=3,
        scale=30.0,
    )
    rayrec.predict(
        str(saved.run),
        path,
        out=str(folder / "out"),
        cluster_address=address,
        console=QUIET,
        batch_rows=128,
    )
    table = pq.read_table(folder / "out")
    floats = [column for column in table.column_names if column.startswith(("score", "logit"))]
    types = [(field.name, str(field.type)) for field in table.schema]
    exact = f"{types}{table.drop_columns(floats).to_pydict()}"
    digest = hashlib.sha256(exact.encode()).hexdigest()[:32]
    return {"others": digest, **{column: table[column].to_pylist()[::10] for column in floats}}


def counted(schema: Schema, path: str, out: Path, **options: Any) -> Preprocessor:
    options = {
        "engine": "threads",
        "console": QUIET,
        "min_count": 2,
        **options,
    }
    rayrec.vocabulary(
        path,
        out=str(out),
        schema=schema,
        **options,
    )
    return Preprocessor.load(str(out))


def scoring_app(preprocessor: Preprocessor) -> ScoringApp:
    return make_app(make_model(preprocessor, seed=1), max_rows=20, max_body_bytes=200_000)


def exported_encoder(folder: Path) -> Any:
    program = folder.parent / "encode.py"
    program.write_text(encoder_program())
    return runpy.run_path(str(program))["Encoder"](str(folder))


def rows_in_order(config: TrainConfig, *, world_size: int) -> list[list[list[int]]]:
    """The numbers of the rows of each step of each worker; a tensor's last axis starts with a row's
    number in two bytes.
    """
    engine = ThreadEngine(1)
    prepared = config.workload.prepare(
        RunContext(config, "run", engine, lambda text: None, lambda *progress: None)
    )
    found = []
    for rank in range(world_size):
        context = WorkerContext(config, rank, world_size, torch.device("cpu"), engine)
        loader = config.workload.make_loader(context, prepared, state=None, step=0)
        found.append(
            [
                _numbers(next(iter(batch.tensors.values()))) if batch.loss_weight else []
                for batch in loader
            ]
        )
        loader.close()
    return found


def _numbers(tensor: torch.Tensor) -> list[int]:
    first = tensor.reshape(len(tensor), -1)[:, :2].long()
    return (first[:, 0] * 256 + first[:, 1]).tolist()
