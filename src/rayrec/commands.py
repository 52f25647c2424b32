"""Each command: its flags, the public function it calls, and what it prints (results to standard output, as JSON)."""

import contextlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rayrec import api, recipes, storage
from rayrec.config import InputError
from rayrec.launch.policy import Policy
from rayrec.launch.supervision import SuperviseConfig
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig
from rayrec.prepare.preprocess import Format
from rayrec.prepare.preprocess import preprocess as prepare_preprocess
from rayrec.prepare.text import TextConfig
from rayrec.prepare.validate import Gates, Report
from rayrec.prepare.validate import validate as prepare_validate
from rayrec.prepare.vocabulary import vocabulary as prepare_vocabulary
from rayrec.schema import Schema, load_schema
from rayrec.verbs import VERBS
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys import ClickWorkload

DEFAULT_POLICY = Policy()
Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Path_ = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
Out = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
OwnRecipe = Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
Address = Annotated[str | None, tyro.conf.arg(name="cluster.address")]


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()


def _flags(verb: str, function: Any, arguments: list[str]) -> Any:
    return tyro.cli(function, args=arguments, prog=f"rayrec {verb}")


def _no_arguments(verb: str, arguments: list[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"usage: rayrec {verb} {VERBS[verb][0]}\n\n{VERBS[verb][1]}")
        raise SystemExit(0)
    if arguments:
        raise InputError(f"takes no argument '{arguments[0]}'")


def parse_config(verb: str, arguments: list[str]) -> tuple[TrainConfig, set[str]]:
    """A recipe's name or FILE.py:FUNCTION, --config FILE or both, then flags laid over it. Returns the configuration and the
    switches -v and -q."""
    switches = {argument for argument in arguments if argument in ("-v", "-q")}
    arguments, schema = _with_schema([argument for argument in arguments if argument not in switches])
    recipe = None
    if arguments and not arguments[0].startswith("-"):
        recipe, arguments = recipes.find(arguments[0]), arguments[1:]
    if "--config" in arguments:
        place = arguments.index("--config")
        if place + 1 == len(arguments):
            raise InputError("--config needs a file")
        default = recipes.load_config(storage.read_bytes(arguments[place + 1]).decode(), recipe=recipe)
        flags = arguments[:place] + arguments[place + 2 :]
    elif recipe is not None:
        default, flags = recipe(), arguments
    elif any(argument in ("-h", "--help") for argument in arguments):
        print(f"usage: rayrec {verb} {VERBS[verb][0]}\n\n{VERBS[verb][1]}\n")
        print(f"Recipes: {', '.join(recipes.ALL)}. `rayrec {verb} RECIPE --help` shows every flag with its meaning.")
        raise SystemExit(0)
    else:
        raise InputError(
            f"which recipe? rayrec {verb} RECIPE; there are {', '.join(recipes.ALL)}, and FILE.py:FUNCTION"
        )
    if schema is not None:
        if not isinstance(default.workload, ClickWorkload):
            raise InputError(f"--schema: recipe {default.recipe} reads no click log")
        default = default.replace(workload=default.workload.replace(schema=schema))
    config = tyro.cli(type(default), default=default, args=flags, prog=f"rayrec {verb} {default.recipe}")
    return config, switches


def recipes_(arguments: list[str]) -> None:
    _no_arguments("recipes", arguments)
    for name, recipe in recipes.ALL.items():
        print(f"{name:16} {(recipe.__doc__ or '').strip().splitlines()[0]}")


def config(arguments: list[str]) -> None:
    resolved, _ = parse_config("config", arguments)
    print(resolved.to_yaml(), end="")


def _generate(
    out: Out,
    rows: int,
    dialect: Literal["kaggle", "terabyte"] = "kaggle",
    days: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a synthetic click log whose best reachable AUROC and logloss are known.

    Args:
        out: Folder to write to.
        rows: Rows to write.
        dialect: Columns like those of Criteo Kaggle (one file) or Criteo 1TB (a file a day).
        days: Days the rows are spread over.
        seed: The same seed gives the same bytes.
    """
    console = Console()
    with console.preparing():
        return api.generate(out, rows=rows, dialect=dialect, days=days, seed=seed, console=console)


def generate(arguments: list[str]) -> None:
    _print_json(_flags("generate", _generate, arguments))


def _with_schema(arguments: list[str]) -> tuple[list[str], Schema | None]:
    """Takes `--schema FILE` out of the arguments and reads the file."""
    if "--schema" not in arguments:
        return arguments, None
    place = arguments.index("--schema")
    if place + 1 == len(arguments):
        raise InputError("--schema needs a file")
    file = arguments[place + 1]
    return arguments[:place] + arguments[place + 2 :], load_schema(storage.read_bytes(file).decode(), file)


Preparation = Annotated[PreparationConfig, tyro.conf.arg(name="")]
DEFAULT_GATES = Gates()
DEFAULT_TEXT = TextConfig()


def _prepare(verb: str, function: Callable[[PreparationConfig], Any], arguments: list[str]) -> Any:
    """Runs a preparation's function, which takes its flags and, as `config`, those of PreparationConfig."""
    rest, schema = _with_schema(arguments)
    config = PreparationConfig() if schema is None else PreparationConfig(schema=schema)
    return _flags(verb, function(config), rest)


def vocabulary(arguments: list[str]) -> None:
    def command(default: PreparationConfig) -> Any:
        def run(path: Path_, out: str, config: Preparation = default) -> dict[str, Any]:
            """Count the categories of a click log in one pass and write the Preprocessor. --schema FILE names the columns
            of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                out: Folder to write to.
                config: How the log is read and prepared.
            """
            return prepare_vocabulary(path, out=out, config=config, console=Console())

        return run

    _print_json(_prepare("vocabulary", command, arguments))


def preprocess(arguments: list[str]) -> None:
    def command(default: PreparationConfig) -> Any:
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
            """Write a click log in a ready-made format, or plain text as rows of tokens (mds). --schema FILE names the
            columns of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                out: Folder to write to; an interrupted call made again goes on where it stopped.
                format: parquet; npy (TorchRec's three arrays a file); binary (int32 rows); npz (multi-hot bags); mds (text).
                preprocessor: Folder of a Preprocessor; else the categories are counted first.
                shuffle: full puts the training rows into an order that is random over the whole log.
                seed: Of that order.
                config: How the log is read and prepared.
                text: How text is, with --format mds; of the options of logs, --files and --address are for it too.
            """
            return prepare_preprocess(
                path,
                out=out,
                format=format,
                preprocessor=preprocessor,
                shuffle=shuffle,
                seed=seed,
                config=config,
                text=text,
                console=Console(),
            )

        return run

    _print_json(_prepare("preprocess", command, arguments))


def validate(arguments: list[str]) -> None:
    console = Console()

    def command(default: PreparationConfig) -> Any:
        def run(
            path: Path_, preprocessor: str | None = None, gates: Gates = DEFAULT_GATES, config: Preparation = default
        ) -> Report:
            """Report on a log: faults, missing values, label rate, categories, drift. Exit status 2 where a gate fails.
            --schema FILE names the columns of a log that is not Criteo's.

            Args:
                path: File, glob or folder.
                preprocessor: Folder of a Preprocessor, whose unknown categories are counted.
                gates: What the log must fulfil.
                config: How the log is read.
            """
            return prepare_validate(path, config=config, gates=gates, preprocessor=preprocessor, console=console)

        return run

    report = _prepare("validate", command, arguments)
    report.show(console)
    _print_json(report.to_dict())
    if report.failures:
        raise InputError(
            report.failures[0] + (f" (and {len(report.failures) - 1} more)" if report.failures[1:] else "")
        )


def _fetch(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    out: str,
    base_url: str | None = None,
    verify: bool = False,
) -> list[dict[str, Any]]:
    """Download a published data set, going on where an earlier call stopped, and check every file.

    Args:
        name: criteo_kaggle, criteo_small, criteo_full or mnist.
        out: Folder to write to.
        base_url: Another place the files lie at, such as a mirror of your own.
        verify: Check the checksums of files that are there already, too.
    """
    return api.fetch(name, out=out, base_url=base_url, verify=verify, console=Console())


def fetch(arguments: list[str]) -> None:
    _print_json(_flags("fetch", _fetch, arguments))


def plan(arguments: list[str]) -> None:
    resolved, _ = parse_config("plan", arguments)
    print(api.plan(resolved))


def train(arguments: list[str]) -> None:
    resolved, switches = parse_config("train", arguments)
    console = Console(verbose="-v" in switches, quiet="-q" in switches)
    with contextlib.redirect_stdout(sys.stderr):  # where Ray prints what it thinks of dead processes
        result = api.train(resolved, console=console)
    console.table(f"{resolved.recipe}: finished", summary_rows(result.summary, folder=result.folder))
    _print_json(result.summary)


def _supervision(
    address: str | None = None,
    python: str = "python",
    env: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = (),
    working_dir: str | None = None,
    state: str | None = None,
    detach_on_signal: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    policy: Annotated[Policy, tyro.conf.arg(name="")] = DEFAULT_POLICY,
) -> SuperviseConfig:
    """Train as a job of a Ray cluster, and go on when its head, or all of it, was lost: rayrec supervise [--flags] --
    train RECIPE [--flags]. -q hides what the job prints.

    Args:
        address: URL of the dashboard of the cluster's head; default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265.
        python: The cluster's Python that has rayrec.
        env: Name of an environment variable that the job gets, with the value it has here; may be given again.
        working_dir: Folder that the job begins in, uploaded from here, or URL of a zip.
        state: File of what the supervisor remembers, its log beside it; default supervise/RUN.json of RAYREC_CACHE, else of
            ~/.cache/rayrec.
        detach_on_signal: Ctrl-C and SIGTERM end the supervisor alone, and the job goes on.
        policy: When to give up.
    """
    return SuperviseConfig(
        address=address,
        python=python,
        env=env,
        working_dir=working_dir,
        state=state,
        detach_on_signal=detach_on_signal,
        policy=policy,
    )


def supervise(arguments: list[str]) -> int:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:place], arguments[place + 1 :]
    supervision = _flags("supervise", _supervision, [argument for argument in own if argument != "-q"])
    if command[:1] != ["train"]:
        raise InputError("what shall be supervised? rayrec supervise [--flags] -- train RECIPE [--flags]")
    resolved, _ = parse_config("train", command[1:])

    def show(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    outcome = api.supervise(resolved, command[1:], supervision=supervision, show=None if "-q" in own else show)
    if outcome.status == 2:
        raise InputError(outcome.cause)
    if outcome.status == 0:
        _print_json(outcome.summary or {"name": outcome.name, "status": "finished", "attempts": outcome.attempts})
    return outcome.status


def summary_rows(summary: dict[str, Any], *, folder: str) -> list[tuple[str, str]]:
    """The short table a finished run ends with."""
    metrics = summary["metrics"]
    rows = [
        (name, f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float) and name != "label_rate"
    ]
    if "share_of_best_auroc" in summary:
        reached = (
            f"{summary['share_of_best_auroc']:.1%} of the way from 0.5 to the best possible {summary['best_auroc']:.4f}"
        )
        rows.append(("auroc reached", reached))
    return [
        *rows,
        ("rows/s in training", f"{summary['rows_per_s']:,.0f}"),
        ("blocked on data", f"{summary['blocked_fraction']:.1%}"),
        (
            "rows trained",
            f"{summary['rows']:,} in {summary['steps']:,} steps; {summary['wall_s']:.0f} s with preparation",
        ),
        *([("faulty rows left out", f"{summary['bad_rows']:,}")] if "bad_rows" in summary else []),
        ("checkpoint", summary["checkpoint"]),
        ("run", folder),
    ]


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
        address: Address of a running Ray cluster; default RAY_ADDRESS, else a local Ray.
    """
    return {
        "recipe": recipes.find(recipe) if recipe else None,
        "batch_rows": batch_rows,
        "device": device,
        "max_bad_fraction": max_bad_fraction,
        "cluster_address": address,
    }


Scoring = Annotated[dict[str, Any], tyro.conf.arg(name="", constructor=_scoring)]


def _evaluate(checkpoint: Checkpoint, path: Path_, scoring: Scoring) -> dict[str, Any]:
    """Score every labelled row of a path exactly once.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored, with labels: a click log, images, text; file, glob or folder.
        scoring: How rows are scored.
    """
    return api.evaluate(checkpoint, path, **scoring)


def evaluate(arguments: list[str]) -> None:
    _print_json(_flags("evaluate", _evaluate, arguments))


def _predict(checkpoint: Checkpoint, path: Path_, out: str, scoring: Scoring) -> dict[str, Any]:
    """Score the rows of a path, labelled or not.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        path: What is scored: a click log, images, text; file, glob or folder.
        out: Folder for the Parquet files: column row and what is predicted, such as score and logit.
        scoring: How rows are scored.
    """
    return api.predict_to(checkpoint, path, out=out, **scoring)


def predict(arguments: list[str]) -> None:
    _print_json(_flags("predict", _predict, arguments))


def _export(checkpoint: Checkpoint, out: str, recipe: OwnRecipe = None) -> dict[str, Any]:
    """Write a trained model as other tools read it.

    Args:
        checkpoint: Folder of a checkpoint, or of a run (then the one its summary names, else the newest).
        out: Folder to write to, which appears complete or not at all.
        recipe: The recipe the checkpoint is of, where it is one of your own.
    """
    return api.export(checkpoint, out=out, recipe=recipes.find(recipe) if recipe else None)


def export(arguments: list[str]) -> None:
    _print_json(_flags("export", _export, arguments))


def _report(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: str | None = None,
    price_per_node_hour: float | None = None,
    nodes: int = 1,
) -> dict[str, Any]:
    """Write what a run's events tell, of a run in progress too, as one HTML file that needs no other; of several runs, side by
    side.

    Args:
        runs: Folder of a run, or of up to eight.
        out: File to write; default RUN/report.html, which several runs do not have.
        price_per_node_hour: Tells what the run cost: in all, for each epoch, for each point of AUROC.
        nodes: Machines that this price was paid for.
    """
    return {"report": api.report(*runs, out=out, price_per_node_hour=price_per_node_hour, nodes=nodes)}


def report(arguments: list[str]) -> None:
    _print_json(_flags("report", _report, arguments))


def benchmark(arguments: list[str]) -> None:
    # Benchmarks live beside the package in the source tree, with the peers they measure against.
    script = Path(__file__).parents[2] / "benchmarks" / "run.py"
    if not script.exists():
        raise InputError(
            "benchmarks are part of the source tree; run them from a checkout installed with `pip install -e .`"
        )
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


ALL = {verb: globals()[f"{verb}_" if verb == "recipes" else verb] for verb in VERBS if verb != "doctor"}
"""Every command's function by its verb."""
