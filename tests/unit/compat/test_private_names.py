"""Private names of Ray, torch and TorchRec in the installed versions, and the arguments they
accept.
"""

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from ray import serve
from ray.data._internal.execution.interfaces import PhysicalOperator
from ray.serve._private.common import DeploymentID
from ray.serve._private.utils import get_deployment_actor_name
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from rayrec.compat import PrivateName, ray_compat, resolve, torch_compat

ALL = {**{("ray", name): entry for name, entry in ray_compat.NAMES.items()}}
ALL |= {("torch", name): entry for name, entry in torch_compat.NAMES.items()}


@pytest.mark.parametrize(("library", "name"), ALL)
def test_private_name_exists_with_reason(library: str, name: str) -> None:
    entry = ALL[library, name]
    assert isinstance(
        getattr({"ray": ray_compat, "torch": torch_compat}[library], name), ModuleType
    ) == (entry.attribute is None)
    assert entry.reason.endswith(".")
    assert "\n" not in entry.reason


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "get_memory_info_reply": (
        lambda: ray_compat.internal_api.get_memory_info_reply,
        (0,),
        {"timeout_seconds": 5.0},
    ),
    "draining": (
        lambda: ray_compat.state.state.get_draining_nodes,
        (),
        {},
    ),
    "available": (
        lambda: ray_compat.state.available_resources_per_node,
        (),
        {},
    ),
    "token": (
        lambda: ray_compat.maybe_enable_token_auth_if_token_available,
        (),
        {"warn_if_disabled": False},
    ),
    "channel": (
        lambda: ray_compat.init_grpc_channel,
        ("host:1",),
        {},
    ),
    "client": (
        lambda: ray_compat.SubmissionClient,
        (),
        {"address": "http://host"},
    ),
    "policy": (
        lambda: ray_compat.BackpressurePolicy,
        (0, 0, 0),
        {},
    ),
    "active": (
        lambda: PhysicalOperator.num_active_tasks,
        (0,),
        {},
    ),
    "serve": (
        lambda: ray_compat.get_global_client,
        (),
        {},
    ),
    "call of all replicas": (
        lambda: DeploymentHandle.broadcast,
        (0, "method", 1),
        {},
    ),
    "results of all replicas": (
        lambda: DeploymentBroadcastResponse.results,
        (0,),
        {"timeout_s": 1.0, "return_exceptions": True},
    ),
    "shared actor": (
        lambda: serve.get_deployment_actor,
        ("name",),
        {},
    ),
    "timeout": (
        lambda: ray_compat.WorkerGroupStartupTimeoutError,
        (2,),
        {},
    ),
    "device": (
        lambda: torch_compat.remote_device,
        ("rank:0/cpu",),
        {},
    ),
    "shard": (lambda: torch_compat.Shard, (0, 0), {}),
    "shard metadata": (
        lambda: torch_compat.ShardMetadata,
        ([0], [1], "rank:0/cpu"),
        {},
    ),
    "metadata": (
        lambda: torch_compat.ShardedTensorMetadata,
        (),
        {"shards_metadata": [], "size": 0, "tensor_properties": 0},
    ),
    "properties": (
        lambda: torch_compat.TensorProperties,
        (),
        {"dtype": torch.float32},
    ),
    "sharded": (
        lambda: torch_compat.ShardedTensor._init_from_local_shards_and_global_metadata,
        ([], 0),
        {"process_group": None},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_private_function_accepts_arguments(call: str) -> None:
    function, arguments, named = CALLS[call]
    inspect.signature(function()).bind(*arguments, **named)


def test_ray_answers_private_requests_and_constants_match() -> None:
    assert ray_compat.gcs_service_pb2.CheckAliveRequest() is not None  # type: ignore[attr-defined]
    assert hasattr(ray_compat.gcs_service_pb2_grpc, "NodeInfoGcsServiceStub")
    for name in ("DataParallelTrainer", "PlacementGroupCleanerCallback", "DatasetsCallback"):
        assert hasattr(ray_compat.data_parallel_trainer, name)
    name = get_deployment_actor_name(
        DeploymentID("deployment", "application"), "actor", code_version="*"
    )
    assert name.split("::")[-4:] == ["application", "deployment", "*", "actor"]
    assert isinstance(ray_compat.ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, str)


def test_torch_private_attributes_exist() -> None:
    found = torch_compat.uncounted_operators(lambda: 0, lambda: 0)
    assert (
        torch_compat.base_operator(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        )
        in found
    )
    assert torch_compat.onednn_has_bfloat16() in (False, True)
    called = []
    value = torch.ones(1, requires_grad=True)
    loss = (value * 2).sum()
    loss.register_hook(
        lambda gradient: torch_compat.call_at_end_of_backward(
            lambda: called.append(value.grad is not None)
        )
    )
    loss.backward()
    assert called == [True]


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
def test_onednn_linear_matches_torch() -> None:
    inputs = torch.randn(8, 16)
    weight = torch.randn(4, 16)
    bias = torch.randn(4)
    expected = torch.nn.functional.linear(inputs, weight, bias).relu()
    torch.testing.assert_close(
        torch_compat.linear_pointwise(inputs, weight, bias, "relu"), expected
    )


def test_torchrec_private_attributes_exist_or_raise() -> None:
    from torchrec.distributed import (
        DistributedModelParallel,
        embedding,
        embedding_lookup,
        embeddingbag,
    )

    assert "_dmp_wrapped_module" in inspect.getsource(DistributedModelParallel)
    assert "_process_group" in inspect.getsource(torch_compat.ShardedTensor)
    for module in (embeddingbag, embedding):
        source = inspect.getsource(module)
        assert all(
            name in source
            for name in ('"_optimizer_classes"', '"_optimizer_kwargs"', "self._lookups")
        )
    assert "self._emb_modules" in inspect.getsource(embedding_lookup)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name' from 'torch'"):
        resolve(
            {"gone": PrivateName("torch", "no_such_name", "For this test.")},
            "gone",
            "rayrec.compat.torch_compat",
        )
    with pytest.raises(AttributeError, match="has no attribute 'never_listed'"):
        torch_compat.__getattr__("never_listed")
