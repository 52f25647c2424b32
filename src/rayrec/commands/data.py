"""Data commands: generate, fetch, schema, validate, split, sequences, vocabulary, preprocess,
adopt.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rayrec.commands.declaration import Argument, LogPath, NewFolder, Shown, command
from rayrec.commands.settings import named_configuration, updated
from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.observe.console import Console
    from rayrec.prepare.config import PreparationConfig
    from rayrec.prepare.preprocess import Format
    from rayrec.prepare.split_tasks import By
    from rayrec.prepare.validate import Gates, Report
    from rayrec.schema import Schema

_PREPARATION = ("", "rayrec.prepare.config:PreparationConfig")
RecipeOptions = Annotated[
    str | None,
    Argument(
        "recipe, run or YAML file with the files, schema, preset and split; other flags override "
        "it",
        "RECIPE",
    ),
]


@command("Data", examples=("rayrec generate log --rows 20000",))
def generate(
    out: Annotated[str, Argument("output folder", "OUT")],
    *,
    rows: Annotated[int, Argument("number of rows")] = 1_500_000,
    dialect: Annotated[
        Literal["kaggle", "terabyte"],
        Argument("columns of Criteo Kaggle (one file) or Criteo 1TB (one file per day)"),
    ] = "kaggle",
    days: Annotated[int, Argument("number of days covered by the rows")] = 7,
    seed: Annotated[int, Argument("seed; equal seeds create equal bytes")] = 0,
    drift: Annotated[
        int,
        Argument(
            "number of days of change in clicks and categories between consecutive days; 0: none"
        ),
    ] = 1,
    first_date: Annotated[
        str | None,
        Argument("write one folder per day, dt=2026-01-31/train.txt, from this date on", "DATE"),
    ] = None,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """Write a synthetic click log with known best AUROC and logloss.

    Returns the content of truth.json. The same seed creates the same bytes on any machine and
    number of cores. Raises InputError for invalid arguments, or if `out` already contains a log.
    """
    from rayrec.data import synthetic

    progress = (
        (lambda done, total: console.progress("generate (rows)", done, total)) if console else None
    )
    with console.preparing() if console else contextlib.nullcontext():
        return synthetic.generate(
            out,
            rows=rows,
            dialect=dialect,
            days=days,
            seed=seed,
            drift=drift,
            first_date=first_date,
            progress=progress,
        )


@command("Data", examples=("rayrec fetch criteo_kaggle --out criteo",))
def fetch(
    name: Annotated[str, Argument("criteo_kaggle, criteo_small, criteo_full or mnist", "NAME")],
    *,
    out: Annotated[str, Argument("output folder", "DIR")],
    verify: Annotated[bool, Argument("also check the checksums of existing files")] = False,
    console: "Console | None" = None,
) -> list[dict[str, Any]]:
    """Download a published data set and check each file. Skips files that are complete.

    See rayrec.datasets.fetch.
    """
    from rayrec.datasets.fetch import fetch as run
    from rayrec.datasets.fetch import files_of

    console = _console(console)
    with console.preparing():
        return run(files_of(name), out, verify=verify, note=console.note, progress=console.progress)


@command(
    "Data",
    examples=(
        "rayrec schema shop.csv --out shop.yaml",
        "rayrec schema shop.csv --tables items.csv users.csv --out shop.yaml",
        "rayrec train clicks --schema shop.yaml --data shop.csv",
    ),
)
def schema(
    path: Annotated[
        Any,
        Argument(
            "log in any format, with or without column names: file, glob or folder",
            "PATH",
            type="builtins:str",
        ),
    ],
    *,
    out: Annotated[str | None, Argument("new YAML file; default: standard output", "FILE")] = None,
    label: Annotated[
        str | None,
        Argument("label column; default: one of 0 and 1, chosen by its name", "COLUMN"),
    ] = None,
    tables: Annotated[
        Sequence[str],
        Argument("side tables with columns of items or users, in any format", "PATH"),
    ] = (),
    events: Annotated[
        bool,
        Argument("lists of items to recommend from, whatever label the log has"),
    ] = False,
    console: "Console | None" = None,
) -> str | None:
    """Draft the schema of your own log from its first rows, for `rayrec train RECIPE --schema`.

    See rayrec.prepare.schema_draft.draft. `path` is a path, or a pandas DataFrame, a pyarrow.Table
    or a ray.data.Dataset. Returns the YAML text without `out`.
    """
    from rayrec import storage
    from rayrec.prepare.schema_draft import draft, recipe_of

    path = _path_or_rows(path)
    if out is not None and storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    text = draft(path, label=label, tables=tables, events=events)
    if out is None:
        return text.rstrip("\n")
    storage.write_bytes(out, text.encode())
    data = path if isinstance(path, str) else "PATH"
    _console(console).note(
        f"Wrote {out}. Check it, then: rayrec train {recipe_of(text)} --schema {out} --data {data}"
    )
    return None


def _feature_text(rows: list[dict[str, Any]]) -> str:
    from rayrec.humanize import aligned, value_text

    cells = [[value_text(value) for value in row.values()] for row in rows]
    return "\n".join(aligned([list(rows[0]), *cells]))


@command(
    "Data",
    show=lambda rows: Shown(rows, _feature_text(rows)),
    examples=("rayrec features shop.yaml shop.csv --rows 10",),
)
def features(
    schema: Annotated[str, Argument("YAML file of a schema with formulas", "SCHEMA")],
    path: LogPath,
    *,
    rows: Annotated[int, Argument("number of rows")] = 5,
) -> list[dict[str, Any]]:
    """Show the columns that a schema's formulas compute, for the first rows of a log.

    See rayrec.prepare.feature_table.compute_features.
    """
    from rayrec import storage
    from rayrec.prepare.feature_table import compute_features
    from rayrec.schema import load_schema

    return compute_features(load_schema(storage.read_text(schema), schema), path, rows)


def draft_schema(
    path: Any,
    *,
    label: str | None = None,
    tables: Sequence[str] = (),
    events: bool = False,
) -> "Schema":
    """Draft the schema of your own log for recipes such as `rayrec.recipes.clicks`.

    `rayrec schema` writes the same schema, with a comment on each decision.

    Args:
        path: Path of a log, or a pandas DataFrame, a pyarrow.Table or a ray.data.Dataset. Up to
            100,000 rows at its start are examined.
        label: Name of the label column. None takes the column whose name and values are most like
            a label.
        tables: Paths of side tables, whose columns become features.
        events: Whether rows are events to learn recommendations from, whatever label they may have.

    Raises InputError for rows without label, features or enough valid rows.
    """
    from rayrec.prepare.schema_draft import draft
    from rayrec.schema import load_schema

    text = draft(_path_or_rows(path), label=label, tables=tables, events=events)
    return load_schema(text, "path")


def _show_report(report: "Report") -> Shown:
    more = f" (and {len(report.failures) - 1} more)" if report.failures[1:] else ""
    return Shown(
        report.to_dict(),
        "\n".join(report.lines()),
        report.failures[0] + more if report.failures else "",
    )


@command(
    "Data",
    options=[("gates", "rayrec.prepare.validate:Gates"), _PREPARATION],
    show=_show_report,
    examples=(
        "rayrec validate log/train.txt",
        "rayrec validate new.csv --schema shop.yaml --preprocessor runs/demo",
    ),
)
def validate(
    path: LogPath,
    *,
    preprocessor: Annotated[
        str | None,
        Argument("Preprocessor folder, to count unknown categories", "DIR"),
    ] = None,
    gates: "Gates | None" = None,
    console: "Console | None" = None,
    **options: Any,
) -> "Report":
    """Report faults, missing values, label rate, categories and drift of a log. Exit status 2 if a
    gate fails.

    `options` are fields of `rayrec.PreparationConfig`. `failures` lists the failed `gates`. Raises
    InputError without a log.
    """
    from rayrec.prepare.validate import Gates as DefaultGates
    from rayrec.prepare.validate import validate as run

    path = _path_text(path)
    return run(
        path,
        config=_preparation(options),
        gates=gates or DefaultGates(),
        preprocessor=preprocessor,
        console=_console(console),
    )


@command(
    "Data",
    options=[("", "rayrec.prepare.split:RowSplit"), _PREPARATION],
    examples=("rayrec split log.csv --out parts --by time --schema shop.yaml",),
)
def split(
    path: LogPath,
    *,
    out: NewFolder,
    by: Annotated[
        "By",
        Argument(
            "rows (random), group (random values of a column), time, or last-out (the last rows "
            "of each user)",
            type="rayrec.prepare.split_tasks:By",
        ),
    ],
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Split a log into training, validation and test files, for split kind named_files.

    An interrupted call resumes if repeated. With `by` "last-out", the last row of each user is for
    the test, the one before it for validation. `options` are the fields of
    `rayrec.prepare.split.RowSplit` and of `rayrec.PreparationConfig`. Returns rows, share and
    number of files of each part, `bad_rows`, and `rows_without_group`. Raises InputError for an
    unusable log, a part without rows, or if `out` exists.
    """
    from rayrec.prepare.split import RowSplit
    from rayrec.prepare.split import split as run

    row_options, rest = _split_options(options, RowSplit)
    path = _path_text(path)
    return run(
        path,
        out=out,
        rows=RowSplit(by=by).updated(row_options),
        config=_preparation(rest),
        console=_console(console),
    )


