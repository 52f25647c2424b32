"""Commands on what was trained: evaluate, compare, predict, ensemble, export."""

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
    batch_rows, device, max_bad_fraction, and for a click model group, slice_by, slice_top, confidence, resamples, seed and
    compare (another checkpoint), see `rayrec.inference.evaluate.evaluate`.

    `checkpoint` is the folder of a checkpoint, or of a run (then the one its summary names, else the newest); `recipe` the
    function it was trained with, or FILE.py:FUNCTION, where that is the caller's own. `cluster_address`: HOST:PORT or auto: a
    running Ray cluster; local: a local Ray; none: threads of this process; None: the Ray that this process is connected to or
    that RAY_ADDRESS names, else threads of this process. Raises InputError for an unusable checkpoint or path.
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
    """Compare several click models on the same labelled rows, with p-values; exit status 2 if a gate fails.

    Returns metrics with intervals, what each model costs, and which of them differ; see `rayrec.inference.compare.compare`.
    `options` are the fields of `rayrec.inference.config.ComparisonConfig`: batch_rows, device, max_bad_fraction, group, ensemble,
    confidence, resamples and seed; what fails of `gates` is in the result's `failures`, and no error is raised for it. The other
    arguments are those of `evaluate`. Raises InputError for models that are not of one raw schema, one label and the same rows.
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
        str | None, Argument("folder for the Parquet files: row and what is predicted, such as score", "DIR", required=True)
    ] = None,
    recipe: OwnRecipe = None,
    cluster_address: ClusterAddress = None,
    console: Console | None = None,
    **options: Any,
) -> Any:
    """Write scores of rows as Parquet, in their order.

    Returns a `ray.data.Dataset` of `row` and what the workload predicts, such as `score`, `logit` and, if the input has labels,
    `label`. With `out`, writes them as Parquet files into this folder, which appears complete or not at all, and returns what was
    written; an interrupted call made again resumes where it stopped. `options` are the fields of
    `rayrec.inference.config.ScoringConfig`; the other arguments are those of `evaluate`.
    """
    from rayrec.inference import predict as prediction
    from rayrec.inference.config import ScoringConfig

    asked = ScoringConfig().updated(options)
    given: dict[str, Any] = {
        "config": _scoring_config(checkpoint, recipe, cluster_address, asked),
        "options": asked,
        "console": _console(console),
    }
    if out is None:
        return prediction.predict(checkpoint, path, **given)
    return prediction.predict_to(checkpoint, path, out, **given)


def predict_to(checkpoint: str, path: str, *, out: str, **options: Any) -> dict[str, Any]:
    """Call `predict` with `out`, by its old name."""
    warnings.warn(renamed("rayrec.predict_to", "rayrec.predict"), FutureWarning, stacklevel=2)
    written: dict[str, Any] = predict(checkpoint, path, out=out, **options)
    return written


@command("Score", examples=("rayrec ensemble runs/one runs/two --out both",))
def ensemble(checkpoints: Checkpoints, *, out: NewFolder, recipe: OwnRecipe = None) -> dict[str, Any]:
    """Join several click models into one, which is evaluated, predicted with, exported and served as any.

    Its logit is the mean of those of two or more models that were trained with one Preprocessor; see
    `rayrec.inference.ensemble.ensemble`. Folder `out`, a checkpoint, appears complete or not at all. Checkpoints and recipe
    are as in `evaluate`.
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

    The folder appears complete or not at all. Checkpoint and recipe are as in `evaluate`. `options`, of a click model, are
    the fields of `rayrec.inference.config.ExportConfig`: quantize, parity_path, and so on. Raises InputError for an unusable
    checkpoint, a model that cannot be exported, a click model's export that does not score as its checkpoint does, and where
    `out` exists.
    """
    from rayrec.inference.config import ExportConfig
    from rayrec.inference.export.write import export as run

    return run(checkpoint, out, config=_config_of(checkpoint, recipe), settings=ExportConfig().updated(options))


def _config_of(checkpoint: str, recipe: Any) -> TrainConfig:
    """The configuration a checkpoint was trained with."""
    from rayrec import storage
    from rayrec.checkpoint import open_checkpoint
    from rayrec.recipes import find, load_config

    own = find(recipe) if isinstance(recipe, str) else recipe
    found = open_checkpoint(checkpoint)
    found.manifest()  # says so where it is none
    place = storage.join(found.path, "config.yaml")
    return load_config(storage.read_text(place), recipe=own, source=place)


def _scoring_config(checkpoint: str, recipe: Any, cluster_address: str | None, asked: ScoringConfig) -> TrainConfig:
    from rayrec.workloads.run_config import ClusterConfig

    config = _config_of(checkpoint, recipe).replace(cluster=ClusterConfig(address=cluster_address))
    return config if asked.max_bad_fraction is None else config.replace(max_bad_fraction=asked.max_bad_fraction)


def _grouped(config: TrainConfig, group: str | None) -> TrainConfig:
    """The configuration with another group of its schema, where one is asked for."""
    from rayrec.workloads.recsys.workload import ClickWorkload

    if group is None:
        return config
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(f"group: recipe {config.recipe} predicts no clicks, and only of clicks there is a gauc; leave it out")
    return config.replace(workload=config.workload.replace(schema=config.workload.schema.replace(group=group)))
