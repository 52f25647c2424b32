"""The Spark engines: the same data tasks, run by Spark in a process of its own, and the Python environments that they need."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import IO, Any

import pyarrow as pa

from rayrec.config import Config, InputError
from rayrec.storage import Scratch


@dataclass(frozen=True, kw_only=True)
class SparkConfig(Config):
    """Of the engines spark and spark-on-ray."""

    master: str = "local[*]"
    """Spark master (engine spark): local[N], spark://HOST:PORT, or sc://HOST:PORT for Spark Connect."""
    executors: int = 1
    """Executors inside the Ray cluster (engine spark-on-ray)."""
    executor_cpus: int = 1
    """CPUs of each of them."""
    executor_memory: str = "2g"
    """Memory of each of them."""
    shared_folder: str | None = None
    """Folder that this machine and all executors share, for the tasks' results; None: the cache's, fit for one machine."""
    timeout_s: float = 120.0
    """How long Spark may take to start, and then to finish any one task, before it is given up."""


_COMPLETE = "complete"
"""File that is written last."""


def environment(name: str, *, folder: str, note: Callable[[str], None]) -> str:
    """The interpreter of environment `name`, whose distributions NAME.lock beside this file lists; it is made in a folder
    below `folder`, named by them, where it is not there yet.

    Two processes that want it at once make it once. Raises InputError where pip cannot install it.
    """
    lock = resources.files("rayrec.ingest").joinpath(f"{name}.lock").read_text()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(f"{sys.executable}\0{version}\0{lock}".encode()).hexdigest()[:12]
    place = os.path.join(folder, f"{name}-{key}")
    python = os.path.join(place, "bin", "python")
    if os.path.exists(os.path.join(place, _COMPLETE)):
        return python
    os.makedirs(folder, exist_ok=True)
    with open(place + ".lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(place, _COMPLETE)):
            return python
        note(f"making the Python environment of {name} in {place} (once)")
        shutil.rmtree(place, ignore_errors=True)
        requirements = os.path.join(folder, f"{name}-{key}.txt")
        with open(requirements, "w") as file:
            file.write(lock)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
        for command in ([sys.executable, "-m", "venv", place], [*pip, "-r", requirements]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
                why = lines[0].strip() if lines else f"exit status {done.returncode}"
                raise InputError(f"{place}: {' '.join(command[1:4])} failed ({why}); see what pip can reach, and call again")
        with open(os.path.join(place, _COMPLETE), "w"):
            pass
    return python


_POLL_S = 0.02
_WINDOW_BYTES = 4 << 30
_LEAST_TASKS = 64
"""Tasks that are submitted together: as many as give about _WINDOW_BYTES of results, and at least _LEAST_TASKS."""
_NO_EXECUTOR = "an executor may be gone, or waits for CPUs or memory that others hold"
_STOP_S = 30.0
"""How long Spark may take to stop before it is killed."""


@dataclass
class SparkEngine:
    """Runs data tasks on Spark; see `Engine`.

    Spark's driver is a child process (spark_driver.py), so that its JVM, its logs and, for RayDP, its Python environment are
    its own. Tasks leave their results as files in a folder that this process and all executors share; they are read as
    they come, in order, and removed.
    """

    process: subprocess.Popen[str]
    folder: str
    timeout_s: float
    logs_at_start: dict[str, int] | None = None
    """With Ray: `_ray_logs` of before."""
    _runs: int = field(default=0)

    @classmethod
    @contextmanager
    def started(
        cls, config: SparkConfig, *, ray_address: str | None, cache_folder: str, note: Callable[[str], None]
    ) -> Iterator[SparkEngine]:
        """Spark, started on `config.master`, or with `ray_address` inside that Ray cluster; stopped at the end.

        Raises InputError where Spark is not installed, no Java is there, or it does not start in time.
        """
        if shutil.which("java") is None:
            if ray_address is not None:
                raise InputError(
                    "engine spark-on-ray: needs Java 17, got no java on PATH. Install it on each node, and put it on PATH."
                )
            if not os.environ.get("JAVA_HOME"):
                raise InputError("engine: Spark needs Java 17 and no java is found; install one or set JAVA_HOME")
        if ray_address is not None:
            python = environment("raydp", folder=os.path.join(cache_folder, "environments"), note=note)
        elif importlib.util.find_spec("pyspark") is None:
            raise InputError("engine spark: pyspark is not installed; pip install 'rayrec[spark]'")
        else:
            python = sys.executable
        shared = config.shared_folder or cache_folder
        os.makedirs(shared, exist_ok=True)
        with Scratch("spark", parent=shared) as folder:
            known = _ray_logs() if ray_address is not None else None
            engine = cls(_start(python, folder, config, ray_address), folder, config.timeout_s, known)
            try:
                engine._await_start()
                yield engine
            except BaseException:
                engine._stop(failed=True)
                raise
            engine._stop(failed=False)

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        """Submits the items in windows: results wait on a disk that all executors share."""
        if not items:
            return
        size = max(_LEAST_TASKS, _WINDOW_BYTES // max(block_bytes, 1))
        windows = [items[start : start + size] for start in range(0, len(items), size)]
        # Spark runs one window while the results of the one before are read: no more than two are on the disk.
        folders = deque([self._submit(name, function, windows[0])])
        for number, window in enumerate(windows):
            if number + 1 < len(windows):
                folders.append(self._submit(name, function, windows[number + 1]))
            yield from self._results(name, folders.popleft(), len(window))

    def _submit(self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any]) -> str:
        self._runs += 1
        folder = os.path.join(self.folder, f"{self._runs:03d}-{name.replace(' ', '-')}")
        os.makedirs(folder)
        with open(os.path.join(folder, "job.pickle"), "wb") as file:
            pickle.dump((function, list(items)), file)
        self._send({"folder": folder, "tasks": len(items)})
        return folder

    def _results(self, name: str, folder: str, tasks: int) -> Iterator[pa.Table]:
        last = time.monotonic()
        for number in range(tasks):
            path = os.path.join(folder, f"{number:06d}.arrow")
            while not os.path.exists(path):
                last = self._check(name, folder, last)
                time.sleep(_POLL_S)
            with pa.memory_map(path) as mapped:
                table = pa.ipc.open_file(mapped).read_all()
            os.remove(path)  # what is mapped stays readable
            last = time.monotonic()
            yield table
        shutil.rmtree(folder)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise InputError(self._died()) from None

    def _check(self, name: str, folder: str, last: float) -> float:
        """Raises where the run has failed, ended or stopped moving; returns when it was last seen to move."""
        error = os.path.join(folder, "error.json")
        if os.path.exists(error):
            with open(error) as file:
                found = json.load(file)
            if found["kind"] == "InputError":
                raise InputError(found["message"])
            raise RuntimeError(f"Spark, {name}: {found['message']}; its log is {self._kept_log()}")
        if self.process.poll() is not None:
            raise InputError(self._died())
        newest = max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)
        if time.time() - newest < self.timeout_s:
            return time.monotonic()
        if time.monotonic() - last > self.timeout_s:
            raise InputError(
                f"Spark, {name}: no task ended for {self.timeout_s:g} s ({self._ray_error() or _NO_EXECUTOR}); call again, or "
                f"raise --spark.timeout-s; its log is {self._kept_log()}"
            )
        return last

    def _died(self) -> str:
        status = self.process.wait()
        why = _last_error(os.path.join(self.folder, "driver.log")) or f"exit status {status}"
        return f"Spark's driver ended ({why}); its log is {self._kept_log()}"

    def _ray_error(self) -> str:
        """The last error that a process of Ray on this machine has logged since the start, and where; empty if none has."""
        if self.logs_at_start is not None:
            for path in _ray_logs():
                if why := _last_error(path, skip=self.logs_at_start.get(path, 0)):
                    return f"{path}: {why}"
        return ""

    def _kept_log(self) -> str:
        """Where the logs lie once the working folder is gone."""
        kept = os.path.join(tempfile.gettempdir(), f"{os.path.basename(self.folder)}.log")
        with open(kept, "wb") as out:
            for name in ("driver.log", "spark.log"):
                path = os.path.join(self.folder, name)
                if os.path.exists(path):
                    with open(path, "rb") as log:
                        shutil.copyfileobj(log, out)
        return kept

    def _await_start(self) -> None:
        ready, begun = os.path.join(self.folder, "ready"), time.monotonic()
        while not os.path.exists(ready):
            if self.process.poll() is not None:
                raise InputError(self._died())
            if time.monotonic() - begun > self.timeout_s:
                why = self._ray_error() or "are there CPUs and memory for its executors?"
                raise InputError(f"Spark did not start in {self.timeout_s:g} s ({why}); its log is {self._kept_log()}")
            time.sleep(_POLL_S)

    def _stop(self, *, failed: bool) -> None:
        if not failed and self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()  # the driver's sign to stop
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                failed = True
        if failed:
            # The whole group: the JVM and its Python workers are the driver's children.
            _signal(self.process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            _signal(self.process, signal.SIGKILL)
            self.process.wait()


def _ray_logs() -> dict[str, int]:
    """The sizes in bytes of the logs of this machine's part of Ray that tell why a worker does not start."""
    from rayrec.compat.ray_compat import local_node

    folder = glob.escape(local_node().get_logs_dir_path())
    found = (path for name in ("raylet.err", "*java-worker-*.log", "worker-*.err") for path in glob.glob(f"{folder}/{name}"))
    return {path: os.path.getsize(path) for path in found}


def _last_error(path: str, *, skip: int = 0) -> str:
    """The last line of a log, without its first `skip` bytes, that names an error; empty if none does."""
    with open(path, "rb") as file:
        file.seek(skip)
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if "Error" in line or "Exception" in line), "")


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _start(python: str, folder: str, config: SparkConfig, ray_address: str | None) -> subprocess.Popen[str]:
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    job = {**config.to_dict(), "folder": folder, "ray_address": ray_address, "source": source}
    environment = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "SPARK_CONF_DIR")}
    environment |= {
        # RayDP's environment has this package by its source alone; it needs no more of it than the data layer.
        "PYTHONPATH": os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")])),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }
    log: IO[bytes]
    with open(os.path.join(folder, "driver.log"), "wb") as log:
        return subprocess.Popen(
            [python, "-m", "rayrec.ingest.spark_driver", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
