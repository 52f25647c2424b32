"""How a model is served over HTTP: address, limits, replicas."""

import hashlib
import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Final, Literal

from rayrec import storage
from rayrec.config import Config, InputError
from rayrec.imports import is_in_file
from rayrec.workloads.scoring import Device

Follow = Literal["no", "newest", "best"]
"""Checkpoint of a run in progress that a server changes to."""
WILDCARDS: Final = ("0.0.0.0", "::", "")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """How a model is served over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets in other machines (then set a token)."""
    port: int = 8000
    """Port to listen at."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients reach the server (in the header Host), such as api.example.org or *.example.org; *: any.
    Always allowed: names of loopback and `host`, or any IP address if `host` is 0.0.0.0."""
    ingress: Literal["auto", "serve", "direct"] = "auto"
    """How requests come to the replicas. serve: by Ray Serve's proxies; direct: each listens itself, which is many times as fast;
    auto: direct on a local Ray of its own, serve on a cluster."""
    replicas: int = 1
    """Processes that each hold the model."""
    cpus_per_replica: float = 1.0
    """Cores of each, and threads its model computes with."""
    device: Device = "cpu"
    """cuda: each replica gets one GPU."""
    max_batch_rows: int = 8192
    """Rows of several requests that the model takes at once."""
    max_batch_bytes: int = 16 << 20
    """Bytes of several requests that are read together; a single request may have more."""
    max_rows: int = 8192
    """Rows of one request; more: 413."""
    max_body_bytes: int = 16 << 20
    """Bytes of one request; more: 413."""
    max_waiting_rows: int = 65536
    """Rows that may wait in a replica; beyond: 503."""
    max_waiting_requests: int = 512
    """Requests that may wait in a replica; beyond: 503."""
    max_held_bytes: int = 1 << 30
    """Bytes of memory that all requests may take in a replica until they are answered (8 to 80 times their length: lists of
    categories grow most); beyond: 503, of a single request 413."""
    time_limit_s: float = 10.0
    """From a request's first byte to its answer; beyond: 408 while it is still being sent, else 504."""
    token_file: str | None = None
    """File with the bearer token that requests must bear."""
    token_env: str | None = None
    """Name of the environment variable that holds it."""
    recipe: str | None = None
    """FILE.py:FUNCTION, the recipe that the model was trained by, if its network is one of your own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = (
            "replicas",
            "max_batch_rows",
            "max_batch_bytes",
            "max_rows",
            "max_body_bytes",
            "max_waiting_rows",
            "max_waiting_requests",
            "max_held_bytes",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("time_limit_s", "cpus_per_replica"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}: {getattr(self, name)} must be above 0")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|[0-9A-Fa-f]*(:[0-9A-Fa-f.]*){2,}", name):
                raise InputError(f"allowed_hosts: {name!r} must be a name without scheme and port, such as api.example.org")
        if not 0 < self.port < 65536:
            raise InputError(f"port: {self.port} must be from 1 to 65535")
        if self.recipe is not None and not is_in_file(self.recipe):
            raise InputError(f"recipe: {self.recipe!r} is not FILE.py:FUNCTION; for rayrec's own models leave it out")
        if self.token_file and self.token_env:
            raise InputError("token_file and token_env are both given; one holds the token")

    def token_digest(self) -> bytes | None:
        """SHA-256 of the bearer token; the token itself goes nowhere. Raises InputError where it is named, but not there."""
        if self.token_file:
            token = storage.read_bytes(self.token_file).strip()
            where = self.token_file
        elif self.token_env:
            token = os.fsencode(os.environ.get(self.token_env, "")).strip()
            where = f"environment variable {self.token_env}"
        else:
            return None
        if not token:
            raise InputError(f"{where}: holds no token; put one there, such as `openssl rand -hex 32` gives")
        return hashlib.sha256(token).digest()

    def is_own_host(self, value: str) -> bool:
        """Return whether the value of a request's header Host names the server. Other names are those of web pages that
        resolve to its address (DNS rebinding)."""
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(:[0-9]*)?", value.lower())
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        for allowed in (*LOOPBACK, self.host.lower(), *map(str.lower, self.allowed_hosts)):
            if allowed in (name, "*") or (allowed.startswith("*.") and name.endswith(allowed[1:])):
                return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self.host in WILDCARDS


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServeConfig):
    """How a model is served over HTTP, and which other models beside it."""

    follow: Follow = "no"
    """The model is a run; change over to its newest or best checkpoint as they appear."""
    shadow: str | None = None
    """Model that scores every row too; how far the scores differ is in /metrics."""
