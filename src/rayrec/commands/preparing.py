"""Commands on data: generate, fetch, vocabulary, preprocess, adopt, split, validate."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from rayrec import api
from rayrec.commands.arguments import (
    Out,
    Path_,
    flags,
    print_json,
    results_alone,
    table_sizes,
    take_option,
    with_console,
    with_schema,
)
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.prepare.adopt import AdoptionConfig
from rayrec.prepare.adopt import adopt as prepare_adopt
from rayrec.prepare.config import PreparationConfig
from rayrec.prepare.preprocess import Format
from rayrec.prepare.preprocess import preprocess as prepare_preprocess
from rayrec.prepare.preprocess import vocabulary as prepare_vocabulary
from rayrec.prepare.split import RowSplit
from rayrec.prepare.split import split as prepare_split
from rayrec.prepare.text import TextConfig
from rayrec.prepare.validate import Gates, Report
from rayrec.prepare.validate import validate as prepare_validate


def _generate(
    out: Out,
    rows: int,
    dialect: Literal["kaggle", "terabyte"] = "kaggle",
    days: int = 7,
    seed: int = 0,
    drift: int = 1,
    first_date: str | None = None,
    *,
    console: Console,
) -> dict[str, Any]:
    """Write a synthetic click log whose best reachable AUROC and logloss are known.

    Args:
        out: Folder to write to.
        rows: Rows to write.
        dialect: Columns like those of Criteo Kaggle (one file) or Criteo 1TB (a file a day).
        days: Days the rows are spread over.
        seed: The same seed gives the same bytes.
        drift: From one day to the next, clicks and categories change as much as in so many days; 0: never.
        first_date: Write a folder a day, dt=2026-01-31/train.txt, from this date on.
    """
    with console.preparing():
        return api.generate(
            out,
            rows=rows,
            dialect=dialect,
            days=days,
            seed=seed,
            drift=drift,
            first_date=first_date,
            console=console,
        )


def generate(arguments: list[str]) -> None:
    print_json(flags("generate", _generate, arguments))


Preparation = Annotated[PreparationConfig, tyro.conf.arg(name="")]
DEFAULT_ADOPTION = AdoptionConfig()
DEFAULT_GATES = Gates()
DEFAULT_TEXT = TextConfig()


def _prepare(verb: str, function: Callable[[PreparationConfig, Console], Any], arguments: list[str]) -> Any:
    """Runs a preparation's function, which takes its flags and, as `config`, those of PreparationConfig."""
    rest, schema = with_schema(arguments)
    rest, console = with_console(rest)
    config = PreparationConfig() if schema is None else PreparationConfig(schema=schema)
    return flags(verb, function(config, console), rest)


def vocabulary(arguments: list[str]) -> None:
    def command(default: PreparationConfig, console: Console) -> Any:
        def run(path: Path_, out: str, extend: str | None = None, config: Preparation = default) -> dict[str, Any]:
            """Count the categories of a click log in one pass and write the Preprocessor. --schema FILE names the columns
            of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                out: Folder to write to.
                extend: Folder of an older Preprocessor, or of a run or checkpoint that has one: keep its ids, constants, schema
                    and rules, and append the log's new categories.
                config: How the log is read and prepared.
            """
            with results_alone():
                return prepare_vocabulary(path, out=out, extend=extend, config=config, console=console)

        return run

    print_json(_prepare("vocabulary", command, arguments))


def preprocess(arguments: list[str]) -> None:
    def command(default: PreparationConfig, console: Console) -> Any:
        def run(
            path: Path_,
            out: str,
            format: Format,
            preprocessor: str | None = None,
            shuffle: Literal["none", "full"] = "none",
            seed: int = 0,
            config: Preparation = default,
            text: Annotated[TextConfig, tyro.conf.arg(name="")] = DEFAULT_TEXT,
        ) -> dict[str, Any]:
            """Write a click log in a preprocessed format, or plain text as rows of tokens (mds). --schema FILE names the
            columns of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                out: Folder to write to; an interrupted call made again resumes where it stopped.
                format: parquet; npy (TorchRec's three arrays a file); binary (int32 rows); mds (text).
                preprocessor: Folder of a Preprocessor; else the categories are counted first.
                shuffle: full puts the training rows into an order that is random over the whole log.
                seed: Of that order.
                config: How the log is read and prepared.
                text: How text is, with --format mds; of the options of logs, --files and --address are for it too.
            """
            with results_alone():
                return prepare_preprocess(
                    path,
                    out=out,
                    format=format,
                    preprocessor=preprocessor,
                    shuffle=shuffle,
                    seed=seed,
                    config=config,
                    text=text,
                    console=console,
                )

        return run

    print_json(_prepare("preprocess", command, arguments))


