"""README.md of an export: its files, and code that scores with them. Its texts are in templates/."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, StrictUndefined

from rayrec.models.base import ModelInputs

if TYPE_CHECKING:
    from rayrec.inference.export.manifest import ExportedModel


def _text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text()


LOADER: Final = _text("score.txt")
"""Code that scores encoded rows with only PyTorch, NumPy and safetensors."""
FROM_RAW: Final = _text("from_raw.txt")
"""Code that follows LOADER and scores raw rows without rayrec."""


def readme(exported: ExportedModel) -> str:
    """Return the text of an export's README.md."""
    model, inputs = exported.model, ModelInputs.of(exported.preprocessor.inputs)
    heads = () if model.LABELLED else model.output_heads(inputs)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(_text("README.md")).render(
        exported=exported,
        network=type(exported.model).__name__.removesuffix("Config"),
        columns=exported.preprocessor.inputs,
        inputs=inputs,
        width=model.table_width,
        gives=" and ".join(f"{head.kind} `{head.name}`" for head in heads),
        outputs=[name for head in heads for name in head.names],
        sequences=model.sequences(inputs),
        tables=model.full_tables(inputs) if model.TRAINS_ON_TABLES else (),
        listed=_listed,
        score=LOADER,
        from_raw=FROM_RAW,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
