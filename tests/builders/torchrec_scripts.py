"""TorchRec's own code for Criteo's logs, as its preprocessing scripts call it, without iopath,
which only remote files need.
"""

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PARTS = ("dense", "sparse", "labels")


@contextlib.contextmanager
def torchrec_criteo() -> Iterator[Any]:
    """The module torchrec.datasets.criteo, usable within."""
    manager = types.SimpleNamespace(open=open, set_strict_kwargs_checking=lambda _: None)
    module: Any = types.ModuleType("iopath.common.file_io")
    module.PathManagerFactory = lambda: types.SimpleNamespace(get=lambda _: manager)
    module.PathManager = object
    with pytest.MonkeyPatch.context() as patch:
        for name in ("iopath", "iopath.common"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, "iopath.common.file_io", module)
        from torchrec.datasets import criteo

        yield criteo


def write_npy(days: list[Path], folder: Path) -> None:
    """What npy_preproc_criteo.py writes of files of raw text: day_N_dense.npy, day_N_sparse.npy,
    day_N_labels.npy.
    """
    folder.mkdir()
    with torchrec_criteo() as criteo, contextlib.redirect_stdout(io.StringIO()):
        for number, day in enumerate(days):
            paths = [str(folder / f"day_{number}_{part}.npy") for part in PARTS]
            criteo.BinaryCriteoUtils.tsv_to_npys(str(day), *paths)


def write_contiguous_and_shuffled(
    npy: Path, folder: Path, *, rows: list[int], threshold: int
) -> None:
    """What contiguous_preproc_criteo.py and shuffle_preproc_criteo.py make of a folder of
    `write_npy`, days of `rows` rows.
    """
    contiguous = folder.parent / f"{folder.name}-contiguous"
    contiguous.mkdir()
    folder.mkdir()
    with torchrec_criteo() as criteo, contextlib.redirect_stdout(io.StringIO()):
        utils = criteo.BinaryCriteoUtils
        files = [str(npy / f"day_{number}_sparse.npy") for number in range(len(rows))]
        utils.sparse_to_contiguous(files, str(contiguous), threshold, output_file_suffix=".npy")
        utils.shuffle(str(npy), str(contiguous), str(folder), dict(enumerate(rows)), days=len(rows))
