"""OpenAPI document of a server, with the type of each column
(https://spec.openapis.org/oas/v3.1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from rayrec.config import packaged_json
from rayrec.data.logs.column_values import LIMIT
from rayrec.environment.installation import versions
from rayrec.models.heads import many
from rayrec.serve.recommendations import DEFAULT_K
from rayrec.serve.requests import find_delimiter
from rayrec.serve.row_readers import MAX_INTEGER

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema
    from rayrec.serve.config import ServeConfig
    from rayrec.workloads.recsys.items.recommender import Recommender

_MISSING = "Absent or null: missing."


def document(
    model: ServedModel,
    *,
    config: ServeConfig,
    with_token: bool,
    recommender: Recommender | None = None,
) -> dict[str, Any]:
    """Return the document as JSON values: openapi.json, completed for a model. `with_token`:
    whether requests need a token. `recommender`: that of a model that recommends.
    """
    schema = model.preprocessor.schema
    result: dict[str, Any] = packaged_json(__package__, "openapi.json")
    score = result["paths"]["/v1/score"]["post"]
    metrics = result["paths"]["/metrics"]["get"]
    components = result["components"]
    answers = result["components"]["schemas"]
    result["info"]["version"] = versions()["rayrec"]
    score["requestBody"]["content"] = _contents(schema, example_row(model.preprocessor), config)
    answers["Row"]["properties"] = _columns(schema)
    fields = {
        name: field for head in model.scorer.heads for name, field in head.json_schema().items()
    }
    answers["Scores"]["properties"] = {**fields, **answers["Scores"]["properties"]}
    answers["Scores"]["required"] = [*fields, *answers["Scores"]["required"]]
    operations = [score, metrics]
    if recommender is not None:
        recommend = _recommend_operation(score, recommender, schema, config)
        result["paths"]["/v1/recommend"] = {"post": recommend}
        operations.append(recommend)
        answers["Recommendations"] = _recommendations(recommender)
    if not with_token:
        del components["securitySchemes"]
        for operation in operations:
            del operation["security"], operation["responses"]["401"]
    return result


def _id_type(recommender: Recommender) -> str:
    return "integer" if recommender.ids.type == pa.int64() else "string"


def _recommendations(recommender: Recommender) -> dict[str, Any]:
    """Return the schema of answers with items."""
    ids = "Ids of items, the best first."
    if not recommender.ids.is_known:
        ids = "Tokens of items, the best first: integers, or hashes of texts."
    fallback = {
        "type": ["string", "null"],
        "description": "popularity, if the model knows nothing of the row. Then a score is 1 / "
        "rank.",
    }
    text = {"type": "string"}
    properties = {
        "items": many(many({"type": _id_type(recommender)}, ids), "Of each row."),
        "scores": many(many({"type": "number"}, "Of each item."), "Of each row."),
        "fallback": many(fallback, "What answered each row in place of the model."),
        "model": text,
        "preprocessor": text,
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _recommend_operation(
    score: Mapping[str, Any],
    recommender: Recommender,
    schema: Schema,
    config: ServeConfig,
) -> dict[str, Any]:
    """Return the operation of recommendations, with the errors of `score`."""
    one = {"type": ["string", "integer", "boolean"]}
    ids = many(one, "Ids of items.")
    per_row = {**many(ids, "A list for each row."), "type": ["array", "null"]}
    columns = _columns(schema)
    columns["user"] = one
    if recommender.is_list:
        columns.pop(recommender.feature, None)
    history = {**many(one, "Items in chronological order."), "type": ["array", "null"]}
    columns["history"] = history
    if recommender.is_list:
        columns |= _time_fields(recommender)
        columns.pop(recommender.ages or "", None)
    row = {"type": "object", "properties": columns, "additionalProperties": False}
    rows = {"type": "array", "minItems": 1, "maxItems": config.max_rows, "items": row}
    count = {
        "type": "integer",
        "minimum": 1,
        "maximum": config.max_k,
        "default": min(DEFAULT_K, config.max_k),
    }
    among = {"anyOf": [per_row, ids], "description": "The only possible items."}
    fields = {
        "rows": rows,
        "k": count,
        "exclude_seen": {"type": "boolean", "default": True},
        "exclude": per_row,
        "among": among,
    }
    body = {
        "type": "object",
        "required": ["rows"],
        "properties": fields,
        "additionalProperties": False,
    }
    answer = {"$ref": "#/components/schemas/Recommendations"}
    answered = {
        "description": "Items, in the order of the rows.",
        "content": {"application/json": {"schema": answer}},
    }
    return {
        "summary": "Recommend items for rows.",
        "operationId": "recommend",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {**score["responses"], "200": answered},
        "security": list(score["security"]),
    }


def _time_fields(recommender: Recommender) -> dict[str, Any]:
    """Return the fields of a row with times, which models that read none ignore."""
    one = {"type": ["string", "number"]}
    times = "The time of each item of the history: a date or time, or a number since 1970."
    if recommender.ages is None:
        times = "Ignored."
    request_time = "Ignored."
    if recommender.reads_request_time:
        request_time = "The time for which the row asks. Null: now."
    return {
        "times": {**many(one, times), "type": ["array", "null"]},
        "time": {"type": ["string", "number", "null"], "description": request_time},
    }


def example_row(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return a row of numbers and of known categories, if the vocabulary reveals them."""
    schema = preprocessor.schema
    inputs = preprocessor.inputs
    row: dict[str, Any] = {name: 1 for name in schema.dense if name not in schema.derived}
    if schema.tokens != "hexadecimal":  # The vocabulary has only hashes of text
        return row
    for number, name in enumerate(inputs.sparse):
        vocabulary = preprocessor.vocabulary(number)
        if len(vocabulary) and name in schema.sparse:
            row[name] = f"{int(np.uint32(vocabulary[0])):08x}"
    return row


