"""The data sets `rayrec fetch` knows, by name."""

from __future__ import annotations

import difflib

from rayrec.config import InputError
from rayrec.datasets import criteo, mnist
from rayrec.datasets.remote import RemoteFile

ALL: dict[str, tuple[RemoteFile, ...]] = {
    "criteo_kaggle": criteo.KAGGLE_FILES,
    "criteo_small": criteo.SMALL_DAYS,
    "criteo_full": criteo.FULL_DAYS,
    "mnist": mnist.FILES,
}
"""The files of every data set that can be fetched."""


def files_of(name: str) -> tuple[RemoteFile, ...]:
    """The files of a data set. Raises InputError for an unknown name, with the nearest one."""
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=1)
        raise InputError(
            f"no data set '{name}' to fetch; "
            + (f"did you mean '{near[0]}'?" if near else f"there are {', '.join(ALL)}")
        )
    return ALL[name]
