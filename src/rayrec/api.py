"""The public functions, one a command; each may be called from a notebook as well."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from rayrec import storage
from rayrec.config import InputError

if TYPE_CHECKING:
    import pandas
    import ray.data

    from rayrec.cluster.restart_policy import SuperviseConfig
    from rayrec.cluster.supervisor import Outcome
    from rayrec.environment.doctor import Report
    from rayrec.inference.config import ComparisonGates, ScoringConfig
    from rayrec.observe.console import Console
    from rayrec.observe.timing import Stopwatch
    from rayrec.prepare.config import PreparationConfig
    from rayrec.prepare.preprocess import Format
    from rayrec.prepare.split_tasks import By
    from rayrec.prepare.validate import Gates
    from rayrec.prepare.validate import Report as DataReport
    from rayrec.recipes import Recipe
    from rayrec.serve.config import Follow, ServeConfig
    from rayrec.serve.server import Server
    from rayrec.training.trainer import Result
    from rayrec.workloads.base import TrainConfig


_SAVED_S = 30.0
"""What a job that is stopped gets beyond the time its workers have to save: the driver must notice and end, too."""


def generate(
    out: str,
    *,
    rows: int = 1_500_000,
    dialect: Literal["kaggle", "terabyte"] = "kaggle",
    days: int = 7,
    seed: int = 0,
    drift: int = 1,
    first_date: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes a synthetic click log with a planted truth into folder `out`, and returns what truth.json says of it.

    `drift`: from one day to the next, the truth changes as much as in so many days; 0: never. `first_date`, such as 2026-01-31:
    write a folder a day, `dt=2026-01-31/train.txt`, from this date on.

    The same seed gives the same bytes on any machine, whatever its number of cores. Raises InputError for bad arguments
    and where `out` holds a log already.
    """
    from rayrec.data import synthetic

    progress = (lambda done, total: console.progress("generate (rows)", done, total)) if console else None
    return synthetic.generate(
        out, rows=rows, dialect=dialect, days=days, seed=seed, drift=drift, first_date=first_date, progress=progress
    )


def vocabulary(
    path: str, *, out: str, extend: str | None = None, console: Console | None = None, **options: Any
) -> dict[str, Any]:
    """One pass over a click log -> the Preprocessor (schema, constants, vocabularies) in folder `out`. `extend`: an older
    Preprocessor, or a run or checkpoint that has one, whose ids and constants are kept.

    `options` are the fields of `rayrec.PreparationConfig`: preset, min_count, engine, split, and so on. Returns the hash,
    the rows counted, and the rows each embedding table needs. Without `split` all rows are counted: keep what you evaluate
    on out of the log then. Raises InputError for an unusable log or where `out` exists.
    """
    from rayrec.prepare.preprocess import vocabulary as run

    return run(path, out=out, extend=extend, config=_preparation(options), console=_console(console))


