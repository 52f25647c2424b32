"""Python processes that Ray starts ahead of the workers that will run in them, with a worker's modules imported.

Importing torch, TorchRec and Ray Train takes a worker's process some 5 s of CPU, most of what a start or a restart waits for.
Ray's node manager starts processes on request (`PrestartWorkers`). They wait idle, and Ray gives them to the next actors or tasks
whose job and runtime environment are the same. A hook in the environment imports the modules.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rayrec.cluster.connection import train_environment
from rayrec.cluster.fork_server import import_all
from rayrec.cluster.forked_worker import MODULES, python_of_a_job
from rayrec.compat.ray_compat import SETUP_HOOK_VARIABLE as HOOK

_IMPORT_MODULES: Final = f"{__name__}.import_modules"
_MODULES: Final = "RAYREC_WORKER_MODULES"
_TIMEOUT_S: Final = 10.0

_logger = logging.getLogger(__name__)


def importing(modules: Sequence[str], *, without_ray: Sequence[str] = ()) -> dict[str, str]:
    """Variables of a runtime environment whose processes import all these modules when they start. Those `without_ray`, which do
    not import Ray, are imported once for all processes of a local Ray."""
    return {HOOK: _IMPORT_MODULES, _MODULES: ",".join((*modules, *without_ray)), MODULES: ",".join(without_ray)}


def import_modules() -> None:
    """The hook."""
    import_all(os.environ[_MODULES].split(","))


def imports_ahead(variables: Mapping[str, str]) -> bool:
    """Whether processes with these variables import a worker's modules when they start."""
    return variables.get(HOOK) == _IMPORT_MODULES


def for_tasks_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for the tasks of a worker that has these, which they inherit: their processes import nothing ahead. A hook of
    the job's own stays."""
    return {HOOK: "", MODULES: ""} if imports_ahead(variables) else {}


def is_possible() -> bool:
    """Whether this process is connected to Ray and its job has no runtime environment, which all processes of the job inherit
    and which may have another hook, but the Python that rayrec gives it."""
    import ray

    return ray.is_initialized() and _of_job() in ({}, {"py_executable": python_of_a_job()})


def _of_job() -> dict[str, Any]:
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def of_train_workers(variables: Mapping[str, str]) -> str:
    """The runtime environment of Ray Train's workers that were given `variables`, as Ray writes it: they inherit that of the job,
    which has no variables (`is_possible`), and what Ray Train gives its controller."""
    from rayrec.compat.ray_compat import get_env_vars_to_propagate

    of_controller = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **train_environment(), **get_env_vars_to_propagate()}
    return json.dumps({**_of_job(), "env_vars": {**of_controller, **variables}}, sort_keys=True, separators=(",", ":"))


def start_actors_of_data() -> None:
    """Starts the actors that Ray Data has one of in a cluster. If the first Dataset were that of a worker, they would inherit its
    environment, and import what they do not need."""
    from rayrec.compat.ray_compat import default_autoscaling_coordinator, get_or_create_stats_actor

    get_or_create_stats_actor()
    default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()


def prestart(node: Mapping[str, Any], runtime_env: str, *, num_processes: int, keep_s: float) -> bool:
    """Asks the node manager of `node` (an entry of `ray.nodes()`) for idle processes of this job with the serialized
    `runtime_env`, which it keeps for `keep_s` seconds and ends with the job. Does not wait for them. False if it refuses: then
    the workers' processes are started when they are needed, which only takes longer."""
    import grpc
    import ray

    from rayrec.compat.ray_compat import common_pb2, init_grpc_channel, node_manager_pb2, node_manager_pb2_grpc

    request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]  # protobuf makes it at run time
        language=common_pb2.PYTHON,  # type: ignore[attr-defined]
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        keep_alive_duration_secs=int(keep_s),
        num_workers=num_processes,
    )
    request.runtime_env_info.serialized_runtime_env = runtime_env
    request.runtime_env_info.runtime_env_config.setup_timeout_seconds = 600
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    try:
        with init_grpc_channel(address) as channel:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        _logger.info("%s starts no processes ahead: %s", address, error)
        return False
    return True
