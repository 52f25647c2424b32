"""Flags of commands, from arguments and configuration fields, and the main ones of a recipe."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from rayrec.commands.settings import ALIASES, COMPANIONS, resolve_alias, text_metavar
from rayrec.config import Config, InputError, default_of, field_types, packaged_json

SWITCHES = {
    "--json": "print JSON instead of tables (default into a pipe)",
    "-v": "show every checkpoint and the output of Ray's processes",
    "-q": "show only the result and errors",
}
"""Flags of all commands, parsed before the others."""

MISSING = dataclasses.MISSING


@lru_cache(maxsize=1024)
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases."""
    from docstring_parser import parse_from_object

    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and base is not Config:
            fields = parse_from_object(base).params
            docs.update({field.arg_name: field.description or "" for field in fields})
    return docs


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
    group: str = ""
    """Heading in the help."""

    @property
    def text(self) -> str:
        """Help text, by default from the docstring of the field."""
        if self.owner is None:
            return self.help
        docs = field_docs(self.owner)
        return self.help or " ".join(docs.get(self.path.rpartition(".")[2], "").split())

    @property
    def is_unset(self) -> bool:
        """True if the default is None, False or empty, which the help does not show."""
        return self.value is None or self.value is False or self.value == ()

    @property
    def names(self) -> list[str]:
        """Names with dashes."""
        return [f"--{name}" for name in (self.name, *self.aliases) if name]

    @property
    def negative_names(self) -> list[str]:
        """Negative form of the name, if any."""
        owner, dot, last = self.name.rpartition(".")
        return [f"--{owner}{dot}no-{last}"] if self.pair else []

    @property
    def shown(self) -> str:
        """Flag and metavar, for usage and errors."""
        metavar = self.metavar or type_metavar(self.type)
        return " ".join(word for word in (*self.names[:1], metavar) if word)


def flag_name(path: str) -> str:
    return path.replace("_", "-")


def config_flags(config: Config | type[Config], prefix: str = "", old: str = "") -> Iterator[Flag]:
    """Yield a flag for each field of a configuration, or of a class with its defaults."""
    cls = config if isinstance(config, type) else type(config)
    kinds = field_types(cls)
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
            yield from config_flags(value, f"{path}.", f"{old_path}." if old_path else "")
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            for number, item in enumerate(value):
                yield from config_flags(item, f"{path}.{number}.")
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


def type_metavar(kind: Any) -> str:
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
            metavars.append(" ".join(map(type_metavar, inner)))
        elif origin is not None and inner and origin is not type(None) and takes_many(member):
            metavars.append(f"{type_metavar(inner[0])} ...".strip())
        elif member in _NAMES:
            metavars.append(_NAMES[member])
    return " | ".join(metavars)


def convert_value(flag: Flag, words: list[str] | bool) -> Any:
    """Convert the words given for a flag to its type. Raises InputError."""
    import pydantic

    if isinstance(words, bool):
        return words
    if not takes_many(flag.type):
        words = words[-1:]  # Of a flag set several times, the last one counts.
    label = flag.names[0] if flag.name else flag.shown
    if flag.read is not None:
        return flag.read(label, ",".join(words))
    # Types of fields carry their bounds, so that a value is checked here as in a YAML file.
    adapter = pydantic.TypeAdapter(flag.type)
    errors = []
    for candidate in _candidates(flag.type, words):
        try:
            return adapter.validate_python(candidate)
        except pydantic.ValidationError as error:
            errors.append(error)
    messages = dict.fromkeys(detail["msg"] for detail in errors[0].errors())
    expected = " or ".join(messages).replace("Input should", "must")
    raise InputError(f"{label}: {expected}, got {' '.join(words)!r}")


def _candidates(kind: Any, words: list[str]) -> Iterator[Any]:
    """Yield the values that words may stand for, first the usual one."""
    has_names = any(typing.get_origin(member) is dict for member in members(kind))
    if has_names and len(words) % 2 == 0:
        yield dict(zip(words[::2], words[1::2], strict=True))
    # pydantic takes texts for numbers, but not for lists, mappings and None. The first candidate's
    # error is the one to show.
    if len(words) != 1 or takes_many(kind):
        yield words
    if len(words) == 1:
        yield words[0]
        # A Literal of numbers and None accept no text.
        yield {"None": None}.get(words[0], words[0])
        yield int(words[0]) if words[0].isdecimal() else words[0]


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
    settings = [
        replace(flag, aliases=(short[flag.path],)) if flag.path in short else flag
        for flag in config_flags(config)
    ]
    rate = _companion_flags(config, "learning_rate", float)
    return [*rate, *settings, *_companion_flags(config, "gpus", int)]


def _companion_flags(config: Config, name: str, kind: type) -> list[Flag]:
    """Return the flag for several settings of a recipe, if it has them."""
    if not resolve_alias(config, name):
        return []
    short = SHORT[name]
    named = flag_name(name)
    return [Flag(name, kind, None, help=short.help, metavar=short.metavar, name=named)]
