"""Parser of flags, which assigns words to them and lists them in the help."""

import argparse
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from rayrec.cli.flags import MISSING, SHORT, Flag, takes_many, type_metavar
from rayrec.config import InputError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an InputError instead of printing the usage and exiting."""
        raise InputError(
            re.sub(r"^argument ([^:/]+)\S*: expected .*", r"\1: requires a value", message)
        )


# argparse assigns words and lists the flags. Conversion is left to pydantic (`value_of`), which
# knows the types of configuration fields, unions and literals.
class _Switch(argparse.Action):
    """Action of a flag without a value, which its negative form makes False."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Set the truth value."""
        setattr(namespace, self.dest, option not in self.const)


def assign(flags: Sequence[Flag], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the words of each given flag by path, True or False for switches, and the other words.
    Raises InputError.
    """
    parser = _parser([flag for flag in flags if flag.name])
    values, rest = parser.parse_known_args(list(words))
    return vars(values), rest


def listed(flags: Sequence[Flag]) -> str:
    """Return the help of flags below the headings of their groups."""
    return _parser(flags, is_help=True).format_help().strip()


def _parser(flags: Sequence[Flag], *, is_help: bool = False) -> argparse.ArgumentParser:
    """Return the parser of flags. In the help, names of values show how many there are."""
    width = max(100, min(shutil.get_terminal_size().columns, 160))
    parser = _Parser(
        add_help=False,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 40, width),
    )
    names = dict.fromkeys(flag.group for flag in flags)
    groups = {name: parser.add_argument_group(name) for name in names}
    for flag in flags:
        options: dict[str, Any] = {"metavar": flag.metavar or type_metavar(flag.type)}
        if flag.type is bool:
            options = {"action": _Switch, "nargs": 0, "const": flag.negative_names}
        elif flag.name:
            options |= {
                "action": "extend",
                "nargs": "*" if takes_many(flag.type) and not is_help else 1,
            }
        if flag.name:
            options["dest"] = flag.path
        groups[flag.group].add_argument(
            *(flag.names + flag.negative_names or [flag.path]),
            default=argparse.SUPPRESS,
            # Finding the texts takes as long as everything else, so parse without them.
            help=_description(flag).replace("%", "%%") if is_help else None,
            **options,
        )
    return parser


def _description(flag: Flag) -> str:
    """Return the help of a flag, with its default or what a default None means."""
    if flag.value is MISSING:
        return f"{flag.text} [required]"
    if flag.is_unset:
        default = SHORT[flag.path].unset if flag.path in SHORT else ""
    elif isinstance(flag.value, tuple):
        default = " ".join(map(str, flag.value))
    else:
        default = "on" if flag.value is True else str(flag.value)
    return f"{flag.text} [{default}]" if default else flag.text
