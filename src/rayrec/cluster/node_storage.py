"""Checks that the nodes of a running cluster can reach the stores of a command's URLs, and sends them credentials on request.

Ray's processes get the environment of `ray start`, not that of the command, so that credentials that the command has may be
missing on the nodes.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rayrec import storage
from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.storage.stores import SENT_SETTINGS
from rayrec.storage.urls import in_object_store, split_options

SEND: Final = "RAYREC_SEND_CREDENTIALS"
"""Environment variable that has a command send its stores' settings to the nodes of a running cluster."""
_PATIENCE_S: Final = 5.0
"""For a store that does not answer a node: a node without settings looks for the store in the wrong place."""
_ANSWER_S: Final = 60.0
"""For all nodes together: each may have to start a process first."""


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The runtime environment of a job whose processes get the command's settings of stores; None unless
    `RAYREC_SEND_CREDENTIALS` is 1.

    The settings travel in the pickled setup hook, in the memory of Ray's head, as functions do. They are in no command line, no
    log and no page of the dashboard, unlike `env_vars`. All code that runs on the cluster can read them.
    Raises InputError for another value, and if there are no settings to send.
    """
    asked = environment.get(SEND, "")
    if asked in ("", "0"):
        return None
    if asked != "1":
        raise InputError(f"{SEND}: is {asked!r}; set it to 1 to send the settings of stores to the cluster, or to 0")
    settings = {name: environment[name] for name in SENT_SETTINGS if environment.get(name)}
    if not settings:
        raise InputError(f"{SEND}: the environment has no settings to send; set {', '.join(SENT_SETTINGS[:3])}")

    def set_store_settings() -> None:
        os.environ.update(settings)

    return {"worker_process_setup_hook": set_store_settings}


def require_reachable(paths: Iterable[str | None]) -> None:
    """Returns if every node of the connected cluster that can run tasks reaches the object stores of `paths`, of which None and
    local paths are ignored; at once if this process started Ray, whose processes have its environment.

    Raises InputError, within some seconds, which names the first node that does not, if this process itself reaches the store.
    A store that this process does not reach either is left to the command, and so is a node that starts no task in 60 s.
    """

    urls = sorted({_folder(path) for path in paths if path is not None and in_object_store(path)})
    node = ray_compat.local_node()
    if not urls or node is None or node.is_head():
        return
    urls = [url for url in urls if trouble_with([url], patience_s=0.0) is None]
    found = _ask_nodes(urls) if urls else []
    for address, trouble in found:
        if trouble is not None and trouble_with(urls, patience_s=0.0) is None:
            raise InputError(refusal(address, trouble, os.environ))


def refusal(address: str, trouble: str, environment: Mapping[str, str]) -> str:
    """The line that names a node, what is wrong there, and what to do about it."""
    names = [name for name in SENT_SETTINGS if environment.get(name)]
    trouble = trouble.partition(";")[0]  # without the advice for this machine
    if environment.get(SEND) == "1":
        return f"node {address} does not reach the store: {trouble}"
    settings = f"set {', '.join(names)} as here when you start Ray there" if names else "give the nodes credentials"
    send = f", or have this command send them: {SEND}=1" if names else ""
    return f"node {address} does not reach the store, which this machine does: {trouble}; {settings}{send}"


def trouble_with(urls: Sequence[str], *, patience_s: float) -> str | None:
    """Why this process does not reach one of the URLs, which need not exist; None if it reaches all."""
    with storage.patience(patience_s):
        for url in urls:
            try:
                storage.exists(url)
            except (OSError, InputError) as error:
                return str(error)
    return None


def _folder(url: str) -> str:
    """The URL, or the folder above the first name with a wildcard."""
    body, options = split_options(url)
    names = body.split("/")
    plain = next((place for place, name in enumerate(names) if re.search(r"[*?\[]", name)), len(names))
    return "/".join(names[:plain]) + options


def _ask_nodes(urls: Sequence[str]) -> list[tuple[str, str | None]]:
    """The address of each node that answered, and its trouble."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check: Callable[..., str | None] = trouble_with
    task = ray.remote(check)
    asked = {
        # No CPU: a cluster that others use is asked as well.
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(urls, patience_s=_PATIENCE_S): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0
    }
    answers, pending = [], list(asked)
    deadline_s = time.monotonic() + _ANSWER_S
    while pending and time.monotonic() < deadline_s:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
        for reference in done:
            try:
                answers.append((asked[reference], ray.get(reference)))
            except ray.exceptions.RayError:  # the node went meanwhile
                continue
            if answers[-1][1] is not None:  # one is enough to refuse
                pending = []
    for reference in pending:
        ray.cancel(reference, force=True)
    return answers
