"""Result of a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayrec import storage

if TYPE_CHECKING:
    import pandas
    import ray.train


class CheckpointPath(str):
    """Path of a checkpoint folder, with `path` and `as_directory` of `ray.train.Checkpoint`."""

    __slots__ = ()

    @property
    def path(self) -> str:
        return str(self)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a local folder with the checkpoint: its own, or a copy of one at a URL that is removed afterwards."""
        if not storage.is_url(self):
            yield str(self)
            return
        with storage.Scratch("checkpoint") as parent:
            folder = storage.join(parent, storage.name_of(self))  # readers need the name, such as step_00001000
            storage.copy_files(self, folder)
            yield folder


@dataclass(frozen=True)
class Result:
    """Finished run."""

    folder: str
    checkpoint: CheckpointPath
    summary: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint", CheckpointPath(self.checkpoint))

    @property
    def metrics(self) -> dict[str, float]:
        return self.summary["metrics"]

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """One row per logged step and evaluation; see `rayrec.observe.events.metrics_dataframe`."""
        from rayrec.observe.events import metrics_dataframe

        return metrics_dataframe(storage.join(self.folder, "events.jsonl"))

    def to_ray(self) -> ray.train.Result:
        """Return the result of Ray Train's `Trainer.fit`, for code that expects it: metrics, `path` (the run's folder),
        `checkpoint` and a single entry in `best_checkpoints`, as a `ray.train.Checkpoint` (path and pyarrow file system with a
        URL's credentials), `metrics_dataframe`, and no error. Imports Ray without starting it."""
        import ray.train

        filesystem, path = storage.resolve(self.folder)
        checkpoint = ray.train.Checkpoint(storage.resolve(self.checkpoint)[1], filesystem)
        return ray.train.Result(
            metrics=dict(self.metrics),
            checkpoint=checkpoint,
            error=None,
            path=path,
            metrics_dataframe=self.metrics_dataframe,
            best_checkpoints=[(checkpoint, dict(self.metrics))],
            _storage_filesystem=filesystem,
        )


def summary_rows(summary: dict[str, Any], *, folder: str) -> list[tuple[str, str]]:
    """Return the table shown after a finished run."""
    metrics = summary["metrics"]
    rows = [(name, f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float) and name != "label_rate"]
    if summary.get("share_of_best_auroc") is not None:
        reached = f"{summary['share_of_best_auroc']:.1%} of the way from 0.5 to the best possible {summary['best_auroc']:.4f}"
        rows.append(("auroc reached", reached))
    return [
        *rows,
        ("rows/s in training", f"{summary['rows_per_s']:,.0f}"),
        ("blocked on data", f"{summary['blocked_fraction']:.1%}"),
        ("rows trained", f"{summary['rows']:,} in {summary['steps']:,} steps; {summary['wall_s']:.0f} s with preparation"),
        *([("faulty rows left out", f"{summary['bad_rows']:,}")] if "bad_rows" in summary else []),
        *([("where the time went", summary["verdict"])] if summary.get("verdict") else []),
        ("checkpoint", summary["checkpoint"]),
        ("run", folder),
        ("report", f"{folder}/report.html"),
        *([("next", "rayrec evaluate, predict, export or serve, with this run")] if "auroc" in metrics else []),
    ]
