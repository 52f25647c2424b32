"""Recipe commands: recipes, config, plan, train, tune, supervise."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import Argument, Shown, command, find_summary, table_sizes
from rayrec.commands.settings import named_configuration, nest_settings, updated
from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.cluster.restart_policy import SuperviseConfig
    from rayrec.cluster.supervisor import Outcome
    from rayrec.data.frame_files import Rows
    from rayrec.observe.console import Console
    from rayrec.observe.timing import Stopwatch
    from rayrec.recipes import Recipe
    from rayrec.training.result import Result
    from rayrec.workloads.base import TrainConfig

_SAVED_S = 30.0
"""Seconds for the driver of a stopped job to notice and end, in addition to the workers' time to
save.
"""


@command("Train")
def recipes() -> str:
    """List the recipes, one per line."""
    from rayrec.recipes import ALL

    return "\n".join(f"{name:24} {find_summary(recipe)}." for name, recipe in ALL.items())


@command(
    "Train",
    recipe="first",
    examples=("rayrec config criteo_demo > my.yaml", "rayrec train my.yaml"),
)
def config(recipe: "TrainConfig | Recipe | str", **settings: Any) -> str:
    """Print the configuration of a recipe as YAML."""
    return configuration(recipe, settings).to_yaml().rstrip("\n")


@command(
    "Train",
    recipe="first",
    examples=("rayrec plan criteo_kaggle --tables mlperf --cluster cpus=16,gpus=8",),
)
def plan(
    config: "TrainConfig | Recipe | str",
    *,
    cluster: Annotated[
        str | None,
        Argument(
            "resources of the cluster, such as cpus=16,gpus=1,nodes=2,network_gbit=100", "RESOURCES"
        ),
    ] = None,
    tables: Annotated[
        Sequence[int] | None,
        Argument(
            "mlperf, or the number of rows of each table, such as 1000,200",
            "ROWS",
            read=table_sizes,
        ),
    ] = None,
    **settings: Any,
) -> str:
    """Show sharding, memory and expected speed before training.

    Starts no training. Table sizes come from `tables` (rows of each), a Preprocessor
    (`--workload.preprocessor DIR`), or a preset that fixes them. With a `cluster`, such as
    "cpus=16,gpus=1,nodes=2,gpu_memory_gb=80,network_gbit=100", plans for its workers, with their
    communication volume and the resulting limit in rows/s. With a log and no `tables`, the text
    also contains rows/s of each stage, the bottleneck and the CPUs needed per GPU, measured by
    training on a slice of the log here for about twenty seconds. Without a Preprocessor, table
    sizes then come from the slice. Recipe and settings: see `train`. Raises InputError for tables
    that do not fit, with their required memory, and for unusable data.
    """
    resolved = configuration(config, settings)
    resolved = resolved.workload.adapted(resolved)
    if tables is None:
        resolved.workload.check_data(resolved)
    if cluster is None:
        return resolved.workload.plan(resolved, tables=tables)
    from rayrec.training.forecast import ClusterShape, forecast, plan_for

    shape = ClusterShape.parse(cluster)
    if tables is not None or resolved.train_data.path is None:
        return plan_for(resolved, shape, tables=tables)
    return forecast(resolved, shape).text()


def _show_run(result: "Result") -> Shown:
    from rayrec.training.result import summary_rows

    rows = summary_rows(result.summary, folder=result.folder)
    width = max(len(name) for name, _ in rows)
    text = "\n".join(
        [
            f"{result.summary['recipe']}: finished",
            *(f"  {name:{width}}  {value}" for name, value in rows),
        ]
    )
    return Shown(result.summary, text)


@command(
    "Train",
    recipe="first",
    show=_show_run,
    examples=(
        "rayrec train criteo_demo --data log/train.txt",
        "rayrec train criteo_demo --data s3://bucket/log --name day-2026-05-04 --workers 8",
        "rayrec train my.yaml",
    ),
)
def train(
    config: "TrainConfig | Recipe | str",
    *,
    data: "Rows | str | os.PathLike[str] | None" = None,
    eval_data: "Rows | str | os.PathLike[str] | None" = None,
    console: "Console | None" = None,
    stopwatch: "Stopwatch | None" = None,
    stop: threading.Event | None = None,
    **settings: Any,
) -> "Result":
    """Train a recipe. An existing name resumes its run (also: rayrec resume RUN).

    `config` is a configuration, a recipe, or a text: a recipe's name, FILE.py:FUNCTION, FILE.yaml,
    or the folder of a run. `settings` override it: `rayrec.train("criteo_demo",
    data="log/train.txt", steps=100, schema="shop.yaml")`. `data` and `eval_data` are paths, or, for
    click models, a pandas DataFrame, a pyarrow.Table or a ray.data.Dataset; None uses those of the
    configuration. See `rayrec.training.trainer.train`.
    """
    from rayrec.training.trainer import train as run

    # A path belongs to the configuration, which is stored, so that the run resumes by its name
    # alone. Objects must be given again.
    if isinstance(data, str | os.PathLike):
        settings["data"] = os.fspath(data)
        data = None
    if isinstance(eval_data, str | os.PathLike):
        settings["eval_data.path"] = os.fspath(eval_data)
        eval_data = None
    resolved = configuration(config, settings)
    console = _console(console)
    require_files(resolved, note=console.note)
    return run(
        resolved, data=data, eval_data=eval_data, console=console, stopwatch=stopwatch, stop=stop
    )


@command(
    "Train",
    options=[("", "rayrec.commands.dlrm:DLRMFlags")],
    underscores=True,
    show=_show_run,
    examples=(
        "rayrec dlrm --batch_size 256 --learning_rate 1.0",
        "torchrun --nproc_per_node 8 -m rayrec dlrm --in_memory_binary_criteo_path arrays "
        "--adagrad --learning_rate 0.005",
    ),
)
def dlrm(
    *, console: "Console | None" = None, stopwatch: "Stopwatch | None" = None, **flags: Any
) -> "Result":
    """Train with the flags of TorchRec's dlrm_main.py, and print the `rayrec train` command.

    `flags` are the fields of `rayrec.commands.dlrm.DLRMFlags`. `print_sharding_plan` also prints
    the plan of the tables, once. Without data, trains on random rows. Raises InputError for flags
    without an equivalent, with the fix of each.
    """
    import torch

    from rayrec.cluster.layout import TorchrunEnv
    from rayrec.commands.dlrm import DLRMFlags, command_line, train_settings

    console, parsed = _console(console), DLRMFlags().updated(flags)
    torchrun = TorchrunEnv.from_environment()
    workers = 1 if torchrun is None else torchrun.world_size
    recipe, settings = train_settings(parsed, workers=workers, use_gpu=torch.cuda.is_available())
    console.note(command_line(recipe, settings))
    if parsed.print_sharding_plan and (torchrun is None or torchrun.rank == 0):
        console.note(plan(recipe, tables=parsed.table_rows, **settings))
    return train(recipe, console=console, stopwatch=stopwatch, **settings)


@command(
    "Train",
    recipe="first",
    options=[("tune", "rayrec.tuning.space:TuneConfig")],
    examples=(
        "rayrec tune clicks --schema shop.yaml --data log --search space.yaml --tune.trials 30",
    ),
)
def tune(
    config: "TrainConfig | Recipe | str",
    *,
    search: Annotated[
        Mapping[str, Any] | str,
        Argument(
            "search space as a YAML file, such as workload.model.dropout: {uniform: [0, 0.5]}",
            "FILE",
            type="builtins:str",
        ),
    ],
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Search for the best settings of a recipe.

    See `rayrec.tuning.search.tune`. `search` maps fields to their values, directly or as the path
    of a YAML file. `options` are the fields of `rayrec.tuning.space.TuneConfig`. The recipe: see
    `train`.
    """
    from rayrec import storage
    from rayrec.tuning.search import tune as run
    from rayrec.tuning.space import Space, TuneConfig

    space = (
        Space.read(storage.read_text(search), source=search)
        if isinstance(search, str)
        else Space.parse(search, source="search")
    )
    return run(
        configuration(config, {}),
        space,
        options=TuneConfig().updated(options),
        console=_console(console),
    )


