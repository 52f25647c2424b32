"""Make the reference pages of the documentation from the code, as Markdown: `python
tools/reference.py [PAGE]` prints them.

Commands and flags come from their declarations, fields from the Config classes, the Python
interface from `rayrec.__all__`. Events, metrics, HTTP and exit statuses come from the tables that
the code uses, file formats from the modules that write them.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rayrec
from rayrec import models
from rayrec.cli.flags import MISSING, SWITCHES, Flag, field_docs, flag_name, type_metavar
from rayrec.cli.help import STATUSES, usage
from rayrec.cli.parser import command_flags
from rayrec.commands import COMMANDS
from rayrec.commands.settings import ALIASES
from rayrec.config import Config
from rayrec.datasets.criteo import SCHEMA
from rayrec.models.heads import label_heads
from rayrec.observe.events import KINDS
from rayrec.recipes import ALL
from rayrec.serve import openapi
from rayrec.serve.config import ServeConfig
from rayrec.serve.counters import Counters

SOURCE = Path(rayrec.__file__).parent
INTRODUCTIONS = {
    "commands": (
        "Every command is also a function of the same name in [Python](python.md). Results go to "
        "standard output, all else to standard error ([exit statuses](exit-statuses.md)). `rayrec "
        "COMMAND --help` shows the same flags."
    ),
    "configuration": (
        "`rayrec config RECIPE` prints a whole configuration. A field `a` of a field `b` is "
        '`--b.a` on the command line, `b: {a: ...}` in YAML and `replace(b={"a": ...})` in '
        "Python; `_` is `-` in flags. A recipe overrides many of these defaults."
    ),
    "recipes": "`rayrec config NAME` prints all settings of a recipe.",
    "python": (
        "What `import rayrec` offers; it loads no torch. `rayrec.recipes.NAME(path)` gives the "
        "configuration of a [recipe](recipes.md)."
    ),
    "events": (
        "`RUN/events.jsonl` has one JSON object a line: `time` (seconds since 1970), `kind`, and "
        "fields of the kind. `rayrec.observe.events.read_events` reads them. Fields may be added; "
        "readers ignore kinds and fields that they do not know. The last column lists the fields "
        "that are written by name; metrics and measurements come in addition."
    ),
    "metrics": (
        "How to collect them, and where the Grafana dashboard is: [trackers](../trackers.md)."
    ),
    "http": (
        "A server describes itself at `/openapi.json`, with the columns of its own model. This is "
        "the description for Criteo's columns and a server with a token; [serve](../serve.md) has "
        "examples."
    ),
    "exit-statuses": "Scripts and schedulers may rely on these; all commands have the same.",
    "formats": (
        "No file is a pickle, and none is executed when it is read. A folder that has its "
        "manifest is complete."
    ),
}
"""Introduction of each page."""


def cell(text: object) -> str:
    """Format a text as a table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def summary(documented: Any) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n\n")[0]


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell(value) for value in line) + " |\n" for line in lines)


def commands_page() -> str:
    """Return the page of commands with their arguments and flags."""
    parts: list[str] = []
    for command in COMMANDS.values():
        flags = command_flags(command)
        parts.append(
            f"## rayrec {command.name}\n\n`{usage(command, flags)}`: {cell(command.summary)}.\n"
        )
        if command.examples:
            parts.append("```text\n" + "\n".join(command.examples) + "\n```\n")
        if flags and not command.raw:
            parts.append(
                table(("flag", "value", "default", "meaning"), [_flag(flag) for flag in flags])
            )
        if command.recipe == "first":
            aliases = ", ".join(f"`--{flag_name(name)}`" for name in ALIASES)
            parts.append(
                "Flags are the fields of the recipe's [configuration](configuration.md), such as "
                f"`--scaling.num-workers`; {aliases} are short names of some.\n"
            )
    switches = [(f"`{switch}`", text) for switch, text in SWITCHES.items()]
    return "\n".join([*parts, "## Every command\n", table(("switch", "meaning"), switches)])


def _flag(flag: Flag) -> tuple[object, ...]:
    names = [*flag.names[:1], *flag.negative_names] or [flag.metavar]
    name = ", ".join(f"`{name}`" for name in names)
    value = (
        "none"
        if flag.type is bool
        else f"`{flag.metavar or type_metavar(flag.type)}`"
        if flag.name
        else ""
    )
    default = (
        "required"
        if flag.value is MISSING
        else ""
        if flag.value in (None, (), False)
        else f"`{flag.value}`"
    )
    return name, value, default, flag.text


