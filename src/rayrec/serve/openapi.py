"""OpenAPI document of a server, with the type of each column (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayrec.environment.installation import versions
from rayrec.models.heads import Head, many
from rayrec.serve.row_readers import MAX_INTEGER, MAX_NUMBER

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema
    from rayrec.serve.config import ServeConfig

_MISSING = "Absent or null: missing."
_STATUSES = {
    400: "Not a request, or a row that is not one: which, and the column at fault.",
    401: "No bearer token, or another one.",
    408: "The request did not end in time.",
    413: "Too many bytes or rows.",
    415: "Another content type, charset or encoding.",
    421: "The header Host names another server.",
    422: "Numbers too large for a finite score.",
    503: "Too much waits already, or no model is loaded; Retry-After says when to try again.",
    504: "Not scored in time.",
}


def document(model: ServedModel, *, config: ServeConfig, with_token: bool) -> dict[str, Any]:
    """Return the document as JSON values. `with_token` is whether requests need a token."""
    schema = model.preprocessor.schema
    secured: dict[str, Any] = {"security": [{"token": []}]} if with_token else {}
    metrics = {"200": _content("Metrics in Prometheus' text format.", "text/plain", {"type": "string"})}
    if with_token:
        metrics["401"] = _error(401)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rayrec",
            "version": versions()["rayrec"],
            "description": "Scores rows of a click log. The model and the Preprocessor are named in every answer.",
        },
        "paths": {
            "/v1/score": {"post": {**_score(schema, example_row(model.preprocessor), config, with_token), **secured}},
            "/healthz": {"get": {"summary": "Whether the process lives.", "responses": {"200": _json("Alive.", "Alive")}}},
            "/readyz": {
                "get": {
                    "summary": "Whether a model is loaded.",
                    "responses": {"200": _json("Ready.", "Ready"), "503": _error(503)},
                }
            },
            "/metrics": {"get": {"summary": "Counts of all replicas, for Prometheus.", "responses": metrics, **secured}},
        },
        "components": {
            "schemas": {
                "Row": {"type": "object", "properties": _columns(schema), "additionalProperties": False},
                **_answers(model.scorer.heads),
            },
            **({"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}} if with_token else {}),
        },
    }


def example_row(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return a row of numbers and of known categories, if the vocabulary reveals them."""
    schema, inputs = preprocessor.schema, preprocessor.inputs
    row: dict[str, Any] = dict.fromkeys(schema.dense, 1)
    if schema.tokens != "hexadecimal":  # The vocabulary has only hashes of text
        return row
    for number, name in enumerate(inputs.sparse):
        vocabulary = preprocessor.vocabulary(number)
        if len(vocabulary) and name in schema.sparse:
            row[name] = f"{int(np.uint32(vocabulary[0])):08x}"
    return row


def _columns(schema: Schema) -> dict[str, Any]:
    dense: dict[str, Any]
    token: dict[str, Any]
    if schema.tokens == "hexadecimal":
        dense = {"type": ["integer", "null"], "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER, "description": _MISSING}
        # Limits the length too, because in some regex dialects $ also matches before a final line end.
        token = {"type": ["string", "null"], "pattern": "^([0-9a-fA-F]{8})?$", "maxLength": 8}
        token["description"] = f"A category: 8 hexadecimal digits. {_MISSING}"
    else:
        dense = {"type": ["number", "boolean", "null"], "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
        dense["description"] = _MISSING
        token = {"type": ["string", "integer", "boolean", "null"], "minimum": -(2**63), "maximum": 2**64 - 1}
        token["description"] = f"A category. {_MISSING}"
    ignored = {"description": "Ignored."}
    scored = schema.unlabelled().columns
    categories = {"type": ["array", "null"], "items": token, "description": f"Any number of categories. {_MISSING}"}
    weights = {"type": ["array", "null"], "items": dense, "description": "A weight for each category of a list."}
    return {
        **{name: ignored for name in schema.columns if name not in scored},
        **dict.fromkeys(schema.dense, dense),
        **{name: categories if name in schema.lists else token for name in schema.sparse},
        **dict.fromkeys(schema.list_weights, weights),
    }


def _score(schema: Schema, example: dict[str, Any], config: ServeConfig, with_token: bool) -> dict[str, Any]:
    rows = {"type": "array", "minItems": 1, "maxItems": config.max_rows, "items": {"$ref": "#/components/schemas/Row"}}
    body = {**_fields({"rows": rows}), "additionalProperties": False}
    content: dict[str, Any] = {"application/json": {"schema": body, "example": {"rows": [example]}}}
    texts = {"text/tab-separated-values": "\t"}
    if schema.tokens != "hexadecimal":
        texts["text/csv"] = schema.delimiter
    for media_type, delimiter in texts.items():
        if delimiter != schema.list_delimiter:
            names = delimiter.join(schema.unlabelled().columns)
            header = "without a header" if delimiter == "\t" else "behind a header or none (header=present or absent)"
            described = f"A line a row, its columns in this order, {header}: {names}. A label before them is ignored."
            described += " The parameter label=present or label=absent says whether there is one."
            if schema.lists:
                described += f" Categories of a list are joined by {schema.list_delimiter}."
            content[media_type] = {"schema": {"type": "string", "pattern": "[^\\r\\n]", "description": described}}
    responses = {"200": _json("Scores, in the order of the rows.", "Scores")}
    responses.update({str(status): _error(status) for status in _STATUSES if status != 401 or with_token})
    return {
        "summary": "Score rows.",
        "operationId": "score",
        "parameters": [
            {
                "name": "columns",
                "in": "query",
                "description": "Whether to name the columns of unknown categories, too.",
                "schema": {"type": "boolean", "default": False},
            }
        ],
        "requestBody": {"required": True, "content": content},
        "responses": responses,
    }


def _answers(heads: Sequence[Head]) -> dict[str, Any]:
    text = {"type": "string"}
    scores = {
        **{name: field for head in heads for name, field in head.json_schema().items()},
        "unknown": many({"type": "integer", "minimum": 0}, "Categories the vocabulary does not hold."),
        "model": text,
        "preprocessor": text,
        "unknown_columns": many(many(text, "Names."), "Where these are, with columns=true."),
    }
    error = {
        "message": text,
        "row": {"type": ["integer", "null"], "description": "Number of the row at fault, from 0."},
        "field": {"type": ["string", "null"], "description": "Column or field at fault."},
    }
    return {
        "Scores": _fields(scores, optional="unknown_columns"),
        "Error": _fields({"error": _fields(error)}),
        "Alive": _fields({"status": text}),
        "Ready": _fields({"status": text, "model": text, "preprocessor": text}),
    }


def _fields(described: dict[str, Any], *, optional: str = "") -> dict[str, Any]:
    return {"type": "object", "required": [name for name in described if name != optional], "properties": described}


def _content(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _json(description: str, name: str) -> dict[str, Any]:
    return _content(description, "application/json", {"$ref": f"#/components/schemas/{name}"})


def _error(status: int) -> dict[str, Any]:
    return _json(_STATUSES[status], "Error")
