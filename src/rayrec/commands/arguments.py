"""How commands read their arguments and print their results."""

import contextlib
import difflib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import tyro

from rayrec import recipes, storage
from rayrec.config import CLASS, InputError, renamed
from rayrec.data.encoding.presets import MLPERF_NUM_EMBEDDINGS
from rayrec.models import ranking
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.observe.console import Console
from rayrec.schema import Schema, load_schema
from rayrec.verbs import VERBS
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload

Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Path_ = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
Out = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
OwnRecipe = Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
Address = Annotated[str | None, tyro.conf.arg(name="cluster.address")]

SWITCHES = {
    "-q": "shows only the result and errors",
    "-v": "also shows every checkpoint and the output of Ray's processes",
}
_MOST_MATCHES = 3
"""Flags that a message about an unknown flag suggests."""


def print_json(value: Any) -> None:
    print(storage.json_text(value), flush=True)  # a server keeps running after it


def results_alone() -> contextlib.AbstractContextManager[object]:
    """Within it what Ray and other libraries print goes to standard error, so that only results reach standard output."""
    return contextlib.redirect_stdout(sys.stderr)


def take_switches(arguments: list[str], *known: str) -> tuple[list[str], set[str]]:
    """Take the switches among `known`, the keys of `SWITCHES`, out of the arguments. Print what they do if help is asked for."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print("".join(f"{switch}: {SWITCHES[switch]}\n" for switch in known))
    return [each for each in arguments if each not in known], {each for each in arguments if each in known}


def with_console(arguments: list[str]) -> tuple[list[str], Console]:
    """Take -q out of the arguments, and return the console of the command."""
    rest, switches = take_switches(arguments, "-q")
    return rest, Console(quiet="-q" in switches)


def flags(verb: str, function: Callable[..., Any], arguments: list[str]) -> Any:
    """Calls `function` with the values that the command line gives its parameters and returns what it returns. A parameter
    `console` is no flag: it is the console that -q makes quiet.

    Raises InputError for a flag that does not exist, with the nearest one, and for a value that does not fit.
    """
    signature, given = inspect.signature(function), dict[str, Any]()
    if "console" in signature.parameters:
        arguments, given["console"] = with_console(arguments)

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(function, *args, **kwargs, **given)

    parameters = [parameter for name, parameter in signature.parameters.items() if name not in given]
    bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    # Called outside of the parser, which captures standard error.
    return parsed(f"rayrec {verb}", bound, arguments)()


def parsed(prog: str, kind: Any, arguments: list[str], **options: Any) -> Any:
    """What tyro makes of the arguments. Its own messages, boxes of many lines, become one InputError each."""
    said = io.StringIO()
    arguments = [with_new_name(argument) for argument in arguments]
    try:
        with contextlib.redirect_stderr(said):
            value, unknown = tyro.cli(kind, args=arguments, prog=prog, return_unknown_args=True, **options)
    except SystemExit as error:
        if error.code in (0, None):  # --help, which went to standard output
            raise
        cause = _input_error(error)
        if cause is not None:
            raise cause from None
        text = said.getvalue()
        listed = text.partition("Unrecognized")[2]
        for token in arguments:
            if token.startswith("--") and token.partition("=")[0] in listed:
                _refuse_unknown(prog, kind, token, options)
        raise InputError(f"{_one_line(text)}; `{prog} --help` describes every flag") from None
    if unknown:
        _refuse_unknown(prog, kind, unknown[0], options)
    return value


_RENAMED_FLAGS = {"--profile": "--preset", "--workload.profile": "--workload.preset"}
"""New names of flags by their old ones, which are accepted for one release. A flag of a field within follows its field's."""


def with_new_name(argument: str) -> str:
    """A command line's argument; an old flag by its new name, with a notice on standard error."""
    flag, equals, value = argument.partition("=")
    for old, new in _RENAMED_FLAGS.items():
        nested = flag.startswith(f"{old}.") and "." in old  # --profile.steps is another flag
        if flag == old or nested:
            flag_now = new + flag.removeprefix(old)
            print(renamed(flag, flag_now), file=sys.stderr)
            return flag_now + equals + value
    return argument