@command(
    "Data",
    options=[_PREPARATION],
    examples=("rayrec sequences events.csv --schema events.yaml --out lists",),
)
def sequences(
    path: LogPath,
    *,
    out: NewFolder,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Build a list of items per user from events, in order of time, and split it for training.

    `options` are the fields of `rayrec.PreparationConfig`; its `schema` names the columns of the
    events in `sequence`, and what to hold out in `split`. An interrupted call resumes if repeated.
    Training, evaluations and predictions take `out` as their data, and build the same lists of
    events. Returns the numbers of users, items, events, rows of each part, and held-out items
    unknown to training. Raises InputError for an unusable log, a part without lists, or if `out`
    exists.
    """
    from rayrec.prepare.sequences import sequences as run

    path = _path_text(path)
    return run(path, out=out, config=_preparation(options), console=_console(console))


@command(
    "Data",
    options=[_PREPARATION],
    examples=(
        "rayrec vocabulary log/train.txt --out vocabulary --min-count 2",
        "rayrec vocabulary shop.csv --out vocabulary --schema shop.yaml",
        "rayrec vocabulary criteo --out vocabulary --recipe criteo_kaggle",
    ),
)
def vocabulary(
    path: LogPath,
    *,
    out: NewFolder,
    extend: Annotated[
        str | None,
        Argument(
            "folder of an older Preprocessor, or of a run or checkpoint with one, to keep its ids, "
            "constants, schema and rules and append new categories",
            "DIR",
        ),
    ] = None,
    id_tables: Annotated[
        str | None,
        Argument(
            "folder with the ids of each column's values, as Parquet or CSV, instead of counting",
            "DIR",
        ),
    ] = None,
    recipe: RecipeOptions = None,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Count the categories of a log in one pass and write the Preprocessor (schema, constants,
    vocabularies).

    `options` are the fields of `rayrec.PreparationConfig`: preset, min_count, engine, split, and so
    on. Those of the rows and rules default to the ones of `recipe` (a name, FILE.py:FUNCTION,
    FILE.yaml or run). Returns the hash, the counted rows, and the required rows of each embedding
    table. Without `split`, counts all rows, so keep evaluation data out of the log. Raises
    InputError for an unusable log or if `out` exists.
    """
    from rayrec.prepare.preprocess import vocabulary as run

    path = _path_text(path)
    return run(
        path,
        out=out,
        extend=extend,
        id_tables=id_tables,
        config=_preparation(options, recipe),
        console=_console(console),
    )


@command(
    "Data",
    options=[_PREPARATION, ("", "rayrec.prepare.text:TextConfig")],
    examples=(
        "rayrec preprocess log/train.txt --out ready --format parquet --split sevenths",
        "rayrec preprocess corpus.txt --out tokens --format mds",
    ),
)
def preprocess(
    path: Annotated[
        str,
        Argument("click log, or plain text for mds: file, glob or folder", "PATH"),
    ],
    *,
    out: NewFolder,
    format: Annotated[
        "Format",
        Argument(
            "parquet; npy (TorchRec's three arrays per file); binary (int32 rows); mds (text as "
            "token rows)",
            type="rayrec.prepare.preprocess:Format",
        ),
    ],
    preprocessor: Annotated[
        str | None,
        Argument("Preprocessor folder; by default, categories are counted first", "DIR"),
    ] = None,
    shuffle: Annotated[
        Literal["none", "full"],
        Argument("full shuffles the training rows over the full log"),
    ] = "none",
    seed: Annotated[int, Argument("seed of the shuffle")] = 0,
    recipe: RecipeOptions = None,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a log as Parquet, npy or binary files, or text as token rows.

    An interrupted call resumes if repeated. `options` and `recipe`: see `vocabulary`. For format
    "mds", `options` are the fields of `rayrec.prepare.text.TextConfig`, files and address. Raises
    InputError for an unusable log or text, an unsuitable format, or if `out` exists.
    """
    from rayrec.prepare.preprocess import RowOutput
    from rayrec.prepare.preprocess import preprocess as run
    from rayrec.prepare.text import TextConfig

    text_options, rest = _split_options(options, TextConfig)
    if recipe is not None and format == "mds":
        raise InputError("--recipe: an option for click logs, not for --format mds. Remove it")
    path = _path_text(path)
    return run(
        path,
        out=out,
        rows=RowOutput(format=format, preprocessor=preprocessor, shuffle=shuffle, seed=seed),
        config=_preparation(rest, recipe),
        text=TextConfig().updated(text_options),
        console=_console(console),
    )


@command(
    "Data",
    options=[("", "rayrec.prepare.adopt:AdoptionConfig")],
    examples=("rayrec adopt arrays --num-embeddings-per-feature mlperf",),
)
def adopt(
    path: Annotated[
        str,
        Argument(
            "folder with day_N_dense.npy, day_N_labels.npy, and day_N_sparse.npy or "
            "day_N_sparse_multi_hot.npz; MDS shards; or a "
            "DLRM's state dict (.pt, .pth, .pkl, .safetensors)",
            "FOLDER",
        ),
    ],
    *,
    out: Annotated[
        str | None,
        Argument("new folder that refers to the data; default: the folder of the data", "DIR"),
    ] = None,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Make TorchRec's arrays or MDS shards trainable without copying them, or DLRM weights a
    checkpoint.

    Checks all arrays, and writes dataset.json and a Preprocessor next to them, or into the new
    folder `out` with links to them. `options` are the fields of
    `rayrec.prepare.adopt.AdoptionConfig`: num_embeddings_per_feature, files, split, and so on; for
    MDS shards, `tokenizer` is the folder of their tokenizer. Returns rows, sets, num_embeddings,
    modulo, bad_rows, hashes; see `rayrec.prepare.adopt.adopt`. A file of weights needs `out` and
    `preprocessor`; see `rayrec.inference.dlrm_weights.adopt_dlrm`. Raises InputError for unsuitable
    arrays and weights.
    """
    from rayrec.prepare.adopt import AdoptionConfig
    from rayrec.prepare.adopt import adopt as run
    from rayrec.prepare.config import reject_options

    path = _path_text(path)
    adoption = AdoptionConfig().updated(options)
    if not path.endswith((".pt", ".pth", ".pkl", ".safetensors")):
        return run(path, out=out, config=adoption, console=_console(console))
    from rayrec.inference.dlrm_weights import adopt_dlrm

    reject_options(
        adoption,
        AdoptionConfig(),
        "an option for arrays and shards, not for weights",
        but=("preprocessor",),
    )
    if out is None or adoption.preprocessor is None:
        raise InputError(
            f"{path}: needs --preprocessor DIR, with the ids of its rows, and --out DIR for the "
            "checkpoint"
        )
    return adopt_dlrm(
        path,
        out=out,
        preprocessor=adoption.preprocessor,
        config=named_configuration("clicks"),
    )


def _path_or_rows(path: Any) -> Any:
    """Return a text or path object as text, and rows in memory unchanged. Raises InputError for
    others.
    """
    from rayrec.data.frames import DATA_TYPES, as_table, is_rows

    path = as_table(path)
    if is_rows(path):
        return path
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    raise InputError(f"path: must be a path, {DATA_TYPES}, got {type(path).__name__}")


def _path_text(path: object) -> str:
    """Return a text or path object as text. Raises InputError for others, such as a DataFrame."""
    if isinstance(path, str | os.PathLike):
        return str(os.fspath(path))
    fix = (
        "Write its rows to a file first, such as by `to_parquet`"
        if hasattr(path, "columns")
        else "Pass text"
    )
    raise InputError(f"path: must be a path, got {type(path).__name__}. {fix}")


def _split_options(options: dict[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into fields of a class and others."""
    fields = {field.name for field in dataclasses.fields(kind)}
    matching = {name: value for name, value in options.items() if name in fields}
    return matching, {name: value for name, value in options.items() if name not in fields}


def _console(console: "Console | None") -> "Console":
    from rayrec.observe.console import Console

    return console or Console()


def _preparation(options: dict[str, Any], recipe: str | None = None) -> "PreparationConfig":
    from rayrec.prepare.config import PreparationConfig, RecipePreparation

    if recipe is None:
        return updated(PreparationConfig(), options)
    from rayrec.workloads.recsys.settings import ClickSettings

    config = named_configuration(recipe)
    workload = config.workload
    data = config.train_data
    if not isinstance(workload, ClickSettings):
        raise InputError(f"recipe: must train a click model, got {recipe}. Leave it out.")
    named = {name: getattr(data, name) for name in ("files", "block_bytes", "segments_per_block")}
    memory_bytes = workload.vocabulary_memory_bytes
    return updated(
        RecipePreparation.from_preset(
            workload.preset,
            schema=workload.schema,
            memory_bytes=memory_bytes,
            **named,
        ),
        options,
    )
