"""Benchmark of prediction from raw TSV to Parquet with criteo_kaggle's network.

Peers: a bare PyTorch forward pass on tensors in memory, and the same pipeline without a model. Also
checks that memory stays constant. Every candidate is a separate process.
"""

import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from logs import build_preprocessor, synthetic_log
from memory import watched
from rows import emit, interleaved, note
from subprocesses import child, run_task

BATCH_ROWS = 8192
STEP = 1


def checkpoint_of(path: str) -> str:
    """Return a checkpoint of the untrained network, made once. Speed does not depend on the
    weights.
    """
    from rayrec import checkpoint as checkpoints
    from rayrec import recipes, storage
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.models.base import ModelInputs
    from rayrec.models.sharded_model import build_click_model

    run = os.path.join(os.path.dirname(path), "run")
    folder = checkpoints.step_folder(run, STEP)
    if not os.path.exists(folder):
        config = recipes.criteo_kaggle(path)
        preprocessor = Preprocessor.load(build_preprocessor(path))
        model = build_click_model(
            config.workload.model,  # type: ignore[attr-defined]
            ModelInputs.from_schema(preprocessor.inputs),
            num_embeddings=preprocessor.num_embeddings,
            embedding_device="cpu",
        )

        def extra_files(target: str) -> None:
            Path(target, "config.yaml").write_text(config.to_yaml())
            storage.copy_files(build_preprocessor(path), f"{target}/preprocessor")

        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        checkpoints.save(folder, weights, state={}, extra_files=extra_files)
    return folder


@dataclasses.dataclass(frozen=True)
class WithoutModel:
    """Stand-in for the model of a scoring process, without the forward pass."""

    process: Any

    def load(self, device: str) -> Any:
        import numpy as np

        from rayrec.models.heads import label_heads

        class ZeroScorer:
            heads = label_heads("label")

            def predict(self, rows: Any) -> Any:
                return {"label": np.zeros(len(rows), np.float32)}

        process = self.process
        scorer: Any = ZeroScorer()
        return process.block_scorer(process.preprocessor.get(), process.blocks.get(), scorer)


def predicted(
    *, path: str, checkpoint: str, with_model: bool, memory: bool = False
) -> dict[str, float]:
    """Predict and return `rows_per_s` after each process has scored a block, `whole_rows_per_s`
    with their start, and `peak_bytes`.
    """
    import rayrec
    from rayrec.inference.scoring import ScoringJob
    from rayrec.observe.console import Console

    tables = ScoringJob.tables
    seen = []

    def noted(self: ScoringJob, console: Console, *, first_row: int = 0) -> Any:
        if not with_model:
            load = WithoutModel(self.scoring.load.__self__).load  # type: ignore[attr-defined]
            self = dataclasses.replace(self, scoring=dataclasses.replace(self.scoring, load=load))
        for table in tables(self, console, first_row=first_row):
            seen.append((time.perf_counter(), len(table)))
            yield table

    ScoringJob.tables = noted  # type: ignore[method-assign, assignment]
    out = tempfile.mkdtemp()
    with watched(every_s=0.5 if memory else 3600) as peak:
        summary = rayrec.predict(checkpoint, path, out=f"{out}/scores", console=Console(quiet=True))
    assert summary["rows"] == sum(count for _, count in seen)
    shutil.rmtree(out)
    num_warm = min(2 * (os.cpu_count() or 1), len(seen) // 2)
    rows = sum(count for _, count in seen[num_warm:])
    seconds = seen[-1][0] - seen[num_warm - 1][0]
    return {
        "rows_per_s": rows / seconds,
        "whole_rows_per_s": summary["rows_per_s"],
        "peak_bytes": float(peak.size_bytes),
    }


def bare(*, path: str, checkpoint: str, threads: int, seconds: float, ours: bool) -> float:
    """Measure the rows/s of the forward pass on batches in memory, by PyTorch's operators, or with
    `ours` by a scoring process.
    """
    import numpy as np
    import torch
    from peers.bare_forward import BareDLRM

    from rayrec.checkpoint import Checkpoint, full_tensors
    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.inference.model import open_served
    from rayrec.native import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    served = open_served(checkpoint)
    with open(path, "rb") as file:
        text = file.read(64 << 20)
    text = text[: text.rindex(b"\n") + 1]
    raw, _ = parse(SCHEMA, text)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in full_tensors(Checkpoint(checkpoint), "model.")
    }
    model = BareDLRM(weights, SCHEMA.sparse)
    encoded: list[Any] = [
        served.preprocessor.encode(raw, np.arange(start, start + BATCH_ROWS))
        for start in range(0, raw.rows - BATCH_ROWS, BATCH_ROWS)
    ]
    ready = [
        (torch.from_numpy(rows.dense), torch.from_numpy(np.stack(rows.ids))) for rows in encoded
    ]
    with torch.inference_mode():
        np.testing.assert_allclose(model(*ready[0]).numpy(), served.score(encoded[0]), atol=1e-4)
        calls = [lambda rows=rows: served.score(rows) for rows in encoded]
        if not ours:
            calls = [lambda batch=batch: model(*batch) for batch in ready]
        for call in calls[:3]:
            call()
        done = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            calls[done % len(calls)]()
            done += 1
        return done * BATCH_ROWS / (time.perf_counter() - start)


