"""Result of a finished run."""

from __future__ import annotations

import contextlib
import html
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint.discovery import committed
from rayrec.config import InputError
from rayrec.observe.events import metrics_dataframe, readable_events
from rayrec.observe.run_summary import select_metrics, series, target_text

if TYPE_CHECKING:
    import pandas
    import ray.train
    from pyarrow import fs as arrow_fs


class CheckpointPath(str):
    """Path or URL of a checkpoint folder, with the attributes of `ray.train.Checkpoint`."""

    __slots__ = ()

    @property
    def filesystem(self) -> arrow_fs.FileSystem:
        return storage.resolve(self)[0]

    @property
    def path(self) -> str:
        """Path within `filesystem`."""
        return str(storage.resolve(self)[1])

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a local folder with the checkpoint: its own, or a copy of one at a URL that is
        removed afterwards.
        """
        if not storage.is_url(self):
            yield str(self)
            return
        with storage.Scratch("checkpoint") as parent:
            # readers need the name, such as step_00001000
            yield self.to_directory(storage.join(parent, storage.name_of(self)))

    def to_directory(self, path: str | None = None) -> str:
        """Copy the checkpoint to a local folder and return it. None creates a temporary folder."""
        folder = path or os.path.join(storage.make_temporary_folder(), storage.name_of(self))
        storage.copy_files(self, folder)
        return folder


@dataclass(frozen=True, repr=False)
class Result:
    """Finished run, with the attributes of `ray.train.Result`."""

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
        return metrics_dataframe(self._events)

    @property
    def filesystem(self) -> arrow_fs.FileSystem:
        return storage.resolve(self.folder)[0]

    @property
    def path(self) -> str:
        """Run folder within `filesystem`."""
        return storage.resolve(self.folder)[1]

    @property
    def error(self) -> None:
        """None: a run that fails raises its error instead of returning a result."""

    @property
    def best_checkpoints(self) -> list[tuple[CheckpointPath, dict[str, float]]]:
        """Kept checkpoints, oldest first, with the validation metrics of their step, empty if it
        was not evaluated.
        """
        events = readable_events(self._events)
        metrics = {
            event["step"]: select_metrics(event)
            for event in events
            if series(event) == ("evaluate", "validation")
        }
        return [
            (CheckpointPath(saved.path), metrics.get(saved.step, {}))
            for saved in committed(self.folder)
        ]

    def get_best_checkpoint(self, metric: str, mode: str) -> CheckpointPath:
        """Return the checkpoint with the best metric. `mode` is min or max. Raises InputError for
        another mode or metric.
        """
        if mode not in ("min", "max"):
            raise InputError(f"mode: must be min or max, got {mode!r}")
        pairs = self.best_checkpoints
        values = {
            checkpoint: metrics[metric]
            for checkpoint, metrics in pairs
            if metrics.get(metric) is not None
        }
        if not values:
            names = dict.fromkeys(name for _, metrics in pairs for name in metrics)
            raise InputError(f"metric: must be one of {', '.join(names)}, got {metric!r}")
        return (
            min(values, key=values.__getitem__)
            if mode == "min"
            else max(values, key=values.__getitem__)
        )

    def to_ray(self) -> ray.train.Result:
        """Return a `ray.train.Result`, for code that checks the class. Imports Ray without starting
        it.
        """
        import ray.train

        def ray_checkpoint(checkpoint: CheckpointPath) -> ray.train.Checkpoint:
            return ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem)

        return ray.train.Result(
            metrics=dict(self.metrics),
            checkpoint=ray_checkpoint(self.checkpoint),
            error=self.error,
            path=self.path,
            metrics_dataframe=self.metrics_dataframe,
            best_checkpoints=[
                (ray_checkpoint(checkpoint), metrics)
                for checkpoint, metrics in self.best_checkpoints
            ],
            _storage_filesystem=self.filesystem,
        )

    @property
    def _events(self) -> str:
        return storage.join(self.folder, "events.jsonl")

    def __repr__(self) -> str:
        shown = {"metrics": self.metrics, "path": self.folder, "checkpoint": str(self.checkpoint)}
        fields = ",\n".join(f"  {name}={value!r}" for name, value in shown.items())
        return f"Result(\n{fields}\n)"

    def _repr_html_(self) -> str:
        """Return the table of `rayrec train`, for a notebook."""
        rows = summary_rows(self.summary, folder=self.folder)
        cells = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in rows
        )
        return f"<table>{cells}</table>"


def summary_rows(summary: dict[str, Any], *, folder: str) -> list[tuple[str, str]]:
    """Return the table shown after a finished run."""
    metrics = summary["metrics"]
    target = target_text(summary)
    rows = [
        (name, f"{value:.4f}")
        for name, value in metrics.items()
        if isinstance(value, float) and name != "label_rate"
    ]
    if summary.get("share_of_best_auroc") is not None:
        reached = (
            f"{summary['share_of_best_auroc']:.1%} of the way from 0.5 to the best possible "
            f"{summary['best_auroc']:.4f}"
        )
        rows.append(("auroc reached", reached))
    if summary.get("metrics_set") == "validation":
        rows.append(("metrics of", "the validation rows, because no rows are held out for a test"))
    return [
        *rows,
        *([("target", target)] if target else []),
        ("rows/s in training", f"{summary['rows_per_s']:,.0f}"),
        ("blocked on data", f"{summary['blocked_fraction']:.1%}"),
        (
            "rows trained",
            f"{summary['rows']:,} in {summary['steps']:,} steps; {summary['wall_s']:.0f} s with "
            "preparation",
        ),
        *([("faulty rows left out", f"{summary['bad_rows']:,}")] if "bad_rows" in summary else []),
        *(
            [("rows sampled out", f"{summary['sampled_out']:,}")]
            if "sampled_out" in summary
            else []
        ),
        *([("where the time went", summary["verdict"])] if summary.get("verdict") else []),
        ("checkpoint", summary["checkpoint"]),
        ("run", folder),
        ("report", f"{folder}/report.html"),
        *(
            [("next", f"rayrec serve {shlex.quote(folder)}  # or evaluate, predict, export")]
            if "auroc" in metrics
            else []
        ),
    ]
