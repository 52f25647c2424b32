"""Commands on trained models: evaluate, compare, predict, ensemble, export."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import (
    Argument,
    Checkpoint,
    Checkpoints,
    ClusterAddress,
    InputPath,
    NewFolder,
    OwnRecipe,
    Shown,
    command,
)
from rayrec.config import InputError, renamed

if TYPE_CHECKING:
    from rayrec.inference.config import ComparisonGates, ScoringConfig
    from rayrec.observe.console import Console
    from rayrec.workloads.base import TrainConfig


def _shown_evaluation(found: dict[str, Any]) -> Shown:
    from rayrec.inference.result_tables import evaluation_text

    return Shown(found, evaluation_text(found))


@command(
    "Score",
    options=[("", "rayrec.inference.config:EvaluationConfig")],
    show=_shown_evaluation,
    examples=("rayrec evaluate runs/demo log/train.txt", "rayrec evaluate runs/demo new.txt --slice-by day"),
)
def evaluate(
    checkpoint: Checkpoint,
    path: InputPath,
    *,
    recipe: OwnRecipe = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compute the metrics of a model on labelled rows, each scored exactly once.

    Returns the workload's metrics, rows, checkpoint. `options` are the fields of `rayrec.inference.config.EvaluationConfig`:
    batch_rows, device, max_bad_fraction, and for click models group, slice_by, slice_top, confidence, resamples, seed and
    compare (another checkpoint), see `rayrec.inference.evaluate.evaluate`.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (the checkpoint in its summary, otherwise the latest).
        path: Labelled rows.
        recipe: Custom recipe of the checkpoint, as a function or FILE.py:FUNCTION.
        cluster_address: HOST:PORT or auto for a running Ray cluster, local for a local Ray, none for threads of this process.
            None: the connected Ray or RAY_ADDRESS, otherwise threads of this process.

    Raises:
        InputError: for an unusable checkpoint or path.
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


def _shown_comparison(found: dict[str, Any]) -> Shown:
    from rayrec.inference.result_tables import comparison_text

    return Shown(found, comparison_text(found), "; ".join(found["failures"]))


@command(
    "Score",
    options=[("gates", "rayrec.inference.config:ComparisonGates"), ("", "rayrec.inference.config:ComparisonConfig")],
    show=_shown_comparison,
    examples=("rayrec compare runs/dlrm runs/finalnet log/train.txt",),
)
def compare(
    checkpoints: Checkpoints,
    path: InputPath,
    *,
    recipe: OwnRecipe = None,
    gates: ComparisonGates | None = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare several click models on the same labelled rows, with p-values. Exit status 2 if a gate fails.

    Returns metrics with intervals, the cost of each model, and the significant differences; see
    `rayrec.inference.compare.compare`. `options` are the fields of `rayrec.inference.config.ComparisonConfig`: batch_rows,
    device, max_bad_fraction, group, ensemble, confidence, resamples and seed. Failed `gates` are listed in the result's
    `failures` and raise no error. Other arguments: see `evaluate`. Raises InputError for models without a common raw schema,
    label and rows.
    """
    from rayrec.inference.compare import compare as run
    from rayrec.inference.config import ComparisonConfig

    asked = ComparisonConfig().updated(options)
    configs = [_grouped(_scoring_config(checkpoint, recipe, cluster_address, asked), asked.group) for checkpoint in checkpoints]
    return run(checkpoints, path, configs=configs, options=asked, gates=gates, console=_console(console))


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
    recipe: OwnRecipe = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> Any:
    """Write scores of rows as Parquet, in their order.

    Returns a `ray.data.Dataset` of `row` and the workload's predictions, such as `score`, `logit` and, for labelled input,
    `label`. With `out`, writes them to this folder as Parquet files, completely or not at all, and returns a summary. An
    interrupted call resumes if repeated. `options` are the fields of `rayrec.inference.config.ScoringConfig`. Other
    arguments: see `evaluate`.
    """
    from rayrec.inference import predict as prediction
    from rayrec.inference.config import ScoringConfig

    asked = ScoringConfig().updated(options)
    config = _scoring_config(checkpoint, recipe, cluster_address, asked)
    if out is None:
        return prediction.predict(checkpoint, path, config=config, options=asked, console=_console(console))
    return prediction.predict_to(checkpoint, path, out, config=config, options=asked, console=_console(console))


def predict_to(checkpoint: str, path: str, *, out: str, **options: Any) -> dict[str, Any]:
    """Call `predict` with `out`. Deprecated."""
    warnings.warn(renamed("rayrec.predict_to", "rayrec.predict"), FutureWarning, stacklevel=2)
    written: dict[str, Any] = predict(checkpoint, path, out=out, **options)
    return written


@command("Score", examples=("rayrec ensemble runs/one runs/two --out both",))
def ensemble(checkpoints: Checkpoints, *, out: NewFolder, recipe: OwnRecipe = None) -> dict[str, Any]:
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
def export(checkpoint: Checkpoint, *, out: NewFolder, recipe: OwnRecipe = None, **options: Any) -> dict[str, Any]:
    """Write a model as a folder for other tools.

    Writes the folder completely or not at all. Checkpoint and recipe: see `evaluate`. `options`, for click models, are the
    fields of `rayrec.inference.config.ExportConfig`: quantize, parity_path, and so on. Raises InputError for an unusable
    checkpoint, an unsupported model, an exported click model with different scores than its checkpoint, or if `out` exists.
    """
    from rayrec.inference.config import ExportConfig
    from rayrec.inference.export.write import export as run

    return run(checkpoint, out, config=_config_of(checkpoint, recipe), settings=ExportConfig().updated(options))


def _config_of(checkpoint: str, recipe: Any) -> TrainConfig:
    """Load the configuration of a checkpoint."""
    from rayrec import storage
    from rayrec.checkpoint import open_checkpoint
    from rayrec.recipes import find, load_config

    own = find(recipe) if isinstance(recipe, str) else recipe
    found = open_checkpoint(checkpoint)
    found.manifest()  # Raises if it is not a checkpoint.
    place = storage.join(found.path, "config.yaml")
    return load_config(storage.read_text(place), recipe=own, source=place)


def _scoring_config(checkpoint: str, recipe: Any, cluster_address: str | None, asked: ScoringConfig) -> TrainConfig:
    from rayrec.workloads.run_config import ClusterConfig

    config = _config_of(checkpoint, recipe).replace(cluster=ClusterConfig(address=cluster_address))
    return config if asked.max_bad_fraction is None else config.replace(max_bad_fraction=asked.max_bad_fraction)


def _grouped(config: TrainConfig, group: str | None) -> TrainConfig:
    """Replace the group column of the schema, if requested."""
    from rayrec.workloads.recsys.workload import ClickWorkload

    if group is None:
        return config
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(f"group: gauc requires a click model, and recipe {config.recipe} is not one. Omit group.")
    return config.replace(workload=config.workload.replace(schema=config.workload.schema.replace(group=group)))
