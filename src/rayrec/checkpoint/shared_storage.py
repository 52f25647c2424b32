"""Checks that the driver and all workers of a run reach the same storage."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Final

from rayrec import storage
from rayrec.checkpoint.cleaning import tolerated
from rayrec.checkpoint.save_retry import Persistence
from rayrec.config import InputError

if TYPE_CHECKING:  # it loads torch, which the driver, which writes the token, need not do
    from rayrec.checkpoint.communicator import Ranks

_logger = logging.getLogger(__name__)
_APPEARS_S: Final = 10.0
"""Seconds after which a file that another node has written must be visible: NFS clients cache what a folder contains."""
_POLL_S: Final = 0.2


def write_token(run_folder: str, *, max_outage_s: float) -> str:
    """Writes a small file into the run's folder, on the driver, for `check_shared` -> its path. Raises InputError if storage is
    unavailable or full for `max_outage_s`."""
    token = storage.join(run_folder, f".storage-{uuid.uuid4().hex}")
    persistence = Persistence(
        place=run_folder,
        max_outage_s=max_outage_s,
        seed=run_folder,
        ended=threading.Event(),
        late=lambda cause: _logger.warning("%s: cannot be written yet (%s)", run_folder, cause),
    )
    text = b"This file shows that all workers see the storage of the driver.\n"
    persistence.run(lambda: storage.write_bytes(token, text))
    return token


def check_shared(token: str, ranks: Ranks) -> None:
    """Checks that every rank sees the driver's token, which rank 0 then removes; collective.

    Raises InputError, on all ranks, if one does not: its part of every checkpoint would be written where no other process
    finds it.
    """
    found = ranks.each(lambda: (socket.gethostname(), _appears(token)))
    if ranks.first:
        with tolerated(f"{token}: is left"):
            storage.remove_file(token)
    blind = [f"{rank} on {host}" for rank, (host, seen) in enumerate(found) if not seen]
    if blind:
        shown = ", ".join(blind[:4]) + (f" and {len(blind) - 4} more" if len(blind) > 4 else "")
        folder = token.rpartition("/")[0]
        raise InputError(
            f"storage_path: {folder} is not shared by all nodes: worker {shown} does not see what the driver has written "
            "there; give a URL such as s3://bucket/runs, or a folder that every node mounts"
        )


def _appears(path: str) -> bool:
    deadline_s = time.monotonic() + _APPEARS_S
    while not storage.exists(path):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