def _show_outcome(outcome: "Outcome") -> Shown:
    if outcome.status == 2:
        return Shown(None, error=outcome.cause)
    done = outcome.summary or {
        "name": outcome.name,
        "status": "finished",
        "attempts": outcome.attempts,
    }
    return Shown(done if outcome.status == 0 else None, status=outcome.status)


@command(
    "Train",
    recipe="after --",
    options=[("supervision", "rayrec.cluster.restart_policy:SuperviseConfig")],
    show=_show_outcome,
    examples=(
        "rayrec supervise --address http://head:8265 -- train criteo_kaggle --data "
        "s3://bucket/log --name day-2026-05-04",
    ),
)
def supervise(
    config: "TrainConfig",
    arguments: Sequence[str],
    *,
    supervision: "SuperviseConfig | None" = None,
    show: Callable[[str], None] | None = None,
    console: "Console | None" = None,
) -> "Outcome":
    """Train as a cluster job that survives the loss of the head node.

    Submits `rayrec train ARGUMENTS` through Ray Jobs until it finishes. See
    rayrec.cluster.supervisor.supervise. `config` is the configuration of `arguments` (a recipe, or
    --config FILE, then flags). If it has no name, a name is generated and added to them. `show`
    receives the output of the job. Raises InputError for user errors.
    """
    from rayrec import storage
    from rayrec.cluster.restart_policy import SuperviseConfig
    from rayrec.cluster.supervisor import supervise as run

    if not os.path.isabs(config.storage_path) and not storage.is_url(config.storage_path):
        raise InputError(
            "storage_path: must be absolute, because a new head node would resolve a relative path "
            f"elsewhere, got {config.storage_path!r}. Use a file system that outlives the head, or "
            "a URL."
        )
    if config.cluster.env != config.cluster.names:
        raise InputError(
            "cluster.env: Ray would show the values in the job's command. Use --env NAME=VALUE "
            "before the --"
        )
    name = config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return run(
        [*arguments, *([] if config.name else ["--name", name])],
        name=name,
        config_hash=config.replace(name=name).config_hash(),
        config=supervision or SuperviseConfig(),
        stop_wait_s=max(config.failure.grace_s, config.failure.max_grace_s) + _SAVED_S,
        note=_console(console).note,
        show=show,
    )


