"""One pass over a log -> the Preprocessor."""

from __future__ import annotations

from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.counting import Counts, count_log, index_and_count
from rayrec.data.engine import Engine
from rayrec.data.log import LogIndex, select
from rayrec.data.opening import plain_files
from rayrec.data.position import Part
from rayrec.data.preprocessor import Preprocessor
from rayrec.data.profiles import make_preprocessor
from rayrec.data.tables import is_table
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, cache_folder, check_index, engine, raw_index


def vocabulary(path: str, *, out: str, config: PreparationConfig, console: Console) -> dict[str, Any]:
    """Counts the rows of a log and writes the Preprocessor into folder `out`, which appears complete or not at all.

    Returns its hash, rows, and the rows each embedding table needs. Raises InputError for an unusable log or where `out`
    exists.
    """
    if storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    config.rules.check(config.schema)
    with console.preparing(), engine(config, console, paths=(path,)) as running:
        if config.split == "none" or config.rules.counted == "all":
            index, preprocessor = _index_and_count(path, config, running, console)
        else:
            index = raw_index(path, config, running, console)
            preprocessor = count(index, sets_of(index, config), config, running, console)
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


def _index_and_count(
    path: str, config: PreparationConfig, engine: Engine, console: Console
) -> tuple[LogIndex, Preprocessor]:
    """The index and the Preprocessor of all rows; those of text are read once for both."""
    found = storage.list_files(path, names=config.files)
    if is_table(found, config.schema):
        index = raw_index(path, config, engine, console)
        return index, count(index, None, config, engine, console)
    cache = storage.absolute(cache_folder())
    files = plain_files(found, unpack_folder=storage.join(cache, "unpacked"), engine=engine, note=console.note)
    size = sum(file.size_bytes for file in files)
    index, counts = index_and_count(
        files,
        config.rules.counting(config.schema),
        segment_bytes=config.segment_bytes,
        engine=engine,
        cache_folder=cache,
        memory_bytes=config.memory_bytes,
        progress=lambda done: console.progress("vocabulary (bytes)", done, size),
    )
    with counts:
        _report_spill(counts, console)
        check_index(index, path, config, console)
        return index, make_preprocessor(config.rules, config.schema, counts)


def sets_of(index: LogIndex, config: PreparationConfig) -> dict[str, tuple[int, int]] | None:
    """Row ranges of the sets; None where no rows are held out."""
    return None if config.split == "none" else config.rules.split.rows(index)


def count(
    index: LogIndex,
    sets: dict[str, tuple[int, int]] | None,
    config: PreparationConfig,
    engine: Engine,
    console: Console,
) -> Preprocessor:
    """The Preprocessor of a log's training rows, or of all rows where the profile counts them all."""
    profile = config.rules
    start, stop = (0, index.rows) if sets is None or profile.counted == "all" else sets["train"]
    parts = [Part(segment, low, high) for segment, low, high in select(index, start, stop)]
    with count_log(
        profile.counting(config.schema),
        parts,
        engine=engine,
        memory_bytes=config.memory_bytes,
        progress=lambda rows: console.progress("vocabulary (rows)", rows, stop - start),
    ) as counts:
        _report_spill(counts, console)
        return make_preprocessor(profile, config.schema, counts)


def _report_spill(counts: Counts, console: Console) -> None:
    if spilled := counts.spilled():
        console.note(f"{spilled}; --memory-bytes sets the limit")
