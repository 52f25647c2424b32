"""How commands read their arguments and print their results."""

import json
import sys
from typing import Annotated, Any

import tyro

from rayrec import recipes, storage
from rayrec.config import InputError
from rayrec.schema import Schema, load_schema
from rayrec.verbs import VERBS
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys import ClickWorkload

Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Path_ = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
Out = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
OwnRecipe = Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
Address = Annotated[str | None, tyro.conf.arg(name="cluster.address")]


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print(flush=True)  # a server goes on after it


def flags(verb: str, function: Any, arguments: list[str]) -> Any:
    return tyro.cli(function, args=arguments, prog=f"rayrec {verb}")


def no_arguments(verb: str, arguments: list[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"usage: rayrec {verb} {VERBS[verb][0]}\n\n{VERBS[verb][1]}")
        raise SystemExit(0)
    if arguments:
        raise InputError(f"takes no argument '{arguments[0]}'")


def parse_config(verb: str, arguments: list[str]) -> tuple[TrainConfig, set[str]]:
    """A recipe's name or FILE.py:FUNCTION, --config FILE or both, then flags laid over it. Returns the configuration and the
    switches -v and -q."""
    switches = {argument for argument in arguments if argument in ("-v", "-q")}
    arguments, schema = with_schema([argument for argument in arguments if argument not in switches])
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


def with_schema(arguments: list[str]) -> tuple[list[str], Schema | None]:
    """Takes `--schema FILE` out of the arguments and reads the file."""
    if "--schema" not in arguments:
        return arguments, None
    place = arguments.index("--schema")
    if place + 1 == len(arguments):
        raise InputError("--schema needs a file")
    file = arguments[place + 1]
    return arguments[:place] + arguments[place + 2 :], load_schema(storage.read_bytes(file).decode(), file)