def adopt(arguments: list[str]) -> None:
    arguments, sizes = take_option(
        arguments, "--num-embeddings-per-feature", what="mlperf, or the rows of each table, such as 1000,200"
    )
    default = DEFAULT_ADOPTION
    if sizes is not None:
        default = default.replace(num_embeddings_per_feature=table_sizes("--num-embeddings-per-feature", sizes))

    def run(
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
        out: str | None = None,
        config: Annotated[AdoptionConfig, tyro.conf.arg(name="")] = default,
        *,
        console: Console,
    ) -> dict[str, Any]:
        """Make arrays that TorchRec's scripts wrote trainable as they are: check all of them, and write dataset.json and a
        Preprocessor next to them. --num-embeddings-per-feature takes the value that dlrm_main.py has: 1000,200,... Or make MDS
        shards of tokens trainable, next to the tokenizer that made them.

        Args:
            path: Folder of day_N_dense.npy, day_N_labels.npy, and day_N_sparse.npy or day_N_sparse_multi_hot.npz; or of MDS
                shards.
            out: New folder to write to, with links to the arrays; else their own folder is written to.
            config: How they are read, checked and split.
        """
        with results_alone():
            return prepare_adopt(path, out=out, config=config, console=console)

    print_json(flags("adopt", run, arguments))


def split(arguments: list[str]) -> None:
    def command(default: PreparationConfig, console: Console) -> Any:
        def run(
            path: Path_, out: str, rows: Annotated[RowSplit, tyro.conf.arg(name="")], config: Preparation = default
        ) -> dict[str, Any]:
            """Split a raw log into files of training, validation and test rows, which split kind named_files reads: random
            rows or groups, by time, or the last rows of each user. --schema FILE names the columns of a log that is not
            Criteo's.

            Args:
                path: File, glob or folder.
                out: Folder to write to; an interrupted call made again resumes where it stopped.
                rows: Which row is in which part.
                config: How the log is read: files, engine, address, max-bad-fraction.
            """
            with results_alone():
                return prepare_split(path, out=out, rows=rows, config=config, console=console)

        return run

    print_json(_prepare("split", command, arguments))


def validate(arguments: list[str]) -> None:
    def command(default: PreparationConfig, console: Console) -> Any:
        def run(
            path: Path_, preprocessor: str | None = None, gates: Gates = DEFAULT_GATES, config: Preparation = default
        ) -> tuple[Report, Console]:
            """Report on a log: faults, missing values, label rate, categories, drift. Exit status 2 where a gate fails.
            --schema FILE names the columns of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                preprocessor: Folder of a Preprocessor, whose unknown categories are counted.
                gates: What the log must fulfil.
                config: How the log is read.
            """
            with results_alone():
                found = prepare_validate(path, config=config, gates=gates, preprocessor=preprocessor, console=console)
            return found, console

        return run

    report, console = _prepare("validate", command, arguments)
    report.show(console)
    print_json(report.to_dict())
    if report.failures:
        raise InputError(
            report.failures[0] + (f" (and {len(report.failures) - 1} more)" if report.failures[1:] else "")
        )


def _fetch(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    out: str,
    base_url: str | None = None,
    verify: bool = False,
    *,
    console: Console,
) -> list[dict[str, Any]]:
    """Download a published data set, going on where an earlier call stopped, and check every file.

    Args:
        name: criteo_kaggle, criteo_small, criteo_full or mnist.
        out: Folder to write to.
        base_url: Another URL of the files, such as your own mirror.
        verify: Check the checksums of files that are there already, too.
    """
    return api.fetch(name, out=out, base_url=base_url, verify=verify, console=console)


def fetch(arguments: list[str]) -> None:
    print_json(flags("fetch", _fetch, arguments))
