"""Commands on runs to be: recipes, config, plan, train, supervise."""

import dataclasses
import sys
from typing import Annotated, Any

import tyro

from rayrec import api
from rayrec.cluster.layout import Launched
from rayrec.cluster.restart_policy import Policy, SuperviseConfig
from rayrec.commands.arguments import (
    SWITCHES,
    flags,
    no_arguments,
    parse_config,
    parsed,
    print_json,
    results_alone,
    table_sizes,
    take_option,
    take_switches,
)
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.recipes import ALL
from rayrec.tuning.space import TuneConfig

DEFAULT_POLICY = Policy()


def recipes(arguments: list[str]) -> None:
    no_arguments("recipes", arguments)
    for name, recipe in ALL.items():
        print(f"{name:24} {(recipe.__doc__ or '').strip().splitlines()[0]}")


def config(arguments: list[str]) -> None:
    resolved, _ = parse_config("config", arguments)
    print(resolved.to_yaml(), end="")


def plan(arguments: list[str]) -> None:
    arguments, cluster = take_option(
        arguments, "--cluster", what="the resources of its nodes, such as cpus=16,gpus=1,nodes=2,network_gbit=100"
    )
    arguments, tables = take_option(arguments, "--tables", what="mlperf, or the rows of each table, such as 1000,200")
    resolved, _ = parse_config("plan", arguments)
    print(api.plan(resolved, cluster=cluster, tables=None if tables is None else table_sizes("--tables", tables)))


def train(arguments: list[str]) -> None:
    resolved, switches = parse_config("train", arguments)
    launched = Launched.of_environment()
    first = launched is None or launched.rank == 0
    console = Console(verbose="-v" in switches, quiet="-q" in switches or not first)
    with results_alone():  # Ray prints what it thinks of dead processes
        result = api.train(resolved, console=console, stopwatch=Stopwatch.of_process())
    if first:
        console.table(f"{resolved.recipe}: finished", summary_rows(result.summary, folder=result.folder))
        print_json(result.summary)


_TUNE = "--tune."


def tune(arguments: list[str]) -> None:
    arguments, search = take_option(arguments, "--search", what="a YAML file with fields and their values")
    own, rest = _own_flags(arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        names = ", ".join(f"{_TUNE}{field.name.replace('_', '-')}" for field in dataclasses.fields(TuneConfig))
        print(f"--search FILE.yaml: fields and their values. Flags of the search: {names}\n")
    resolved, switches = parse_config("tune", rest)
    if search is None:
        raise InputError("--search FILE.yaml: which settings? such as workload.model.dropout: {uniform: [0, 0.5]}")
    options = parsed("rayrec tune", TuneConfig, own)
    console = Console(verbose="-v" in switches, quiet="-q" in switches)
    with results_alone():
        found = api.tune(resolved, search=search, console=console, **vars(options))
    print_json(found)


def _own_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The search's flags with their values, without `--tune.`, and all others."""
    own: list[str] = []
    rest: list[str] = []
    into = rest
    for argument in arguments:
        if argument.startswith("--") or argument in SWITCHES:
            into = own if argument.startswith(_TUNE) else rest
        into.append(f"--{argument.removeprefix(_TUNE)}" if into is own and argument.startswith(_TUNE) else argument)
    return own, rest


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
    own, switches = take_switches(own, "-q")
    supervision = flags("supervise", _supervision, own)
    if command[:1] != ["train"]:
        raise InputError("what shall be supervised? rayrec supervise [--flags] -- train RECIPE [--flags]")
    resolved, _ = parse_config("train", command[1:])

    def show(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    outcome = api.supervise(resolved, command[1:], supervision=supervision, show=None if "-q" in switches else show)
    if outcome.status == 2:
        raise InputError(outcome.cause)
    if outcome.status == 0:
        print_json(outcome.summary or {"name": outcome.name, "status": "finished", "attempts": outcome.attempts})
    return outcome.status


def summary_rows(summary: dict[str, Any], *, folder: str) -> list[tuple[str, str]]:
    """The short table a finished run ends with."""
    metrics = summary["metrics"]
    rows = [
        (name, f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float) and name != "label_rate"
    ]
    if summary.get("share_of_best_auroc") is not None:
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
        *([("where the time went", summary["verdict"])] if summary.get("verdict") else []),
        ("checkpoint", summary["checkpoint"]),
        ("run", folder),
        ("report", f"{folder}/report.html"),
        *([("next", "rayrec evaluate, predict, export or serve, with this run")] if "auroc" in metrics else []),
    ]
