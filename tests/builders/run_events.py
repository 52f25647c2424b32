"""Fake events of a run that lost a worker once."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.tracker import Tracker

CONFIG = "# rayrec 0.1.0, config hash 0123\nrecipe: gpt2_tiny\nname: <b>bold</b> & more\n"


class Events:
    """List of events, one second apart by default."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.now_s = 1_790_000_000.0

    def add(self, kind: str, *, after_s: float = 1.0, **fields: Any) -> None:
        self.now_s += after_s
        self.all.append({"time": self.now_s, "kind": kind, **fields})

    def steps(self, first: int, last: int, *, loss: float | None = None) -> None:
        """Add a step event every 10 steps, and an evaluation and a checkpoint every 50."""
        for step in range(first, last + 1, 10):
            self.add(
                "step",
                step=step,
                steps=200,
                loss=math.exp(-step / 100) if loss is None else loss,
                rows=step * 64,
                rows_per_s=1000.0 + step,
                blocked_fraction=0.01,
            )
            if step % 50 == 0:
                self.add(
                    "evaluate",
                    step=step,
                    set="validation",
                    loss=math.exp(-step / 90),
                    perplexity=2.0,
                    rows=640,
                )
                self.add(
                    "checkpoint",
                    step=step,
                    path=f"runs/run/checkpoints/step_{step:08d}",
                    bytes=44_000_000,
                    stall_s=0.25,
                    write_s=1.5,
                )


def feed(
    tracker: Tracker, events: Iterable[dict[str, Any]], *, flush: bool = True, close: bool = False
) -> None:
    """Feed the events of a run to a tracker and flush it after each. Close it in the end if
    asked.
    """
    run = RunSummary(curves=False)
    for event in events:
        run.update(event)
        tracker.update(event, run)
        if flush:
            tracker.flush()
    if close:
        tracker.close()


def begin(events: Events, name: str = "<script>alert(1)</script>") -> None:
    """Add the events of the driver's start and of its first workers."""
    events.add(
        "run",
        recipe="gpt2_tiny",
        name=name,
        config_hash="0123456789abcdef",
        versions={"python": "3.11.7", "torch": "2.13.0"},
    )
    events.add("prepared", seconds=1.0)
    events.add(
        "start_up",
        after_s=0.0,
        process="driver",
        stages={"imports": 4.0, "index": 0.5},
    )
    events.add("attempt", number=1, num_workers=2)
    events.add(
        "start",
        step=0,
        steps=200,
        world_size=2,
        checkpoint=None,
    )
    events.add(
        "start_up", after_s=0.0, process="worker", stages={"process_group": 8.0, "set_up": 2.0}
    )
    events.add(
        "start_up", after_s=0.0, process="worker", stages={"first_batch": 0.25, "first_step": 1.25}
    )


def samples() -> list[dict[str, Any]]:
    """Return nine images, one of them misclassified, and a text."""
    images = []
    for number in range(9):
        prediction = {"prediction": "1" if number == 7 else str(number), "probability": 0.875}
        images.append(
            {
                "kind": "image",
                "pixels": [[0, 128], [255, number]],
                "label": str(number),
                **prediction,
            }
        )
    return [*images, {"kind": "text", "prompt": "ROMEO:\n", "text": "What <light> through\nyonder"}]


def run(*, finished: bool = True) -> list[dict[str, Any]]:
    """Return a run that fails at step 120 and resumes from step 100 with one worker, to step 200 if
    `finished`, else 150.
    """
    events = Events()
    begin(events)
    events.steps(10, 120, loss=9.0)
    events.add("failure", cause="worker 1 died of SIGKILL & <more>")
    events.add("attempt", number=2, num_workers=1)
    events.add("checkpoint_damaged", path="runs/run/checkpoints/step_00000110", cause="cut short")
    events.add(
        "start",
        after_s=5.0,
        step=100,
        steps=200,
        world_size=1,
        checkpoint="runs/run/checkpoints/step_00000100",
    )
    events.add(
        "start_up",
        after_s=0.0,
        process="worker",
        stages={"process_group": 6.0, "restore": 3.0, "later_stage": 1.0},
    )
    events.steps(110, 200 if finished else 150)
    if finished:
        events.add("samples", samples=samples())
        events.add("finish", step=200)
        events.add("summary", steps=200)
    return events.all


