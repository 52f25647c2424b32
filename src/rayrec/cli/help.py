"""Help texts: the overview, and the arguments and flags of a command."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from rayrec.cli.flags import MISSING, SHORT, SWITCHES, Flag, recipe_flags, takes_many
from rayrec.commands.declaration import COMMANDS, Command, Group
from rayrec.config import Config
from rayrec.schema import PlaceholderSchema

STATUSES = {
    0: "success",
    1: "other error, with a traceback if unexpected",
    2: "user error, with the fix in one line, or failed gate",
    130: "interrupted (Ctrl-C), after a checkpoint if a run was in progress",
    143: "terminated (SIGTERM), after a checkpoint if a run was in progress",
}
"""Exit statuses of all commands."""
_FIRST_STEPS = """\
First steps:  rayrec generate log --rows 200000
              rayrec train criteo_demo --data log/train.txt --name demo
              rayrec evaluate runs/demo log/train.txt"""


def overview() -> str:
    """Return the help of `rayrec`."""
    lines = [
        "rayrec: train and serve click models from raw logs, on a laptop, with torchrun or on Ray.",
        f"usage: rayrec COMMAND [arguments] [{'] ['.join(SWITCHES)}]",
        _FIRST_STEPS,
    ]
    for group in get_args(Group):
        for number, command in enumerate(
            [command for command in COMMANDS.values() if command.group == group]
        ):
            text = command.summary[0].lower() + command.summary[1:]
            lines.append(f"{'' if number else group:8}{command.name:13}{text}")
    lines.append(
        "rayrec COMMAND --help describes a command. rayrec train RECIPE --help-all shows all "
        "settings."
    )
    lines += ["Exit status:", *(f"  {status:<5} {text}" for status, text in STATUSES.items())]
    return "\n".join(lines)


def usage(command: Command, flags: Sequence[Flag], recipe: str = "") -> str:
    """Return the usage line of a command."""
    job = {"": "", "first": recipe or "RECIPE", "after --": ""}[command.recipe]
    required = [_syntax(flag) for flag in flags if flag.value is MISSING or not flag.name]
    tail = "-- train RECIPE [flags]" if command.recipe == "after --" else ""
    return " ".join(
        word for word in ("rayrec", command.name, job, *required, "[flags]", tail) if word
    )


def _syntax(flag: Flag) -> str:
    if flag.name:
        return flag.shown
    many = f"{flag.metavar}..." if takes_many(flag.type) else flag.metavar
    return many if flag.value is MISSING else f"[{many}]"


def command_help(command: Command, *, everything: bool = False) -> str:
    """Return the help of a command without the settings of its recipe."""
    from rayrec.cli.parser import command_flags

    flags = command_flags(command)
    shown = [
        flag
        for flag in flags
        if everything or "." not in flag.name.removeprefix("gates.") or not flag.owner
    ]
    lines = [
        f"usage: {usage(command, flags)}",
        command.summary + ".",
        *(f"  {example}" for example in command.examples),
    ]
    lines += _groups(
        [("Arguments" if not flag.name else "Flags", flag) for flag in shown if not flag.owner]
    )
    lines += _groups([(_title(flag.owner), flag) for flag in shown if flag.owner])
    if command.recipe == "first":
        from rayrec import recipes

        lines.append(
            f"Recipes: {', '.join(recipes.ALL)}, FILE.py:FUNCTION, FILE.yaml or the folder of a "
            "run."
        )
        lines.append(f"rayrec {command.name} RECIPE --help shows the flags of a recipe.")
    return "\n".join(
        [
            *lines,
            *([f"{len(flags) - len(shown)} more: --help-all."] if len(flags) > len(shown) else []),
        ]
    )


def recipe_help(command: Command, config: Any, *, everything: bool = False) -> str:
    """Return the help of a command with the main settings of its recipe, or all settings."""
    from rayrec import recipes
    from rayrec.cli.parser import command_flags

    flags = command_flags(command)
    settings = recipe_flags(config)
    needs_schema = isinstance(getattr(config.workload, "schema", None), PlaceholderSchema)
    schema = " --schema FILE" if needs_schema else ""
    data = (
        " --data PATH"
        if config.train_data.path is None and command.name in ("train", "tune")
        else ""
    )
    recipe = recipes.ALL.get(config.recipe)
    summary = (
        (recipe.__doc__ if recipe and recipe.__doc__ else f"{command.summary}.")
        .strip()
        .splitlines()[0]
    )
    shortest = f"{config.recipe}{schema.replace('FILE', 'schema.yaml')}"
    examples = [f"  {example.replace('criteo_demo', shortest)}" for example in command.examples]
    lines = [f"usage: {usage(command, flags, config.recipe + schema + data)}", summary, *examples]
    lines += _groups([(command.name.capitalize(), flag) for flag in flags])
    if everything:
        return "\n".join(
            [*lines, *_groups([(_title(flag.owner), flag) for flag in settings if flag.owner])]
        )
    by_path = {flag.path: flag for flag in settings}
    shown = []
    for path, short in SHORT.items():
        if flag := by_path.get(path):
            name = short.name or flag.name
            text = (
                "YAML file with the columns of the log [required]"
                if schema and name == "schema"
                else short.help
            )
            shown.append(
                (
                    short.group,
                    replace(flag, name=name, aliases=(), help=text, metavar=short.metavar),
                )
            )
    lines += _groups(shown)
    more = f"rayrec config {shortest} > my.yaml, then rayrec train my.yaml"
    return "\n".join([*lines, f"{len(settings) - len(shown)} more: --help-all. As a file: {more}"])


def _title(owner: type[Config] | None) -> str:
    return (owner.__doc__ or owner.__name__).strip().split("\n")[0] if owner else ""


def _groups(flags: Sequence[tuple[str, Flag]]) -> Iterator[str]:
    """Yield the lines for flags, grouped below titles."""
    width = max(100, min(shutil.get_terminal_size().columns, 160))
    column = min(36, max((len(_syntax(flag)) for _, flag in flags), default=0)) + 4
    title = ""
    for group, flag in flags:
        if group != title:
            title = group
            yield title
        text = " ".join(part for part in (flag.text, _default(flag)) if part)
        syntax = f"  {_syntax(flag)}"
        wrapped = textwrap.wrap(text, width - column) or [""]
        if len(syntax) + 1 > column:
            yield syntax
        else:
            yield (syntax.ljust(column) + wrapped.pop(0)).rstrip()
        yield from (" " * column + line for line in wrapped)


def _default(flag: Flag) -> str:
    if flag.value is MISSING:
        return "(required)" if flag.name else ""
    if flag.value is None or flag.value is False or flag.value == ():
        unset = SHORT[flag.path].unset if flag.path in SHORT else ""
        return f"[{unset}]" if unset else ""
    if isinstance(flag.value, tuple):
        return f"[{' '.join(map(str, flag.value))}]"
    return f"[{'on' if flag.value is True else flag.value}]"
