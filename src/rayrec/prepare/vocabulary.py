"""One pass over a log -> the Preprocessor."""

from __future__ import annotations

from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.counting_indexer import CountingIndexer
from rayrec.data.engine import Engine
from rayrec.data.log import LogIndex
from rayrec.data.preprocessor import Preprocessor
from rayrec.data.profiles import make_preprocessor
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine, raw_index


def vocabulary(path: str, *, out: str, config: PreparationConfig, console: Console) -> dict[str, Any]:
    """Counts the rows of a log and writes the Preprocessor into folder `out`, which appears complete or not at all.

    Returns its hash, rows, and the rows each embedding table needs. Raises InputError for an unusable log or where `out`
    exists.
    """
    if storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    config.rules.check(config.schema)
    with console.preparing(), engine(config, console, paths=(path,)) as running, counting_indexer(config) as counting:
        index = raw_index(path, config, running, console, index_text=counting.index)
        preprocessor = count(index, counting, config, running, console)
    with storage.writing_folder(out) as folder:
        preprocessor.save(folder)
    return {
        "out": storage.absolute(out),
        "hash": preprocessor.hash(),
        "profile": preprocessor.profile,
        "rows": preprocessor.constants["rows"],
        "bad_rows": index.faults.total,
        "num_embeddings": dict(zip(preprocessor.inputs.sparse, preprocessor.num_embeddings, strict=True)),
    }


def counting_indexer(config: PreparationConfig) -> CountingIndexer:
    """Indexes a log of text, and counts its training rows (or all rows, if the profile counts them all) on the way, for
    `count`."""
    return CountingIndexer(
        config.rules.counting(config.schema),
        lambda index: _counted_rows(index, config),
        memory_bytes=config.memory_bytes,
    )


def _counted_rows(index: LogIndex, config: PreparationConfig) -> tuple[int, int]:
    sets = None if config.rules.counted == "all" else sets_of(index, config)
    return (0, index.rows) if sets is None else sets["train"]


def sets_of(index: LogIndex, config: PreparationConfig) -> dict[str, tuple[int, int]] | None:
    """Row ranges of the sets; None where no rows are held out."""
    return None if config.split == "none" else config.rules.split.rows(index)


def count(
    index: LogIndex, counting: CountingIndexer, config: PreparationConfig, engine: Engine, console: Console
) -> Preprocessor:
    """The Preprocessor of the rows that `counting` chooses; reads those that it did not count while it made the index."""
    start, stop = _counted_rows(index, config)
    with counting.counts(
        index, engine=engine, progress=lambda rows: console.progress("vocabulary (rows)", rows, stop - start)
    ) as counts:
        if spilled := counts.spilled():
            console.note(f"{spilled}; --memory-bytes sets the limit")
        return make_preprocessor(config.rules, config.schema, counts)
