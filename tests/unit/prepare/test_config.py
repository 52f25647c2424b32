"""Choice of the engine, without starting Ray."""

from typing import Any

import pytest

from rayrec import host_resources
from rayrec.cluster import connection, node_storage
from rayrec.config import InputError
from rayrec.data.engine import Engine, TaskPlacement, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine
from rayrec.storage import cache


class Ray:
    """Recorder of calls to Ray."""

    def __init__(self) -> None:
        self.addresses: list[str | None] = []
        self.paths: list[tuple[str, ...]] = []

    def connect_for_data(self, address: str | None) -> TaskPlacement:
        self.addresses.append(address)
        return TaskPlacement(num_cpus=1.0)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "connect_for_data", made.connect_for_data)
    monkeypatch.setattr(node_storage, "require_reachable", made.paths.append)
    return made


def chosen(config: PreparationConfig) -> Engine:
    with engine(config, Console(quiet=True), paths=("a", "b")) as found:
        return found


@pytest.mark.parametrize(
    ("settings", "environment", "connected", "on_ray"),
    [
        ({}, None, False, False),
        ({"engine": "auto"}, "", False, False),
        ({"engine": "auto"}, "head:6379", False, True),
        ({"engine": "auto"}, None, True, True),
        ({"address": "head:6379"}, None, False, True),
        ({"address": "local"}, None, False, True),
        ({"address": "none"}, "head:6379", True, False),
        ({"engine": "threads"}, "head:6379", True, False),
        ({"engine": "ray"}, None, False, True),
        ({"engine": "ray", "address": "head:6379"}, None, False, True),
    ],
)
def test_engine_matches_config_and_environment(
    monkeypatch: pytest.MonkeyPatch, ray: Ray, settings: dict[str, Any], environment: str | None, connected: bool, on_ray: bool
) -> None:
    monkeypatch.setattr(connection, "is_connected", lambda: connected)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    found = chosen(PreparationConfig(**settings))
    if on_ray:
        assert found == RayEngine(TaskPlacement(num_cpus=1.0))
        assert ray.addresses == [settings.get("address")]
        assert ray.paths == [("a", "b", cache.folder())]
    else:
        assert found == ThreadEngine(host_resources.usable_cpus())
        assert not ray.addresses
        assert not ray.paths


@pytest.mark.parametrize("address", ["head:6379", "local", "none"])
def test_config_rejects_threads_with_address(address: str) -> None:
    with pytest.raises(InputError, match=r"^engine threads: must not be used with address, because it runs in this process"):
        PreparationConfig(engine="threads", address=address)