def classes() -> Iterator[type[Config]]:
    """Yield the package's Config classes by module, each after its bases."""
    for path in sorted(SOURCE.rglob("*.py")):
        if not re.search(
            r"^class \w+\(.*\b\w*(?<!Backend)(Config|Workload)\b", path.read_text(), re.MULTILINE
        ):
            continue
        name = ".".join(("rayrec", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        module = importlib.import_module(name)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Config)
                and value.__module__ == name
                and dataclasses.fields(value)
            ):
                yield value


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return f"{type(value).__name__}" if isinstance(value, Config) else f"`{value!r}`"


def _types(kind: type[Config]) -> dict[str, str]:
    """Return the annotations of a class and of its bases, as in their sources."""
    annotations: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(Config)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        fields = [line for line in definition.body if isinstance(line, ast.AnnAssign)]
        annotations |= {ast.unparse(line.target): ast.unparse(line.annotation) for line in fields}
    return annotations


def configuration_page() -> str:
    """Return the page of settings classes with their fields."""
    parts: list[str] = []
    first = {"TrainConfig": 0, "DataConfig": 1, "ScalingConfig": 2}
    kinds = sorted(
        {kind.__name__: kind for kind in classes()}.values(),
        key=lambda kind: (first.get(kind.__name__, 9), kind.__name__),
    )
    for kind in kinds:
        docs = field_docs(kind)
        types = _types(kind)
        rows = [
            (f"`{field.name}`", f"`{types[field.name]}`", _default(field), docs.get(field.name, ""))
            for field in dataclasses.fields(kind)
        ]
        parts.append(
            f"## {kind.__name__}\n\n{summary(kind)}\n\n"
            f"{table(('field', 'type', 'default', 'meaning'), rows)}"
        )
    return "\n".join(parts)


def recipes_page() -> str:
    """Return the page of recipes and click models."""
    recipes = [(f"`{name}`", summary(recipe)) for name, recipe in ALL.items()]
    rows = []
    for name in models.names():
        kind = models.config_class(name)
        rows.append((f"`{name}`", summary(kind)))
    named = (
        "## Click models\n\n`--model NAME` trains one of them with any recipe for click logs.\n\n"
    )
    return f"{table(('recipe', 'is'), recipes)}\n{named}{table(('model', 'is'), rows)}"


def python_page() -> str:
    """Return the page of public names, for mkdocstrings."""
    names = sorted(set(rayrec.__all__) - {"recipes"}, key=lambda name: (name[0].isupper(), name))
    return "".join(f"::: rayrec.{name}\n\n" for name in names)


def events_page() -> str:
    """Return the page of event kinds, with the fields named by the code that writes them."""
    named: dict[str, set[str]] = {}
    for kind, fields in logged_events():
        named.setdefault(kind, set()).update(fields)
    rows = [
        (f"`{kind}`", text, ", ".join(f"`{name}`" for name in sorted(named.get(kind, ()))))
        for kind, text in KINDS.items()
    ]
    return table(("kind", "reports", "fields"), rows)


