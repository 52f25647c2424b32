"""Spark engines: data tasks run by Spark from a separate driver process, and the Python
environments they need.
"""

from __future__ import annotations

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
from typing import Any

import pyarrow as pa

from rayrec.config import Config, InputError
from rayrec.data.engine import Task
from rayrec.storage import Scratch, locked


# Files between this process and Spark, in a folder that executors share:
#
#   parent                                driver               executor
#   starts the driver                     writes ready
#   writes job.pickle, sends its folder   starts the tasks     writes NUMBER.arrow
#   reads NUMBER.arrow in order, removes  -                    writes error.json
#   closes standard input                 stops Spark, ends
#
# Files are renamed into place. The parent polls, because shared file systems have no notices.
@dataclass(frozen=True, kw_only=True)
class SparkConfig(Config):
    """Settings of the engines spark and spark-on-ray."""

    master: str = "local[*]"
    """Spark master (engine spark): local[N], spark://HOST:PORT, or sc://HOST:PORT for Spark
    Connect.
    """
    executors: int = 1
    """Number of executors inside the Ray cluster (engine spark-on-ray)."""
    executor_cpus: int = 1
    """CPUs per executor."""
    executor_memory: str = "2g"
    """Memory per executor."""
    shared_folder: str | None = None
    """Folder for task results, shared by this machine and all executors. None uses the cache
    folder, for one machine only.
    """
    timeout_s: float = 120.0
    """Maximum time in seconds for Spark to start, and then to finish a task."""


_COMPLETE = "complete"
"""Marker file of a complete environment."""


