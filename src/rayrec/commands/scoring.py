"""Commands on what was trained: evaluate, predict, export, serve."""

from typing import Annotated, Any

import tyro

from rayrec import api, recipes
from rayrec.commands.arguments import Address, Checkpoint, OwnRecipe, Path_, flags, print_json, results_alone
from rayrec.config import InputError
from rayrec.inference.config import ComparisonConfig, ComparisonGates, EvaluationConfig, ExportConfig, ScoringConfig
from rayrec.inference.evaluation_text import comparison_text, evaluation_text
from rayrec.observe.console import Console
from rayrec.serve.config import Follow, ServeConfig

DEFAULT_SCORING, DEFAULT_EVALUATION, DEFAULT_EXPORT = ScoringConfig(), EvaluationConfig(), ExportConfig()
Scoring = Annotated[ScoringConfig, tyro.conf.arg(name="")]
Evaluation = tyro.conf.UseAppendAction[Annotated[EvaluationConfig, tyro.conf.arg(name="")]]
DEFAULT_COMPARISON, DEFAULT_GATES = ComparisonConfig(), ComparisonGates()
Comparison = Annotated[ComparisonConfig, tyro.conf.arg(name="")]
Export = Annotated[ExportConfig, tyro.conf.arg(name="")]


def _evaluate(
    checkpoint: Checkpoint,
    path: Path_,
    recipe: OwnRecipe = None,
    address: Address = None,
    config: Evaluation = DEFAULT_EVALUATION,
    *,
    console: Console,
) -> dict[str, Any]:
    """Score every labelled row of a path exactly once.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored, with labels: a click log, images, text; file, glob or folder.
        recipe: The recipe the checkpoint is of, where it is one of your own.
        address: HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this process. Default: the Ray
            that RAY_ADDRESS names, else threads of this process.
        config: How rows are scored, and what is reported of a click model in addition to its metrics over all rows.
    """
    with results_alone():
        options = {"recipe": _own(recipe), "cluster_address": address, **vars(config)}
        found = api.evaluate(checkpoint, path, console=console, **options)
    console.note(evaluation_text(found))
    return found


def _own(recipe: str | None) -> recipes.Recipe | None:
    return recipes.find(recipe) if recipe else None


def evaluate(arguments: list[str]) -> None:
    print_json(flags("evaluate", _evaluate, arguments))


def _compare(
    places: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT... PATH")],
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    recipe: OwnRecipe = None,
    address: Address = None,
    gates: ComparisonGates = DEFAULT_GATES,
    config: Comparison = DEFAULT_COMPARISON,
    *,
    console: Console,
) -> tuple[bool, dict[str, Any]]:
    """Score every labelled row of a path with two or more click models, and say which differ. Exit status 2 where a gate fails.

    Args:
        places: Two or more folders of checkpoints, or of runs (then the one that the summary names, else the newest); the
            first is the baseline. Then the path of the rows, with labels: a click log; file, glob or folder.
        json: Print JSON in place of tables.
        recipe: The recipe the checkpoints are of, where it is one of your own.
        address: HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this process. Default: the Ray
            that RAY_ADDRESS names, else threads of this process.
        gates: What the last model (the ensemble, if it is asked for) must gain over the first.
        config: How rows are scored, and how sure differences are.
    """
    with results_alone():
        options = {"recipe": _own(recipe), "cluster_address": address, **vars(config)}
        found = api.compare(places[:-1], "".join(places[-1:]), gates=gates, console=console, **options)
    return json, found


def compare(arguments: list[str]) -> None:
    json, found = flags("compare", _compare, arguments)
    if json:
        print_json(found)
    else:
        print(comparison_text(found))
    if found["failures"]:
        raise InputError("; ".join(found["failures"]))


def _ensemble(
    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT...")],
    out: str,
    recipe: OwnRecipe = None,
) -> dict[str, Any]:
    """Make several click models one, which is evaluated, predicted with, exported and served as any.

    Args:
        checkpoints: Two or more folders of checkpoints, or of runs (then the one that the summary names, else the newest), all
            trained with one Preprocessor.
        out: Folder of the new checkpoint, which appears complete or not at all.
        recipe: The recipe the checkpoints are of, where it is one of your own.
    """
    with results_alone():
        return api.ensemble(checkpoints, out=out, recipe=_own(recipe))


def ensemble(arguments: list[str]) -> None:
    print_json(flags("ensemble", _ensemble, arguments))


def _predict(
    checkpoint: Checkpoint,
    path: Path_,
    out: str,
    recipe: OwnRecipe = None,
    address: Address = None,
    config: Scoring = DEFAULT_SCORING,
    *,
    console: Console,
) -> dict[str, Any]:
    """Score the rows of a path, labelled or not.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored: a click log, images, text; file, glob or folder.
        out: Folder for the Parquet files: column row and what is predicted, such as score and logit.
        recipe: The recipe the checkpoint is of, where it is one of your own.
        address: HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this process. Default: the Ray
            that RAY_ADDRESS names, else threads of this process.
        config: How rows are scored.
    """
    with results_alone():
        options = {"recipe": _own(recipe), "cluster_address": address, **vars(config)}
        return api.predict_to(checkpoint, path, out=out, console=console, **options)


def predict(arguments: list[str]) -> None:
    print_json(flags("predict", _predict, arguments))


def _export(
    checkpoint: Checkpoint, out: str, recipe: OwnRecipe = None, config: Export = DEFAULT_EXPORT
) -> dict[str, Any]:
    """Write a trained model as other tools read it.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        out: Folder to write to, which appears complete or not at all.
        recipe: The recipe the checkpoint is of, where it is one of your own.
        config: Of a click model: how its tables are stored, and what its scores are compared on.
    """
    with results_alone():
        return api.export(checkpoint, out=out, recipe=_own(recipe), **vars(config))


def export(arguments: list[str]) -> None:
    print_json(flags("export", _export, arguments))


DEFAULT_SERVE = ServeConfig()
Serve = Annotated[ServeConfig, tyro.conf.arg(name="")]


def _serve(
    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT_OR_EXPORT")] = None,
    follow: Follow = "no",
    shadow: str | None = None,
    swap: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    rollback: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    no_shadow: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    stop: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    address: Address = None,
    config: Serve = DEFAULT_SERVE,
) -> None:
    """Score rows over HTTP until Ctrl-C or SIGTERM; then requests in flight are answered. Or tell a running server, by its
    --cluster.address, to change its model or to end.

    Args:
        model: Folder of a checkpoint, of a run (then the checkpoint its summary names, else the newest), or of an export.
        follow: MODEL is a run; change over to its newest or best checkpoint as they appear.
        shadow: Score every row with this checkpoint or export too; how far the scores differ is in /metrics.
        swap: Give the running server MODEL, without losing a request.
        rollback: Give the running server back the model before.
        no_shadow: The running server's shadow model is no longer used.
        stop: The running server answers the requests in flight and ends, also one whose own process was killed.
        address: HOST:PORT or auto: a running Ray cluster; default RAY_ADDRESS, else a local Ray.
        config: How it is served.
    """
    api.serve(
        model,
        follow=follow,
        shadow=shadow,
        swap=swap,
        rollback=rollback,
        no_shadow=no_shadow,
        stop=stop,
        cluster_address=address,
        config=config,
        started=print_json,
    )


def serve(arguments: list[str]) -> None:
    flags("serve", _serve, arguments)
