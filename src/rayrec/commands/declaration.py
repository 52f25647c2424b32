"""Command declarations: information for the command line beyond function signatures. Imports
nothing heavy.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from rayrec.config import Config, InputError
from rayrec.process_state import preserved_process

Function = TypeVar("Function", bound=Callable[..., Any])
Group = Literal["Data", "Train", "Score", "Serve", "Watch"]


@dataclass(frozen=True)
class Argument:
    """Help and parsing of a parameter on the command line."""

    help: str
    metavar: str = ""
    flag: str = ""
    """Flag name. Empty: the parameter's name."""
    type: str = ""
    """MODULE:NAME of the type, if importing it for the annotation is expensive."""
    read: Callable[[str, str], Any] | None = None
    """Function that parses (flag name, text)."""
    required: bool = False
    """Whether the command line requires it, unlike the function."""


def table_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parse rows per embedding table: mlperf, or numbers separated by commas."""
    from rayrec.data.encoding.presets import MLPERF_NUM_EMBEDDINGS

    if text == "mlperf":
        return MLPERF_NUM_EMBEDDINGS
    return parse_counts(option, text, "mlperf or row counts of at least 1, such as 1000,200")


def parse_counts(option: str, text: str, expected: str) -> tuple[int, ...]:
    """Parse numbers of at least 1, separated by commas. Raises InputError with what is expected."""
    numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(numbers) < 1:
        raise InputError(f"{option}: must be {expected}, got {text!r}")
    return numbers


Checkpoint = Annotated[
    str,
    Argument(
        "folder of a checkpoint, or of a run (the checkpoint in its summary, otherwise the latest)",
        "CHECKPOINT",
    ),
]
Checkpoints = Annotated[
    Sequence[str],
    Argument("two or more checkpoint or run folders; the first is the baseline", "CHECKPOINT"),
]
LogPath = Annotated[str, Argument("click log: file, glob or folder", "PATH")]
InputRows = Annotated[
    Any,
    Argument(
        "rows to score: a click log, images, text; file, glob or folder",
        "PATH",
        type="builtins:str",
    ),
]
"""Path, pandas DataFrame, pyarrow.Table or ray.data.Dataset."""
OptionalInputRows = Annotated[
    Any,
    Argument(
        "rows to score: a click log, images, text; file, glob or folder; default: the run's own "
        "test rows",
        "PATH",
        type="builtins:str",
    ),
]
NewFolder = Annotated[str, Argument("output folder, written completely or not at all", "DIR")]
RunFolder = Annotated[str, Argument("run folder or URL", "RUN")]
CustomRecipe = Annotated[
    str | Callable[..., Any] | None,
    Argument("recipe of the checkpoint, if custom", "FILE.py:FUNCTION"),
]
CustomRecipes = Annotated[
    Sequence[str] | Sequence[Callable[..., Any]] | str | Callable[..., Any] | None,
    Argument("recipes of the checkpoints, if custom", "FILE.py:FUNCTION"),
]
ClusterAddress = Annotated[
    str | None,
    Argument(
        "HOST:PORT or auto: a running Ray cluster; local: a local Ray; none: threads of this "
        "process. Default: RAY_ADDRESS, otherwise threads of this process",
        flag="cluster.address",
    ),
]


@dataclass(frozen=True)
class Shown:
    """Command result as JSON, or as text on a terminal."""

    value: Any
    text: str | None = None
    error: str = ""
    """Failure in addition to a result, such as a failed gate."""
    status: int = 0
    as_text: bool = False
    """Whether to print text into pipes too, unless JSON is requested."""


@dataclass(frozen=True)
class Command:
    """Public function with its command-line declaration. Name and help are the function's name and
    docstring.
    """

    function: Callable[..., Any]
    group: Group
    options: Sequence[tuple[str, str]] = ()
    """Flag prefix and MODULE:CLASS of configurations with flags: the parameter named like the
    prefix, or keyword arguments.
    """
    recipe: Literal["", "first", "after --"] = ""
    """Position of a recipe in the words of the command. Its settings become flags of the
    command.
    """
    show: Callable[[Any], Shown] = Shown
    prints: bool = False
    """Whether the function itself writes results to standard output."""
    underscores: bool = False
    """Whether flags of configurations have underscores, like the fields."""
    raw: bool = False
    """Whether to pass the words after the command's name without parsing."""
    examples: Sequence[str] = ()
    runner: str = ""
    """MODULE:FUNCTION that runs the command, from before its words are parsed: it gets a function
    that runs it and returns its exit status, and returns the status.
    """

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        return find_summary(self.function)

    def parameters(self) -> Iterator[tuple[inspect.Parameter, Any, Argument]]:
        """Yield (parameter, type, declaration) for each argument and flag."""
        for parameter in inspect.signature(self.function).parameters.values():
            # Other parameters have no declaration: the command line passes them itself.
            for argument in getattr(parameter.annotation, "__metadata__", ()):
                kind = load(argument.type) if argument.type else parameter.annotation.__origin__
                if parameter.kind is parameter.VAR_POSITIONAL:
                    kind = tuple[kind, ...]  # type: ignore[valid-type]
                yield parameter, kind, argument

    def run(self, call: Callable[[], int]) -> int:
        """Return the exit status of a function that runs the command."""
        return load(self.runner)(call) if self.runner else call()

    def settings(self) -> list[tuple[str, type[Config]]]:
        """Return (prefix, class) of the configurations with flags."""
        return [(prefix, load(path)) for prefix, path in self.options]


def find_summary(documented: Any) -> str:
    """Return the first paragraph of a docstring as one line without its full stop."""
    paragraph = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).rstrip(".")


COMMANDS: dict[str, Command] = {}
"""All commands by name, in overview order."""


def command(group: Group, **declared: Any) -> Callable[[Function], Function]:
    """Declare a command. `declared` are the other fields of `Command`. Imports nothing. The command
    leaves random generators, warning filters and other state of its caller's process unchanged.
    """

    def declare(function: Function) -> Function:
        called = preserved_process()(function)
        COMMANDS[function.__name__] = Command(called, group, **declared)
        return called

    return declare


def load(path: str) -> Any:
    """Import MODULE:NAME."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
