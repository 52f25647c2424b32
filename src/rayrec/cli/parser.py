"""Command-line parser: from the words of a command to a function call."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from rayrec.cli.flag_parser import assign
from rayrec.cli.flags import (
    MISSING,
    SWITCHES,
    Flag,
    config_flags,
    convert_value,
    flag_name,
    recipe_flags,
    takes_many,
)
from rayrec.commands.declaration import COMMANDS, Argument, Command, table_sizes
from rayrec.commands.settings import named_configuration, nest_settings, updated
from rayrec.config import InputError, nest, renamed

_MAX_MATCHES = 3
"""Maximum number of suggestions for an unknown flag."""
_READERS = {"num_embeddings_per_feature": table_sizes}
"""Custom parsers of settings."""


class Call(NamedTuple):
    """Parsed arguments of a command's function."""

    arguments: list[Any]
    keywords: dict[str, Any]


def command_flags(command: Command) -> list[Flag]:
    """Return the arguments and flags of a command without its recipe's flags."""
    flags: dict[str, Flag] = {}
    for parameter, kind, argument in command.parameters():
        flags[parameter.name] = _argument_flag(parameter, kind, argument)
    for prefix, cls in command.settings():
        for flag in config_flags(cls):
            path = f"{prefix}.{flag.path}" if prefix else flag.path
            flags.setdefault(path, _setting_flag(flag, path, command.underscores))
    return list(flags.values())


def _argument_flag(parameter: inspect.Parameter, kind: Any, argument: Argument) -> Flag:
    """Return the flag of a parameter, or the argument if it may be positional."""
    is_flag = parameter.kind is parameter.KEYWORD_ONLY
    is_required = argument.required or parameter.default is parameter.empty
    return Flag(
        parameter.name,
        kind,
        MISSING if is_required else parameter.default,
        help=argument.help,
        metavar=argument.metavar or ("" if is_flag else parameter.name.upper()),
        name=(argument.flag or flag_name(parameter.name)) if is_flag else "",
        read=argument.read,
    )


def _setting_flag(flag: Flag, path: str, underscores: bool) -> Flag:
    """Return the flag for a setting of a command, which `path` names with its configuration."""
    owner = path.removesuffix(flag.path)
    prefix = "" if owner == "supervision." else owner
    name = f"{prefix}{flag.path.removeprefix('policy.')}"
    return replace(
        flag,
        path=path,
        name=name if underscores else flag_name(name),
        old=f"{prefix}{flag.old}" if flag.old else "",
        pair=flag.pair and not underscores,
        read=_READERS.get(flag.path),
    )


def parse(command: Command, words: Sequence[str]) -> Call:
    """Parse the words after a command's name into a call. Raises InputError for invalid words."""
    words = list(words)
    if command.raw:
        return Call(words, {})
    if command.recipe == "after --":
        index = words.index("--") if "--" in words else len(words)
        job, words = words[index + 1 :], words[:index]
        if job[:1] != ["train"]:
            raise InputError(
                "missing command to supervise. Usage: rayrec supervise [--flags] -- train RECIPE "
                "[--flags]"
            )
        first = [
            *parse(COMMANDS["train"], [word for word in job[1:] if word not in SWITCHES]).arguments,
            job[1:],
        ]
        return _call(command, first, read(f"rayrec {command.name}", command_flags(command), words))
    if not command.recipe:
        return _call(command, [], read(f"rayrec {command.name}", command_flags(command), words))
    config, words = configured(command, words)
    flags = recipe_flags(config)
    values = read(
        f"rayrec {command.name} {config.recipe}", [*command_flags(command), *flags], words
    )
    settings = {flag.path: values.pop(flag.path) for flag in flags if flag.path in values}
    return _call(command, [updated(config, nest_settings(config, settings))], values)


def configured(command: Command, words: list[str]) -> tuple[Any, list[str]]:
    """Take a recipe, `--config FILE` or both, `--schema FILE` and `--model NAME` out of the words.
    Return the configuration, which determines the recipe's flags, and the other words.
    """
    from rayrec import recipes, storage

    text = words[0] if words and not words[0].startswith("-") else None
    (file,), rest = take(words[text is not None :], "config")
    if file is not None:
        config = recipes.load_config(
            storage.read_text(file), recipe=recipes.find(text) if text else None, source=file
        )
    elif text is not None:
        config = named_configuration(text)
    else:
        choices = f"{', '.join(recipes.ALL)}, FILE.py:FUNCTION, FILE.yaml or RUN"
        raise InputError(
            f"missing recipe. Usage: rayrec {command.name} RECIPE, where RECIPE is one of "
            f"{choices}."
        )
    # Taken before the other flags, because these two determine which flags there are.
    (schema, model), rest = take(rest, "schema", "model")
    settings = {
        name: text for name, text in (("schema", schema), ("model", model)) if text is not None
    }
    return (updated(config, nest_settings(config, settings)) if settings else config), rest