def preprocess(
    path: str,
    *,
    out: str,
    format: Format,
    preprocessor: str | None = None,
    shuffle: Literal["none", "full"] = "none",
    seed: int = 0,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The log in a preprocessed format in folder `out`, which appears complete or not at all; an interrupted call made again
    resumes where it stopped. `options` are the fields of `rayrec.PreparationConfig`.

    Without a `preprocessor` folder the categories are counted first. shuffle "full" puts the training rows into an order
    that is random over the whole log. With format "mds" plain text becomes rows of tokens; `options` are then the fields
    of `rayrec.prepare.text.TextConfig`, files and address. Raises InputError for an unusable log or text, a format that
    cannot hold it, or where `out` exists.
    """
    from rayrec.prepare.preprocess import preprocess as run
    from rayrec.prepare.text import TextConfig

    of_text = {field.name for field in dataclasses.fields(TextConfig)}
    return run(
        path,
        out=out,
        format=format,
        preprocessor=preprocessor,
        shuffle=shuffle,
        seed=seed,
        config=_preparation({name: value for name, value in options.items() if name not in of_text}),
        text=TextConfig().updated({name: value for name, value in options.items() if name in of_text}),
        console=_console(console),
    )


def adopt(path: str, *, out: str | None = None, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Makes a folder of arrays that TorchRec's scripts wrote (day_N_dense.npy, day_N_sparse.npy or day_N_sparse_multi_hot.npz,
    day_N_labels.npy) trainable, without copying them: checks all of them, and writes dataset.json and a Preprocessor next to
    them, or into the new folder `out`, which has links to them. MDS shards of tokens become trainable in the same way, with
    the option `tokenizer`, the folder of the tokenizer that made them.

    `options` are the fields of `rayrec.prepare.adopt.AdoptionConfig`: num_embeddings_per_feature, files, split, and so on.
    Returns rows, sets, num_embeddings, modulo, bad_rows, hashes; see `rayrec.prepare.adopt.adopt`. Raises InputError for arrays
    that cannot be trained on.
    """
    from rayrec.prepare.adopt import AdoptionConfig
    from rayrec.prepare.adopt import adopt as run

    return run(path, out=out, config=AdoptionConfig().updated(options), console=_console(console))


def split(path: str, *, out: str, by: By, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Writes a raw log's rows into folder `out` as files train-*, validation-* and test-*, which split kind `named_files` reads;
    the folder appears complete or not at all, and an interrupted call made again resumes.

    `by`: "rows" (random), "group" (random values of a column), "time" or "last-out" (the last row of each user for the test, the
    one before it for validation). `options` are the fields of `rayrec.prepare.split.RowSplit` (validation, test, seed, group,
    timestamp, ...) and of `rayrec.PreparationConfig`. Returns rows, share and number of files of each part, `bad_rows`, and
    `rows_without_group`. Raises InputError for an unusable log, a part without rows, or where `out` exists.
    """
    from rayrec.prepare.split import RowSplit
    from rayrec.prepare.split import split as run

    of_rows = {field.name for field in dataclasses.fields(RowSplit)}
    return run(
        path,
        out=out,
        rows=RowSplit(by=by).updated({name: value for name, value in options.items() if name in of_rows}),
        config=_preparation({name: value for name, value in options.items() if name not in of_rows}),
        console=_console(console),
    )


def validate(
    path: str,
    *,
    preprocessor: str | None = None,
    gates: Gates | None = None,
    console: Console | None = None,
    **options: Any,
) -> DataReport:
    """A report on a log's faults, missing values, label rates, categories and drift. `options` are the fields of
    `rayrec.PreparationConfig`; what its `failures` name does not pass `gates`. Raises InputError where there is no log."""
    from rayrec.prepare.validate import Gates as DefaultGates
    from rayrec.prepare.validate import validate as run

    return run(
        path,
        config=_preparation(options),
        gates=gates or DefaultGates(),
        preprocessor=preprocessor,
        console=_console(console),
    )


def fetch(
    name: str, *, out: str, base_url: str | None = None, verify: bool = False, console: Console | None = None
) -> list[dict[str, Any]]:
    """Downloads a published data set into folder `out`, resuming and checking each file; see rayrec.datasets.fetch."""
    from rayrec.datasets.fetch import fetch as run
    from rayrec.datasets.fetch import files_of

    console = _console(console)
    with console.preparing():
        return run(files_of(name), out, base_url=base_url, verify=verify, note=console.note, progress=console.progress)


def train(
    config: TrainConfig,
    *,
    data: pandas.DataFrame | ray.data.Dataset | None = None,
    eval_data: pandas.DataFrame | ray.data.Dataset | None = None,
    console: Console | None = None,
    stopwatch: Stopwatch | None = None,
    stop: threading.Event | None = None,
) -> Result:
    """Trains a recipe, on the data that `config.train_data` names, or on a DataFrame or Dataset; see
    `rayrec.training.trainer.train`."""
    from rayrec.training.trainer import train as run

    console = _console(console)
    require_files(config, note=console.note)
    return run(config, data=data, eval_data=eval_data, console=console, stopwatch=stopwatch, stop=stop)


def supervise(
    config: TrainConfig,
    arguments: Sequence[str],
    *,
    supervision: SuperviseConfig | None = None,
    show: Callable[[str], None] | None = None,
    console: Console | None = None,
) -> Outcome:
    """Keeps a run going on a Ray cluster whose head may be lost: submits `rayrec train ARGUMENTS` through Ray Jobs, as
    often as it takes. See rayrec.cluster.supervisor.supervise.

    `config` is what `arguments` (a recipe's name or FILE.py:FUNCTION, or --config FILE, then flags) come to; without a name
    in it, one is chosen and added to them. `show` takes what the job prints. Raises InputError for what the user can fix.
    """
    from rayrec.cluster.restart_policy import SuperviseConfig
    from rayrec.cluster.supervisor import supervise as run

    if not os.path.isabs(config.storage_path) and not storage.is_url(config.storage_path):
        raise InputError(
            f"storage_path: {config.storage_path!r} is relative, and a job of a new head would look for it elsewhere; "
            "give an absolute path of a file system that outlives the head, or a URL"
        )
    name = config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    named = config.replace(name=name)
    # Flags that follow a subcommand of the command line would be taken for that one's.
    place = 0 if not arguments or arguments[0].startswith("-") else 1
    naming = [] if config.name else ["--name", name]
    return run(
        [*arguments[:place], *naming, *arguments[place:]],
        name=name,
        config_hash=named.config_hash(),
        config=supervision or SuperviseConfig(),
        stop_wait_s=max(config.failure.grace_s, config.failure.max_grace_s) + _SAVED_S,
        note=_console(console).note,
        show=show,
    )


def require_files(config: TrainConfig, *, note: Callable[[str], None]) -> None:
    """Raises InputError where a recipe of published files is given a folder that lacks some: which, how large they are
    and where they are published. Files of an unlikely size are noted."""
    from rayrec import recipes
    from rayrec.data.log_source import refuse_foreign
    from rayrec.data.materialized import is_preprocessed
    from rayrec.datasets import fetch as fetching
    from rayrec.datasets import published_files

    name, path = recipes.PUBLISHED.get(config.recipe), config.train_data.path
    if name is None or path is None or not os.path.isdir(path) or is_preprocessed(path):
        return
    named = config.train_data.files
    wanted = [file for file in fetching.files_of(name) if re.sub(r"(\.txt)?(\.gz)?$", "", file.name) in named]
    try:
        published_files.require_files(path, wanted, fetch_name=name, note=note)
    except InputError:
        refuse_foreign(path, storage.list_files(path))
        raise


def plan(config: TrainConfig, *, cluster: str | None = None, tables: Sequence[int] | None = None) -> str:
    """The sharding of a recipe's tables over its workers and the memory that a worker needs, without starting anything.

    The tables' sizes come from `tables` (rows of each), a Preprocessor (`--workload.preprocessor DIR`), or a preset that fixes
    them. With a `cluster`, such as "cpus=16,gpus=1,nodes=2,gpu_memory_gb=80,network_gbit=100", the plan is for its workers, with
    the bytes that they send each other and the rows/s that its links carry. If a log is given and no `tables`, the text also has
    rows/s of each stage there, the bottleneck and the CPUs that keep a GPU busy, from a slice of the log that is read and trained
    on here (some twenty seconds); without a Preprocessor the tables are then the slice's.
    Raises InputError when the tables do not fit, with what they need, and for data that cannot be trained on.
    """
    config = config.workload.adapted(config)
    if tables is None:
        config.workload.check_data(config)
    if cluster is None:
        return config.workload.plan(config, tables=tables)
    from rayrec.training.forecast import ClusterShape, forecast, plan_for

    shape = ClusterShape.parse(cluster)
    if tables is not None or config.train_data.path is None:
        return plan_for(config, shape, tables=tables)
    return forecast(config, shape).text()


def tune(
    config: TrainConfig, *, search: str | Mapping[str, Any], console: Console | None = None, **options: Any
) -> dict[str, Any]:
    """Tries settings of a click recipe and tells which are best; see `rayrec.tuning.search.tune`. `search`: the fields and their
    values, as a mapping or as the path of a YAML file; `options` are the fields of `rayrec.tuning.space.TuneConfig`."""
    from rayrec.tuning.search import tune as run
    from rayrec.tuning.space import Space, TuneConfig

    if isinstance(search, str):
        space = Space.read(storage.read_text(search), source=search)
    else:
        space = Space.of(search, source="search")
    return run(config, space, options=TuneConfig().updated(options), console=_console(console))


def evaluate(
    checkpoint: str,
    path: str,
    *,
    recipe: Recipe | None = None,
    cluster_address: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Scores every labelled row of a path exactly once -> the workload's metrics, rows, checkpoint. `options` are the fields of
    `rayrec.inference.config.EvaluationConfig`: batch_rows, device, max_bad_fraction, and for a click model group, slice_by,
    slice_top, confidence, resamples, seed and compare (another checkpoint), see `rayrec.inference.evaluate.evaluate`.

    `checkpoint` is the folder of a checkpoint, or of a run (then the one its summary names, else the newest); `recipe` the
    function it was trained with, where that is the caller's own. `cluster_address`: HOST:PORT or auto: a running Ray cluster;
    local: a local Ray; none: threads of this process; None: the Ray that this process is connected to or that RAY_ADDRESS names,
    else threads of this process. Raises InputError for an unusable checkpoint or path.
    """
    from rayrec.inference.config import EvaluationConfig
    from rayrec.inference.evaluate import evaluate as run

    asked = EvaluationConfig().updated(options)

    def config_of(place: str) -> TrainConfig:
        return _grouped(_scoring_config(place, recipe, cluster_address, asked), asked.group)

    return run(
        checkpoint,
        path,
        config=config_of(checkpoint),
        options=asked,
        other=None if asked.compare is None else config_of(asked.compare),
        console=_console(console),
    )


def compare(
    checkpoints: Sequence[str],
    path: str,
    *,
    recipe: Recipe | None = None,
    gates: ComparisonGates | None = None,
    cluster_address: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Scores every labelled row of a path with each of two or more click models -> metrics with intervals, what each model costs,
    and which of them differ; see `rayrec.inference.compare.compare`. `options` are the fields of
    `rayrec.inference.config.ComparisonConfig`: batch_rows, device, max_bad_fraction, group, ensemble, confidence, resamples and
    seed; what fails of `gates` is in the result's `failures`, and no error is raised for it. The other arguments are those of
    `evaluate`. Raises InputError for models that are not of one raw schema, one label and the same rows."""
    from rayrec.inference.compare import compare as run
    from rayrec.inference.config import ComparisonConfig

    asked = ComparisonConfig().updated(options)
    configs = [
        _grouped(_scoring_config(checkpoint, recipe, cluster_address, asked), asked.group) for checkpoint in checkpoints
    ]
    return run(checkpoints, path, configs=configs, options=asked, gates=gates, console=_console(console))


def ensemble(checkpoints: Sequence[str], *, out: str, recipe: Recipe | None = None) -> dict[str, Any]:
    """Writes the checkpoint of a model whose logit is the mean of those of two or more click models into folder `out`, which
    appears complete or not at all; see `rayrec.inference.ensemble.ensemble`. Checkpoints and recipe are as in `evaluate`."""
    from rayrec.inference.ensemble import ensemble as run

    return run(checkpoints, out, configs=[_config_of(checkpoint, recipe) for checkpoint in checkpoints])


def predict(
    checkpoint: str,
    path: str,
    *,
    recipe: Recipe | None = None,
    cluster_address: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """Predictions for the rows of a path, in their order: a Dataset of `row` and what the workload predicts, such as `score`,
    `logit` and, if the input has labels, `label`. `options` are the fields of `rayrec.inference.config.ScoringConfig`; the other
    arguments are those of `evaluate`."""
    from rayrec.inference import predict as prediction

    return prediction.predict(checkpoint, path, **_scoring(checkpoint, recipe, cluster_address, options, console))


def predict_to(
    checkpoint: str,
    path: str,
    *,
    out: str,
    recipe: Recipe | None = None,
    cluster_address: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Writes what `predict` gives as Parquet files into folder `out`, which appears complete or not at all; an interrupted call
    made again resumes where it stopped."""
    from rayrec.inference import predict as prediction

    return prediction.predict_to(
        checkpoint, path, out, **_scoring(checkpoint, recipe, cluster_address, options, console)
    )


def export(checkpoint: str, *, out: str, recipe: Recipe | None = None, **options: Any) -> dict[str, Any]:
    """Writes a trained model into folder `out` as other tools read it; the folder appears complete or not at all. Checkpoint
    and recipe are as in `evaluate`.

    `options`, of a click model, are the fields of `rayrec.inference.config.ExportConfig`: quantize, parity_path, and so on.
    Raises InputError for an unusable checkpoint, a model that cannot be exported, a click model's export that does not score
    as its checkpoint does, and where `out` exists.
    """
    from rayrec.inference.config import ExportConfig
    from rayrec.inference.export import export as run

    return run(checkpoint, out, config=_config_of(checkpoint, recipe), settings=ExportConfig().updated(options))


def serve(
    model: str | None = None,
    *,
    follow: Follow = "no",
    shadow: str | None = None,
    swap: bool = False,
    rollback: bool = False,
    no_shadow: bool = False,
    stop: bool = False,
    cluster_address: str | None = None,
    config: ServeConfig | None = None,
    started: Callable[[dict[str, Any]], None] | None = None,
    console: Console | None = None,
) -> None:
    """Scores rows over HTTP until Ctrl-C or SIGTERM; see `rayrec.serve.server.serve_forever`. With `swap`, `rollback`,
    `no_shadow`, or `shadow` and no model, tells the server that runs on the Ray cluster at `cluster_address` to change, with
    `stop` to end; nothing else is given then.

    `started` gets what is served, once it is. Raises InputError for an unusable model or address, and where no server runs.
    """
    from rayrec.serve import client, server
    from rayrec.serve.config import ServeConfig

    address, tell = cluster_address, started or (lambda told: None)
    config = config or ServeConfig()
    wishes = {"swap": swap, "rollback": rollback, "no_shadow": no_shadow, "stop": stop}
    asked = [name for name, wish in wishes.items() if wish]
    if len(asked) > 1:
        raise InputError("swap, rollback, no_shadow and stop: one at a time")
    if asked or (model is None and shadow):
        settings = [name for name, value in vars(ServeConfig()).items() if getattr(config, name) != value]
        unused = ["shadow"] * bool(asked and shadow) + ["follow"] * (follow != "no") + settings
        if unused:
            raise InputError(f"{(asked or ['shadow'])[0]}: tells a running server, and takes no {', '.join(unused)}")
    if model is None:
        if rollback:
            tell(client.roll_back(address=address))
        elif stop:
            tell(client.stop(address=address))
        elif no_shadow or shadow:
            tell(client.set_shadow(None if no_shadow else shadow, address=address))
        else:
            raise InputError("which model? give the folder of a checkpoint, a run or an export")
    elif rollback or no_shadow or stop:
        raise InputError(f"{model}: rollback, no_shadow and stop take no model")
    elif swap:
        tell(client.swap(model, address=address))
    else:
        server.serve_forever(
            model,
            config=config,
            address=address,
            follow=follow,
            shadow=shadow,
            console=_console(console),
            started=tell,
        )


def serving(
    model: str,
    *,
    shadow: str | None = None,
    cluster_address: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> AbstractContextManager[Server]:
    """A server while the context lasts: `with rayrec.serving("runs/demo", port=8123) as server: ...`, whose `url` takes
    requests. `options` are the fields of `rayrec.serve.config.ServeConfig`. Raises InputError as `serve` does."""
    from rayrec.serve.config import ServeConfig
    from rayrec.serve.server import serving as run

    config = ServeConfig().updated(options)
    return run(model, config=config, address=cluster_address, shadow=shadow, console=_console(console))


def top(run: str, *, once: bool = False) -> None:
    """Shows a run's folder in the terminal until the run is finished; `once`: as it stands now. Raises InputError where there
    is no run."""
    from rayrec.observe.panel import top as show

    show(run, once=once)


def report(
    *runs: str, out: str | None = None, price_per_node_hour: float | None = None, nodes: int = 1, currency: str = "USD"
) -> str:
    """Writes what the events of a run's folder tell, of a run in progress too, as one HTML file that needs no other; of several
    runs, side by side. `out` None: RUN/report.html, which several runs do not have. With the price of each of so many
    nodes, in `currency`, it tells what the run cost. `out` may be a file (.html) or a folder.
    Returns the file's path. Raises InputError where there is no run."""
    from rayrec.observe.report import comparison
    from rayrec.observe.report import run as run_report
    from rayrec.observe.run_summary import Price

    price = None if price_per_node_hour is None else Price(price_per_node_hour, nodes, currency)
    if len(runs) == 1:
        return run_report.write(runs[0], out=out, price=price)
    if not runs:
        raise InputError("which run? give the folder of one, or of several to compare them")
    if out is None:
        raise InputError("out: several runs have no folder in common; say which file to write, --out FILE.html")
    return comparison.write(runs, out=out, price=price)


def profile(run: str, *, steps: int = 10, timeout_s: float = 300.0, console: Console | None = None) -> dict[str, Any]:
    """Asks a run in progress for a profile of so many steps (at most 200) of every worker, waits for it, and says where it is: a
    folder in RUN/profile. Nothing but the run's folder is needed to reach it. Raises InputError where the run is not training,
    does not answer, ends before, or a worker could not write its profile."""
    from rayrec.observe.events import read_events
    from rayrec.training.profiling import request_profile

    folder = storage.absolute(run)
    events = read_events(storage.join(folder, "events.jsonl"))
    return request_profile(folder, events, steps=steps, timeout_s=timeout_s, note=_console(console).note)


def doctor() -> Report:
    """What is installed, what fits together, what does not and how to fix it."""
    from rayrec.environment.doctor import doctor as examine

    return examine()


def _config_of(checkpoint: str, recipe: Recipe | None) -> TrainConfig:
    """The configuration a checkpoint was trained with."""
    from rayrec.checkpoint import open_checkpoint
    from rayrec.recipes import load_config

    found = open_checkpoint(checkpoint)
    found.manifest()  # says so where it is none
    place = storage.join(found.path, "config.yaml")
    return load_config(storage.read_text(place), recipe=recipe, source=place)


def _scoring(
    checkpoint: str,
    recipe: Recipe | None,
    cluster_address: str | None,
    options: dict[str, Any],
    console: Console | None,
) -> dict[str, Any]:
    """What `rayrec.inference.predict` is told: the checkpoint's configuration, but for what the caller decides."""
    from rayrec.inference.config import ScoringConfig

    asked = ScoringConfig().updated(options)
    return {
        "config": _scoring_config(checkpoint, recipe, cluster_address, asked),
        "batch_rows": asked.batch_rows,
        "device": asked.device,
        "console": _console(console),
    }


def _scoring_config(
    checkpoint: str, recipe: Recipe | None, cluster_address: str | None, asked: ScoringConfig
) -> TrainConfig:
    from rayrec.workloads.run_config import ClusterConfig

    config = _config_of(checkpoint, recipe).replace(cluster=ClusterConfig(address=cluster_address))
    return config if asked.max_bad_fraction is None else config.replace(max_bad_fraction=asked.max_bad_fraction)


def _grouped(config: TrainConfig, group: str | None) -> TrainConfig:
    """The configuration with another group of its schema, where one is asked for."""
    from rayrec.workloads.recsys.workload import ClickWorkload

    if group is None:
        return config
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(
            f"group: recipe {config.recipe} predicts no clicks, and only of clicks there is a gauc; leave it out"
        )
    return config.replace(workload=config.workload.replace(schema=config.workload.schema.replace(group=group)))


def _console(console: Console | None) -> Console:
    from rayrec.observe.console import Console

    return console or Console()


def _preparation(options: dict[str, Any]) -> PreparationConfig:
    from rayrec.prepare.config import PreparationConfig

    return PreparationConfig().updated(options)
