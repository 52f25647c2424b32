"""Declarations of commands: what the command line must know of a public function beyond its signature. Imports nothing heavy."""

import builtins
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from rayrec.config import Config, InputError

Function = TypeVar("Function", bound=Callable[..., Any])
Group = Literal["Data", "Train", "Score", "Serve", "Watch"]


@dataclass(frozen=True)
class Argument:
    """What the command line shows of a parameter, and how it reads it."""

    help: str
    metavar: str = ""
    flag: str = ""
    """Name of its flag; empty: the parameter's."""
    type: str = ""
    """MODULE:NAME of its type, where the annotation would import too much."""
    read: Callable[[str, str], Any] | None = None
    """Reads the text of a flag, whose name comes first."""
    required: bool = False
    """Whether the command line needs it although the function does not."""


def table_sizes(option: str, text: str) -> tuple[int, ...]:
    """Rows of each embedding table, from the value of an option: mlperf, or numbers with commas between them."""
    from rayrec.data.encoding.presets import MLPERF_NUM_EMBEDDINGS

    if text == "mlperf":
        return MLPERF_NUM_EMBEDDINGS
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(sizes) < 1:
        raise InputError(f"{option}: {text!r} is neither mlperf nor numbers of rows, such as 1000,200, each at least 1")
    return sizes


Checkpoint = Annotated[
    str, Argument("folder of a checkpoint, or of a run (then the one its summary names, else the newest)", "CHECKPOINT")
]
Checkpoints = Annotated[
    Sequence[str], Argument("two or more folders of checkpoints, or of runs; the first is the baseline", "CHECKPOINT")
]
LogPath = Annotated[str, Argument("click log: file, glob or folder", "PATH")]
InputPath = Annotated[str, Argument("rows to score: a click log, images, text; file, glob or folder", "PATH")]
NewFolder = Annotated[str, Argument("folder to write to, which appears complete or not at all", "DIR")]
RunFolder = Annotated[str, Argument("folder of a run, local or a URL", "RUN")]
OwnRecipe = Annotated[
    str | Callable[..., Any] | None, Argument("recipe of the checkpoint, if it is one of your own", "FILE.py:FUNCTION")
]
ClusterAddress = Annotated[
    str | None,
    Argument(
        "HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this process. Default: the Ray that "
        "RAY_ADDRESS names, else threads of this process",
        flag="cluster.address",
    ),
]

NOT_FLAGS = frozenset({"console", "show", "started", "stopwatch"})
"""Parameters for Python alone; the command line passes its own console, stopwatch and so on."""


@dataclass(frozen=True)
class Shown:
    """How the result of a command is shown: as JSON, or as text on a terminal."""

    value: Any
    text: str | None = None
    error: str = ""
    """What fails although there is a result, such as a gate."""
    status: int = 0
    as_text: bool = False
    """Whether text goes into a pipe too, unless JSON is asked for."""


@dataclass(frozen=True)
class Command:
    """A public function, and what its signature cannot say. Name and help are the function's name and docstring."""

    function: Callable[..., Any]
    group: Group
    options: Sequence[tuple[str, str]] = ()
    """Prefix of flags, and MODULE:CLASS of the configuration whose fields they are. The configuration is passed as the parameter
    that has the prefix's name, or else its fields as further keyword arguments."""
    recipe: Literal["", "first", "after --"] = ""
    """Where the command line names a recipe, whose flags are flags of the command."""
    show: Callable[[Any], Shown] = Shown
    prints: bool = False
    """Whether the function itself writes its results to standard output."""
    raw: bool = False
    """Whether the words after the command's name are passed unread."""
    examples: Sequence[str] = ()
    not_flags: frozenset[str] = NOT_FLAGS

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return inspect.getdoc(self.function).partition("\n")[0].rstrip(".")  # type: ignore[union-attr]

    def parameters(self) -> Iterator[tuple[inspect.Parameter, Any, Argument]]:
        """Yield the parameters that are arguments or flags, each with its type."""
        names = _Names(vars(builtins) | getattr(self.function, "__globals__", {}))
        named = list(inspect.signature(self.function).parameters.values())[{"": 0, "first": 1, "after --": 2}[self.recipe] :]
        objects = {prefix for prefix, _ in self.options}
        for parameter in named:
            if parameter.name in self.not_flags | objects or parameter.kind is parameter.VAR_KEYWORD:
                continue
            annotation = parameter.annotation
            if isinstance(annotation, str):
                annotation = eval(annotation, {}, names)
            arguments = [part for part in get_args(annotation) if isinstance(part, Argument)]
            argument = arguments[0] if arguments else Argument("")
            kind = get_args(annotation)[0] if arguments else annotation
            kind = load(argument.type) if argument.type else kind
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind = Sequence[kind]  # type: ignore[valid-type]
            yield parameter, kind, argument

    def settings(self) -> list[tuple[str, type[Config]]]:
        """Return the configurations that its flags may set, by prefix."""
        return [(prefix, load(place)) for prefix, place in self.options]


class _Names(dict[str, Any]):
    """Names of annotations; those that are imported for type checkers alone, which `Argument.type` names, are Any."""

    def __missing__(self, name: str) -> Any:
        return Any


COMMANDS: dict[str, Command] = {}
"""Every command by its name, in the order of the overview."""


def command(group: Group, **declared: Any) -> Callable[[Function], Function]:
    """Declare a command; `declared` are the other fields of `Command`. Imports nothing."""

    def declare(function: Function) -> Function:
        COMMANDS[function.__name__] = Command(function, group, **declared)
        return function

    return declare


def load(place: str) -> Any:
    """Import what MODULE:NAME names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
