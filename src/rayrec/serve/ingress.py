"""How requests reach the replicas on a Ray cluster (Ray Serve's HTTP proxies, or the replicas' own ports), and what answers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import re
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from rayrec.config import InputError
from rayrec.serve.config import ServeConfig

WILDCARDS: Final = ("0.0.0.0", "::", "")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
PROXY_CALLBACK_VARIABLE: Final = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK: Final = "rayrec.serve.listener:sole_proxy"
"""Function that Ray Serve's HTTP proxies call if the variable names it in their environment."""
_ANSWER_S: Final = 30.0
_TRY_S: Final = 2.0
_MOST_BYTES: Final = 1 << 16


def is_own_host(value: str, config: ServeConfig) -> bool:
    """Return whether the value of a request's header Host names the server. Other names are those of web pages that
    resolve to its address (DNS rebinding)."""
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(:[0-9]*)?", value.lower())
    if match is None:
        return False
    name = match[1].strip("[]").removesuffix(".")
    for allowed in (*LOOPBACK, config.host.lower(), *map(str.lower, config.allowed_hosts)):
        if allowed in (name, "*") or (allowed.startswith("*.") and name.endswith(allowed[1:])):
            return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or config.host in WILDCARDS


@dataclass(frozen=True)
class ServeInstance:
    """Ray Serve as it runs on a cluster."""

    with_proxies: bool
    host: str
    port: int
    """Where its HTTP proxies listen, if there are any."""
    proxy_ips: tuple[str, ...]
    """Nodes with a proxy."""
    replica_ips: tuple[str, ...]
    """Nodes with a replica of the application asked for."""
    applications: tuple[str, ...]


def find_instance(application: str) -> ServeInstance | None:
    """Ray Serve on the cluster this process is connected to; None if it does not run there."""
    from ray.serve.exceptions import RayServeException

    from rayrec.compat.ray_compat import get_global_client

    try:
        client: Any = get_global_client()
    except RayServeException:
        return None
    found: dict[str, Any] = client.get_serve_details()
    options = found.get("http_options") or {}
    deployments = (found["applications"].get(application) or {}).get("deployments", {})
    replicas = [replica for deployment in deployments.values() for replica in deployment["replicas"]]
    return ServeInstance(
        with_proxies=found.get("proxy_location") not in (None, "Disabled"),
        host=options.get("host") or "127.0.0.1",
        port=options.get("port") or 8000,
        proxy_ips=_distinct(found["proxies"].values()),
        replica_ips=_distinct(replicas),
        applications=tuple(found["applications"]),
    )


def _distinct(actors: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(actor["node_ip"] for actor in actors if actor.get("node_ip")))


def settle(config: ServeConfig, instance: ServeInstance | None, *, own_ray: bool) -> ServeConfig:
    """`config` with an ingress that the cluster can have, and with the proxies' own address if they run already. Pure.

    auto: direct on a local Ray of its own and on a cluster whose Ray Serve runs without proxies, else serve. Raises InputError if
    Ray Serve runs there in a way that `config` excludes."""
    running = instance if instance is not None and instance.applications else None  # an idle one is started again
    if config.ingress == "auto":
        direct = own_ray or (running is not None and not running.with_proxies)
        config = config.replace(ingress="direct" if direct else "serve")
    if config.ingress == "serve":
        if running is not None and not running.with_proxies:
            raise InputError(
                f"ingress: Ray Serve runs on this cluster without HTTP proxies, for {', '.join(running.applications)}; give "
                "--ingress direct, or end Ray Serve (`serve shutdown`) and start again"
            )
        if instance is not None and instance.with_proxies:
            config = config.replace(host=instance.host, port=instance.port)
    elif instance is not None and instance.with_proxies and instance.port == config.port:
        raise InputError(
            f"port: Ray Serve's HTTP proxies listen at {config.port} on this cluster; give another --port, or --ingress serve"
        )
    return config


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[None]:
    """Hold a port of this machine for one server, whose replicas may share it. Raises InputError if the port is taken.

    The lock is a Unix socket with an abstract name: these belong to a network namespace, as ports do, and end with their
    process."""
    with socket.socket(socket.AF_UNIX) as lock:
        name = f"\0rayrec-serve-{port}"
        try:
            lock.bind(name)
        except OSError as error:
            raise _cannot_listen(host, port, error, _pid_at(name)) from None
        lock.listen(socket.SOMAXCONN)
        bind(host, port).close()
        yield


def _pid_at(name: str) -> int | None:
    """The process that listens at a Unix socket, if it can be seen from here."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.connect(name)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid or None
    return None


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to an address, with `shared` also if others share it. Raises InputError if it is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        connections = psutil.net_connections("tcp") if error.errno == errno.EADDRINUSE else ()
        listeners = (one.pid for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port)
        raise _cannot_listen(host, port, error, next(filter(None, listeners), None)) from None
    return bound


def _cannot_listen(host: str, port: int, error: OSError, pid: int | None) -> InputError:
    owner = ""
    with contextlib.suppress(psutil.Error):
        owner = f", by process {pid} ({psutil.Process(pid).name()})" if pid else ""
    return InputError(f"{host}:{port}: cannot listen there ({error.strerror}{owner}); choose another --port or --host")


def urls(config: ServeConfig, instance: ServeInstance) -> list[str]:
    """Where the application may answer: a proxy, or with the direct ingress a replica. Pure."""
    hosts: Sequence[str] = (config.host,)
    if config.host in WILDCARDS:
        hosts = instance.proxy_ips if config.ingress == "serve" else instance.replica_ips
    return [f"http://{f'[{host}]' if ':' in host else host}:{config.port}" for host in hosts]


def first_answering(found: Sequence[str], *, versions: Sequence[str], timeout_s: float = _ANSWER_S) -> str:
    """The first of some URLs at which the application says that it is ready with one of these models. Raises InputError if none
    does in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through the proxy of the environment
    deadline_s = time.monotonic() + timeout_s
    while True:
        trouble = "no replica or proxy has an address"
        for url in found:
            try:
                with opener.open(f"{url}/readyz", timeout=_TRY_S) as response:
                    told = json.loads(response.read(_MOST_BYTES))
                if isinstance(told, dict) and told.get("model") in versions:
                    return url
                trouble = "something else answers"
            except (OSError, ValueError) as error:  # HTTPError is an OSError
                trouble = str(error)
        if time.monotonic() > deadline_s:
            where = " or ".join(found) or "any node"
            local = any(f"//{host}" in where for host in LOOPBACK)
            hint = "; from another machine than the server's it is reached with --host 0.0.0.0" if local else ""
            raise InputError(
                f"ingress: the server started and does not answer at {where} ({trouble}){hint}; it was ended"
            )
        time.sleep(0.2)
