"""Fixtures that tests of several kinds share: a small synthetic click log and a local Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt (20,000 rows, seven days) and truth.json; do not write to it."""
    from rayrec.data.synthetic import generate

    folder = tmp_path_factory.mktemp("click_log")
    generate(str(folder), rows=20_000, days=7, seed=1, parallelism=2)
    return folder


@pytest.fixture(scope="session")
def start_ray() -> Callable[[], None]:
    """Starts a Ray of this machine alone with two CPUs, whose workers get this process's environment."""

    def start() -> None:
        import ray

        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=300_000_000,
            configure_logging=False,
        )

    return start


@pytest.fixture(scope="session")
def local_ray(start_ray: Callable[[], None]) -> Iterator[None]:
    """The Ray that most tests share."""
    import ray

    start_ray()
    yield
    ray.shutdown()
