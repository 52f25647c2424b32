"""Connection to a running or local Ray cluster, and its nodes for workers and data tasks."""

import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from rayrec.cluster import worker_pool
from rayrec.cluster.layout import Layout, Node, nodes_for_tasks
from rayrec.cluster.node_storage import RuntimeEnvConfig, job_environment
from rayrec.config import Config, InputError
from rayrec.humanize import one_line
from rayrec.process_state import temporary_environment

IN_PROCESS: Final = "none"
"""Address for training without Ray, in the command's own process."""

_LOCAL_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_num_workers_soft_limit": "64",
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment of a local Ray's processes. By default Ray ends idle processes beyond the number of
CPUs, and reports its use to Ray's makers. It also starts a process for each CPU ahead, which no
task of rayrec uses, as its tasks have a runtime environment.
"""
_MAX_FOLDER_BYTES: Final = 37
"""Maximum length of the path below which a local Ray can have its folder. Linux allows 107 bytes
for the path of a socket, and Ray's longest is
ray/session_YYYY-MM-DD_hh-mm-ss_uuuuuu_PROCESS/sockets/plasma_store.
"""
_started: set[str] = set()
_environment: tuple[Any, ...] | None = None
"""Connection that this process made, and `env` and `runtime_env` of its environment."""
_PROBE_S = 2.0


def is_in_process(address: str | None) -> bool:
    """Return whether to run without Ray: by the address `none`, or without address, RAY_ADDRESS and
    connection.
    """
    if address is not None:
        return address == IN_PROCESS
    return not is_connected() and not os.environ.get("RAY_ADDRESS")


def is_connected() -> bool:
    """Return whether this process is connected to Ray, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized()


