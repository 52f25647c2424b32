"""Command lines of the documentation, deploy/ and tests are parsed as in tests/golden/command_lines.json."""

import dataclasses
import inspect
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrec import recipes
from rayrec.cli import take_switches
from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS
from rayrec.config import Config
from rayrec.workloads.base import TrainConfig

LINES = json.loads((Path(__file__).parents[1] / "golden" / "command_lines.json").read_text())
SCHEMA = "{label: y, dense: [a], sparse: [b]}"
CONFIG = "recipe: criteo_demo\nsteps: 7\n"


def changes(config: Config, default: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from the default, with their names."""
    for field in dataclasses.fields(config):
        value, before = getattr(config, field.name), getattr(default, field.name, None)
        if isinstance(value, Config) and type(value) is type(before):
            yield from changes(value, before, f"{prefix}{field.name}.")
        elif value != before:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: Any) -> Any:
    if isinstance(value, Config):
        return plain({"class": type(value).__name__, **value.to_dict()})
    if isinstance(value, dict):
        return {name: each.rpartition(".")[2] if name == "class" else plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def call_of(line: str) -> dict[str, Any]:
    """Return the call of a command line: command name and non-default values."""
    name, *words = shlex.split(line)
    words, switches = take_switches(words)
    command = COMMANDS[name]
    call = parse(command, words)
    signature = inspect.signature(command.function)
    given = signature.bind(*call.arguments, **call.keywords).arguments
    given.update(given.pop(next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), ""), {}))
    made = {"command": name, **({"quiet": True} if "-q" in switches else {}), **({"verbose": True} if "-v" in switches else {})}
    for prefix, cls in command.settings():  # Passed as keyword arguments, often of several configurations.
        if prefix not in signature.parameters:
            fields = {field.name for field in dataclasses.fields(cls)} - set(signature.parameters)
            options = {field: given.pop(field) for field in fields & given.keys()}
            config = settings(cls, options, given)
            made.update(changes(config, settings(cls, {}, given)))
    for parameter, value in given.items():
        if isinstance(value, TrainConfig):
            made["recipe"] = value.recipe
            made.update(changes(value, recipes.ALL.get(value.recipe, recipes.ALL["clicks"])()))
        elif isinstance(value, Config):
            made.update(changes(value, type(value)(), f"{parameter}." if parameter == "gates" else ""))
        elif value != signature.parameters[parameter].default and value is not None:
            made[parameter] = plain(value)
    return made


def settings(cls: type[Config], options: dict[str, Any], given: dict[str, Any]) -> Config:
    from rayrec.commands.settings import updated

    needed = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.default is field.default_factory}
    return updated(cls(**needed), options)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each file in a command line by a schema or configuration, and each recipe file by `clicks`."""

    def text(place: str) -> str:
        return SCHEMA if any(word in place for word in ("schema", "labels", "columns")) else CONFIG

    monkeypatch.setattr("rayrec.storage.read_text", text)
    monkeypatch.setattr("rayrec.recipes.function_in_file", lambda name, returns: recipes.ALL["clicks"])


@pytest.mark.usefixtures("files")
def test_command_lines_match_golden_calls() -> None:
    failed = {line: (made, expected) for line, expected in LINES if (made := call_of(line)) != expected}
    assert not failed
