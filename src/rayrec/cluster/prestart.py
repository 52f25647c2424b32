"""Idle Python processes that Ray prestarts for future workers, with a worker's modules imported.
Imports take some 5 s of CPU per worker, most of the wait in a start. Ray's node manager prestarts
processes on request (`PrestartWorkers`) and assigns them to the next actors or tasks of the same
job and runtime environment. A setup hook in the environment imports the modules.
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
    """Return the variables of a runtime environment whose processes import these modules when they
    start. `without_ray` are modules that do not import Ray; a local Ray imports them once for all
    processes.
    """
    return {
        HOOK: _IMPORT_MODULES,
        _MODULES: ",".join((*modules, *without_ray)),
        MODULES: ",".join(without_ray),
    }


def import_modules() -> None:
    import_all(os.environ[_MODULES].split(","))


def preloads_modules(variables: Mapping[str, str]) -> bool:
    """Return whether processes with these variables import a worker's modules when they start."""
    return variables.get(HOOK) == _IMPORT_MODULES


def for_tasks_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep the tasks of a worker with `variables` from preloading modules.
    Keeps a hook of the job.
    """
    return {HOOK: "", MODULES: ""} if preloads_modules(variables) else {}


def is_possible() -> bool:
    """Return whether this process is connected to Ray and its job's runtime environment contains at
    most the Python set by rayrec. A job environment is inherited by all processes and may have
    another hook.
    """
    import ray

    return ray.is_initialized() and _of_job() in ({}, {"py_executable": python_of_a_job()})


def _of_job() -> dict[str, Any]:
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def of_train_workers(variables: Mapping[str, str]) -> str:
    """Return the serialized runtime environment of Ray Train's workers with `variables`. They
    inherit the job's environment, without variables (`is_possible`), and the variables of Ray
    Train's controller.
    """
    from rayrec.compat.ray_compat import get_env_vars_to_propagate

    of_controller = {
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
        **train_environment(),
        **get_env_vars_to_propagate(),
    }
    return json.dumps(
        {**_of_job(), "env_vars": {**of_controller, **variables}},
        sort_keys=True,
        separators=(",", ":"),
    )


def start_actors_of_data() -> None:
    """Start Ray Data's cluster-wide actors, which would otherwise inherit the environment of a
    worker's Dataset.
    """
    from rayrec.compat.ray_compat import default_autoscaling_coordinator, get_or_create_stats_actor

    get_or_create_stats_actor()
    default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()


def prestart(
    node: Mapping[str, Any], runtime_env: str, *, num_processes: int, keep_s: float
) -> bool:
    """Request idle processes of this job with the serialized `runtime_env` on `node`, an entry of
    `ray.nodes()`, without waiting for them. They are kept for `keep_s` seconds, or until the job
    ends. Returns False if the node manager rejects the request: workers' processes then start on
    demand, which only takes longer.
    """
    import grpc
    import ray

    from rayrec.compat.ray_compat import (
        common_pb2,
        init_grpc_channel,
        node_manager_pb2,
        node_manager_pb2_grpc,
    )

    # Protobuf defines the messages at run time.
    request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
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
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(
                request, timeout=_TIMEOUT_S
            )
    except grpc.RpcError as error:
        _logger.info("Cannot prestart processes on %s: %s", address, error)
        return False
    return True
