"""The lease of a run: each attempt acquires it, so that a process of an earlier attempt can commit nothing more."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass

from rayrec import storage
from rayrec.config import InputError

_NAME = re.compile(r"(\d{6,})-[0-9a-f]{32}")
_NUM_KEPT = 5
"""Leases that stay in the folder, so that people can read which processes had the run last."""
_FOLDER = "claims"
"""Of the leases, within the run's; its name in earlier versions too."""


@dataclass(frozen=True)
class Lease:
    """One attempt's lease of a run. A plain value: it can be sent to another process."""

    run_folder: str
    name: str
    """NNNNNN-UUID."""

    def valid(self) -> bool:
        """Whether no later attempt has acquired the lease; lists a folder. Raises OSError if storage is unavailable."""
        return max(_leases(self.run_folder), key=_order, default="") == self.name

    def check(self) -> None:
        """Raises InputError if the lease is not valid any more."""
        if not self.valid():
            raise InputError(
                f"{self.run_folder}: another process has taken over this run, so this one ends; let the other continue"
            )


def acquire_lease(run_folder: str) -> Lease:
    """Takes over a run: from now on, no process with an earlier lease commits a checkpoint. Not collective."""
    present = sorted(_leases(run_folder), key=_order)
    number = _order(present[-1])[0] + 1 if present else 1
    name = f"{number:06d}-{uuid.uuid4().hex}"
    storage.write_json(
        storage.join(run_folder, _FOLDER, name),
        {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()},
    )
    for old in present[: -_NUM_KEPT + 1]:
        with contextlib.suppress(OSError):  # the next attempt will
            storage.remove_file(storage.join(run_folder, _FOLDER, old))
    return Lease(run_folder, name)


def _order(name: str) -> tuple[int, str]:
    return int(name.split("-", maxsplit=1)[0]), name


def _leases(run_folder: str) -> list[str]:
    return [name for name in storage.list_folder(storage.join(run_folder, _FOLDER)) if _NAME.fullmatch(name)]
