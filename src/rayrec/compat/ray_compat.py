"""Private names of Ray, imported lazily. Importing this module does not import Ray."""

# ruff: noqa: F401  # the names are for other modules
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rayrec.compat import read_names, resolve

if TYPE_CHECKING:
    from ray._private import internal_api, state
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient
    from ray.data._internal.execution.backpressure_policy import (
        ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    )
    from ray.data._internal.execution.backpressure_policy.backpressure_policy import (
        BackpressurePolicy,
    )
    from ray.serve.context import _get_global_client as get_global_client
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api import data_parallel_trainer

NAMES: Final = read_names("ray")
"""All private names of Ray used by rayrec, by their name in this module."""


def __getattr__(name: str) -> Any:
    return resolve(NAMES, name, __name__)


# Public alpha APIs of Ray Serve, which may change. tests/integration/test_serve.py calls them.


def shared_actor(name: str, actor_class: type, **arguments: Any) -> dict[str, Any]:
    """Return deployment options for an actor shared by the replicas. Ray Serve starts it first,
    restarts and stops it.
    """
    import ray
    from ray.serve.config import DeploymentActorConfig

    remote: Any = ray.remote(actor_class)
    actor = DeploymentActorConfig(
        name=name, actor_class=remote, init_kwargs=arguments, actor_options={"num_cpus": 0}
    )
    return {"deployment_actors": [actor]}


def get_shared_actor(name: str) -> Any:
    """Return the handle of a shared actor in a replica. Raises ValueError while it restarts."""
    from ray import serve

    return serve.get_deployment_actor(name)


def find_shared_actor(application: str, deployment: str, name: str) -> Any:
    """Return the handle of a shared actor in any process. Raises ValueError if it does not exist or
    restarts.
    """
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        # Ray Serve names it PREFIX::APPLICATION::DEPLOYMENT::VERSION::NAME.
        parts = actor["name"].split("::")
        if [*parts[-4:-2], parts[-1]] == [application, deployment, name]:
            return ray.get_actor(**actor)
    raise ValueError(f"{application}: no actor {name}")


def call_replicas(handle: Any, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """Call a method of all active replicas, and return their results or exceptions."""
    results: list[Any] = handle.broadcast(method, *arguments).results(
        timeout_s=timeout_s, return_exceptions=True
    )
    return results
