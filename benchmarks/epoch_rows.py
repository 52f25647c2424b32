"""Benchmark of one epoch of criteo_kaggle: test AUROC and time, compared with TorchRec's own DLRM
on the same rows in order.

`--data PATH`: log in Criteo's format, such as Kaggle's train.txt. Default: a synthetic log of
200,000 rows. Both have one process with all cores, the same Preprocessor, split, sizes, optimizers
and constant learning rates. TorchRec's DLRM gets encoded batches from a thread that reads ahead.
"""

import gzip
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from logs import synthetic_log
from rows import attempt, emit, note
from subprocesses import child, run_task

ROWS = 200_000
BATCH = 2048


def main(*, quick: bool) -> None:
    arguments = sys.argv[1:]
    path = (
        arguments[arguments.index("--data") + 1] if "--data" in arguments else synthetic_log(ROWS)
    )
    with tempfile.TemporaryDirectory() as storage:
        ours = attempt(
            "criteo_kaggle", lambda: child(__file__, "rayrec_epoch", path=path, storage=storage)
        )
        theirs = attempt(
            "TorchRec's DLRM",
            lambda: child(__file__, "torchrec_epoch", path=path, **ours["for_peer"]),
        )
    for name, result in (("criteo_kaggle", ours), ("TorchRec's DLRM", theirs)):
        note(
            f"  {name}: test AUROC {result['auroc']:.4f}, logloss {result['logloss']:.4f}, "
            f"{result['seconds']:.1f} s"
        )
    emit(
        "epoch",
        peer="TorchRec's own DLRM, the same rows in the same order",
        workload=(
            f"criteo_kaggle, one epoch of {os.path.basename(path)}, {ours['rows']:,} training "
            f"rows, batch {BATCH}"
        ),
        unit="auroc",
        value=ours["auroc"],
        ratio=(ours["auroc"] + -0.5) / (theirs["auroc"] + -0.5),
        repeats=1,
        peer_auroc=round(theirs["auroc"], 4),
        logloss=round(ours["logloss"], 4),
        peer_logloss=round(theirs["logloss"], 4),
        seconds=round(ours["seconds"], 1),
        peer_seconds=round(theirs["seconds"], 1),
    )


def rayrec_epoch(*, path: str, storage: str) -> dict[str, Any]:
    """Train one epoch from the raw log -> test metrics, training seconds, rows, and what the peer
    needs.
    """
    from rayrec.observe.console import Console
    from rayrec.observe.events import read_events
    from rayrec.recipes import criteo_kaggle
    from rayrec.training.trainer import train

    config = criteo_kaggle(path).replace(
        train_data={"files": (), "shuffle": "none"},
        workload={"schedule": {"decay_fraction": 0.0}},
        batch_size=BATCH,
        evaluations_per_epoch=1,
        early_stopping={"patience": 0},
        scaling={"num_workers": 1, "threads_per_worker": os.cpu_count() or 1},
        storage_path=storage,
        name="epoch",
    )
    result = train(config, console=Console(quiet=True))
    sets = result.summary["rows_of_sets"]
    steps = read_events(os.path.join(result.folder, "events.jsonl"), kinds={"step"})
    rows = [0, *(event["rows"] for event in steps)]
    seconds = sum(
        (after - before) / event["rows_per_s"]
        for before, after, event in zip(rows, rows[1:], steps, strict=False)
    )
    for_peer = {"preprocessor": os.path.join(result.folder, "preprocessor"), "sets": sets}
    metrics = {name: result.summary["metrics"][name] for name in ("auroc", "logloss")}
    return {**metrics, "seconds": seconds, "rows": sets["train"], "for_peer": for_peer}


def torchrec_epoch(*, path: str, preprocessor: str, sets: dict[str, int]) -> dict[str, Any]:
    """Train TorchRec's DLRM on the training rows, and score the test rows."""
    import numpy as np
    import torch
    from peers.torchrec_dlrm import build
    from pipelines import begin_group

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.metrics.binary import binary_metrics

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    begin_group()
    encoder = Preprocessor.load(preprocessor)
    pipeline = build(encoder.num_embeddings, precision="fp32")
    test = sets["train"] + sets["validation"]
    source = _batches(path, encoder, 0, sets["train"])
    begin = time.perf_counter()
    for _ in range(-(-sets["train"] // BATCH)):
        pipeline.progress(source)
    seconds = time.perf_counter() - begin
    pipeline._model.eval()
    source = _batches(path, encoder, test, test + sets["test"])
    logits = []
    labels = []
    for _ in range(-(-sets["test"] // BATCH)):
        _, row_logits, clicks = pipeline.progress(source)
        logits.append(row_logits.float().numpy())
        labels.append(clicks.float().numpy())
    metrics = binary_metrics(np.concatenate(logits), np.concatenate(labels))
    return {"auroc": metrics["auroc"], "logloss": metrics["logloss"], "seconds": seconds}


def _batches(path: str, encoder: Any, start: int, stop: int) -> Iterator[Any]:
    """Yield the encoded rows [start, stop) of a log without invalid rows, in order, in batches made
    ahead by a thread.
    """
    import torch
    from torchrec.datasets.utils import Batch

    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.batches import sparse_features
    from rayrec.storage.range_reader import in_order

    def encoded(text: bytes) -> Any:
        rows = encoder.encode(parse(SCHEMA, text)[0])
        features = sparse_features(SCHEMA.sparse, rows.ids, len(rows))
        return Batch(torch.from_numpy(rows.dense), features, torch.from_numpy(rows.label))

    opened = gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # noqa: SIM115
    with opened as file:
        lines = islice(file, start, stop)
        texts = iter(lambda: b"".join(islice(lines, BATCH)), b"")
        yield from in_order(encoded, texts, name="epoch", num_threads=1, prefetch=8)


if __name__ == "__main__":
    run_task(rayrec_epoch, torchrec_epoch)
