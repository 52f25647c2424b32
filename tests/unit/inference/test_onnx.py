"""The model repository for Triton: its configuration by the documented schema, its graph by the runtime that Triton embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import bucketed_preprocessor, lists_preprocessor, multi_hot_preprocessor, save_clicks
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from rayrec.config import InputError
from rayrec.inference.config import ExportConfig
from rayrec.inference.export.onnx import onnx_inputs
from rayrec.inference.export.triton import MAX_BATCH_ROWS, config_pbtxt
from rayrec.inference.export.write import export
from rayrec.inference.model import open_served

FIELD = descriptor_pb2.FieldDescriptorProto
# The part of Triton's model_config.proto (package inference) that a model like ours uses: message -> (field, number, type, many).
SCHEMA: dict[str, list[tuple[str, int, str, bool]]] = {
    "ModelInput": [("name", 1, "string", False), ("data_type", 2, "DataType", False), ("dims", 4, "int64", True)],
    "ModelOutput": [("name", 1, "string", False), ("data_type", 2, "DataType", False), ("dims", 3, "int64", True)],
    "ModelDynamicBatching": [
        ("preferred_batch_size", 1, "int32", True),
        ("max_queue_delay_microseconds", 2, "uint64", False),
    ],
    "ModelParameter": [("string_value", 1, "string", False)],
    "ModelConfig": [
        ("name", 1, "string", False),
        ("platform", 2, "string", False),
        ("max_batch_size", 4, "int32", False),
        ("input", 5, "ModelInput", True),
        ("output", 6, "ModelOutput", True),
        ("default_model_filename", 8, "string", False),
        ("dynamic_batching", 11, "ModelDynamicBatching", False),
        ("backend", 17, "string", False),
    ],
}
DATA_TYPES = {"TYPE_INVALID": 0, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_FP64": 12}
SCALARS = {
    "string": FIELD.TYPE_STRING,
    "int32": FIELD.TYPE_INT32,
    "int64": FIELD.TYPE_INT64,
    "uint64": FIELD.TYPE_UINT64,
}


def _model_config() -> type[Any]:
    file = descriptor_pb2.FileDescriptorProto(name="triton_part.proto", package="inference", syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    for name, number in DATA_TYPES.items():
        kinds.value.add(name=name, number=number)
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, number, kind, many in fields:
            field = described.field.add(
                name=name, number=number, label=FIELD.LABEL_REPEATED if many else FIELD.LABEL_OPTIONAL
            )
            if kind in SCALARS:
                field.type = SCALARS[kind]
            else:
                field.type = FIELD.TYPE_ENUM if kind == "DataType" else FIELD.TYPE_MESSAGE
                field.type_name = f".inference.{kind}"
    config = file.message_type[-1]  # map<string, ModelParameter> parameters = 14
    entry = config.nested_type.add(name="ParametersEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=FIELD.LABEL_OPTIONAL, type=FIELD.TYPE_STRING)
    entry.field.add(
        name="value",
        number=2,
        label=FIELD.LABEL_OPTIONAL,
        type=FIELD.TYPE_MESSAGE,
        type_name=".inference.ModelParameter",
    )
    config.field.add(
        name="parameters",
        number=14,
        label=FIELD.LABEL_REPEATED,
        type=FIELD.TYPE_MESSAGE,
        type_name=".inference.ModelConfig.ParametersEntry",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def test_the_configuration_fits_the_schema() -> None:
    config = text_format.Parse(config_pbtxt("step_1-abc-int8", num_dense=13, num_ids=214), _model_config()())
    assert (config.name, config.backend, config.max_batch_size) == ("click_model", "onnxruntime", MAX_BATCH_ROWS)
    found = {(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in (*config.input, *config.output)}
    fp32, int64 = DATA_TYPES["TYPE_FP32"], DATA_TYPES["TYPE_INT64"]
    assert found == {("dense", fp32, (13,)), ("ids", int64, (214,)), ("logit", fp32, (1,))}
    assert config.HasField("dynamic_batching")
    assert config.parameters["rayrec_version"].string_value == "step_1-abc-int8"
    with pytest.raises(text_format.ParseError):  # the schema is one that can be broken
        text_format.Parse('name: "x" no_such_field: 1', _model_config()())


@pytest.mark.parametrize(
    ("quantize", "make"),
    [
        pytest.param(None, lambda: None, marks=pytest.mark.extended),
        ("int4", lambda: multi_hot_preprocessor(5)),
        pytest.param("int8", bucketed_preprocessor, marks=pytest.mark.extended),  # without dense columns
    ],
)
def test_the_graph_scores_as_the_export(
    tmp_path: Path, quantize: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)
    saved = save_clicks(tmp_path / "run", preprocessor=make())
    settings = ExportConfig(
        quantize=quantize, triton=True, parity_rows=100, max_auroc_loss=0.1, ignore_parity=True
    )  # of no log
    told = export(str(saved.run), str(tmp_path / "out"), config=saved.config, settings=settings)
    assert told["triton"]["max_relative_difference"] < 1e-5
    assert told["parity"]["failure"].startswith("no rows of the run's log")
    model = tmp_path / "out" / "triton" / "click_model"
    config = text_format.Parse((model / "config.pbtxt").read_text(), _model_config()())
    session = onnxruntime.InferenceSession(str(model / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert {tensor.name: tensor.shape[1:] for tensor in session.get_inputs()} == {
        tensor.name: list(tensor.dims) for tensor in config.input
    }
    assert [(tensor.name, tensor.shape[1:]) for tensor in session.get_outputs()] == [("logit", [1])]
    served = open_served(str(tmp_path / "out"))  # its files are in the manifest, and sound
    for count in (50, 1):
        rows = saved.rows(count)
        np.testing.assert_allclose(session.run(None, onnx_inputs(rows))[0][:, 0], served.score(rows), rtol=0, atol=1e-5)


def test_what_no_graph_can_hold_is_refused(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path / "run", preprocessor=lists_preprocessor())
    with pytest.raises(InputError, match="column keys has any number"):
        export(
            str(saved.run),
            str(tmp_path / "out"),
            config=saved.config,
            settings=ExportConfig(triton=True, parity_rows=50),
        )
    assert not (tmp_path / "out").exists()