def configuration(
    recipe: "TrainConfig | Recipe | str", settings: Mapping[str, Any]
) -> "TrainConfig":
    """Return a recipe's configuration with settings applied. See `train`."""
    if isinstance(recipe, str):
        config = named_configuration(recipe)
    else:
        config = recipe() if callable(recipe) else recipe
    return updated(config, nest_settings(config, settings)) if settings else config


def require_files(config: "TrainConfig", *, note: Callable[[str], None]) -> None:
    """Check that the folder of a published data set is complete. Raises InputError with missing
    files. Logs unlikely sizes.
    """
    from rayrec import recipes
    from rayrec.data.log_source import LogSource
    from rayrec.datasets import fetch as fetching
    from rayrec.datasets import published_files

    name = recipes.PUBLISHED.get(config.recipe)
    path = config.train_data.path
    if (
        name is None
        or path is None
        or not os.path.isdir(path)
        or LogSource.at(path).is_preprocessed
    ):
        return
    named = config.train_data.files
    expected_files = [
        file
        for file in fetching.files_of(name)
        if re.sub(r"(\.txt)?(\.gz)?$", "", file.name) in named
    ]
    try:
        published_files.require_files(path, expected_files, fetch_name=name, note=note)
    except InputError:
        LogSource.at(path).raw_files()
        raise
