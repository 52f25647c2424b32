"""Flags of commands, from arguments and configuration fields, and the selection of a recipe's help.
Imports no parser.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from rayrec.commands.settings import ALIASES, COMPANIONS, resolve_alias, text_metavar
from rayrec.config import Config, InputError, default_of, field_docs, field_types, packaged_json

SWITCHES = {
    "--json": "print JSON instead of tables (default into a pipe)",
    "-v": "show every checkpoint and the output of Ray's processes",
    "-q": "show only the result and errors",
}
"""Flags of all commands, parsed before the others."""

MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag or positional argument."""

    path: str
    """Parameter name, or dotted path of a configuration field."""
    type: Any
    value: Any = MISSING
    """Default value. MISSING if required."""
    owner: type[Config] | None = None
    """Configuration class that declares the field."""
    help: str = ""
    metavar: str = ""
    name: str = ""
    """Name without dashes. Empty for positional arguments."""
    aliases: tuple[str, ...] = ()
    old: str = ""
    """Deprecated name."""
    read: Callable[[str, str], Any] | None = None
    pair: bool = False
    """Whether the flag has a negative form: --name and --no-name."""

    @property
    def text(self) -> str:
        """Help text, by default from the docstring of the field."""
        if self.owner is None:
            return self.help
        docs = field_docs(self.owner)  # type: ignore[arg-type]
        return self.help or " ".join(docs.get(self.path.rpartition(".")[2], "").split())

    @property
    def negative(self) -> str:
        owner, dot, name = self.name.rpartition(".")
        return f"{owner}{dot}no-{name}"

    @property
    def shown(self) -> str:
        """Flag and metavar, for the help."""
        if self.type is bool:
            return f"--{self.name}, --{self.negative}" if self.pair else f"--{self.name}"
        metavar = self.metavar or metavar_of(self.type)
        return (
            " ".join([*(f"--{name}" for name in (self.name, *self.aliases[:1]) if name), metavar])
            if self.name
            else metavar
        )


def flag_name(path: str) -> str:
    return path.replace("_", "-")


def flags_of(config: Config | type[Config], prefix: str = "", old: str = "") -> Iterator[Flag]:
    """Yield a flag for each field of a configuration, or of a class with its defaults."""
    cls = config if isinstance(config, type) else type(config)
    kinds = field_types(cls)  # type: ignore[arg-type]
    old_names = {new: name for name, new in cls.RENAMED.items()}
    for field in dataclasses.fields(cls):
        value = default_of(field) if isinstance(config, type) else getattr(config, field.name)
        path = f"{prefix}{field.name}"
        old_path = (
            f"{old or prefix}{old_names.get(field.name, field.name)}"
            if old or field.name in old_names
            else ""
        )
        if isinstance(value, Config):
            metavar = text_metavar(type(value))
            if metavar:
                yield Flag(path, str, None, cls, metavar=metavar, name=flag_name(path))
            yield from flags_of(value, f"{path}.", f"{old_path}." if old_path else "")
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            for number, item in enumerate(value):
                yield from flags_of(item, f"{path}.{number}.")
        else:
            kind = kinds[field.name]
            name = flag_name(path)
            old_name = flag_name(old_path)
            yield Flag(path, kind, value, cls, name=name, old=old_name, pair=kind is bool)


def members(kind: Any) -> list[Any]:
    """Return the member types of a union, including nested ones."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(kind) for member in members(part)]
    return [kind]


def takes_many(kind: Any) -> bool:
    """Return whether a value consists of several words."""
    return any(
        typing.get_origin(member) in (tuple, dict, Sequence, _SEQUENCE) for member in members(kind)
    )


_SEQUENCE = typing.get_origin(Sequence[str])
_NAMES = {int: "N", float: "X", str: "TEXT"}


def metavar_of(kind: Any) -> str:
    """Return the metavar of a type."""
    metavars = []
    for member in members(kind):
        origin = typing.get_origin(member)
        inner = typing.get_args(member)
        if origin is Literal:
            metavars.append("|".join(map(str, inner)))
        elif origin is dict:
            metavars.append("NAME X ...")
        elif origin is tuple and Ellipsis not in inner:
            metavars.append(" ".join(map(metavar_of, inner)))
        elif origin is not None and inner and origin is not type(None) and takes_many(member):
            metavars.append(f"{metavar_of(inner[0])} ...")
        elif member in _NAMES:
            metavars.append(_NAMES[member])
    return " | ".join(metavars)


def value_of(flag: Flag, words: list[str]) -> Any:
    """Parse the words given for a flag. Raises InputError if they do not match its type."""
    label = f"--{flag.name}" if flag.name else flag.metavar or flag.path
    if flag.read is not None and len(words) == 1:
        return flag.read(label, words[0])
    for member in members(flag.type):
        try:
            return _read(member, words)
        except (ValueError, KeyError):
            continue
    expected = " or ".join(
        dict.fromkeys(
            map(_expected, (each for each in members(flag.type) if each is not type(None)))
        )
    )
    raise InputError(f"{label}: must be {expected}, got {' '.join(words)!r}")


def _read(kind: Any, words: list[str]) -> Any:
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is dict:
        return {
            _read(inner[0], [name]): _read(inner[1], [value])
            for name, value in zip(words[::2], words[1::2], strict=True)
        }
    if origin is tuple and Ellipsis not in inner:
        return tuple(_read(each, [word]) for each, word in zip(inner, words, strict=True))
    if origin in (tuple, _SEQUENCE):
        return tuple(_read(inner[0], [word]) for word in words)
    (word,) = words
    if origin is Literal:
        return {str(value): value for value in inner}[word]
    if kind is type(None):
        return {"None": None}[word]
    if kind in (int, float, str):
        return kind(word)
    raise ValueError


def _expected(kind: Any, many: bool = False) -> str:
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is Literal:
        return f"{'any of ' if many else ''}{' or '.join(map(str, inner))}"
    if origin is dict:
        return "names, each followed by a number"
    if origin is tuple and Ellipsis not in inner:
        return f"{len(inner)} {_expected(inner[0], True)}"
    if origin in (tuple, _SEQUENCE):
        return _expected(inner[0], True)
    singular, plural = {
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
    }.get(kind, ("text", "texts"))
    return plural if many else singular


class Short(NamedTuple):
    """Entry of the short help."""

    group: str
    name: str
    metavar: str
    help: str
    unset: str = ""
    """Description of the behavior if the setting is None."""


SHORT = {
    path: Short(*entry) for path, entry in packaged_json(__package__, "short_help.json").items()
}
"""Flags in a recipe's help, in order. --help-all shows all settings."""


def recipe_flags(config: Config) -> list[Flag]:
    """Return all settings of a recipe as flags in field order, between --learning-rate, which they
    override, and --gpus.
    """
    short = {
        resolve_alias(config, name): flag_name(name) for name in ALIASES if name not in COMPANIONS
    }
    rate, gpus = (
        [
            Flag(
                name,
                kind,
                None,
                name=flag_name(name),
                help=SHORT[name].help,
                metavar=SHORT[name].metavar,
            )
        ]
        if resolve_alias(config, name)
        else []
        for name, kind in (("learning_rate", float), ("gpus", int))
    )
    settings = [
        replace(flag, aliases=(short[flag.path],)) if flag.path in short else flag
        for flag in flags_of(config)
    ]
    return [*rate, *settings, *gpus]
