"""Lease of a run, which prevents older attempts from committing checkpoints, and a check for shared
storage.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rayrec import storage
from rayrec.checkpoint.save_retry import log_cleanup_errors, retry_write
from rayrec.config import InputError, first_of

if TYPE_CHECKING:
    from rayrec.checkpoint.communicator import Communicator


_NAME = re.compile(r"(\d{6,})-[0-9a-f]{32}")
_MAX_LEASES = 5
"""Number of leases kept in the folder, to show which processes ran last."""
_FOLDER = "claims"
"""Lease folder within the run folder. Earlier versions use the same name."""


# Lease of a run folder. A lease is a file NNNNNN-UUID in it; the one with the highest number, then
# the highest name, is valid. Nothing is locked, because object stores have no locks, and a lock
# would outlive a lost node.
#
#   attempt starts        rank 0 lists the leases, writes the next number
#   two start at once     both write; the order of names decides, and both see the same winner
#   before a manifest     the lease must still be the latest, else the save fails with InputError
#   before a removal      the same, since files may belong to a newer attempt
#
# A process that is suspended between the check and the manifest can still commit one save. So the
# check comes last before it.
@dataclass(frozen=True)
class Lease:
    """Lease of one attempt at a run. Picklable."""

    run_folder: str
    name: str
    """Has the form NNNNNN-UUID."""

    def valid(self) -> bool:
        """Return whether no later attempt has acquired the lease; lists a folder. Raises OSError if
        storage is unavailable.
        """
        return self._latest() == self.name

    def _latest(self) -> str:
        """Return the name of the latest lease, "" if the folder of leases is absent."""
        return max(_leases(self.run_folder), key=_order, default="")

    def check(self) -> None:
        """Raise InputError if the lease is no longer valid."""
        latest = self._latest()
        if not latest:
            raise InputError(
                f"{storage.join(self.run_folder, _FOLDER)}: not found, which this run wrote. The "
                "storage was removed, emptied or unmounted while training. Restore it, or run the "
                "same command again to start over"
            )
        if latest != self.name:
            raise InputError(
                f"{self.run_folder}: another process acquired the lease of this run. Stopping; "
                "let it continue"
            )


def acquire_lease(run_folder: str) -> Lease:
    """Acquire the lease of a run, after which no process with an earlier lease can commit a
    checkpoint. Not collective.
    """
    present = sorted(_leases(run_folder), key=_order)
    number = _order(present[-1])[0] + 1 if present else 1
    name = f"{number:06d}-{uuid.uuid4().hex}"
    storage.write_json(
        storage.join(run_folder, _FOLDER, name),
        {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()},
    )
    # Written first, removed later: a reader of the folder always finds the latest lease.
    for old in present[: -_MAX_LEASES + 1]:
        with contextlib.suppress(OSError):  # the next attempt will remove it
            storage.remove_file(storage.join(run_folder, _FOLDER, old))
    return Lease(run_folder, name)


def _order(name: str) -> tuple[int, str]:
    return int(name.split("-", maxsplit=1)[0]), name


def _leases(run_folder: str) -> list[str]:
    return [
        name
        for name in storage.list_folder(storage.join(run_folder, _FOLDER))
        if _NAME.fullmatch(name)
    ]


_APPEARS_S: Final = 10.0
"""Maximum delay in seconds until another node's file is visible: NFS clients cache folder
listings.
"""
_POLL_S: Final = 0.2


def write_token(run_folder: str, *, max_outage_s: float) -> str:
    """Write a small file into the run folder, on the driver, for `check_shared`, and return its
    path. Raises InputError if storage is unavailable or full for `max_outage_s`.
    """
    token = storage.join(run_folder, f".storage-{uuid.uuid4().hex}")
    text = b"This file shows that all workers see the storage of the driver.\n"
    retry_write(
        lambda: storage.write_bytes(token, text), path=run_folder, max_outage_s=max_outage_s
    )
    return token


def check_shared(token: str, ranks: Communicator) -> None:
    """Check that every rank sees the driver's token, then remove it on rank 0. Collective. Raises
    InputError on all ranks if a rank does not see it, because no other process would find its part
    of a checkpoint.
    """
    # Each rank returns its host name with the result, so that rank 0 can name the ranks that do not
    # see the file.
    visible = ranks.each(lambda: (socket.gethostname(), _appears(token)))
    if ranks.first:
        with log_cleanup_errors(f"Cannot remove {token}"):
            storage.remove_file(token)
    blind = [f"{rank} on {host}" for rank, (host, seen) in enumerate(visible) if not seen]
    if blind:
        folder = token.rpartition("/")[0]
        raise InputError(
            f"storage_path: {folder} must be shared by all nodes, but worker "
            f"{first_of(blind, 4)} does not see the driver's files there. Use a URL such as "
            "s3://bucket/runs, or a folder that every node mounts"
        )


def _appears(path: str) -> bool:
    deadline_s = time.monotonic() + _APPEARS_S
    # Polls, because NFS has no notice of new files.
    while not storage.exists(path):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
