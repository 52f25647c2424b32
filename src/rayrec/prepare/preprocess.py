"""Creation of a log's Preprocessor, and of preprocessed data for training, evaluation and
prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.counts import CountingIndexer, Counts
from rayrec.data.encoding.extension import Extension, extension_rules, with_id_tables
from rayrec.data.encoding.extension import extend as extend_preprocessor
from rayrec.data.encoding.name_search import find_names
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset, make_preprocessor
from rayrec.data.engine import Engine
from rayrec.data.features.lookups import with_contents
from rayrec.data.log_source import LogSource, index_log
from rayrec.data.logs.index import LogIndex, WritableFormat
from rayrec.data.materialized import writer as writing
from rayrec.observe.console import Console
from rayrec.prepare.config import (
    PreparationConfig,
    engine,
    load_matching_preprocessor,
    raw_index,
    reject_options,
)
from rayrec.prepare.text import TextConfig, preprocess_text
from rayrec.schema import Schema

_OF_COUNTS = ("min_count", "max_num_embeddings", "token_modulo")
"""Overrides of a preset that apply to counted vocabularies."""


def vocabulary(
    path: str,
    *,
    out: str,
    extend: str | None = None,
    id_tables: str | None = None,
    config: PreparationConfig,
    console: Console,
) -> dict[str, Any]:
    """Count the rows of a log and write the Preprocessor atomically into folder `out`. `extend`:
    folder of an older Preprocessor, or of a run or checkpoint with one. The new one keeps its IDs
    and constants, appends the log's new categories, and has its schema and rules, which `config`
    may only repeat. Side tables are taken as they are today, and may have moved. `id_tables`:
    folder of `with_id_tables`, whose IDs replace counted ones; the log is then read only for
    constants of numbers. Returns its hash, rows, and the rows of each embedding table. Raises
    InputError for an unusable log, for an `extend` with another schema or other rules, or if `out`
    exists.
    """
    if storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    config = config.adapted(path)
    old = None
    rules = config.rules
    if extend is not None:
        old, config, rules = _opened_to_extend(extend, config)
    rules.check(config.schema)
    _check_id_tables(id_tables, extend, config)
    reads_log = rules.dense_standardized or rules.dense_from_file_minimum
    if id_tables is not None and not reads_log and not config.schema.program.unfitted:
        counts = rules.counting(config.schema).empty()
        return _written(
            with_id_tables(make_preprocessor(rules, config.schema, counts), rules, id_tables), out
        )
    with (
        console.preparing(),
        engine(config, console, paths=(path, *([] if extend is None else [extend]))) as running,
        counting_indexer(config, rules) as counting,
    ):
        index = raw_index(path, config, running, console, index_text=counting.index)
        with _counted(index, counting, config, rules, running, console) as counts:
            extension = None
            if old is not None:
                extension = extend_preprocessor(old, rules, counts, schema=config.schema)
            preprocessor = (
                extension.preprocessor
                if extension
                else make_preprocessor(rules, counting.schema, counts)
            )
    if id_tables is not None:
        preprocessor = with_id_tables(preprocessor, rules, id_tables)
    extended: dict[str, Any] = {"bad_rows": index.faults.total}
    if extension is not None:
        console.table("categories", _extension_rows(extension))
        extended |= {
            "extends": extension.preprocessor.constants["extends"],
            "kept": extension.existing,
            "appended": extension.appended,
            "left_out": {name: number for name, number in extension.left_out.items() if number},
        }
    return {**_written(preprocessor, out), **extended}


def _written(preprocessor: Preprocessor, out: str) -> dict[str, Any]:
    with storage.writing_folder(out) as folder:
        preprocessor.save(folder)
    return {
        "out": storage.absolute(out),
        "hash": preprocessor.hash(),
        "preset": preprocessor.preset,
        "profile": preprocessor.preset,  # old name
        "rows": preprocessor.constants["rows"],
        "bad_rows": 0,
        "num_embeddings": dict(
            zip(preprocessor.inputs.sparse, preprocessor.num_embeddings, strict=True)
        ),
    }


def _check_id_tables(id_tables: str | None, extend: str | None, config: PreparationConfig) -> None:
    """Reject settings of counted vocabularies together with tables of IDs. Raises InputError."""
    for name, value in {
        "extend": extend,
        **{name: getattr(config, name) for name in _OF_COUNTS},
    }.items():
        if id_tables is not None and value is not None:
            raise InputError(
                f"--{name.replace('_', '-')}: an option for counted vocabularies, not for "
                "--id-tables. Remove it"
            )


def _opened_to_extend(
    path: str, config: PreparationConfig
) -> tuple[Preprocessor, PreparationConfig, Preset]:
    """Load a Preprocessor to extend, and return it with the config for its schema, and its rules.
    Raises InputError for settings of `config` that are neither defaults nor the Preprocessor's.
    """
    default = PreparationConfig()
    old = Preprocessor.load(path)
    old_schema = _without_contents(old.schema)
    if config.schema == default.schema:
        config = config.replace(schema=with_contents(old_schema))
    schema = _without_contents(config.schema, old_schema)
    if schema != old_schema:
        raise InputError(f"--extend {path}: {schema.difference(old_schema)}")
    rules = extension_rules(old, path)
    if config.preset not in (default.preset, old.preset):
        raise InputError(
            f"--preset: must be {old.preset}, as in --extend {path}, got {config.preset}. Remove "
            "it, or count all again"
        )
    for name in _OF_COUNTS:
        if getattr(config, name) not in (None, getattr(rules, name)):
            raise InputError(
                f"--{name.replace('_', '-')}: must be {getattr(rules, name)}, as in --extend "
                f"{path}, got {getattr(config, name)}. Remove it, or count all days again"
            )
    # Existing ids and weights belong to the old constants.
    config = config.replace(schema=config.schema.replace(fitted=old.schema.fitted))
    return old, config, rules.replace(split=config.rules.split)


def _without_contents(schema: Schema, origin: Schema | None = None) -> Schema:
    """Return the schema with side tables of any content, at their paths in `origin` if it is
    given.
    """
    paths = {table.name: table.path for table in (origin or schema).tables}
    tables = [
        table.replace(path=paths.get(table.name, table.path), content=None)
        for table in schema.tables
    ]
    return schema.replace(tables=tuple(tables))


def _extension_rows(extension: Extension) -> list[tuple[str, str]]:
    rows = [
        (name, _amounts(old, extension.appended[name], extension.left_out[name]))
        for name, old in extension.existing.items()
    ]
    counts = (extension.existing, extension.appended, extension.left_out)
    return [*rows, ("total", _amounts(*(sum(count.values()) for count in counts)))]


def _amounts(old: int, appended: int, left_out: int) -> str:
    text = f"{old:,} kept, {appended:,} appended"
    return f"{text}, {left_out:,} left out (max_num_embeddings)" if left_out else text


def counting_indexer(config: PreparationConfig, rules: Preset) -> CountingIndexer:
    """Create an indexer of text logs that also counts training rows (or all rows, if the preset
    does).
    """
    return CountingIndexer(
        rules.counting(config.schema),
        lambda index: _counted_rows(index, config, rules),
        memory_bytes=config.memory_bytes,
    )


def _counted_rows(index: LogIndex, config: PreparationConfig, rules: Preset) -> tuple[int, int]:
    sets = None if rules.counted == "all" else row_sets(index, config)
    return (0, index.rows) if sets is None else sets["train"]


def row_sets(index: LogIndex, config: PreparationConfig) -> dict[str, tuple[int, int]] | None:
    """Return the row ranges of the sets, or None if no rows are held out."""
    return None if config.split_of_lists is None else config.split_of_lists.rows(index)


@contextmanager
def _counted(
    index: LogIndex,
    counting: CountingIndexer,
    config: PreparationConfig,
    rules: Preset,
    engine: Engine,
    console: Console,
) -> Iterator[Counts]:
    start, stop = _counted_rows(index, config, rules)
    with counting.counts(
        index,
        engine=engine,
        progress=lambda rows: console.progress("vocabulary (rows)", rows, stop - start),
    ) as counts:
        if spilled := counts.spilled():
            console.note(f"{spilled}; --memory-bytes sets the limit")
        yield counts


def _with_item_names(
    preprocessor: Preprocessor,
    index: LogIndex,
    config: PreparationConfig,
    engine: Engine,
) -> Preprocessor:
    """Return the Preprocessor with the texts of listed items, which preprocessed rows lack. Others
    are returned unchanged.
    """
    columns = config.schema.sequence
    if columns is None:
        return preprocessor
    parts = tuple(index.parts(*_counted_rows(index, config, config.rules)))
    names = find_names(preprocessor, columns.item, parts, engine=engine)
    return preprocessor if names is None else preprocessor.with_names(names)


Format = Literal[WritableFormat, "mds"]


@dataclass(frozen=True, kw_only=True)
class RowOutput:
    """Output options of preprocessed rows."""

    format: Format
    preprocessor: str | None = None
    """Folder of the Preprocessor. None counts the log."""
    shuffle: Literal["none", "full"] = "none"
    seed: int = 0


def preprocess(
    path: str,
    *,
    out: str,
    rows: RowOutput,
    config: PreparationConfig,
    text: TextConfig | None = None,
    console: Console,
) -> dict[str, Any]:
    """Write the log's rows as model inputs atomically into folder `out`. Resumes an interrupted
    call. Format `mds` is for plain text instead, see `rayrec.prepare.text.preprocess_text`. Raises
    InputError for an unusable log, a Preprocessor of another schema, a format that does not support
    the rows, an option of another format, or if `out` exists.
    """
    text = text or TextConfig()
    if rows.format == "mds":
        why = "an option for click logs, not for --format mds"
        reject_options(config, PreparationConfig(), why, but=("address", "files"))
        reject_options(rows, RowOutput(format="mds"), why)
        return preprocess_text(path, out=out, text=text, config=config, console=console)
    why = f"an option for text (--format mds), not for --format {rows.format}"
    reject_options(text, TextConfig(), why)
    config = config.adapted(path, preprocessor=rows.preprocessor)
    preprocessor = load_matching_preprocessor(rows.preprocessor, config.schema)
    if preprocessor is None:
        config.rules.check(config.schema)
    with (
        console.preparing(),
        engine(config, console, paths=(path, out)) as running,
        counting_indexer(config, config.rules) as counting,
    ):
        labelled = LogSource.at(path, config.files).is_labelled(config.schema)
        if not labelled and preprocessor is None:
            raise InputError(
                f"{path}: must have labels to count categories. Specify a training log's "
                "--preprocessor"
            )
        index_text = counting.index if preprocessor is None else index_log
        index = raw_index(path, config, running, console, labelled=labelled, index_text=index_text)
        sets = row_sets(index, config)
        used = preprocessor
        if used is None:
            with _counted(index, counting, config, config.rules, running, console) as counts:
                used = make_preprocessor(config.rules, counting.schema, counts)
            used = _with_item_names(used, index, config, running)
        result = writing.preprocess(
            index,
            preprocessor=used,
            out=out,
            format=rows.format,
            engine=running,
            sets=sets,
            segments_per_task=config.segments_per_block,
            shuffle=rows.shuffle,
            seed=rows.seed,
            labelled=labelled,
            progress=lambda done: console.progress("preprocess (rows)", done, index.rows),
            note=console.note,
        )
    return {**result, "preprocessor": used.hash(), "bad_rows": index.faults.total}