def main(*, quick: bool) -> None:
    rows = 1_200_000 if quick else 4_000_000
    repeats = 1 if quick else 3
    path = synthetic_log(rows)
    checkpoint = checkpoint_of(path)
    common = {"path": path, "checkpoint": checkpoint}
    threads = os.cpu_count() or 1
    seconds = 3.0 if quick else 20.0
    rates_with_start: list[float] = []

    def ours() -> float:
        result = child(__file__, "predicted", with_model=True, **common)
        rates_with_start.append(result["whole_rows_per_s"])
        return result["rows_per_s"]

    rates = interleaved(
        repeats,
        predict=ours,
        ingest=lambda: child(__file__, "predicted", with_model=False, **common)["rows_per_s"],
        bare=lambda: child(
            __file__, "bare", threads=threads, seconds=seconds, ours=False, **common
        ),
        scorer=lambda: child(
            __file__, "bare", threads=threads, seconds=seconds, ours=True, **common
        ),
    )
    # Each core reads, encodes and scores in turn, so that the two times add up.
    both = 1 / (1 / rates["ingest"] + 1 / rates["bare"])
    workload = (
        f"criteo_kaggle network, fp32, {rows:,} rows of raw TSV to Parquet, batches of {BATCH_ROWS}"
    )
    for peer, rate in (
        ("bare PyTorch forward over ready tensors, all cores", rates["bare"]),
        ("our forward over ready rows, all cores", rates["scorer"]),
        ("the same pipeline without a model (ingest alone)", rates["ingest"]),
        ("bare forward and ingest, one after the other", both),
    ):
        emit(
            "predict",
            peer=peer,
            workload=workload,
            value=rates["predict"],
            ratio=rates["predict"] / rate,
            repeats=repeats,
            peer_rows_per_s=round(rate),
            rows_per_s_with_start=round(sorted(rates_with_start)[len(rates_with_start) // 2]),
        )
    few = synthetic_log(rows // 4)
    # its index and pages are then there
    child(__file__, "predicted", with_model=True, path=few, checkpoint=checkpoint)
    peaks = [
        child(__file__, "predicted", with_model=True, memory=True, path=log, checkpoint=checkpoint)[
            "peak_bytes"
        ]
        for log in (few, path)
    ]
    note(
        f"  memory: {peaks[0] / 1e6:,.0f} MB at {rows // 4:,} rows, {peaks[1] / 1e6:,.0f} MB at "
        f"{rows:,}"
    )
    emit(
        "predict",
        peer=f"the same with {rows // 4:,} rows",
        workload=f"{workload}: peak memory of all processes",
        unit="peak_bytes",
        value=peaks[1],
        ratio=peaks[1] / peaks[0],
        repeats=1,
        peer_peak_bytes=round(peaks[0]),
    )


if __name__ == "__main__":
    run_task(predicted, bare)