def write_run(folder: Path, events: list[dict[str, Any]] | None = None, *, mode: str = "w") -> str:
    """Write, or append to, the files of a run, by default of an unfinished one, and return its
    folder.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    with (folder / "events.jsonl").open(mode) as file:
        file.write(
            "".join(
                json.dumps(event) + "\n"
                for event in (run(finished=False) if events is None else events)
            )
        )
    return str(folder)


def cut(events: list[dict[str, Any]]) -> int:
    return next(number for number, event in enumerate(events) if event["kind"] == "failure")


def ended(events: list[dict[str, Any]], **metrics: float) -> list[dict[str, Any]]:
    """Replace the final events by one with the given metrics."""
    end = {
        "kind": "finish",
        "time": events[-1]["time"],
        "step": 200,
        "metrics": metrics,
    }
    return [*(event for event in events if event["kind"] not in ("finish", "summary")), end]


SUMMARY: dict[str, Any] = {
    "steps": 200,
    "chosen_step": 150,
    "rows": 12_800,
    "rows_per_s": 1234.5,
    "blocked_fraction": 0.0123,
    "train_s": 75.0,
    "checkpoint_stall_fraction": 0.004,
    "metrics": {"loss": 0.5, "perplexity": 1.6487},
    "validation": {"loss": 0.25, "perplexity": None},
}

_PLACES = (
    ("table_wise", {"0": 68_000}),
    ("table_wise", {"1": 136_000}),
    ("row_wise", {"0": 64_000, "1": 64_000}),
)
TABLES = [
    {
        "table": f"cat_{n}",
        "num_embeddings": 1000 * (n + 1),
        "embedding_dim": 16,
        "sharding_type": kind,
        "bytes_of_rank": held,
    }
    for n, (kind, held) in enumerate(_PLACES)
]


def click_run(
    *, name: str = "clicks", auroc: float = 0.78, seconds: float = 1.0
) -> list[dict[str, Any]]:
    """Return the complete events of a click model, with a step event every `seconds`."""
    events = Events()
    events.add(
        "run",
        recipe="criteo_demo",
        name=name,
        config_hash=f"{name}-hash",
        versions={"torch": "2.13.0"},
    )
    events.add(
        "prepared", seconds=1.0, rows_of_sets={"train": 6400, "validation": 640, "test": 640}
    )
    events.add("attempt", number=1, num_workers=2)
    events.add(
        "start",
        step=0,
        steps=100,
        world_size=2,
        checkpoint=None,
        tables=TABLES,
    )
    parts = {
        "data": 0.2,
        "forward": 0.25,
        "backward": 0.35,
        "optimizer": 0.05,
        "collectives": 0.1,
        "other": 0.05,
    }
    for step in range(10, 101, 10):
        speed = {
            "rows_per_s": 1280.0 / seconds,
            "blocked_fraction": 0.2,
            "multiply_adds_per_s": 1e9,
            "peak_fraction": 0.125,
            "times_s": {part: fraction * seconds for part, fraction in parts.items()},
        }
        events.add(
            "step",
            after_s=seconds,
            step=step,
            steps=100,
            loss=0.6 - step / 1000,
            rows=step * 128,
            **speed,
        )
        if step % 50 == 0:
            events.add(
                "evaluate",
                after_s=0.5,
                step=step,
                set="validation",
                auroc=auroc - 1 / step,
                logloss=0.5,
                rows=640,
            )
            events.add(
                "checkpoint",
                after_s=0.1,
                step=step,
                path="x",
                bytes=1_000_000,
                stall_s=0.05,
                write_s=0.1,
            )
    stages = [
        {
            "stage": "read",
            "rows_per_s": 5000.0,
            "busy": 0.9,
            "cpu_share": 0.8,
            "queue_share": 0.1,
        },
        {
            "stage": "encode",
            "rows_per_s": 9000.0,
            "busy": 0.5,
            "cpu_share": 0.9,
            "queue_share": 0.0,
        },
    ]
    store = {
        "object_store_bytes": 50_000_000,
        "object_store_limit_bytes": 1_000_000_000,
        "spilled_bytes": 0,
    }
    speed = {
        "rows_per_s": 1280.0 / seconds,
        "cpus": 2.0,
        "busy": 0.9,
        "capacity_rows_per_s": 3000.0,
        "stages": stages,
    }
    events.add(
        "data",
        step=100,
        seconds=10.0 * seconds,
        rows=12_800,
        **speed,
        backlog_rows=0,
        backlog_blocks=0,
        **store,
    )
    events.add(
        "profile",
        step=20,
        end=30,
        path="profile/steps_20_30",
        ranks=2,
    )
    events.add(
        "finish",
        step=100,
        rows=12_800,
        metrics={"auroc": auroc, "logloss": 0.5},
    )
    bins = [
        {"rows": 64, "predicted": place / 10, "observed": place / 10 + 0.01}
        for place in range(1, 9)
    ]
    columns = [
        {
            "column": "cat_0",
            "num_tokens": 998,
            "num_embeddings": 1000,
            "unknown": 0.0123,
            "missing": 0.5,
        },
        {
            "column": "<i>",
            "num_tokens": None,
            "num_embeddings": 3000,
            "unknown": None,
            "missing": 0.0,
        },
    ]
    shown = [
        {"kind": "reliability", "set": "test", "bins": bins},
        {"kind": "categories", "set": "test", "columns": columns},
    ]
    events.add("samples", samples=shown)
    events.add("summary", steps=100)
    return events.all


def click_summary(auroc: float = 0.78) -> dict[str, Any]:
    metrics = {
        "metrics": {"auroc": auroc, "logloss": 0.5},
        "validation": {"auroc": auroc - 0.01, "logloss": 0.5},
    }
    verdict = "blocked on data 20.0 % of the time: <read> tasks are CPU-bound"
    return {
        **SUMMARY,
        "steps": 100,
        "chosen_step": 100,
        **metrics,
        "verdict": verdict,
    }
