"""A run as a run of Weights & Biases, online or kept in the run's folder. Needs the extra `wandb`."""

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
"""The axis of all curves. W&B's own counts what was sent and only goes up, so a save that is through late would be lost."""


@final
class WandbTracker:
    """Sends each measure once, under the step it belongs to; steps done again are left out.

    A driver that goes on continues the online run, each series from the step that the run's summary names. Offline there is
    nobody to ask: the run is rewritten from its events, and takes the place of what an earlier driver left in RUN/wandb.
    """

    def __init__(self, folder: str, *, project: str, offline: bool, config: Mapping[str, Any]) -> None:
        self._folder, self._project, self._offline, self._config = folder, project, offline, config
        self._identity = ""
        self._config_hash = ""
        self._scratch: storage.Scratch | None = None
        self._run: Any = None
        self._waiting: list[dict[str, Any]] = []
        self._rows: list[tuple[str, dict[str, Any]]] = []
        """(the key of the summary that tells how far the series was sent, what to send)"""
        self._sent: dict[tuple[str, str], int] = {}
        """The last step of each series that an earlier driver sent."""
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
            self._run = self._opened()
        while self._waiting:
            event = self._waiting[0]
            of = series(event)
            known = "/".join(("last_step", *filter(None, of)))
            if of not in self._sent:
                # Of each series its own: an evaluation of step 100 may be unsent when the losses of step 100 are there.
                self._sent[of] = int(self._run.summary.get(known, -1)) if self._run.resumed else -1
            if event[_STEP] > self._sent[of]:
                self._rows.append((known, {_STEP: event[_STEP], **scalars(event)}))
            del self._waiting[0]
        while self._rows:
            known, row = self._rows[0]
            self._run.log(row)
            del self._rows[0]
            self._run.summary[known] = row[_STEP]

    def close(self) -> None:
        self.flush()
        if self._run is not None and not self._abandoned:
            self._run.finish(exit_code=self._exit_code)
            if wandb.run is None:  # the user has none of their own in this process, which it would end
                wandb.teardown()  # returns when W&B's own process has written all; `finish` does not wait for that
        if self._scratch is not None:
            if self._offline and not self._abandoned:
                self._send(Path(self._scratch.path) / "wandb")
            self._scratch.close()

    def abandon(self) -> None:
        """Ends W&B's own process: this one would wait for it at its end, and it for the server."""
        self._abandoned = True
        if wandb.run is not None:
            return  # the user has a run of their own, which it serves too
        for process in children_named("wandb-core"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _opened(self) -> Any:
        run = wandb.init(
            project=self._project,
            id=self._identity,
            name=self._config["name"],
            config={**self._config, "config_hash": self._config_hash},
            dir=self._folder_to_write(),
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            reinit="create_new",  # leaves a run of the user's own alone
            settings=wandb.Settings(
                console="off",
                silent=True,
                host="",  # the machine's name, which would be sent; its load belongs to Ray's metrics
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
        """Where W&B makes its folder wandb: the run's, where that is a local one and what is written stays there."""
        if self._offline:
            kept = storage.join(self._folder, "wandb")
            for name in storage.list_folder(kept):
                if name.startswith("offline-run-") and name.endswith(self._identity):
                    storage.remove_folder(storage.join(kept, name))
            if not storage.is_url(self._folder):
                return self._folder
        if self._scratch is None:
            self._scratch = storage.Scratch("wandb")
        return self._scratch.path

    def _send(self, written: Path) -> None:
        for run in written.glob("offline-run-*"):
            storage.copy_files(str(run), storage.join(self._folder, "wandb", run.name))


def children_named(name: str) -> list[psutil.Process]:
    """Child processes of this process with that name."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if child.name() == name:
                found.append(child)
    return found