def logged_events() -> Iterator[tuple[str, set[str]]]:
    """Yield kind and named fields of each event that the code writes. A kind is a literal, or a
    module's constant KIND.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    constants = {
        path.stem: line.value.value
        for path, tree in trees.items()
        for line in tree.body
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant)
        if ast.unparse(line.targets[0] if isinstance(line, ast.Assign) else line.target) == "KIND"
    }
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            owner, _, method = ast.unparse(node.func).rpartition(".")
            writes = method in ("log", "_log", "_log_event", "tell") or (
                method == "write" and owner.rpartition(".")[2] in ("events", "_events")
            )
            first = node.args[0]
            if isinstance(first, ast.Constant):
                kind = first.value
            else:
                module, _, name = ast.unparse(first).rpartition(".")
                kind = constants.get(module or path.stem) if name == "KIND" else None
            if writes and isinstance(kind, str) and kind.isidentifier():
                keys_in_code = [
                    key
                    for argument in node.args[1:]
                    if isinstance(argument, ast.Dict)
                    for key in argument.keys
                ]
                keys = {key.value for key in keys_in_code if isinstance(key, ast.Constant)}
                yield kind, keys | {keyword.arg for keyword in node.keywords if keyword.arg}


def metrics_page() -> str:
    """Return the page of Prometheus metrics of training and serving."""
    module = SOURCE / "training" / "launchers" / "ray_metrics.py"
    training: list[tuple[object, ...]] = []
    for kinds, metrics in json.loads(module.with_suffix(".json").read_text()).items():
        training += [
            (f"`ray_{name}`", kinds.removesuffix("s"), text, "`run`")
            for name, text in metrics.items()
        ]
    for node in ast.walk(ast.parse(module.read_text())):  # to import it takes a Ray
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("Gauge", "Counter")
            and isinstance(node.args[0], ast.Constant)
        ):
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            labels = ", ".join(f"`{label}`" for label in options["tag_keys"])
            training.append(
                (
                    f"`ray_{node.args[0].value}`",
                    ast.unparse(node.func).lower(),
                    options["description"],
                    labels,
                )
            )
    serving = [
        (
            f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
            family.type,
            family.documentation,
        )
        for family in Counters().snapshot().families
    ]
    run_text = "The metrics of a run on Ray, exported by Ray's endpoint on the driver's node."
    server_text = "`/metrics` of `rayrec serve`: the sum over all replicas."
    return (
        f"## Training\n\n{run_text}\n\n{table(('metric', 'kind', 'meaning', 'labels'), training)}\n"
        f"## Serving\n\n{server_text}\n\n{table(('metric', 'kind', 'meaning'), serving)}"
    )


def http_page() -> str:
    """Return the page of the HTTP interface of `rayrec serve`, for Criteo's columns."""
    model: Any = SimpleNamespace(
        preprocessor=SimpleNamespace(schema=SCHEMA, inputs=SimpleNamespace(sparse=())),
        scorer=SimpleNamespace(heads=label_heads(SCHEMA.label)),
    )
    document = openapi.document(model, config=ServeConfig(), with_token=True)
    parts: list[str] = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            parts.append(f"## {method.upper()} {path}\n\n{described['summary']}\n")
            for media, body in described.get("requestBody", {}).get("content", {}).items():
                parts.append(f"Takes `{media}`. {cell(body['schema'].get('description', ''))}\n")
            rows = [
                (status, answer["description"]) for status, answer in described["responses"].items()
            ]
            parts.append(table(("status", "meaning"), rows))
    answers = document["components"]["schemas"]
    for name in (name for name in answers if name != "Row"):
        rows = [
            (f"`{field}`", json.dumps(kind.get("type", "")).strip('"'), kind.get("description", ""))
            for field, kind in answers[name]["properties"].items()
        ]
        parts.append(f"## {name}\n\n{table(('field', 'type', 'meaning'), rows)}")
    return "\n".join(parts)


def statuses_page() -> str:
    """Return the page of exit statuses of all commands."""
    return table(
        ("status", "meaning"), [(f"`{status}`", text) for status, text in STATUSES.items()]
    )


FORMATS = {
    "A checkpoint": "rayrec.checkpoint",
    "Its manifest and checksums": "rayrec.checkpoint.format",
    "Events": "rayrec.observe.events",
    "A Preprocessor": "rayrec.data.encoding.preprocessor",
    "Preprocessed data": "rayrec.data.materialized.dataset",
    "Its files": "rayrec.data.materialized.formats",
    "An export": "rayrec.inference.export.manifest",
}
"""Modules that define the files rayrec writes."""


def formats_page() -> str:
    """Return the page of file formats: docstrings and file names of the modules that write them."""
    parts: list[str] = []
    for title, name in FORMATS.items():
        path = SOURCE.parent.joinpath(*name.split("."))
        tree = ast.parse(
            (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        )
        rows = []
        for line, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
            if (
                not isinstance(line, ast.Assign | ast.AnnAssign)
                or not isinstance(line.value, ast.Constant)
                or not isinstance(line.value.value, str | int)
            ):
                continue
            target = ast.unparse(line.targets[0] if isinstance(line, ast.Assign) else line.target)
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else ""
            )
            if target.isupper() and not target.startswith("_"):
                rows.append((f"`{target}`", f"`{line.value.value!r}`", text))
        constants = table(("constant", "value", "meaning"), rows) if rows else ""
        parts.append(f"## {title}\n\n{ast.get_docstring(tree)}\n\nModule `{name}`.\n\n{constants}")
    return "\n".join(parts)


PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "commands": ("Commands and flags", commands_page),
    "configuration": ("Configuration fields", configuration_page),
    "recipes": ("Recipes and models", recipes_page),
    "python": ("Python", python_page),
    "events": ("Events", events_page),
    "metrics": ("Prometheus metrics", metrics_page),
    "http": ("HTTP", http_page),
    "exit-statuses": ("Exit statuses", statuses_page),
    "formats": ("File formats", formats_page),
}
"""Title and content of each generated page, by its name."""


def page(name: str) -> str:
    """Return a whole page as Markdown."""
    title, content = PAGES[name]
    return f"# {title}\n\n{INTRODUCTIONS[name]}\n\n{content()}"


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        print(page(name))
