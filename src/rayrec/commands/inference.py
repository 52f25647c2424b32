"""Commands on trained models: evaluate, compare, predict, ensemble, export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import (
    Argument,
    Checkpoint,
    Checkpoints,
    ClusterAddress,
    CustomRecipe,
    CustomRecipes,
    InputPath,
    NewFolder,
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
    """Return a function that shows a result as text, and its failed gates. `formatter` is in `rayrec.inference.result_tables`."""
    path = f"rayrec.inference.result_tables:{formatter}"
    return lambda result: Shown(result, load(path)(result), "; ".join(result.get("failures", ())))


@command(
    "Score",
    options=[("", "rayrec.inference.config:EvaluationConfig")],
    show=_shown_by("evaluation_text"),
    examples=("rayrec evaluate runs/demo log/train.txt", "rayrec evaluate runs/demo new.txt --slice-by day"),
)
def evaluate(
    checkpoint: Checkpoint,
    path: InputPath,
    *,
    recipe: CustomRecipe = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compute the metrics of a model on labelled rows, each scored exactly once.

    Returns the workload's metrics, rows, checkpoint; see `rayrec.inference.evaluate.evaluate`. `checkpoint` is a checkpoint
    folder, or a run folder (the checkpoint in its summary, otherwise the latest). `recipe` is the checkpoint's custom recipe, as
    a function or FILE.py:FUNCTION. `cluster_address` is HOST:PORT or auto for a running Ray cluster, local for a local Ray, or
    none for threads of this process. None: the connected Ray or RAY_ADDRESS, otherwise threads of this process. `options` are
    the fields of `rayrec.inference.config.EvaluationConfig`. Raises InputError for an unusable checkpoint or path."""
    from rayrec.inference.config import EvaluationConfig
    from rayrec.inference.evaluate import evaluate as run

    settings = EvaluationConfig().updated(options)
    folders = [checkpoint] if settings.compare is None else [checkpoint, settings.compare]
    configs = [_scoring_config(folder, recipe, cluster_address, settings, settings.group) for folder in folders]
    return run(checkpoint, path, config=configs[0], options=settings, other=configs[-1], console=_console(console))


@command(
    "Score",
    options=[("gates", "rayrec.inference.config:ComparisonGates"), ("", "rayrec.inference.config:ComparisonConfig")],
    show=_shown_by("comparison_text"),
    examples=("rayrec compare runs/dlrm runs/finalnet log/train.txt",),
)
def compare(
    checkpoints: Checkpoints,
    path: InputPath,
    *,
    recipe: CustomRecipes = None,
    gates: ComparisonGates | None = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare several click models on the same labelled rows, with p-values. Exit status 2 if a gate fails.

    Returns metrics with intervals, the cost of each model, and the significant differences; see
    `rayrec.inference.evaluate.compare`. `options` are the fields of `rayrec.inference.config.ComparisonConfig`. Failed `gates`
    are listed in the result's `failures` and raise no error. `recipe` may be several, of which each checkpoint takes its own.
    Other arguments: see `evaluate`. Raises InputError for models without a common raw schema, label and rows."""
    from rayrec.inference.config import ComparisonConfig
    from rayrec.inference.evaluate import compare as run

    settings = ComparisonConfig().updated(options)
    configs = [_scoring_config(folder, recipe, cluster_address, settings, settings.group) for folder in checkpoints]
    return run(checkpoints, path, configs=configs, options=settings, gates=gates, console=_console(console))


@command(
    "Score",
    options=[("", "rayrec.inference.config:ScoringConfig")],
    examples=("rayrec predict runs/demo log/train.txt --out scores",),
)
def predict(
    checkpoint: Checkpoint,
    path: InputPath,
    *,
    out: Annotated[
        str | None, Argument("output folder for Parquet files with row and predictions, such as score", "DIR", required=True)
    ] = None,
    recipe: CustomRecipe = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> Any:
    """Write scores of rows as Parquet, in their order.

    Returns a `ray.data.Dataset` of `row` and the workload's predictions, such as `score`, `logit` and, for labelled input,
    `label`. With `out`, writes them to this folder as Parquet files, completely or not at all, and returns a summary. An
    interrupted call resumes if repeated. `options` are fields of `ScoringConfig`. Other arguments: see `evaluate`."""
    from rayrec.inference import predict as prediction
    from rayrec.inference.config import ScoringConfig

    settings = ScoringConfig().updated(options)
    config = _scoring_config(checkpoint, recipe, cluster_address, settings)
    if out is None:
        return prediction.predict(checkpoint, path, config=config, options=settings, console=_console(console))
    return prediction.predict_to(checkpoint, path, out, config=config, options=settings, console=_console(console))


def predict_to(checkpoint: str, path: str, *, out: str, **options: Any) -> dict[str, Any]:
    """Call `predict` with `out`. Deprecated."""
    warnings.warn(renamed("rayrec.predict_to", "rayrec.predict"), FutureWarning, stacklevel=2)
    result: dict[str, Any] = predict(checkpoint, path, out=out, **options)
    return result


@command("Score", examples=("rayrec ensemble runs/one runs/two --out both",))
def ensemble(checkpoints: Checkpoints, *, out: NewFolder, recipe: CustomRecipes = None) -> dict[str, Any]:
    """Merge several click models into one, usable like any other model.

    Its logit is the mean of the logits of two or more models trained with the same Preprocessor; see
    `rayrec.inference.ensemble.ensemble`. Writes the checkpoint `out` completely or not at all. Other arguments: see `evaluate`.
    """
    from rayrec.inference.ensemble import ensemble as run

    return run(checkpoints, out, configs=[_config_of(checkpoint, recipe) for checkpoint in checkpoints])


@command(
    "Score",
    options=[("", "rayrec.inference.config:ExportConfig")],
    examples=("rayrec export runs/demo --out exported --quantize int8",),
)
def export(checkpoint: Checkpoint, *, out: NewFolder, recipe: CustomRecipe = None, **options: Any) -> dict[str, Any]:
    """Write a model as a folder for other tools.

    Other arguments: see `evaluate`. `options`, for click models, are the fields of `rayrec.inference.config.ExportConfig`.
    Raises InputError for an unusable checkpoint, an unsupported model, an exported click model with different scores than its
    checkpoint, or if `out` exists."""
    from rayrec.inference.config import ExportConfig
    from rayrec.inference.export.write import export as run

    return run(checkpoint, out, config=_config_of(checkpoint, recipe), settings=ExportConfig().updated(options))


def _config_of(checkpoint: str, recipe: Any) -> TrainConfig:
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
    checkpoint: str, recipe: Any, cluster_address: str | None, settings: ScoringConfig, group: str | None = None
) -> TrainConfig:
    """Return a checkpoint's configuration with the settings of scoring, and another group column if given."""
    from rayrec.workloads.run_config import ClusterConfig

    config = _config_of(checkpoint, recipe).replace(cluster=ClusterConfig(address=cluster_address))
    if settings.max_bad_fraction is not None:
        config = config.replace(max_bad_fraction=settings.max_bad_fraction)
    if group is None:
        return config
    from rayrec.workloads.recsys.workload import ClickWorkload

    if not isinstance(config.workload, ClickWorkload):
        raise InputError(f"group: gauc requires a click model, and recipe {config.recipe} is not one. Omit group.")
    return config.replace(workload=config.workload.replace(schema=config.workload.schema.replace(group=group)))
