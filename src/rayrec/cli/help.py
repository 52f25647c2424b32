"""Help texts: the overview, and the arguments and flags of a command."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from rayrec.cli.flag_parser import listed
from rayrec.cli.flags import MISSING, SHORT, SWITCHES, Flag, recipe_flags, takes_many
from rayrec.commands.declaration import COMMANDS, Command, Group, find_summary
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
    words = ("rayrec", command.name, job, *required, "[flags]", tail)
    return " ".join(word for word in words if word)


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
        replace(flag, group=_heading(flag))
        for flag in flags
        if everything or "." not in flag.name.removeprefix("gates.") or not flag.owner
    ]
    # Settings follow the arguments and flags of the function itself.
    shown.sort(key=lambda flag: flag.owner is not None)
    lines = _introduction(command, usage(command, flags), command.summary)
    lines += [listed(shown)] if shown else []
    if command.recipe == "first":
        from rayrec import recipes

        lines.append(
            f"Recipes: {', '.join(recipes.ALL)}, FILE.py:FUNCTION, FILE.yaml or the folder of a "
            "run."
        )
        lines.append(f"rayrec {command.name} RECIPE --help shows the flags of a recipe.")
    if len(flags) > len(shown):
        lines.append(f"{len(flags) - len(shown)} more: --help-all.")
    return "\n".join(lines)


def recipe_help(command: Command, config: Any, *, everything: bool = False) -> str:
    """Return the help of a command with the main settings of its recipe, or all settings."""
    from rayrec import recipes
    from rayrec.cli.parser import command_flags

    flags = [replace(flag, group=command.name.capitalize()) for flag in command_flags(command)]
    settings = recipe_flags(config)
    needs_schema = isinstance(getattr(config.workload, "schema", None), PlaceholderSchema)
    needs_data = config.train_data.path is None and command.name in ("train", "tune")
    recipe = f"{config.recipe}{' --schema FILE' if needs_schema else ''}"
    lines = _introduction(
        command,
        usage(command, flags, f"{recipe}{' --data PATH' if needs_data else ''}"),
        find_summary(recipes.ALL.get(config.recipe, command.function)),
        recipe=recipe.replace("FILE", "schema.yaml"),
    )
    if everything:
        described = [replace(flag, group=_heading(flag)) for flag in settings if flag.owner]
        return "\n".join([*lines, listed([*flags, *described])])
    main = {flag.path: flag for flag in settings if flag.path in SHORT}
    shown = [_short(main[path], needs_schema) for path in SHORT if path in main]
    more = f"rayrec config {recipe.replace('FILE', 'schema.yaml')} > my.yaml"
    return "\n".join(
        [
            *lines,
            listed([*flags, *shown]),
            f"{len(settings) - len(shown)} more: --help-all. As a file: {more}, then rayrec train "
            "my.yaml",
        ]
    )


def _short(flag: Flag, needs_schema: bool) -> Flag:
    """Return a main setting with its short name and text."""
    short = SHORT[flag.path]
    text = short.help
    if needs_schema and short.name == "schema":
        text = "YAML file with the columns of the log [required]"
    name = short.name or flag.name
    return replace(flag, name=name, aliases=(), help=text, metavar=short.metavar, group=short.group)


def _introduction(command: Command, usage: str, summary: str, *, recipe: str = "") -> list[str]:
    """Return the lines above the flags: usage, summary and examples, of a recipe if given."""
    examples = [
        example.replace("criteo_demo", recipe or "criteo_demo") for example in command.examples
    ]
    return [f"usage: {usage}", f"{summary}.", *(f"  {example}" for example in examples)]


def _heading(flag: Flag) -> str:
    if flag.owner:
        return find_summary(flag.owner).partition(". ")[0]
    return "Flags" if flag.name else "Arguments"
