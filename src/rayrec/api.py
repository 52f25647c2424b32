"""The public functions, one a command; each may be called from a notebook as well."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from rayrec import storage
from rayrec.config import InputError

if TYPE_CHECKING:
    import ray.data

    from rayrec.launch.doctor import Report
    from rayrec.observe.console import Console
    from rayrec.train.trainer import Result
    from rayrec.workloads.base import TrainConfig


def generate(
    out: str,
    *,
    rows: int = 1_500_000,
    dialect: Literal["kaggle", "terabyte"] = "kaggle",
    days: int = 7,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes a synthetic click log with a planted truth into folder `out`, and returns what truth.json says of it.

    The same seed gives the same bytes on any machine, whatever its number of cores. Raises InputError for bad arguments
    and where `out` holds a log already.
    """
    from rayrec.data import synthetic

    progress = (lambda done, total: console.progress("generate (rows)", done, total)) if console else None
    return synthetic.generate(out, rows=rows, dialect=dialect, days=days, seed=seed, progress=progress)


def vocabulary(
    path: str,
    *,
    out: str,
    profile: Literal["rayrec"] = "rayrec",
    engine: Literal["ray"] = "ray",
    min_count: int = 2,
    max_num_embeddings: int | None = None,
    max_bad_fraction: float = 0.001,
    cluster_address: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """One pass over a click log -> the Preprocessor (schema, constants, vocabularies) in folder `out`.

    Returns its hash, rows, and the rows each embedding table needs. All rows of the log are counted: keep what you
    evaluate on out of it. Raises InputError for an unusable log or where `out` exists.
    """
    from rayrec.data.counting import VocabularyConfig, count_log, make_preprocessor
    from rayrec.data.ingest import open_log
    from rayrec.data.log import select
    from rayrec.data.position import Part
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.launch import cluster

    assert profile == "rayrec"
    assert engine == "ray"
    config = VocabularyConfig(min_count=min_count, max_num_embeddings=max_num_embeddings)
    if storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    console = _console(console)
    placement = cluster.connect_for_data(cluster_address)
    with console.preparing():
        index = open_log(
            path,
            SCHEMA,
            segment_bytes=8 << 20,
            placement=placement,
            cache_folder=_cache_folder(),
            note=console.note,
            progress=console.progress,
        )
        index.check(max_bad_fraction, path)
        parts = [Part(segment, start, stop) for segment, start, stop in select(index, 0, index.rows)]
        counts = count_log(
            SCHEMA,
            parts,
            placement=placement,
            parts_per_task=4,
            progress=lambda rows: console.progress("vocabulary (rows)", rows, index.rows),
        )
    preprocessor = make_preprocessor(profile, SCHEMA, counts, config)
    with storage.writing_folder(out) as folder:
        preprocessor.save(folder)
    return {
        "out": storage.absolute(out),
        "hash": preprocessor.hash(),
        "rows": index.rows,
        "bad_rows": index.faults.total,
        "num_embeddings": dict(zip(SCHEMA.sparse, preprocessor.num_embeddings, strict=True)),
    }


def train(config: TrainConfig, *, console: Console | None = None) -> Result:
    """Trains a recipe; see `rayrec.train.trainer.train`."""
    from rayrec.train.trainer import train as run

    return run(config, console=console)


def plan(config: TrainConfig) -> str:
    """The sharding of a recipe's tables over its workers, readable, without starting anything.

    Needs a ready-made Preprocessor (`--workload.preprocessor DIR`), which knows the tables' sizes. Raises InputError
    where the tables do not fit, with what they need.
    """
    return config.workload.plan(config)


def evaluate(
    checkpoint: str, path: str, *, max_bad_fraction: float | None = None, cluster_address: str | None = None
) -> dict[str, Any]:
    """Scores every row of a labelled log exactly once -> auroc, logloss, normalized_entropy, calibration, rows."""
    from rayrec.serve import predict as serving

    return serving.evaluate(checkpoint, path, config=_config_of(checkpoint, max_bad_fraction, cluster_address))


def predict(
    checkpoint: str, path: str, *, max_bad_fraction: float | None = None, cluster_address: str | None = None
) -> ray.data.Dataset:
    """Scores of a log, in input order: a Dataset of `row`, `score`, `logit` and, where there is one, `label`."""
    from rayrec.serve import predict as serving

    return serving.predict(checkpoint, path, config=_config_of(checkpoint, max_bad_fraction, cluster_address))


def predict_to(
    checkpoint: str, path: str, *, out: str, max_bad_fraction: float | None = None, cluster_address: str | None = None
) -> dict[str, Any]:
    """Writes what `predict` gives as Parquet files into folder `out`, which appears complete or not at all."""
    from rayrec.serve import predict as serving

    return serving.predict_to(checkpoint, path, out, config=_config_of(checkpoint, max_bad_fraction, cluster_address))


def doctor() -> Report:
    """What is installed, what fits together, what does not and how to mend it."""
    from rayrec.launch.doctor import doctor as examine

    return examine()


def _config_of(checkpoint: str, max_bad_fraction: float | None, cluster_address: str | None) -> TrainConfig:
    """The configuration a checkpoint was trained with, but for the cluster, which is the caller's."""
    from rayrec.checkpoint import open_checkpoint
    from rayrec.recipes import load_config
    from rayrec.workloads.base import ClusterConfig

    folder = open_checkpoint(checkpoint).path
    config = load_config(storage.read_bytes(storage.join(folder, "config.yaml")).decode())
    config = config.replace(cluster=ClusterConfig(address=cluster_address))
    return config if max_bad_fraction is None else config.replace(max_bad_fraction=max_bad_fraction)


def _console(console: Console | None) -> Console:
    from rayrec.observe.console import Console

    return console or Console()


def _cache_folder() -> str:
    """Where unpacked files and indices are kept outside a run: $RAYREC_CACHE, else ~/.cache/rayrec."""
    return os.environ.get("RAYREC_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "rayrec")
