"""Configuration of the HTTP server: address, limits, replicas."""

import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from rayrec import storage
from rayrec.bounds import Count, Positive
from rayrec.config import Config, InputError
from rayrec.imports import is_in_file
from rayrec.workloads.scoring import Device

Follow = Literal["no", "newest", "best"]
"""Checkpoint of a running training that a server switches to."""
WILDCARDS: Final = ("0.0.0.0", "::", "")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Address, limits and resources of an HTTP server for one model."""

    host: str = "127.0.0.1"
    """Address to listen at. 0.0.0.0 admits other machines (set a token then)."""
    port: Annotated[int, Ge(1), Le(65535)] = 8000
    """Port to listen at."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional server names in the header Host, such as api.example.org or *.example.org. *
    allows any. Loopback names and `host` are always allowed, and any IP address if `host` is
    0.0.0.0.
    """
    ingress: Literal["auto", "serve", "direct"] = "auto"
    """Route of requests to the replicas. serve: Ray Serve's proxies; direct: replicas listen
    themselves, which is many times as fast; auto: direct on a private local Ray, serve on a
    cluster.
    """
    replicas: Count = 1
    """Number of processes, each with a copy of the model."""
    cpus_per_replica: Positive = 1.0
    """CPU cores and compute threads per replica."""
    device: Device = "cpu"
    """Compute device. With cuda, each replica gets one GPU."""
    max_batch_rows: Count = 8192
    """Maximum rows per batch, over several requests."""
    max_batch_bytes: Count = 16 << 20
    """Maximum bytes per batch of several requests. A single request may have more."""
    max_rows: Count = 8192
    """Maximum rows per request. More are answered with 413."""
    max_k: Count = 10_000
    """Maximum items per row of a recommendation. More are answered with 400."""
    histories: str | None = None
    """Parquet file, or folder of such files, with a user and a list of items per row, for
    recommendations to users that requests name. Read when a model is loaded.
    """
    max_body_bytes: Count = 16 << 20
    """Maximum bytes per request. More are answered with 413."""
    max_waiting_rows: Count = 65536
    """Maximum waiting rows per replica. More are answered with 503."""
    max_waiting_requests: Count = 512
    """Maximum waiting requests per replica. More are answered with 503."""
    max_held_bytes: Count = 1 << 30
    """Maximum memory of unanswered requests per replica, in bytes (8 to 80 times their length, most
    for lists of categories). Beyond it the answer is 503, or 413 if one request alone exceeds
    it.
    """
    time_limit_s: Positive = 10.0
    """Maximum seconds from a request's first byte to its answer. Late requests are answered with
    408 if incomplete, else 504.
    """
    token_file: str | None = None
    """File with the bearer token that requests must have."""
    token_env: str | None = None
    """Environment variable with the bearer token."""
    recipe: str | None = None
    """Training recipe of the model as FILE.py:FUNCTION, if its network is not one of rayrec's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|[0-9A-Fa-f]*(:[0-9A-Fa-f.]*){2,}", name):
                raise InputError(
                    "allowed_hosts: must be names without scheme and port, such as "
                    f"api.example.org, got {name!r}"
                )
        if self.recipe is not None and not is_in_file(self.recipe):
            raise InputError(
                f"recipe: must be FILE.py:FUNCTION, got {self.recipe!r}. Leave it out for "
                "rayrec's models."
            )
        if self.token_file and self.token_env:
            raise InputError("token_file: must not be set together with token_env")

    def token_digest(self) -> bytes | None:
        """Return the SHA-256 of the bearer token, None without one. Raises InputError if it is
        configured but empty.
        """
        if self.token_file:
            token = storage.read_bytes(self.token_file).strip()
            source = self.token_file
        elif self.token_env:
            token = os.fsencode(os.environ.get(self.token_env, "")).strip()
            source = f"environment variable {self.token_env}"
        else:
            return None
        if not token:
            raise InputError(
                f"{source}: token not found. Store one there, such as the output of `openssl rand "
                "-hex 32`."
            )
        return hashlib.sha256(token).digest()

    def is_allowed_host(self, value: str) -> bool:
        """Return whether the header Host names this server. Rejecting other names prevents DNS
        rebinding by web pages.
        """
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
    """Server configuration with follow, shadow model and swapped tables."""

    follow: Follow = "no"
    """Whether to follow a training run: switch to its newest or best checkpoint when it appears."""
    shadow: str | None = None
    """Shadow model, which scores every row too. /metrics has the score differences."""
    swap_table: tuple[str, ...] = ()
    """Side tables in other files, as NAME=PATH, under the model instead of those of its training.
    Without a model, those of the running server.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        table_paths(self.swap_table)


def table_paths(settings: Sequence[str]) -> dict[str, str]:
    """Return the absolute paths of side tables, set as NAME=PATH, by name. Raises InputError for
    another form, or a repeated name.
    """
    paths: dict[str, str] = {}
    for setting in settings:
        name, equals, path = setting.partition("=")
        if not (name and equals and path):
            raise InputError(
                f"swap_table: must be NAME=PATH, such as items=new.csv, got {setting!r}"
            )
        if name in paths:
            raise InputError(f"swap_table: must have one file for each table, got two for {name}")
        paths[name] = storage.absolute(path)
    return paths