def environment(name: str, *, folder: str, note: Callable[[str], None]) -> str:
    """Return the interpreter of environment `name`, and create the environment below `folder` if
    needed. It has the distributions of NAME.lock; its folder's name has their hash. Several
    processes may call it. Raises InputError if pip fails.
    """
    lock = resources.files("rayrec.ingest").joinpath(f"{name}.lock").read_text()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(f"{sys.executable}\0{version}\0{lock}".encode()).hexdigest()[:12]
    env = os.path.join(folder, f"{name}-{key}")
    python = os.path.join(env, "bin", "python")
    if os.path.exists(os.path.join(env, _COMPLETE)):
        return python
    os.makedirs(folder, exist_ok=True)
    with locked(env + ".lock"):
        if os.path.exists(os.path.join(env, _COMPLETE)):
            return python
        note(f"Creating the Python environment of {name} in {env} (once)")
        shutil.rmtree(env, ignore_errors=True)
        requirements = os.path.join(folder, f"{name}-{key}.txt")
        with open(requirements, "w") as file:
            file.write(lock)
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--no-deps",
        ]
        for command in ([sys.executable, "-m", "venv", env], [*pip, "-r", requirements]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [
                    line for line in done.stderr.splitlines() if line.startswith("ERROR")
                ] or done.stderr.splitlines()
                why = lines[0].strip() if lines else f"exit status {done.returncode}"
                raise InputError(
                    f"{env}: {' '.join(command[1:4])} failed ({why}). Check what pip can reach, "
                    "and try again."
                )
        with open(os.path.join(env, _COMPLETE), "w"):
            pass
    return python


_POLL_S = 0.02
_WINDOW_BYTES = 4 << 30
_MIN_TASKS = 64
"""Minimum number of tasks submitted together. More are, for results of up to about
_WINDOW_BYTES.
"""
_NO_EXECUTOR = "an executor may be lost, or waits for CPUs or memory in use by other jobs"
_STOP_S = 30.0
"""Maximum time in seconds for Spark to stop before it is killed."""


@dataclass
class SparkEngine:
    """Engine that runs data tasks on Spark. Implements `Engine`. The Spark driver is a child
    process (spark_driver.py), with a separate JVM, separate logs and, for RayDP, a separate Python
    environment. Tasks write results to files in a folder shared with all executors, which are read
    in order and removed.
    """

    process: subprocess.Popen[str]
    folder: str
    timeout_s: float
    logs_at_start: dict[str, int] | None = None
    """Result of `_ray_logs` before the start, with Ray."""
    _runs: int = field(default=0)

    @classmethod
    @contextmanager
    def started(
        cls,
        config: SparkConfig,
        *,
        ray_address: str | None,
        cache_folder: str,
        note: Callable[[str], None],
    ) -> Iterator[SparkEngine]:
        """Start Spark on `config.master`, or inside the Ray cluster at `ray_address`, and stop it
        at the end. Raises InputError if Spark or Java is not installed, or Spark does not start in
        time.
        """
        if shutil.which("java") is None:
            if ray_address is not None:
                raise InputError(
                    "engine spark-on-ray: needs Java 17, got no java on PATH. Install it on each "
                    "node, on PATH."
                )
            if not os.environ.get("JAVA_HOME"):
                raise InputError(
                    "engine: Spark needs Java 17, java not found. Install it or set JAVA_HOME."
                )
        if ray_address is not None:
            python = environment(
                "raydp", folder=os.path.join(cache_folder, "environments"), note=note
            )
        elif importlib.util.find_spec("pyspark") is None:
            raise InputError("engine spark: pyspark is not installed; pip install 'rayrec[spark]'")
        else:
            python = sys.executable
        shared = config.shared_folder or cache_folder
        os.makedirs(shared, exist_ok=True)
        with Scratch("spark", parent=shared) as folder:
            logs = _ray_logs() if ray_address is not None else None
            engine = cls(
                _start(python, folder, config, ray_address), folder, config.timeout_s, logs
            )
            try:
                engine._await_start()
                yield engine
            except BaseException:
                engine._stop(failed=True)
                raise
            engine._stop(failed=False)

    def run(
        self, name: str, function: Task, items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        """Submit the items in windows, because results wait on the shared disk."""
        if not items:
            return
        size = max(_MIN_TASKS, _WINDOW_BYTES // max(block_bytes, 1))
        windows = [items[start : start + size] for start in range(0, len(items), size)]
        # Spark runs one window while the results of the previous one are read, so at most two are
        # on the disk.
        folders = deque([self._submit(name, function, windows[0])])
        for number, window in enumerate(windows):
            if number + 1 < len(windows):
                folders.append(self._submit(name, function, windows[number + 1]))
            yield from self._results(name, folders.popleft(), len(window))

    def _submit(self, name: str, function: Task, items: Sequence[Any]) -> str:
        self._runs += 1
        folder = os.path.join(self.folder, f"{self._runs:03d}-{name.replace(' ', '-')}")
        os.makedirs(folder)
        with open(os.path.join(folder, "job.pickle"), "wb") as file:
            pickle.dump((function, list(items)), file)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"folder": folder, "tasks": len(items)}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise InputError(self._exit_message()) from None
        return folder

    def _results(self, name: str, folder: str, tasks: int) -> Iterator[pa.Table]:
        last = time.monotonic()
        for number in range(tasks):
            path = os.path.join(folder, f"{number:06d}.arrow")
            # Ends by the result, an error file, the driver's end, or timeout_s without a new file.
            while not os.path.exists(path):
                last = self._check(name, folder, last)
                time.sleep(_POLL_S)
            with pa.memory_map(path) as mapped:
                table = pa.ipc.open_file(mapped).read_all()
            os.remove(path)  # The mapping stays readable.
            last = time.monotonic()
            yield table
        shutil.rmtree(folder)

    def _check(self, name: str, folder: str, last: float) -> float:
        """Check the job and return the time of its last progress. Raises if it failed, ended or
        made no progress for too long.
        """
        error = os.path.join(folder, "error.json")
        if os.path.exists(error):
            with open(error) as file:
                report = json.load(file)
            if report["kind"] == "InputError":
                raise InputError(report["message"])
            raise RuntimeError(f"Spark, {name}: {report['message']}. Log: {self._save_log()}")
        if self.process.poll() is not None:
            raise InputError(self._exit_message())
        newest = max(map(_modified_s, os.scandir(folder)), default=0.0)
        if time.time() - newest < self.timeout_s:
            return time.monotonic()
        if time.monotonic() - last > self.timeout_s:
            raise InputError(
                f"Spark, {name}: no task ended in {self.timeout_s:g} s "
                f"({self._ray_error() or _NO_EXECUTOR}). Try again, or "
                f"increase --spark.timeout-s. Log: {self._save_log()}"
            )
        return last

    def _exit_message(self) -> str:
        status = self.process.wait()
        why = _last_error(os.path.join(self.folder, "driver.log")) or f"exit status {status}"
        return f"Spark's driver ended ({why}). Log: {self._save_log()}"

    def _ray_error(self) -> str:
        """Return the last error logged by Ray processes of this machine since the start, with its
        log path. Empty if none.
        """
        if self.logs_at_start is not None:
            for path in _ray_logs():
                if why := _last_error(path, skip=self.logs_at_start.get(path, 0)):
                    return f"{path}: {why}"
        return ""

    def _save_log(self) -> str:
        """Copy the logs to a file that outlives the working folder, and return its path."""
        log_path = os.path.join(tempfile.gettempdir(), f"{os.path.basename(self.folder)}.log")
        with open(log_path, "wb") as out:
            for name in ("driver.log", "spark.log"):
                path = os.path.join(self.folder, name)
                if os.path.exists(path):
                    with open(path, "rb") as log:
                        shutil.copyfileobj(log, out)
        return log_path

    def _await_start(self) -> None:
        ready = os.path.join(self.folder, "ready")
        start_s = time.monotonic()
        # Spark has no call that waits for its executors.
        while not os.path.exists(ready):
            if self.process.poll() is not None:
                raise InputError(self._exit_message())
            if time.monotonic() - start_s > self.timeout_s:
                why = self._ray_error() or "are there CPUs and memory for its executors?"
                raise InputError(
                    f"Spark did not start in {self.timeout_s:g} s ({why}). Log: {self._save_log()}"
                )
            time.sleep(_POLL_S)

    def _stop(self, *, failed: bool) -> None:
        if not failed and self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()  # Tells the driver to stop.
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                failed = True
        if failed:
            # The whole process group, because the JVM and its Python workers are children of the
            # driver.
            _signal(self.process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            _signal(self.process, signal.SIGKILL)
            self.process.wait()


def _ray_logs() -> dict[str, int]:
    """Return the local Ray logs that explain why a worker does not start, with their sizes in
    bytes.
    """
    import ray

    context = ray.get_runtime_context()
    folder = os.path.join(context.get_temp_dir(), context.get_session_name(), "logs")
    paths = (
        path
        for name in ("raylet.err", "*java-worker-*.log", "worker-*.err")
        for path in glob.glob(f"{glob.escape(folder)}/{name}")
    )
    return {path: os.path.getsize(path) for path in paths}


def _last_error(path: str, *, skip: int = 0) -> str:
    """Return the last line of a log with an error, after its first `skip` bytes. Empty if there is
    no such line.
    """
    with open(path, "rb") as file:
        file.seek(skip)
        lines = file.read().decode(errors="replace").splitlines()
    return next(
        (line.strip()[:300] for line in reversed(lines) if "Error" in line or "Exception" in line),
        "",
    )


def _modified_s(entry: os.DirEntry[str]) -> float:
    """Return when a file was modified, or 0 if an executor renamed it after the folder was read."""
    with suppress(FileNotFoundError):
        return entry.stat().st_mtime
    return 0.0


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _start(
    python: str, folder: str, config: SparkConfig, ray_address: str | None
) -> subprocess.Popen[str]:
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    job = {**config.to_dict(), "folder": folder, "ray_address": ray_address, "source": source}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SPARK_HOME", "SPARK_CONF_DIR")
    }
    environment |= {
        # In RayDP's environment, this package is only on the path, and only its data layer is
        # needed.
        "PYTHONPATH": os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")])),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }
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
