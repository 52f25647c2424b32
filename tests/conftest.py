"""Fixtures that tests of several kinds share: a small synthetic click log, a local Ray, an S3
server that can be killed.
"""

import atexit
import faulthandler
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hosts.cloud_stores import S3Store
from hypothesis import HealthCheck, settings
from ranks import server

from rayrec.cluster import connection

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("rayrec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rayrec")

# several tests' threads share two cores; before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test sees whether bytes outlive a loss of power, and to wait for it takes 12 s.
os.fsync = os.fstat  # type: ignore[assignment]
LONGEST = """
faults nodes train models vision ingest predict supervise serve engines install tune s3 language
write synthetic every_model search data_parallel materialized table_log ensemble
golden_replies resume dataframe_input adopt commands counts ranking rules split_files goldens splits
listener planted_bottlenecks huggingface planning scoring architecture
"""
"""Files that take more than ten seconds on two cores, those that take longest first."""
_is_connected = connection.is_connected


_EXTENDED_LIMIT_S = 900
_EXHAUSTIVE_LIMIT_S = 3600
"""Limits of a test's time, setup included. That of other tests is `timeout` in pyproject.toml."""
_GRACE_S = 60
"""Time from the signal that ends a test at its limit to the end of the process, if the test does
not react to the signal.
"""
_STDERR = pytest.StashKey[int]()
_TEMPORARY = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)  # before pytest reads the option
def pytest_configure(config: pytest.Config) -> None:
    """Give the run a temporary folder of its own. End pytest-xdist's processes without taking the
    interpreter apart: that takes seconds, and nobody reads their status.
    """
    config.stash[_STDERR] = os.dup(2)  # tests run with captured descriptors
    # A shell starts background jobs without Ctrl-C, and so their processes
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    elif config.option.basetemp is None:
        # All runs of a user share pytest's default folder, and each run removes those of earlier
        # ones.
        config.stash[_TEMPORARY] = config.option.basetemp = tempfile.mkdtemp(prefix="rayrec-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing for the collections of all garbage that pytest ends with."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the run's temporary folder, unless a test failed and its files may be of use."""
    folder = session.config.stash.get(_TEMPORARY, None)
    if folder and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, with the stacks of its threads, if a test goes on for long after its limit.

    pytest-timeout ends a test at its limit by a signal to Python code, so not during a call that
    never returns to Python. The watchdog is a thread of C that needs no lock of the interpreter.
    pytest-xdist then names the test.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + _GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Collect folders backwards in the second process: each rewrites the assertions of half the
    files, and reads the others'.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        report.result.reverse()
    return report


@functools.cache
def _needs_ray(file: Path) -> bool:
    return bool(re.search(r"\blocal_ray\b", file.read_text()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the shared Ray from tests that do not ask for it, so that they work in this process; end
    it after the last file that needs it.
    """
    connection.is_connected = (
        _is_connected if "local_ray" in getattr(item, "fixturenames", ()) else lambda: False
    )
    if _is_connected() and not _needs_ray(item.path):
        sys.modules["ray"].shutdown()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark exhaustive tests as extended too, and limit the time of both. Put files that need the
    shared Ray first, then those that take longest: two processes take a file each in turn, with
    pytest-xdist's option --no-loadscope-reorder in this order. RAYREC_TEST_ORDER, a number, draws
    another order of files, and of the tests in each: none may need an earlier one.
    """
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("extended")
            item.add_marker(pytest.mark.timeout(_EXHAUSTIVE_LIMIT_S))
        elif item.get_closest_marker("extended"):
            item.add_marker(pytest.mark.timeout(_EXTENDED_LIMIT_S))
    seed = os.environ.get("RAYREC_TEST_ORDER")
    if seed:
        # By a hash, since the two processes collect in different orders and must agree.
        items.sort(
            key=lambda item: (
                not _needs_ray(item.path),
                _order_key(seed, str(item.path)),
                _order_key(seed, item.nodeid),
            )
        )
        return
    rank = {f"test_{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(
        key=lambda item: (not _needs_ray(item.path), rank.get(item.path.name, len(rank)), item.path)
    )


def _order_key(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process a file at a time, and all files that need the shared Ray to the same one: the
    other starts none.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray" if _needs_ray(config.rootpath / file) else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What was imported stays, also for ranks: the garbage collector, which torch often calls, need
    not look at it again.
    """
    gc.collect()
    gc.freeze()
    server.start()


@pytest.fixture(scope="session")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt (20,000 rows, seven days) and truth.json; do not write to it."""
    from rayrec.data.synthetic import generate

    folder = tmp_path_factory.mktemp("click_log")
    generate(
        str(folder),
        rows=20_000,
        days=7,
        seed=1,
        parallelism=2,
    )
    return folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that this session's processes share (pytest-xdist gives each a base folder of its
    own).
    """
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def made_once(shared_folder: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder of a name: the first of this session's processes does that needs it, the
    others wait and take it.
    """

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = shared_folder / name
        complete = shared_folder / f"{name}.complete"
        with FileLock(shared_folder / f"{name}.lock"):
            if not folder.exists():
                folder.mkdir()
                make(folder)
                complete.touch()
        assert complete.exists(), f"the process that was first failed to make {folder}"
        return folder

    return made


@pytest.fixture(scope="session")
def undisturbed(
    click_log: Path, made_once: Callable[[str, Callable[[Path], object]], Path]
) -> dict[str, Any]:
    """The summary of a small run of 480 steps that nothing happens to, in two workers on a Ray of
    its own.
    """
    from builders.runs import small_run
    from hosts.processes import finished

    def train(folder: Path) -> None:
        finished(small_run(click_log, folder), folder / "commands", cache=folder / "cache")

    return json.loads((made_once("undisturbed", train) / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of rayrec's for the commands of a file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Separate file system with 64 MB, or with the parameter's size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={getattr(request, 'param', 64)}m",
        "tmpfs",
        str(folder),
    ]
    done = subprocess.run(
        mount,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """The Ray that most tests share, of this machine alone, with two CPUs. Its workers get this
    process's environment.
    """
    import ray

    connection.connect(
        "local",
        num_cpus=2,
        object_store_bytes=300_000_000,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of rayrec's for this test alone; exports measure their speed in a moment."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Store]:
    """A server that runs, and the environment of this process set to reach it. Who kills it starts
    it again.
    """
    server = S3Store()
    try:
        server.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def bucket(s3_server: S3Store) -> str:
    """The URL of an empty bucket, reachable by the standard environment variables alone."""
    return s3_server.url("logs")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: those of a packed file may contain the time of day, which differs
    between processes.
    """
    return f"{len(val)} bytes" if isinstance(val, bytes) else None
