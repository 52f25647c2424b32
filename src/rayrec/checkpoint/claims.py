"""Who owns a run: each attempt claims it again, so that a process left over from an earlier one can commit nothing more."""

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

_CLAIM = re.compile(r"(\d{6,})-[0-9a-f]{32}")
_NUM_KEPT = 5
"""Claims left in the folder, for people to read who had the run last."""


@dataclass(frozen=True)
class Claim:
    """One attempt's claim to a run. Plain value: it can be sent to another process."""

    run_folder: str
    name: str
    """NNNNNN-UUID."""

    def valid(self) -> bool:
        """Whether no later attempt has claimed the run; lists a folder. Raises OSError where storage is unavailable."""
        return max(_claims(self.run_folder), key=_order, default="") == self.name

    def check(self) -> None:
        """Raises InputError where the claim is not valid any more."""
        if not self.valid():
            raise InputError(
                f"{self.run_folder}: another process has taken over this run, this one ends; let the other go on"
            )


def claim(run_folder: str) -> Claim:
    """Takes over a run: from here on no process with an earlier claim commits a checkpoint. An effect, not collective."""
    present = sorted(_claims(run_folder), key=_order)
    number = _order(present[-1])[0] + 1 if present else 1
    name = f"{number:06d}-{uuid.uuid4().hex}"
    storage.write_json(
        storage.join(run_folder, "claims", name),
        {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()},
    )
    for old in present[: -_NUM_KEPT + 1]:
        with contextlib.suppress(OSError):  # the next attempt will
            storage.remove_file(storage.join(run_folder, "claims", old))
    return Claim(run_folder, name)


def _order(name: str) -> tuple[int, str]:
    return int(name.split("-", maxsplit=1)[0]), name


def _claims(run_folder: str) -> list[str]:
    return [name for name in storage.list_folder(storage.join(run_folder, "claims")) if _CLAIM.fullmatch(name)]