def _columns(schema: Schema) -> dict[str, Any]:
    if schema.tokens == "hexadecimal":
        dense: dict[str, Any] = {
            "type": ["integer", "null"],
            "minimum": -MAX_INTEGER,
            "maximum": MAX_INTEGER,
        }
        # Limits the length too, because in some regex dialects $ also matches before a final line
        # end.
        token: dict[str, Any] = {
            "type": ["string", "null"],
            "pattern": "^([0-9a-fA-F]{8})?$",
            "maxLength": 8,
        }
        token["description"] = f"A category: 8 hexadecimal digits. {_MISSING}"
    else:
        dense = {
            "type": ["number", "boolean", "null"],
            "minimum": -LIMIT,
            "maximum": LIMIT,
        }
        token = {
            "type": ["string", "integer", "boolean", "null"],
            "minimum": -(2**63),
            "maximum": 2**64 - 1,
        }
        token["description"] = f"A category. {_MISSING}"
    dense["description"] = _MISSING
    ignored = {"description": "Ignored."}
    scored = schema.unlabelled().columns
    categories = {
        "type": ["array", "null"],
        "items": token,
        "description": f"Any number of categories. {_MISSING}",
    }
    weights = {
        "type": ["array", "null"],
        "items": dense,
        "description": "A weight for each category of a list.",
    }
    ages = {**weights, "description": "An age in seconds for each category of a list."}
    aged = [schema.feature(name).ages for name in schema.aged]
    time = {
        "type": ["string", "number", "null"],
        "description": f"A date or time, or seconds since 1970. {_MISSING}",
    }
    properties = {
        **{name: ignored for name in schema.columns if name not in scored},
        **dict.fromkeys(schema.dense, dense),
        **{name: categories if name in schema.lists else token for name in schema.sparse},
        **dict.fromkeys(schema.list_weights, weights),
        **dict.fromkeys(filter(None, aged), ages),
    }
    for name, kind in schema.program.sources.items():
        items = {"number": dense, "time": time}.get(kind.kind, token)
        properties[name] = {"type": ["array", "null"], "items": items} if kind.is_list else items
    return {name: value for name, value in properties.items() if name not in schema.derived}


_LINES: Final = (
    "Lines of a log, with labels, in any format of files with lines: JSON lines, libsvm, libffm, "
    "Vowpal Wabbit, slot:value, or as text/csv and text/tab-separated-values."
)


def _contents(schema: Schema, example: dict[str, Any], config: ServeConfig) -> dict[str, Any]:
    """Return the accepted media types of a scoring request."""
    rows = {
        "type": "array",
        "minItems": 1,
        "maxItems": config.max_rows,
        "items": {"$ref": "#/components/schemas/Row"},
    }
    body = {
        "type": "object",
        "required": ["rows"],
        "properties": {"rows": rows},
        "additionalProperties": False,
    }
    content: dict[str, Any] = {"application/json": {"schema": body, "example": {"rows": [example]}}}
    texts = {"text/tab-separated-values": "\t"}
    if schema.tokens != "hexadecimal":
        texts["text/csv"] = find_delimiter("csv", schema)
    for media_type, delimiter in texts.items():
        described = _described_lines(schema, delimiter)
        if described and delimiter != schema.list_delimiter:
            content[media_type] = {
                "schema": {"type": "string", "pattern": "[^\\r\\n]", "description": described}
            }
    if schema.tokens != "hexadecimal":
        lines = {"type": "string", "pattern": "[^\\r\\n]", "description": _LINES}
        content["text/plain"] = {"schema": lines}
        content["application/x-ndjson"] = {"schema": lines}
    return content


def _described_lines(schema: Schema, delimiter: str) -> str:
    """Return the description of text rows, empty if they are rejected."""
    if not schema.line_forms:
        if delimiter == "\t":
            return ""
        described = "A header with the names of the columns, in any order, then a line a row."
    else:
        full = schema.line_forms[0]
        bare = schema.line_forms[-1]
        header = (
            "without a header"
            if delimiter == "\t"
            else "behind a header or none (header=present or absent)"
        )
        described = (
            f"A line a row, {header}. Without one, its columns are those of the training log, in "
            "this order: "
        )
        described += f"{delimiter.join(bare)}."
        if full != bare:
            described += (
                f" Or with labels, weight and time, which are ignored: {delimiter.join(full)}."
            )
            described += " The parameter label=present or label=absent says which."
    if schema.lists:
        marks = {schema.list_mark(name): None for name in schema.lists}
        described += f" Categories of a list are joined by {' or '.join(map(repr, marks))}."
    return described
