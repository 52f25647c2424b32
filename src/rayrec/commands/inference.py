"""Commands on trained models: evaluate, compare, predict, ensemble, export."""

import atexit
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import (
    Argument,
    Checkpoint,
    Checkpoints,
    ClusterAddress,
    CustomRecipe,
    CustomRecipes,
    InputRows,
    NewFolder,
    OptionalInputRows,
    Shown,
    command,
    load,
)
from rayrec.config import InputError, renamed

if TYPE_CHECKING:
    from rayrec.inference.config import ComparisonGates, ScoringConfig
    from rayrec.observe.console import Console
    from rayrec.workloads.base import TrainConfig


def _shown_by(formatter: str) -> Callable[[dict[str, Any]], Shown]:
    """Return a function that shows a result as text, and its failed gates. `formatter` is in
    `rayrec.inference.result_tables`.
    """
    path = f"rayrec.inference.result_tables:{formatter}"
    return lambda result: Shown(result, load(path)(result), "; ".join(result.get("failures", ())))


@command(
    "Score",
    options=[("", "rayrec.inference.config:EvaluationConfig")],
    show=_shown_by("evaluation_text"),
    examples=(
        "rayrec evaluate runs/demo --baselines",
        "rayrec evaluate runs/demo new.txt --slice-by day",
        "rayrec evaluate runs/demo --importance --report demo.html",
    ),
)
def evaluate(
    checkpoint: Checkpoint,
    path: OptionalInputRows = None,
    *,
    report: Annotated[
        str | None,
        Argument("output file (.html) or folder of a page with the result", "FILE"),
    ] = None,
    recipe: CustomRecipe = None,
    cluster_address: ClusterAddress = None,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Compute the metrics of a model on labelled rows, each scored exactly once.

    Returns the workload's metrics, rows, training_rows, checkpoint; see
    `rayrec.inference.evaluate.evaluate`. `checkpoint` is a checkpoint folder, or a run folder (the
    checkpoint in its summary, otherwise the latest). `path` is a path, or, for click models, a
    pandas DataFrame, a pyarrow.Table or a ray.data.Dataset. None: the run's own test rows. `report`
    is the file or folder of a self-contained HTML page with the result. None: no page. `recipe`
    is the checkpoint's custom recipe, as a function or FILE.py:FUNCTION. `cluster_address` is
    HOST:PORT or auto for a running Ray cluster, local for a local Ray, or none for threads of this
    process. None: the connected Ray or RAY_ADDRESS, otherwise threads of this process. `options`
    are the fields of `rayrec.inference.config.EvaluationConfig`. Raises InputError for an unusable
    checkpoint or path.
    """
    from rayrec.inference.config import EvaluationConfig
    from rayrec.inference.evaluate import evaluate as run

    if report is not None:
        from rayrec.observe.report.run import output_path

        output_path(report)
    settings = EvaluationConfig().updated(options)
    folders = [checkpoint] if settings.compare is None else [checkpoint, settings.compare]
    configs = [
        _scoring_config(folder, recipe, cluster_address, settings, settings.group)
        for folder in folders
    ]
    with _input_path(path, checkpoint, configs[0]) as located:
        result = run(
            checkpoint,
            located,
            config=configs[0],
            options=settings,
            other=configs[-1],
            console=_console(console),
        )
    if report is not None:
        from rayrec.inference.evaluation_report import render
        from rayrec.observe.report.run import save

        save(render(result), report)
    return result


@command(
    "Score",
    options=[
        ("gates", "rayrec.inference.config:ComparisonGates"),
        ("", "rayrec.inference.config:ComparisonConfig"),
    ],
    show=_shown_by("comparison_text"),
    examples=(
        "rayrec compare runs/dlrm runs/finalnet",
        "rayrec compare runs/dlrm runs/finalnet new.txt",
    ),
)
def compare(
    checkpoints: Checkpoints,
    path: OptionalInputRows = None,
    *,
    recipe: CustomRecipes = None,
    gates: "ComparisonGates | None" = None,
    cluster_address: ClusterAddress = None,
    console: "Console | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare several models on the same labelled rows, with p-values. Exit status 2 if a gate
    fails.

    Returns metrics with intervals, the cost of each model, and the significant differences; see
    `rayrec.inference.evaluate.compare`. `options` are the fields of
    `rayrec.inference.config.ComparisonConfig`. Failed `gates` are listed in the result's `failures`
    and raise no error. `recipe` may be several, of which each checkpoint takes its own. Other
    arguments: see `evaluate`. Raises InputError for models without a common raw schema, label and
    rows, and, without a `path`, for runs with different test rows.
    """
    from rayrec.inference.config import ComparisonConfig
    from rayrec.inference.evaluate import compare as run

    settings = ComparisonConfig().updated(options)
    checkpoints = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
    # The last word of the command line, which may be a path as well
    if isinstance(path, str) and _is_model(path):
        checkpoints.append(path)
        path = None
    configs = [
        _scoring_config(folder, recipe, cluster_address, settings, settings.group)
        for folder in checkpoints
    ]
    if not configs:
        raise InputError(
            "compare: needs the folders of trained models. Pass two, or one and --baselines"
        )
    with _input_path(path, checkpoints[0], configs[0]) as located:
        return run(
            checkpoints,
            located,
            configs=configs,
            options=settings,
            gates=gates,
            console=_console(console),
        )


@command(
    "Score",
    options=[("", "rayrec.inference.config:PredictionConfig")],
    examples=(
        "rayrec predict runs/demo log/train.txt --out scores",
        "rayrec predict runs/shop log.csv --out scores --keep user item",
    ),
)
def predict(
    checkpoint: Checkpoint,
    path: InputRows,
    *,
    out: Annotated[
        str | None,
        Argument(
            "output folder for Parquet files with row and predictions, such as score",
            "DIR",
            required=True,
        ),
    ] = None,
    recipe: CustomRecipe = None,
    cluster_address: ClusterAddress = None,
    console: "Console | None" = None,
    **options: Any,
) -> Any:
    """Write scores of rows as Parquet, in their order.

    Returns a `ray.data.Dataset` of `row` and the workload's predictions, such as `score`, `logit`
    and, for labelled input, `label`. With `out`, writes them to this folder as Parquet files,
    completely or not at all, and returns a summary. An interrupted call resumes if repeated.
    `options` are fields of `PredictionConfig`, such as `keep`, the columns of the rows to return
    too. Other arguments: see `evaluate`.
    """
    from rayrec.inference import predict as prediction
    from rayrec.inference.config import PredictionConfig

    settings = PredictionConfig().updated(options)
    config = _scoring_config(checkpoint, recipe, cluster_address, settings)
    if out is None:
        persistent = _persistent_path(path, checkpoint, config, settings.keep)
        return prediction.predict(
            checkpoint,
            persistent,
            config=config,
            options=settings,
            console=_console(console),
        )
    with _input_path(path, checkpoint, config, labelled=False, extra=settings.keep) as located:
        assert located is not None
        return prediction.predict_to(
            checkpoint,
            located,
            out,
            config=config,
            options=settings,
            console=_console(console),
        )


def predict_to(checkpoint: str, path: str, *, out: str, **options: Any) -> dict[str, Any]:
    """Call `predict` with `out`. Deprecated."""
    warnings.warn(renamed("rayrec.predict_to", "rayrec.predict"), FutureWarning, stacklevel=2)
    result: dict[str, Any] = predict(checkpoint, path, out=out, **options)
    return result


@command("Score", examples=("rayrec ensemble runs/one runs/two --out both",))
def ensemble(
    checkpoints: Checkpoints,
    *,
    out: NewFolder,
    recipe: CustomRecipes = None,
) -> dict[str, Any]:
    """Merge several click models into one, usable like any other model.

    Its logit is the mean of the logits of two or more models trained with the same Preprocessor;
    see `rayrec.inference.ensemble.ensemble`. Writes the checkpoint `out` completely or not at all.
    Other arguments: see `evaluate`.
    """
    from rayrec.inference.ensemble import ensemble as run

    return run(
        checkpoints,
        out,
        configs=[_recipe_config(checkpoint, recipe) for checkpoint in checkpoints],
    )


@command(
    "Score",
    options=[("", "rayrec.inference.config:ExportConfig")],
    examples=("rayrec export runs/demo --out exported --quantize int8",),
)
def export(
    checkpoint: Checkpoint,
    *,
    out: NewFolder,
    recipe: CustomRecipe = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a model as a folder for other tools.

    Other arguments: see `evaluate`. `options`, for click models, are the fields of
    `rayrec.inference.config.ExportConfig`. Raises InputError for an unusable checkpoint, an
    unsupported model, an exported click model with different scores than its checkpoint, or if
    `out` exists.
    """
    from rayrec.inference.config import ExportConfig
    from rayrec.inference.export.write import export as run

    return run(
        checkpoint,
        out,
        config=_recipe_config(checkpoint, recipe),
        settings=ExportConfig().updated(options),
    )


def _is_model(path: str) -> bool:
    """Return whether a path is the folder of a checkpoint or of a run."""
    from rayrec import storage
    from rayrec.checkpoint import MANIFEST

    names = (MANIFEST, "checkpoints")
    return any(storage.exists(storage.join(path, name)) for name in names)


@contextmanager
def _input_path(
    path: Any,
    checkpoint: str,
    config: "TrainConfig",
    *,
    labelled: bool = True,
    extra: Sequence[str] = (),
) -> Iterator[str | None]:
    """Yield a path unchanged, else that of a folder with the given rows, which is removed
    afterwards. Their other columns are dropped, except those `extra`. Raises InputError.
    """
    from rayrec.data.frame_files import data_paths
    from rayrec.data.frames import as_table

    if path is None or isinstance(path, str):
        yield path
        return
    path = as_table(path)
    destination = _destination(path, checkpoint, config, labelled=labelled)
    with data_paths(path, name="path", extra=extra, **destination) as located:
        yield located


def _persistent_path(
    path: Any,
    checkpoint: str,
    config: "TrainConfig",
    extra: Sequence[str],
) -> str:
    """Return a path unchanged, else that of a folder with the given rows, which exists as long as
    this process, because a lazy Dataset reads it. Raises InputError.
    """
    from rayrec import storage
    from rayrec.data.frame_files import written
    from rayrec.data.frames import as_table, is_rows

    path = as_table(path)
    if not is_rows(path):
        with _input_path(path, checkpoint, config) as located:
            assert located is not None
            return located
    destination = _destination(path, checkpoint, config, labelled=False)
    target = written(path, name="path", extra=extra, **destination)
    atexit.register(storage.remove_folder, target)
    return target


def _destination(
    path: Any,
    checkpoint: str,
    config: "TrainConfig",
    *,
    labelled: bool,
) -> dict[str, Any]:
    """Return the schema of the columns to write, and a folder that all scoring processes can read.
    Raises InputError.
    """
    from rayrec.checkpoint import open_checkpoint
    from rayrec.data.frame_files import column_names
    from rayrec.data.frames import is_rows, schema_for
    from rayrec.workloads.recsys.scoring import cache_folder

    schema = config.workload.table_schema
    if is_rows(path) and schema is None:
        raise InputError(
            f"path: recipe {config.recipe} does not score tables, got {type(path).__name__}. Pass "
            "a path."
        )
    if is_rows(path) and schema is not None and not labelled:
        schema = schema_for(schema, column_names(path), "path")
    return {"schema": schema, "folder": cache_folder(open_checkpoint(checkpoint).path)}


def _recipe_config(checkpoint: str, recipe: Any) -> "TrainConfig":
    from rayrec import storage
    from rayrec.checkpoint import open_checkpoint
    from rayrec.recipes import find, load_config

    customs = [recipe] if isinstance(recipe, str) or callable(recipe) else recipe or ()
    recipes = [find(custom) if isinstance(custom, str) else custom for custom in customs]
    opened = open_checkpoint(checkpoint)
    opened.manifest()  # Raises if it is not a checkpoint.
    path = storage.join(opened.path, "config.yaml")
    return load_config(storage.read_text(path), recipe=recipes, source=path)


def _scoring_config(
    checkpoint: str,
    recipe: Any,
    cluster_address: str | None,
    settings: "ScoringConfig",
    group: str | None = None,
) -> "TrainConfig":
    """Return a checkpoint's configuration with the settings of scoring, and another group column if
    given.
    """
    from rayrec.workloads.run_config import ClusterConfig

    config = _recipe_config(checkpoint, recipe).replace(
        cluster=ClusterConfig(address=cluster_address)
    )
    if settings.max_bad_fraction is not None:
        config = config.replace(max_bad_fraction=settings.max_bad_fraction)
    if group is None:
        return config
    from rayrec.workloads.recsys.workload import ClickWorkload

    if not isinstance(config.workload, ClickWorkload):
        raise InputError(
            f"group: gauc requires a click model, and recipe {config.recipe} is not one. Omit "
            "group."
        )
    return config.replace(
        workload=config.workload.replace(schema=config.workload.schema.replace(group=group))
    )
