"""Export of trained models as folders for other tools. Click model exports score without TorchRec
and Ray.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined

from rayrec import hashing, storage
from rayrec.checkpoint import Checkpoint, full_tensors, open_checkpoint
from rayrec.checkpoint.discovery import reject_pickles
from rayrec.checkpoint.safetensors import header, write_weights
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding import rules
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER
from rayrec.data.features import definitions
from rayrec.imports import require
from rayrec.inference.config import ExportConfig
from rayrec.inference.export import plain_encoder
from rayrec.inference.export.items import write_items
from rayrec.inference.export.manifest import (
    DENSE,
    ENCODER,
    PROGRAM,
    README,
    REPORT,
    TABLES,
    ExportedModel,
    open_export,
    seal_all,
)
from rayrec.inference.export.onnx import id_widths, write_repository
from rayrec.inference.export.parity import (
    Comparison,
    ParityRows,
    compare,
    compare_encoder,
    parity_rows,
)
from rayrec.inference.export.side_tables import write_tables
from rayrec.inference.model import model_version, open_served
from rayrec.models.heads import BinaryHead, LabelHead
from rayrec.models.scoring_tables import Quantization
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.scorer import (
    ClickScorer,
    PlainModel,
    click_settings,
    empty_model,
    flat_values,
    load_preprocessor,
)
from rayrec.workloads.recsys.scoring import BATCH_ROWS, cache_folder
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.scoring import PREFIX

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.base import TrainConfig


def export(
    checkpoint: str,
    out: str,
    *,
    config: TrainConfig,
    settings: ExportConfig | None = None,
) -> dict[str, Any]:
    """Export the model of a checkpoint or run, atomically into folder `out`. Returns the workload's
    report, out and checkpoint. Raises InputError for an unusable checkpoint, an unsupported model,
    different scores, and if `out` exists.
    """
    settings = settings or ExportConfig()
    opened = open_checkpoint(checkpoint)
    reject_pickles(opened.path, opened.manifest()["files"])
    is_click_model = isinstance(config.workload, ClickWorkload)
    if not is_click_model and settings != ExportConfig():
        raise InputError(
            f"export: recipe {config.recipe} is not for click models, needed for --quantize, "
            "--triton and comparison"
        )
    with storage.writing_folder(out) as folder:
        if is_click_model:
            report = export_clicks(opened, folder, config=config, settings=settings)
        else:
            report = config.workload.export(config, checkpoint=opened.path, out=folder)
    return {**report, "out": storage.absolute(out), "checkpoint": opened.path}


_CHUNK_ROWS = 1 << 18
"""Number of table rows that are quantised and written at once."""


@dataclass(frozen=True)
class _Reference:
    """Scores, speed and size of the checkpoint on the rows to compare."""

    logits: np.ndarray
    rows_per_s: float
    weight_bytes: int


# Order of an export, by memory and by what may fail early:
#
#   1. settings, packages        fail at once
#   2. rows to compare           may be missing
#   3. encode.py and its rows    small
#   4. checkpoint's scores       all weights in memory, freed afterwards
#   5. tables, one at a time; network; program
#   6. manifest                  so that the export can be opened
#   7. export's scores, report   differences raise, and the folder never appears
#   8. manifest again            with the report
def export_clicks(
    checkpoint: Checkpoint, out: str, *, config: TrainConfig, settings: ExportConfig
) -> dict[str, Any]:
    """Export a click model into the empty local folder `out`. Returns the content of report.json.
    Memory: first the checkpoint's weights, then one table of them, then the export's weights.
    Raises InputError for damaged weights, values beyond the quantisation's range, missing rows to
    compare, and an export that scores differently.
    """
    model, precision = click_settings(checkpoint, config)
    preprocessor = load_preprocessor(checkpoint.path)
    exported = ExportedModel(
        model, precision, settings.quantization, model_version(checkpoint), preprocessor
    )
    exported.row_format.check()
    if settings.triton:  # Checked before the slow part
        if not model.LABELLED:
            raise InputError(
                f"export: --triton needs a model of clicks, got {type(model).__name__}. Leave "
                "--triton out."
            )
        if weights := preprocessor.schema.list_weights:
            raise InputError(
                f"{checkpoint.path}: its lists have weights ({', '.join(weights)}), which --triton "
                "does not support. Leave --triton out."
            )
        require(extra="onnx")
        id_widths(preprocessor)
    # Reads rows, which may be missing, before weights, which take long to read and verify.
    rows = parity_rows(config, preprocessor, settings=settings, cache=cache_folder(checkpoint.path))
    encoder_parity = _write_encoder(out, preprocessor, rows, settings)
    served = open_served(checkpoint.path, config=config)
    score = served.scorer.values
    reference = _Reference(rows.score(score), rows.rows_per_s(score), served.scorer.weight_bytes)
    with contextlib.suppress(InputError):  # Of a model that does not recommend
        write_items(out, served.recommender)
    del served, score  # Frees memory for the weights of the export
    _write_program(
        _write_weights(checkpoint, out, exported),
        storage.join(out, PROGRAM),
        preprocessor.num_embeddings,
    )
    storage.write_bytes(storage.join(out, README), readme(exported).encode())
    files = seal_all(out, exported, {})
    _, scorer = open_export(out, own=type(model))
    report = {
        **_compare(out, exported, scorer, rows, reference, settings),
        "encoder_parity": encoder_parity,
    }
    if settings.triton:
        report["triton"] = write_repository(
            exported, scorer, storage.join(out, "triton"), rows=rows
        )
    storage.write_json(storage.join(out, REPORT), report)
    seal_all(out, exported, files)
    return report


def encoder_program() -> str:
    """Return the text of `encode.py`: `plain_encoder` and the rayrec modules that it needs, with
    merged imports.
    """
    heads: dict[str, None] = {"from __future__ import annotations": None}
    bodies = []
    for module in (hashing, rules, definitions, plain_encoder):
        source = inspect.getsource(module)
        lines = source.splitlines(keepends=True)
        docstring, *statements = ast.parse(source).body
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                text = "".join(lines[statement.lineno - 1 : statement.end_lineno])
                if not text.startswith(("from rayrec", "import rayrec")):
                    heads[text.strip()] = None
                lines[statement.lineno - 1 : statement.end_lineno] = [""] * len(text.splitlines())
        title = "".join(lines[: docstring.end_lineno])
        bodies.append("".join(lines[docstring.end_lineno :]).strip())
    return "\n".join([title, *sorted(heads), *(f"\n\n{body}" for body in bodies), ""])


def _write_encoder(
    out: str, preprocessor: Preprocessor, rows: ParityRows, settings: ExportConfig
) -> dict[str, Any]:
    """Write the Preprocessor and `encode.py`, and compare their results. Raises InputError if they
    differ.
    """
    folder = storage.join(out, PREPROCESSOR_FOLDER)
    preprocessor.save(folder)
    write_tables(folder, preprocessor.schema)
    program = storage.join(out, ENCODER)
    storage.write_bytes(program, encoder_program().encode())
    try:
        compared = compare_encoder(
            runpy.run_path(program)["Encoder"](folder),
            preprocessor,
            rows,
        )
    except ValueError as error:
        compared = {"rows": 0, "origin": rows.origin, "failure": str(error)}
    if compared["failure"] and not settings.ignore_parity:
        raise InputError(
            f"export: {ENCODER} does not encode rows as the Preprocessor does: "
            f"{compared['failure']}, on {compared['rows']} "
            f"{compared['origin']}. Report it to rayrec's maintainers, or pass --ignore-parity "
            f"and do not use {ENCODER}."
        )
    return compared


def _write_weights(checkpoint: Checkpoint, out: str, exported: ExportedModel) -> PlainModel:
    """Write the tables, one at a time, and the network weights. Returns the model with the
    latter.
    """
    row_format = exported.row_format
    dense = {}
    model = empty_model(
        exported.model, preprocessor=exported.preprocessor, precision=exported.precision
    )
    vocabulary_of = {
        PREFIX + weight: model.inputs.table_of[feature]
        for feature, weight in model.table_weights().items()
    }

    # A generator, so that one part of one table is in memory besides the tensor that it comes from.
    def chunks() -> Iterator[memoryview]:
        for name, tensor in full_tensors(checkpoint, PREFIX):
            if name not in vocabulary_of:
                dense[name.removeprefix(PREFIX)] = tensor
                continue
            values = tensor.numpy()
            for start in range(0, len(values), _CHUNK_ROWS):
                yield np.ascontiguousarray(
                    row_format.pack(values[start : start + _CHUNK_ROWS], table=vocabulary_of[name])
                ).data

    tables = exported.tables()
    entries = []
    begin = 0
    # In the order of full_tensors
    for vocabulary in (vocabulary_of[name] for name in sorted(vocabulary_of)):
        dtype, shape = tables[vocabulary]
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        entries.append((vocabulary, dtype, shape, begin, size_bytes))
        begin += size_bytes
    storage.write_stream(storage.join(out, TABLES), itertools.chain([header(entries)], chunks()))
    write_weights(storage.join(out, DENSE), dense)
    model.network.load_state_dict(dense, assign=True)
    return model


def _write_program(model: PlainModel, path: str, num_embeddings: Sequence[int]) -> None:
    inputs = model.inputs
    dim = model.width
    width = (len(inputs.features) - len(model.sequences)) * dim
    rows = torch.export.Dim("rows", min=1)
    examples = [
        torch.zeros(BATCH_ROWS, inputs.num_dense),
        torch.zeros(BATCH_ROWS, width),
    ]
    sequence_shapes: list[dict[int, Any]] = []
    first = dict(inputs.aligned)
    # Aligned lists share the number of ids
    lists = [first.get(name, name) for name in model.sequences]
    for name in lists:
        examples += [
            torch.zeros(2 * BATCH_ROWS, dim),
            torch.full((BATCH_ROWS,), 2, dtype=torch.int64),
        ]
        sequence_shapes += [
            {0: torch.export.Dim(f"ids_{lists.index(name)}", min=0)},
            {0: rows},
        ]
    if not isinstance(model.heads[0], LabelHead):
        rows_of = dict(zip(inputs.features, num_embeddings, strict=True))
        tables = model.tables if model.predicts_by_tables else ()
        examples += [torch.zeros(2 * BATCH_ROWS, dtype=torch.int64) for _ in lists]
        examples += [torch.zeros(2 * BATCH_ROWS) for _ in model.aged]
        examples += [torch.zeros(rows_of[name], dim) for name in tables]
        sequence_shapes += [
            {0: torch.export.Dim(f"ids_{lists.index(name)}", min=0)}
            for name in (*lists, *(first.get(name, name) for name in model.aged))
        ]
        sequence_shapes += [{} for _ in tables]
    shapes: tuple[Any, ...] = ({0: rows}, {0: rows})
    if sequence_shapes:
        shapes = (*shapes, tuple(sequence_shapes))
    torch.export.save(torch.export.export(model, tuple(examples), dynamic_shapes=shapes), path)


def _compare(
    out: str,
    exported: ExportedModel,
    scorer: ClickScorer,
    rows: ParityRows,
    reference: _Reference,
    settings: ExportConfig,
) -> dict[str, Any]:
    """Compare an export with its checkpoint, and return the report. Raises InputError if a
    difference exceeds its limit.
    """
    program = torch.export.load(storage.join(out, PROGRAM)).module()

    def score_by_program(batch: EncodedRows) -> np.ndarray:
        """Return the program's logits with the exported tables."""
        with torch.inference_mode():
            return flat_values(program(*scorer.inputs(batch)))

    labels = rows.labels() if isinstance(scorer.heads[0], BinaryHead) else None
    comparisons = {
        name: compare(rows.origin, labels, reference.logits, rows.score(score))
        for name, score in (("export", scorer.values), ("program", score_by_program))
    }
    failure = _failure(comparisons, exported, settings) or rows.fault
    if failure and not settings.ignore_parity:
        raise InputError(
            f"export: comparison failed with {failure}, on {rows.rows} {rows.origin}. Choose "
            "another --quantize or --parity-path, raise --max-auroc-loss, or pass --ignore-parity."
        )
    rows_per_s = rows.rows_per_s(scorer.values)
    return {
        "version": exported.version,
        "quantization": exported.quantization,
        "parity": {
            **comparisons["export"].to_dict(),
            "rows": rows.rows,
            "auroc_limit": settings.auroc_limit,
            "failure": failure,
        },
        "program_parity": {**comparisons["program"].to_dict(), "rows": rows.rows},
        "size": {
            "table_bytes": os.path.getsize(storage.join(out, TABLES)),
            "dense_bytes": os.path.getsize(storage.join(out, DENSE)),
            "weight_bytes": scorer.weight_bytes,
            "checkpoint_weight_bytes": reference.weight_bytes,
            "ratio": scorer.weight_bytes / reference.weight_bytes,
        },
        "speed": {
            "batch_rows": BATCH_ROWS,
            "rows_per_s": rows_per_s,
            "checkpoint_rows_per_s": reference.rows_per_s,
            "ratio": rows_per_s / reference.rows_per_s,
        },
    }