def take(words: Sequence[str], *names: str) -> tuple[list[str | None], list[str]]:
    """Take single flags out of the words. Return their values and the other words."""
    assigned, rest = assign([Flag(name, str, None, name=name) for name in names], words)
    for name, values in assigned.items():
        if values[1:]:
            raise InputError(f"--{name}: must be set once, got {len(values)} values")
        if values == [""]:
            raise InputError(f"--{name}: requires a value")
    return [assigned.get(name, [None])[0] for name in names], rest


def read(prog: str, flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """Parse the words and return the values of flags and arguments by path."""
    assigned, rest = assign(flags, _with_new_names(flags, words))
    if unknown := [word for word in rest if word.startswith("-") and word != "-"]:
        _reject_unknown(prog, flags, unknown[0])
    assigned |= _assign_arguments(prog, [flag for flag in flags if not flag.name], rest)
    missing = [
        flag.shown for flag in flags if flag.value is MISSING and not assigned.get(flag.path)
    ]
    if missing:
        raise InputError(f"missing {', '.join(missing)}. See `{prog} --help`.")
    return {
        flag.path: convert_value(flag, assigned[flag.path])
        for flag in flags
        if flag.path in assigned
    }


def _assign_arguments(
    prog: str, arguments: Sequence[Flag], words: list[str]
) -> dict[str, list[str]]:
    """Assign words to positional arguments. One with several values gets the words that the others
    do not need.
    """
    assignment: dict[str, list[str]] = {}
    rest = list(words)
    for number, argument in enumerate(arguments):
        following = arguments[number + 1 :]
        count = len(rest) - len(following) if takes_many(argument.type) else 1
        # The others can do without words
        if rest and all(each.value is not MISSING for each in following):
            count = max(count, 1)
        assigned, rest = rest[: max(count, 0)], rest[max(count, 0) :]
        if assigned:
            assignment[argument.path] = assigned
    if rest:
        raise InputError(f"unexpected argument '{rest[0]}'. See `{prog} --help`.")
    return assignment


def _call(command: Command, first: list[Any], values: dict[str, Any]) -> Call:
    """Build the call: configuration settings become an object or further keyword arguments."""
    parameters = inspect.signature(command.function).parameters
    keywords = nest(values)
    for prefix, cls in command.settings():
        if prefix in parameters and prefix in keywords:
            keywords[prefix] = updated(cls(), keywords[prefix])
        elif prefix in keywords:
            keywords.update(keywords.pop(prefix))
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            first = [*first, *keywords.pop(name, ())]
    return Call(first, keywords)


def _with_new_names(flags: Iterable[Flag], words: Iterable[str]) -> list[str]:
    """Replace deprecated flags by their new names, with a notice on standard error."""
    new = {f"--{flag.old}": flag.names[0] for flag in flags if flag.old}
    names = {name for flag in flags for name in (*flag.names, *flag.negative_names)}
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in new:
            print(renamed(name, new[name]), file=sys.stderr)
            name = new[name]
        elif name.replace("_", "-") in names:
            name = name.replace("_", "-")
        result.append(name + equals + value)
    return result


def _reject_unknown(prog: str, flags: Iterable[Flag], word: str) -> NoReturn:
    unknown = word.partition("=")[0].replace("_", "-")
    names = [name for flag in flags for name in (*flag.names, *flag.negative_names)]
    suggestions = [
        flag
        for flag in difflib.get_close_matches(unknown, names, cutoff=0.7)
        if _is_similar(flag, unknown)
    ][:1]
    # A wrong suggestion is worse than none, so that each word of it must resemble one that was
    # typed.
    if not suggestions:  # A nested field without its prefix.
        last = {flag: flag.removeprefix("--").rpartition(".")[2] for flag in names}
        similar = difflib.get_close_matches(
            unknown.removeprefix("--").rpartition(".")[2], last.values(), n=1
        )
        suggestions = [
            flag for flag, name in last.items() if name in similar and _is_similar(flag, unknown)
        ][:_MAX_MATCHES]
    hint = (
        f", did you mean {' or '.join(suggestions)}?"
        if suggestions
        else f". `{prog} --help-all` shows all flags."
    )
    raise InputError(f"unknown flag {word.partition('=')[0]}{hint}")


def _is_similar(flag: str, unknown: str) -> bool:
    """Return whether each word of a flag resembles one of a known, equal if short: pin-memory is no
    typo of no-memory.
    """
    words = re.findall(r"\w+", flag)
    unknown_words = re.findall(r"\w+", unknown)
    if len(unknown_words) == 1:
        return True
    return all(
        word in words or (len(word) > 3 and difflib.get_close_matches(word, words))
        for word in unknown_words
    )
