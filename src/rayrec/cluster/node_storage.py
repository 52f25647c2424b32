"""Check that cluster nodes can reach a command's object stores, and send them credentials on request. Ray's processes inherit the
environment of `ray start`, not the command's, so the nodes may lack its credentials."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rayrec import storage
from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.storage.filesystems import SENT_SETTINGS
from rayrec.storage.urls import in_object_store, split_options

SEND: Final = "RAYREC_SEND_CREDENTIALS"
"""Variable that makes a command send its store settings to the nodes of a running cluster."""
_PATIENCE_S: Final = 5.0
"""Timeout for a store on a node. Nodes without settings try the wrong endpoint."""
_ANSWER_S: Final = 60.0
"""Timeout for all nodes together. Each may have to start a process first."""


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a job's runtime environment with the store settings, or None unless `RAYREC_SEND_CREDENTIALS` is 1. The settings are
    sent in the pickled setup hook, in the memory of Ray's head, like functions. Unlike `env_vars`, they do not appear in command
    lines, logs or the dashboard. All code on the cluster can read them. Raises InputError for other values, and without settings
    to send."""
    setting = environment.get(SEND, "")
    if setting in ("", "0"):
        return None
    if setting != "1":
        raise InputError(f"{SEND}: must be 1, to send the store settings to the cluster, or 0, got {setting!r}")
    settings = {name: environment[name] for name in SENT_SETTINGS if environment.get(name)}
    if not settings:
        raise InputError(f"{SEND}: no store settings found in the environment. Set {', '.join(SENT_SETTINGS[:3])}")

    def set_store_settings() -> None:
        os.environ.update(settings)

    return {"worker_process_setup_hook": set_store_settings}


def require_reachable(paths: Iterable[str | None]) -> None:
    """Check that every node that can run tasks reaches the object stores of `paths`. Ignores None and local paths, and returns at
    once if this process started Ray, whose processes inherit its environment. Raises InputError within seconds, naming the first
    node that fails, if this process itself reaches the store. Skips stores that this process cannot reach, and nodes that start
    no task in 60 s."""
    urls = sorted({_folder(path) for path in paths if path is not None and in_object_store(path)})
    node = ray_compat.local_node()
    if not urls or node is None or node.is_head():
        return
    urls = [url for url in urls if first_error([url], patience_s=0.0) is None]
    for address, error in _check_nodes(urls) if urls else []:
        if error is not None and first_error(urls, patience_s=0.0) is None:
            raise InputError(refusal(address, error, os.environ))


def refusal(address: str, error: str, environment: Mapping[str, str]) -> str:
    """Return the error line with the node, the problem there and its fix."""
    names = [name for name in SENT_SETTINGS if environment.get(name)]
    error = error.partition(";")[0]  # without the fix, which is for this machine
    if environment.get(SEND) == "1":
        return f"node {address} does not reach the store: {error}"
    settings = f"set {', '.join(names)} as here when you start Ray there" if names else "give the nodes credentials"
    send = f", or have this command send them: {SEND}=1" if names else ""
    return f"node {address} does not reach the store, which this machine does: {error}; {settings}{send}"


def first_error(urls: Sequence[str], *, patience_s: float) -> str | None:
    """Return the error of the first URL that this process cannot reach, or None. The URLs need not exist."""
    with storage.retry_timeout(patience_s):
        for url in urls:
            try:
                storage.exists(url)
            except (OSError, InputError) as error:
                return str(error)
    return None


def _folder(url: str) -> str:
    """Return the URL up to its first wildcard."""
    body, options = split_options(url)
    names = body.split("/")
    plain = next((index for index, name in enumerate(names) if re.search(r"[*?\[]", name)), len(names))
    return "/".join(names[:plain]) + options


def _check_nodes(urls: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return (address, error or None) of each node that answered."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check: Callable[..., str | None] = first_error
    task = ray.remote(check)
    addresses = {
        # Without a CPU, so that busy clusters answer too.
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(urls, patience_s=_PATIENCE_S): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0
    }
    answers, pending = [], list(addresses)
    deadline_s = time.monotonic() + _ANSWER_S
    while pending and time.monotonic() < deadline_s:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
        for reference in done:
            try:
                answers.append((addresses[reference], ray.get(reference)))
            except ray.exceptions.RayError:  # the node was lost
                continue
            if answers[-1][1] is not None:  # one failure suffices
                pending = []
    for reference in pending:
        ray.cancel(reference, force=True)
    return answers