def _failure(
    comparisons: dict[str, Comparison], exported: ExportedModel, settings: ExportConfig
) -> str | None:
    """Return the first failure of the export, then of its program, None without one. In bf16 only
    the program's AUROC counts, because it rounds at other places than the fused layers.
    """
    failure = comparisons["export"].failure(exported.quantization, auroc_limit=settings.auroc_limit)
    if failure:
        return failure
    quantization: Quantization = (
        "fp32" if exported.quantization == exported.precision == "fp32" else "fp16"
    )
    failure = comparisons["program"].failure(
        quantization, auroc_limit=settings.auroc_limit, relative=True
    )
    return failure and f"{failure} by {PROGRAM}"


# -- README.md, from the texts in templates/


def _text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text()


LOADER: Final = _text("score.txt")
"""Code that scores encoded rows with only PyTorch, NumPy and safetensors."""
FROM_RAW: Final = _text("from_raw.txt")
"""Code that follows LOADER and scores raw rows without rayrec."""


def readme(exported: ExportedModel) -> str:
    """Return the text of an export's README.md."""
    model = exported.model
    inputs = model_inputs(exported.preprocessor)
    heads = () if model.LABELLED else model.output_heads(inputs)
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(_text("README.md")).render(
        exported=exported,
        network=type(exported.model).__name__.removesuffix("Config"),
        columns=exported.preprocessor.inputs,
        inputs=inputs,
        width=model.table_width,
        gives=" and ".join(f"{head.kind} `{head.name}`" for head in heads),
        outputs=[name for head in heads for name in head.names],
        sequences=model.sequences(inputs),
        aged=[name for name in model.sequences(inputs) if name in inputs.aged],
        tables=model.full_tables(inputs) if model.TRAINS_ON_TABLES else (),
        listed=_listed,
        score=LOADER,
        from_raw=FROM_RAW,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