def _input_error(error: BaseException) -> InputError | None:
    """The InputError that a configuration raised while the parser built it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, InputError):
        found = found.__cause__ or found.__context__
    return found


def _refuse_unknown(prog: str, kind: Any, token: str, options: dict[str, Any]) -> NoReturn:
    if not token.startswith("-"):
        raise InputError(f"takes no argument '{token}'; `{prog} --help` shows what it takes")
    wanted, help_text = token.partition("=")[0].replace("_", "-"), io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=prog, **options)
    named = re.findall(r"^[│ ] (?:-\w, )?(--.*?)(?:  |│|$)", help_text.getvalue(), re.MULTILINE)
    known = dict.fromkeys(flag for line in named for flag in re.findall(r"--[a-z][\w.-]*", line))
    near = [flag for flag in difflib.get_close_matches(wanted, known, cutoff=0.7) if _has_words_of(flag, wanted)][:1]
    if not near:  # a nested field without the names before its last dot
        last = {flag: flag.removeprefix("--").rpartition(".")[2] for flag in known}
        similar = difflib.get_close_matches(wanted.removeprefix("--").rpartition(".")[2], last.values(), n=1)
        near = [flag for flag, name in last.items() if name in similar and _has_words_of(flag, wanted)][:_MOST_MATCHES]
    hint = f"did you mean {' or '.join(near)}?" if near else f"`{prog} --help` shows every flag"
    raise InputError(f"no flag {token.partition('=')[0]}; {hint}")


def _has_words_of(flag: str, wanted: str) -> bool:
    """Return whether each word of the wanted flag is similar to a word of the flag, short ones equal: pin-memory is not a typo of
    no-memory or in-memory."""
    words, wanted_words = re.findall(r"\w+", flag), re.findall(r"\w+", wanted)
    if len(wanted_words) == 1:
        return True
    return all(word in words or (len(word) > 3 and difflib.get_close_matches(word, words)) for word in wanted_words)


def _one_line(box: str) -> str:
    """What an error box of tyro says before its first rule, without the frame and the help texts of arguments."""
    lines = [line.strip("│").rstrip() for line in box.splitlines() if line and line[0] not in "╭╰"]
    if len(lines) > 1 and set(lines[1].strip()) == {"-"}:  # a title and a rule, on a standard output that is not UTF-8
        lines = lines[2:]
    said: list[str] = []
    for line in lines:
        text = line.strip()
        if not text or set(text) <= {"─", "-"} or text.startswith("Got errors"):
            break
        if not line.startswith(" " * 9):  # what an argument is for is indented below its name
            said.append(text)
    text = " ".join(said).rstrip(".") or " ".join(box.split())
    text = re.sub(r"^Missing from [^:]*:", "missing", text)
    text = re.sub(r"no type matching (\S+) could be instantiated from \['(.*)'\]", r"'\2' is no \1", text)
    return text.removeprefix("Error parsing ")


def no_arguments(verb: str, arguments: list[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"usage: rayrec {verb} {VERBS[verb][0]}\n\n{VERBS[verb][1]}")
        raise SystemExit(0)
    if arguments:
        raise InputError(f"takes no argument '{arguments[0]}'")


def parse_config(verb: str, arguments: list[str]) -> tuple[TrainConfig, set[str]]:
    """A recipe's name or FILE.py:FUNCTION, --config FILE or both, --schema FILE and --model NAME, then flags laid over it.
    Returns the configuration and the switches -v and -q."""
    arguments, switches = take_switches(arguments, *SWITCHES)
    arguments, schema = with_schema(arguments)
    arguments, file = take_option(arguments, "--config", what="a file")
    arguments, model = take_option(arguments, "--model", what="the name of a model")
    recipe = None
    if arguments and not arguments[0].startswith("-"):
        recipe, arguments = recipes.find(arguments[0]), arguments[1:]
    if file is not None:
        default = recipes.load_config(storage.read_text(file), recipe=recipe, source=file)
    elif recipe is not None:
        default = recipe()
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
    if model is not None:
        default = _with_model(default, model)
    config = parsed(f"rayrec {verb} {default.recipe}", type(default), arguments, default=default)
    return config, switches


def _with_model(config: TrainConfig, name: str) -> TrainConfig:
    """The configuration with another of rayrec's click models, or with several as an ensemble (`dlrm+finalnet`); what all models
    have in common stays."""
    workload = config.workload
    if not isinstance(workload, ClickWorkload):
        raise InputError(f"--model: recipe {config.recipe} trains no click model")
    kinds = [_kind_of_model(part) for part in name.split("+")]
    if len(kinds) > 1:
        return config.replace(workload={"model": EnsembleConfig.of_kinds(kinds, workload.model)})
    return config.replace(workload={"model": {CLASS: name}})


def _kind_of_model(name: str) -> type[ClickModelConfig]:
    kind: type[ClickModelConfig] | None = ranking.config_class(name) if name in ranking.names() else None
    if kind is None:
        near = difflib.get_close_matches(name, ranking.names(), n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(ranking.names())}, and your own, by a recipe"
        )
        raise InputError(f"--model: no model {name}; {hint}")
    return kind


def table_sizes(option: str, text: str) -> tuple[int, ...]:
    """Rows of each embedding table, from the value of an option: mlperf, or numbers with commas between them."""
    if text == "mlperf":
        return MLPERF_NUM_EMBEDDINGS
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(sizes) < 1:
        raise InputError(f"{option}: {text!r} is neither mlperf nor numbers of rows, such as 1000,200, each at least 1")
    return sizes


def with_schema(arguments: list[str]) -> tuple[list[str], Schema | None]:
    """Takes `--schema FILE` out of the arguments and reads the file."""
    rest, file = take_option(arguments, "--schema", what="a file")
    return rest, None if file is None else load_schema(storage.read_text(file), file)


def take_option(arguments: list[str], name: str, *, what: str) -> tuple[list[str], str | None]:
    """The arguments without `NAME VALUE` or `NAME=VALUE`, and the value; None if it is not given.

    Raises InputError for an option without a value, which is `what`, and for one that is given twice.
    """
    places = [place for place, argument in enumerate(arguments) if argument == name or argument.startswith(f"{name}=")]
    if not places:
        return arguments, None
    if places[1:]:
        raise InputError(f"{name} is given {len(places)} times; give it once")
    (place,) = places
    value, size = arguments[place].partition("=")[2], 1
    if arguments[place] == name:
        value, size = (arguments[place + 1] if place + 1 < len(arguments) else ""), 2
    if not value or value.startswith("--"):
        raise InputError(f"{name} needs {what}")
    return arguments[:place] + arguments[place + size :], value
