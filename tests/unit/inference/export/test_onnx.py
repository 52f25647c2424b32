"""Model repository for Triton: configuration by the documented schema, graph in the runtime that Triton embeds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import bucketed_preprocessor, lists_preprocessor, multi_hot_preprocessor, save_clicks
from builders.exports import export_of
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from rayrec.config import InputError
from rayrec.inference.export.onnx import onnx_inputs
from rayrec.inference.export.triton import MAX_BATCH_ROWS, config_pbtxt
from rayrec.inference.model import open_served

# The part of Triton's model_config.proto (package inference) that a model like ours uses: name:number:type, * where repeated.
SCHEMA = {
    "ModelInput": "name:1:string data_type:2:DataType dims:4:int64*",
    "ModelOutput": "name:1:string data_type:2:DataType dims:3:int64*",
    "ModelDynamicBatching": "preferred_batch_size:1:int32* max_queue_delay_microseconds:2:uint64",
    "ModelParameter": "string_value:1:string",
    "Parameters": "key:1:string value:2:ModelParameter",
    "ModelConfig": "name:1:string platform:2:string max_batch_size:4:int32 input:5:ModelInput* output:6:ModelOutput* "
    "default_model_filename:8:string dynamic_batching:11:ModelDynamicBatching parameters:14:Parameters* backend:17:string",
}
DATA_TYPES = {"TYPE_INVALID": 0, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_FP64": 12}


def _model_config() -> type[Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="triton_part.proto", package="inference", syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    for name, number in DATA_TYPES.items():
        kinds.value.add(name=name, number=number)
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (text.split(":") for text in fields.split()):
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            added = described.field.add(name=name, number=int(number), label=label)
            kind = kind.rstrip("*")
            scalar = getattr(field, f"TYPE_{kind.upper()}", None)
            added.type = scalar or (field.TYPE_ENUM if kind == "DataType" else field.TYPE_MESSAGE)
            if scalar is None:
                added.type_name = f".inference.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def test_triton_config_fits_schema() -> None:
    config = text_format.Parse(config_pbtxt("step_1-abc-int8", num_dense=13, num_ids=214), _model_config()())
    assert (config.name, config.backend, config.max_batch_size) == ("click_model", "onnxruntime", MAX_BATCH_ROWS)
    result = {(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in (*config.input, *config.output)}
    fp32, int64 = DATA_TYPES["TYPE_FP32"], DATA_TYPES["TYPE_INT64"]
    assert result == {("dense", fp32, (13,)), ("ids", int64, (214,)), ("logit", fp32, (1,))}
    assert config.HasField("dynamic_batching")
    (parameter,) = config.parameters
    assert (parameter.key, parameter.value.string_value) == ("rayrec_version", "step_1-abc-int8")
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
def test_graph_scores_match_export(tmp_path: Path, quantize: Any, make: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    saved = save_clicks(tmp_path / "run", preprocessor=make())
    report = export_of(saved, tmp_path / "out", quantize=quantize, triton=True, max_auroc_loss=0.1, ignore_parity=True)
    assert report["triton"]["max_relative_difference"] < 1e-5
    assert report["parity"]["failure"].startswith("no rows of the run's log")
    model = tmp_path / "out" / "triton" / "click_model"
    config = text_format.Parse((model / "config.pbtxt").read_text(), _model_config()())
    session = onnxruntime.InferenceSession(str(model / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    dims = {tensor.name: list(tensor.dims) for tensor in config.input}
    assert {tensor.name: tensor.shape[1:] for tensor in session.get_inputs()} == dims
    assert [(tensor.name, tensor.shape[1:]) for tensor in session.get_outputs()] == [("logit", [1])]
    served = open_served(str(tmp_path / "out"))  # its files are in the manifest, and sound
    for count in (50, 1):
        rows = saved.rows(count)
        np.testing.assert_allclose(session.run(None, onnx_inputs(rows))[0][:, 0], served.score(rows), rtol=0, atol=1e-5)


def test_unsupported_graph_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column keys has a variable number"):
        export_of(save_clicks(tmp_path / "run", preprocessor=lists_preprocessor()), tmp_path / "out", triton=True)
    assert not (tmp_path / "out").exists()
