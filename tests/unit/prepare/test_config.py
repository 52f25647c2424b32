"""Choice of the engine, without starting Ray."""

from typing import Any

import pytest

from rayrec import host_resources
from rayrec.cluster import connection, node_storage
from rayrec.config import InputError
from rayrec.data.engine import TaskPlacement, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine
from rayrec.storage import cache


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
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], environment: str | None, connected: bool, on_ray: bool
) -> None:
    addresses, paths, placement = [], [], TaskPlacement(num_cpus=1.0)
    monkeypatch.setattr(connection, "connect_for_data", lambda address: addresses.append(address) or placement)
    monkeypatch.setattr(node_storage, "require_reachable", paths.append)
    monkeypatch.setattr(connection, "is_connected", lambda: connected)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    with engine(PreparationConfig(**settings), Console(quiet=True), paths=("a", "b")) as chosen:
        pass
    assert chosen == (RayEngine(placement) if on_ray else ThreadEngine(host_resources.usable_cpus()))
    assert addresses == [settings.get("address")] * on_ray
    assert paths == [("a", "b", cache.folder())] * on_ray


@pytest.mark.parametrize("address", ["head:6379", "local", "none"])
def test_config_rejects_threads_with_address(address: str) -> None:
    with pytest.raises(InputError, match=r"^engine threads: must not be used with address, because it runs in this process"):
        PreparationConfig(engine="threads", address=address)
