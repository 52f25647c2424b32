"""Environment of the Ray processes that a command starts, and a check that cluster nodes reach its
object stores. Ray's processes inherit the environment of `ray start`, not the command's, so the
nodes may lack variables and credentials.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from rayrec import storage
from rayrec.config import Config, InputError, error_line
from rayrec.storage.filesystems import SENT_SETTINGS
from rayrec.storage.urls import in_object_store, split_options

SEND: Final = "RAYREC_SEND_CREDENTIALS"
"""Variable that makes a command send its store settings to the nodes of a running cluster."""
_HOOK: Final = "worker_process_setup_hook"
_PATIENCE_S: Final = 5.0
"""Timeout for a store on a node. Nodes without settings try the wrong endpoint."""
_ANSWER_S: Final = 60.0
"""Timeout for all nodes together. Each may have to start a process first."""


@dataclass(frozen=True, kw_only=True)
class RuntimeEnvConfig(Config):
    """Environment of Ray processes. Printed and stored configurations contain the names of
    variables, not their values.
    """

    env: tuple[str, ...] = field(default=(), repr=False)
    """Environment variables for Ray's processes, as NAME=VALUE, or NAME for its value here. Only
    names are stored.
    """
    runtime_env: str | None = None
    """YAML or JSON file with a runtime environment as Ray takes it: pip, py_modules, working_dir,
    env_vars and others.
    """

    def __post_init__(self) -> None:
        names = (
            self.names
            if isinstance(self.env, tuple) and all(isinstance(each, str) for each in self.env)
            else ("",)
        )
        # The message must not contain a value.
        if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
            raise InputError(f"{type(self).__name__}.env: must be a list of NAME=VALUE or NAME")
        super().__post_init__()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.partition("=")[0] for each in self.env)

    def without_values(self) -> Self:
        return self.replace(env=self.names)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"env": list(self.names)}

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables. Raises InputError if one without a value is not in
        `environment`.
        """
        values = {}
        for name, equals, value in (each.partition("=") for each in self.env):
            if not equals and name not in environment:
                raise InputError(
                    f"env {name}: not set in this environment. Set it, or use {name}=VALUE"
                )
            values[name] = value if equals else environment[name]
        return values

    def fields(self) -> dict[str, Any]:
        """Return the fields of the file. Raises InputError if Ray does not take them."""
        if self.runtime_env is None:
            return {}
        import yaml
        from ray.runtime_env import RuntimeEnv

        try:
            fields = yaml.safe_load(storage.read_text(self.runtime_env))
        except (OSError, yaml.YAMLError) as error:
            raise InputError(
                f"runtime_env {self.runtime_env}: cannot be read ({error_line(error)})"
            ) from None
        field_names = {name.removeprefix("_") for name in RuntimeEnv.known_fields}
        if not isinstance(fields, dict) or not field_names.issuperset(fields):
            got = (
                ", ".join(sorted(map(str, fields.keys() - field_names)))
                if isinstance(fields, dict)
                else "no mapping"
            )
            raise InputError(
                f"runtime_env {self.runtime_env}: must have Ray's fields "
                f"({', '.join(sorted(field_names))}), got {got}"
            )
        variables = fields.get("env_vars") or {}
        if not isinstance(variables, dict) or not all(
            isinstance(text, str) for item in variables.items() for text in item
        ):
            raise InputError(
                f"runtime_env {self.runtime_env}: env_vars must map names to texts. Put numbers "
                "in quotes"
            )
        try:
            RuntimeEnv(**fields)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise InputError(f"runtime_env {self.runtime_env}: {error_line(error)}") from None
        return fields


def job_environment(config: RuntimeEnvConfig, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the runtime environment of a job on a running cluster; may be empty.

    Variables and store settings are sent in the pickled setup hook, in the memory of Ray's head,
    like functions. Unlike `env_vars`, they do not appear in command lines, logs or the dashboard.
    All code on the cluster can read them. Raises InputError for invalid settings, and for a setup
    hook in the file if there is something to send.
    """
    fields = config.fields()
    sent = {**store_settings(environment), **config.variables(environment)}

    def set_variables() -> None:
        os.environ.update(sent)

    if sent and _HOOK in fields:
        raise InputError(
            f"runtime_env {config.runtime_env}: {_HOOK} also sends variables. Omit one of the two"
        )
    return {**fields, _HOOK: set_variables} if sent else fields


def store_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return store settings to send, none unless `RAYREC_SEND_CREDENTIALS` is 1. Raises InputError
    for others, and without any.
    """
    setting = environment.get(SEND, "")
    if setting in ("", "0"):
        return {}
    if setting != "1":
        raise InputError(
            f"{SEND}: must be 1, to send the store settings to the cluster, or 0, got {setting!r}"
        )
    settings = {name: environment[name] for name in SENT_SETTINGS if environment.get(name)}
    if not settings:
        raise InputError(
            f"{SEND}: no store settings found in the environment. Set "
            f"{', '.join(SENT_SETTINGS[:3])}"
        )
    return settings


def require_reachable(paths: Iterable[str | None]) -> None:
    """Check that every node that can run tasks reaches the object stores of `paths`. Ignores None
    and local paths. Raises InputError with the first node that fails, if this process reaches the
    store. Skips stores that this process cannot reach, and nodes that start no task in 60 s. Not
    needed for a local Ray, whose processes inherit this process's environment.
    """
    urls = sorted({_folder(path) for path in paths if path is not None and in_object_store(path)})
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
    settings = (
        f"set {', '.join(names)} as here when you start Ray there"
        if names
        else "give the nodes credentials"
    )
    send = f", or have this command send them: {SEND}=1" if names else ""
    return (
        f"node {address} does not reach the store, which this machine does: {error}; "
        f"{settings}{send}"
    )


def first_error(urls: Sequence[str], *, patience_s: float) -> str | None:
    """Return the error of the first URL that this process cannot reach, or None. The URLs need not
    exist.
    """
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
    plain = next(
        (index for index, name in enumerate(names) if re.search(r"[*?\[]", name)), len(names)
    )
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
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(urls, patience_s=_PATIENCE_S): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0
    }
    answers = []
    pending = list(addresses)
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