# Which Ray a process reaches, in this order:
#
#   connected already           that one, if it has the requested environment
#   `address`                   that cluster
#   RAY_ADDRESS, no address     that cluster
#   neither, or `local`         a new local Ray, which ends with this process
def connect(
    address: str | None,
    *,
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    log_to_driver: bool = False,
    environment: RuntimeEnvConfig | None = None,
    uses_data: bool = True,
) -> str:
    """Connect this process to Ray and return the address of its head: an existing connection, else
    the cluster at `address` or RAY_ADDRESS, else a new local Ray. `environment` applies to all Ray
    processes of this job. `uses_data` is whether this process uses Ray Data, which is imported to
    silence its logs. Raises InputError within some 20 s if there is no answer or access is
    rejected, and for a connection with another environment; OSError if a local Ray does not start.
    """
    global _environment
    environment = environment or RuntimeEnvConfig()
    requested = environment.env, environment.runtime_env
    if address == IN_PROCESS:
        raise InputError(
            f"address {IN_PROCESS}: needs Ray here. Omit the address, or use local or HOST:PORT"
        )
    # Ray 2.60 enables token authentication for clusters that it starts; the token file is valid for
    # this user only.
    import ray

    require_direct(address)
    if ray.is_initialized():
        if requested != ((), None) and _environment != (_connection(), *requested):
            raise InputError(
                "cluster.env, runtime_env: this process is connected to Ray without them. Use "
                "those of ray.init instead"
            )
        return ray.get_runtime_context().gcs_address
    address, source = _named(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address and address != "local":
        _join(address, source, environment, log_to_driver=log_to_driver)
    else:
        local = {
            "num_cpus": num_cpus,
            "object_store_memory": object_store_bytes,
            "log_to_driver": log_to_driver,
        }
        _start(environment, local)
    if uses_data:
        import ray.data  # sets up its own logger, whose level is raised below

        logging.getLogger("ray.data").setLevel(logging.ERROR)
    _environment = _connection(), *requested
    return ray.get_runtime_context().gcs_address


def _connection() -> tuple[str, str]:
    """Return the address and job of the connection to Ray, which identify it."""
    import ray

    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def require_direct(address: str | None) -> None:
    """Raise InputError if the connection to Ray, or the address (None: RAY_ADDRESS), uses Ray's
    client server, not a node.
    """
    named, source = _named(address)
    if is_connected():
        from ray.util.client import ray as client

        named = "ray://" if client.is_connected() else ""
        source = "ray.init"
    if named.startswith("ray://"):
        raise InputError(
            f"{source}: must be reached directly, got Ray's client server (ray://), with which a "
            "run ends if the connection breaks. Outside the cluster, use `rayrec supervise "
            "--address http://HEAD:8265 -- train ...` (other commands: `ray job submit`), on a "
            "node HOST:PORT of the head or auto"
        )


def _named(address: str | None) -> tuple[str, str]:
    """Return the given address or RAY_ADDRESS (may be empty), and its name for error messages."""
    from_environment = os.environ.get("RAY_ADDRESS", "")
    return (address, address) if address else (from_environment, f"RAY_ADDRESS={from_environment}")


def _join(address: str, source: str, environment: RuntimeEnvConfig, *, log_to_driver: bool) -> None:
    import ray

    job_env = job_environment(environment, os.environ)
    if address != "auto":  # ray.init checks and presents a token to a head that it finds itself
        require_head(address, source=source)
    try:
        ray.init(
            address=address,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
            runtime_env=job_env or None,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if "Failed to merge" in str(error):  # Its text contains the variables.
            raise InputError(
                "cluster.runtime_env: has fields or variables that the job was submitted with "
                "too. Set each in one place"
            ) from None
        if "Could not find any running Ray" in str(error):
            raise InputError(
                f"{source}: no Ray runs on this machine. Start one with `ray start --head`"
            ) from None
        raise InputError(
            f"{source}: the Ray cluster answers, but this machine cannot join it "
            f"({one_line(error)}). Use one of its nodes"
        ) from None


def socket_folder() -> str:
    """Return the folder for the folders of local Rays: RAY_TMPDIR, else TMPDIR unless its path is
    too long for sockets, else /tmp.
    """
    if ray_folder := os.environ.get("RAY_TMPDIR"):
        return ray_folder
    folder = os.environ.get("TMPDIR") or "/tmp"
    return folder if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES else "/tmp"


def _start(environment: RuntimeEnvConfig, settings: Mapping[str, Any]) -> None:
    """Start a local Ray with settings of `ray.init`. Its processes inherit the variables of
    `environment`.
    """
    import ray

    variables = {
        name: value for name, value in _LOCAL_ENVIRONMENT.items() if name not in os.environ
    }
    variables |= environment.variables(os.environ)
    variables |= {"RAY_TMPDIR": socket_folder()}
    try:
        with temporary_environment(variables), _blocked_hangup():
            ray.init(
                address="local",
                logging_level=logging.ERROR,
                include_dashboard=False,
                runtime_env=environment.fields() or {"worker_process_setup_hook": worker_pool.HOOK},
                **settings,
            )
        _started.add(ray.get_runtime_context().gcs_address)
    except ValueError as error:  # e.g. the object store is too small
        raise InputError(f"cannot start a local Ray: {one_line(error)}") from None
    except (
        Exception
    ) as error:  # Ray 2.60 raises no narrower class if its processes are not up in 30 s
        if "AF_UNIX path" in str(error):  # in the text of both Python and Ray
            raise InputError(
                f"RAY_TMPDIR={socket_folder()}: too long for the sockets of a local Ray "
                f"({one_line(error)}). Set it to a folder with a shorter path, such as /tmp"
            ) from None
        raise OSError(
            f"cannot start a local Ray ({one_line(error)}). The machine may be short of CPU, "
            f"memory or disk. Check {session_logs()}, then run the same command again"
        ) from None


def session_logs() -> str:
    """Return the folder with the logs of the newest Ray that this machine's user started."""
    return os.path.join(socket_folder(), "ray", "session_latest", "logs")


@contextlib.contextmanager
def _blocked_hangup() -> Iterator[None]:
    """Block SIGHUP in this thread and in processes started in the context, which never get it. A
    closed terminal sends it to all processes of a command, and those of a local Ray must live until
    its workers have saved. This process gets it afterwards.
    """
    # A mask is inherited by processes and threads that start meanwhile, unlike a handler.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_local_ray() -> bool:
    """Return whether this process started the local Ray that it is connected to."""
    import ray

    return is_connected() and ray.get_runtime_context().gcs_address in _started


def ship_code(config: Config) -> None:
    """Make Ray pickle the modules of the classes of `config` and its nested configurations by
    value, so that nodes do not need the user's files. Modules imported by these are not
    included.
    """
    modules = user_modules(config)
    if modules:
        import ray

        for module in modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])


def user_modules(config: Config) -> set[str]:
    """Return the modules outside rayrec that define `config` and nested configurations, without
    `__main__`, pickled by value.
    """
    nested = (getattr(config, field.name) for field in dataclasses.fields(config))
    modules = set().union(*(user_modules(value) for value in nested if isinstance(value, Config)))
    module = type(config).__module__
    return modules | ({module} if module.partition(".")[0] not in ("rayrec", "__main__") else set())


def alive_nodes(*, probe: bool = False, free: bool = False) -> list[Node]:
    """Return the alive nodes of the cluster, without nodes that are about to be drained. With
    `free`, their resources are the unreserved ones. With `probe`, they must also accept a TCP
    connection: Ray needs some 15 s to notice a lost node, and a placement group on a lost node
    waits in vain.
    """
    import ray

    from rayrec.compat.ray_compat import state

    leaving = state.state.get_draining_nodes()
    left = state.available_resources_per_node() if free else {}
    return [
        Node(node["NodeID"], left.get(node["NodeID"], {}) if free else node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] not in leaving
        and (not probe or _answers(node["NodeManagerAddress"], node["NodeManagerPort"]))
    ]


