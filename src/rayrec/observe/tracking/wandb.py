"""Weights & Biases tracker, online or offline in the run folder. Requires the extra `wandb`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import psutil
import wandb

from rayrec import storage
from rayrec.observe.run_summary import RunSummary, series
from rayrec.observe.tracking.tracker import run_identity, scalars

_STEP: Final = "step"
"""X axis of all curves. W&B's own step counts messages and only increases, so it would drop late
saves.
"""


@final
class WandbTracker:
    """Weights & Biases tracker. Sends each measure once, under its step. Skips repeated steps. A
    resuming driver continues the online run: each series after the step in W&B's summary. Offline,
    it rewrites the run from its events in RUN/wandb.
    """

    def __init__(
        self, folder: str, *, project: str, offline: bool, config: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._project = project
        self._offline = offline
        self._config = config
        self._identity = ""
        self._config_hash = ""
        self._scratch: storage.Scratch | None = None
        self._run: Any = None
        self._waiting: list[dict[str, Any]] = []
        self._rows: list[tuple[str, dict[str, Any]]] = []
        """(summary key with the last sent step of the series, values to send)"""
        self._sent: dict[tuple[str, str], int] = {}
        """Last step of each series sent by an earlier driver."""
        self._exit_code = 1
        self._abandoned = False

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        if not self._identity:
            self._identity = run_identity(self._config["name"], event["time"])
        if event["kind"] == "run":
            self._config_hash = str(event["config_hash"])
        if event["kind"] in ("finish", "stop"):
            self._exit_code = 0
        elif event["kind"] in ("run", "failure"):
            self._exit_code = 1
        if _STEP in event and not run.is_repeat and scalars(event):
            self._waiting.append(event)

    def flush(self) -> None:
        if not self._identity or self._abandoned:
            return
        if self._run is None:
            self._run = self._open_run()
        while self._waiting:
            event = self._waiting[0]
            curve = series(event)
            summary_key = "/".join(("last_step", *filter(None, curve)))
            if curve not in self._sent:
                # Per series: the losses of step 100 may have been sent without its evaluation.
                self._sent[curve] = (
                    int(self._run.summary.get(summary_key, -1)) if self._run.resumed else -1
                )
            if event[_STEP] > self._sent[curve]:
                self._rows.append((summary_key, {_STEP: event[_STEP], **scalars(event)}))
            del self._waiting[0]
        while self._rows:
            summary_key, row = self._rows[0]
            self._run.log(row)
            del self._rows[0]
            self._run.summary[summary_key] = row[_STEP]

    def close(self) -> None:
        self.flush()
        if self._run is not None and not self._abandoned:
            self._run.finish(exit_code=self._exit_code)
            if wandb.run is None:  # Teardown would end the user's own run in this process.
                # Unlike `finish`, waits until W&B's process has written everything.
                wandb.teardown()
        if self._scratch is not None:
            if self._offline and not self._abandoned:
                for run in (Path(self._scratch.path) / "wandb").glob("offline-run-*"):
                    storage.copy_files(str(run), storage.join(self._folder, "wandb", run.name))
            self._scratch.close()

    def abandon(self) -> None:
        """Kill W&B's process, which waits for the server and keeps this process alive."""
        self._abandoned = True
        if wandb.run is not None:
            return  # It also serves the user's own run.
        for process in children_named("wandb-core"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _open_run(self) -> Any:
        run = wandb.init(
            project=self._project,
            id=self._identity,
            name=self._config["name"],
            config={**self._config, "config_hash": self._config_hash},
            dir=self._folder_to_write(),
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            reinit="create_new",  # Keep the user's own run.
            settings=wandb.Settings(
                console="off",
                silent=True,
                host="",  # Do not send the machine name. Its load is in Ray's metrics.
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
            ),
        )
        run.define_metric("*", step_metric=_STEP)
        return run

    def _folder_to_write(self) -> str:
        """Return the parent of W&B's folder: the run folder if offline and local, otherwise a
        scratch folder.
        """
        if self._offline:
            folder = storage.join(self._folder, "wandb")
            for name in storage.list_folder(folder):
                if name.startswith("offline-run-") and name.endswith(self._identity):
                    storage.remove_folder(storage.join(folder, name))
            if not storage.is_url(self._folder):
                return self._folder
        if self._scratch is None:
            self._scratch = storage.Scratch("wandb")
        return self._scratch.path


def children_named(name: str) -> list[psutil.Process]:
    """Return the child processes of this process with that name."""
    children = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
            if child.name() == name:
                children.append(child)
    return children
