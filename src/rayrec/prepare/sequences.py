"""Folders with lists of items per user, built from events."""

from __future__ import annotations

from typing import Any, Final

from rayrec.config import InputError
from rayrec.data.log_source import LogSource
from rayrec.data.sequences.build import EventsLog, build
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine, reject_options, task_context
from rayrec.schema import PlaceholderSchema

_READS: Final = ("address", "files", "engine", "spark", "schema", "max_bad_fraction")
"""Fields of PreparationConfig used to build lists."""


def sequences(
    path: str,
    *,
    out: str,
    config: PreparationConfig,
    console: Console,
) -> dict[str, Any]:
    """Write lists of items per user atomically into folder `out`; see
    `rayrec.data.sequences.build.build`. Resumes an interrupted call. Returns the counts of the
    manifest. Raises InputError for a schema without `sequence`, an unusable log, a part without
    lists, or if `out` exists.
    """
    reject_options(
        config,
        PreparationConfig(),
        "not an option of lists of events",
        but=_READS,
    )
    if isinstance(config.schema, PlaceholderSchema):
        config.schema.reject(path)
    if config.schema.sequence is None:
        raise InputError(
            "schema: must have sequence, the columns of the events. Pass --schema FILE with the "
            "like of {label: null, sequence: {user: user, item: item, time: time}}"
        )
    files = LogSource.at(path, config.files).event_files(config.schema)
    log = EventsLog(
        path,
        tuple(files),
        config.schema,
        config.max_bad_fraction,
    )
    with (
        console.preparing(),
        engine(
            config,
            console,
            paths=(path, out),
        ) as data_engine,
    ):
        manifest = build(
            log,
            out=out,
            context=task_context(data_engine, console),
        )
    left_out = ("sequence", "split", "version")
    return {"out": out, **{name: manifest[name] for name in manifest if name not in left_out}}
