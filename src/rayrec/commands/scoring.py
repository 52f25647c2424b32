"""Commands on what was trained: evaluate, predict, export, serve."""

from typing import Annotated, Any, Literal

import tyro

from rayrec import api, recipes
from rayrec.commands.arguments import Address, Checkpoint, OwnRecipe, Path_, flags, print_json, results_alone
from rayrec.observe.console import Console
from rayrec.serve.online.following import Follow
from rayrec.serve.online.settings import ServeConfig
from rayrec.serve.readable import readable


def _scoring(
    recipe: OwnRecipe = None,
    batch_rows: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    max_bad_fraction: float | None = None,
    address: Address = None,
) -> dict[str, Any]:
    """How rows are scored.

    Args:
        recipe: The recipe the checkpoint is of, where it is one of your own.
        batch_rows: Rows the model takes at once; default 8192 for a click model, else as many as in evaluations while training.
        device: cuda: each scoring process gets one GPU.
        max_bad_fraction: Share of faulty lines above which a log is refused; default as in training.
        address: HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this process. Default: the Ray
            that RAY_ADDRESS names, else threads of this process.
    """
    return {
        "recipe": recipes.find(recipe) if recipe else None,
        "batch_rows": batch_rows,
        "device": device,
        "max_bad_fraction": max_bad_fraction,
        "cluster_address": address,
    }


Scoring = Annotated[dict[str, Any], tyro.conf.arg(name="", constructor=_scoring)]


def _detail(
    group: str | None = None,
    slice_by: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    slice_top: int = 10,
    confidence: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
    compare: str | None = None,
) -> dict[str, Any]:
    """What is told of a click model beside its metrics over all rows.

    Args:
        group: Column such as the user: also tell how well rows are ordered within its values (gauc); default the schema's group.
        slice_by: Tell metrics also by slices: day, COLUMN (its values), frequency:COLUMN (how often its value was trained on);
            may be given several times.
        slice_top: Of a column's values, those with the most rows that are told one by one; the others are told together.
        confidence: Tell intervals that hold the true metric with this probability, such as 0.95.
        resamples: Times the rows are drawn anew for intervals and comparisons.
        seed: Of these draws.
        compare: Another checkpoint (or run), scored on the same rows: whether the two differ.
    """
    return {
        "group": group,
        "slice_by": slice_by,
        "slice_top": slice_top,
        "confidence": confidence,
        "resamples": resamples,
        "seed": seed,
        "compare": compare,
    }


Detail = Annotated[dict[str, Any], tyro.conf.arg(name="", constructor=_detail)]


def _evaluate(checkpoint: Checkpoint, path: Path_, detail: Detail, scoring: Scoring) -> dict[str, Any]:
    """Score every labelled row of a path exactly once.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored, with labels: a click log, images, text; file, glob or folder.
        detail: What is told of a click model beside its metrics over all rows.
        scoring: How rows are scored.
    """
    with results_alone():
        return api.evaluate(checkpoint, path, **detail, **scoring)


def evaluate(arguments: list[str]) -> None:
    found = flags("evaluate", _evaluate, arguments)
    Console().note(readable(found))
    print_json(found)


def _predict(checkpoint: Checkpoint, path: Path_, out: str, scoring: Scoring) -> dict[str, Any]:
    """Score the rows of a path, labelled or not.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored: a click log, images, text; file, glob or folder.
        out: Folder for the Parquet files: column row and what is predicted, such as score and logit.
        scoring: How rows are scored.
    """
    with results_alone():
        return api.predict_to(checkpoint, path, out=out, **scoring)


def predict(arguments: list[str]) -> None:
    print_json(flags("predict", _predict, arguments))


def _export(
    checkpoint: Checkpoint,
    out: str,
    recipe: OwnRecipe = None,
    quantize: Literal["int8", "int4", "fp16"] | None = None,
    parity_path: str | None = None,
    parity_rows: int = 50_000,
    max_auroc_loss: float | None = None,
    ignore_parity: bool = False,
    triton: bool = False,
) -> dict[str, Any]:
    """Write a trained model as other tools read it.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        out: Folder to write to, which appears complete or not at all.
        recipe: The recipe the checkpoint is of, where it is one of your own.
        quantize: Of a click model: how its tables are stored; default as they are, fp32.
        parity_path: Of a click model: labelled log whose rows the export is compared with the checkpoint on; default what the run
            evaluated on.
        parity_rows: Rows compared.
        max_auroc_loss: How far the export's AUROC may be from the checkpoint's; default 0.0001, with int4 0.002.
        ignore_parity: Export also where the comparison fails, and where the run's log cannot be read (rows drawn at random are
            compared then); report.json says what failed.
        triton: Of a click model: write a model repository for Triton as well.
    """
    with results_alone():
        return api.export(
            checkpoint,
            out=out,
            recipe=recipes.find(recipe) if recipe else None,
            quantize=quantize,
            parity_path=parity_path,
            parity_rows=parity_rows,
            max_auroc_loss=max_auroc_loss,
            ignore_parity=ignore_parity,
            triton=triton,
        )


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
