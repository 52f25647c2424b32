"""Checks that a Ray head answers at an address, and presents this user's token if the cluster asks for one.

Ray itself retries a dead address for minutes, and for an explicit address it presents no token.
"""

from __future__ import annotations

import os
import socket
from enum import Enum
from typing import Final

from rayrec.config import InputError

_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 10.0


class _Answer(Enum):
    TAKEN = "taken"
    TOKEN_REFUSED = "token refused"
    NOT_RAY = "not Ray"


def require_head(address: str, *, source: str) -> None:
    """Returns if the head of a running Ray cluster answers at `address` (host:port or auto) and accepts this user; Ray then
    presents the token that the cluster asks for.

    Takes at most some 20 s. Raises InputError, which names the address as `source`, if nothing listens there, if what listens is
    no head of this version of Ray, or if the cluster refuses the token.
    """
    host, port = _host_and_port(address, source)
    _require_listener(host, port, source)
    from rayrec.compat.ray_compat import maybe_enable_token_auth_if_token_available

    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    mode = os.environ.get("RAY_AUTH_MODE")
    answer = _ask(target, source)
    if answer is _Answer.TOKEN_REFUSED and mode is None:
        if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            raise InputError(
                f"{source}: the Ray cluster asks for a token, and this user has none; copy the cluster's token (`ray "
                "get-auth-token` prints it there) into a file and name the file in RAY_AUTH_TOKEN_PATH"
            )
        answer = _ask(target, source)
    if answer is _Answer.TOKEN_REFUSED:
        if mode is not None and mode.lower() != "token":
            raise InputError(f"{source}: the Ray cluster asks for a token; unset RAY_AUTH_MODE={mode} to present one")
        raise InputError(
            f"{source}: the Ray cluster refuses the token of {_token_source()}; copy the cluster's token (`ray get-auth-token` "
            "prints it there) into a file and name the file in RAY_AUTH_TOKEN_PATH"
        )
    if answer is _Answer.NOT_RAY:
        raise InputError(
            f"{source}: what listens there does not answer as the head of a Ray cluster; give the address that `ray start "
            "--head` printed, by default HOST:6379 (8265 is the dashboard's port, 10001 the client server's)"
        )


def _host_and_port(address: str, source: str) -> tuple[str, int]:
    from rayrec.compat.ray_compat import services

    try:
        found = services.canonicalize_bootstrap_address(address)
        if found is None:
            raise ValueError(address)
        host, _, port = found.rpartition(":")
        return host.strip("[]"), int(port)
    except ConnectionError:
        raise InputError(f"{source}: no Ray runs on this machine; start one with `ray start --head`") from None
    except socket.gaierror as error:
        raise InputError(f"{source}: no such host ({error.strerror}); give HOST:PORT of the cluster's head") from None
    except ValueError:
        raise InputError(f"{source}: is no address of a Ray cluster; give HOST:PORT of its head, or auto") from None


def _require_listener(host: str, port: int, source: str) -> None:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:  # the second for a port beyond 65535
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{source}: no Ray cluster answers there ({why}); start one with `ray start --head`, correct the address, or leave "
            "it out (and RAY_ADDRESS unset) for a local Ray"
        ) from None


def _ask(target: str, source: str) -> _Answer:
    """Asks a head whether it is alive, with a token if this process presents one."""
    import grpc
    import ray
    from ray.exceptions import AuthenticationError

    from rayrec.compat.ray_compat import gcs_service_pb2, gcs_service_pb2_grpc, init_grpc_channel

    try:
        with init_grpc_channel(target) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]  # protobuf makes it at run time
            reply = stub.CheckAlive(request, timeout=_ANSWER_S)
    except grpc.RpcError as error:
        refused = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        return _Answer.TOKEN_REFUSED if refused else _Answer.NOT_RAY
    except AuthenticationError as error:  # RAY_AUTH_MODE=token without a token
        raise InputError(
            f"{source}: {str(error).splitlines()[0].rstrip('.')}; name its file in RAY_AUTH_TOKEN_PATH"
        ) from None
    if reply.ray_version != ray.__version__:
        raise InputError(
            f"{source}: the cluster runs Ray {reply.ray_version}, and this environment has Ray {ray.__version__}; install the "
            "same version on both"
        )
    return _Answer.TAKEN


def _token_source() -> str:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    return "~/.ray/auth_token"