def data_nodes(layout: Layout) -> list[Node]:
    """Return the nodes that can run data tasks of a run with this layout now, with the CPUs
    available to such tasks. A node counts if it is alive, not about to be drained, not reserved for
    workers, and has the CPUs of one task beyond all placement groups on it, also of other jobs.
    CPUs of running tasks count as available, because tasks end. If the list is empty, Ray queues
    the run's data tasks without an error until such a node joins. Needs a connection to Ray and
    makes three short calls to its head, so poll it every few seconds at most. Call it on the
    driver.
    """
    from ray.util.placement_group import placement_group_table

    return nodes_for_tasks(alive_nodes(), list(placement_group_table().values()), layout)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 10.0
_Answer = Literal["alive", "token rejected", "not Ray"]


def require_head(address: str, *, source: str) -> None:
    """Check that the head of a running Ray cluster answers at `address` (host:port) and
    accepts this user. From then on Ray presents the token that the cluster requires. Takes at most
    some 20 s. Raises InputError, with the address named as `source`, if nothing listens there, the
    listener is not a head of this Ray version, or the cluster rejects the token.
    """
    host, port = _host_and_port(address, source)
    _require_listener(host, port, source)
    from rayrec.compat.ray_compat import maybe_enable_token_auth_if_token_available

    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    mode = os.environ.get("RAY_AUTH_MODE")
    answer = _check_alive(target, source)
    if answer == "token rejected" and mode is None:
        if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            raise InputError(
                f"{source}: the Ray cluster requires a token, but this user has no token. Copy the "
                "cluster's token (`ray get-auth-token` prints it there) into a file and name the "
                "file in RAY_AUTH_TOKEN_PATH"
            )
        answer = _check_alive(target, source)
    if answer == "token rejected":
        if mode is not None and mode.lower() != "token":
            raise InputError(
                f"{source}: the Ray cluster requires a token. Unset RAY_AUTH_MODE={mode} to "
                "present one"
            )
        names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
        origin = next((name for name in names if os.environ.get(name)), "~/.ray/auth_token")
        raise InputError(
            f"{source}: the Ray cluster rejects the token from {origin}. Copy the cluster's token "
            "(`ray get-auth-token` prints it there) into a file and name the file in "
            "RAY_AUTH_TOKEN_PATH"
        )
    if answer == "not Ray":
        raise InputError(
            f"{source}: the listener there does not answer as the head of a Ray cluster. Use the "
            "address that `ray start --head` printed, by default HOST:6379 (8265 is the "
            "dashboard's port, 10001 the client server's)"
        )


def _host_and_port(address: str, source: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([^]/]+)\]|([^:/]+)):(\d+)", address)
    if match is None:
        raise InputError(
            f"{source}: must be the address of a Ray cluster. Use HOST:PORT of its head, or auto"
        )
    return match[1] or match[2], int(match[3])


def _require_listener(host: str, port: int, source: str) -> None:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:  # the second for a port beyond 65535
        why = (
            "no answer"
            if isinstance(error, TimeoutError)
            else getattr(error, "strerror", None) or str(error)
        )
        raise InputError(
            f"{source}: no Ray cluster answers there ({why}). Start one with `ray start --head`, "
            "correct the address, or omit it (and unset RAY_ADDRESS) to use a local Ray"
        ) from None


def _check_alive(target: str, source: str) -> _Answer:
    import grpc
    import ray
    from ray.exceptions import AuthenticationError

    from rayrec.compat.ray_compat import gcs_service_pb2, gcs_service_pb2_grpc, init_grpc_channel

    try:
        with init_grpc_channel(target) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            # Protobuf defines the message at run time.
            request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
            reply = stub.CheckAlive(request, timeout=_ANSWER_S)
    except grpc.RpcError as error:
        is_rejected = error.code() in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
        )
        return "token rejected" if is_rejected else "not Ray"
    except AuthenticationError as error:  # RAY_AUTH_MODE=token without a token
        raise InputError(
            f"{source}: {str(error).splitlines()[0].rstrip('.')}. Set RAY_AUTH_TOKEN_PATH to its "
            "file"
        ) from None
    if reply.ray_version != ray.__version__:
        raise InputError(
            f"{source}: the cluster runs Ray {reply.ray_version}, but this environment has Ray "
            f"{ray.__version__}. Use one version"
        )
    return "alive"
