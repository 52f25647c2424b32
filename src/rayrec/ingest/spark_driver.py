"""Spark driver in a child process: reads jobs from standard input and runs one Spark task per item.
It also runs in RayDP's environment, so it imports only Spark and the data layer.
"""

import functools
import json
import os
import pickle
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import pyarrow as pa

from rayrec.config import InputError

_OPENED = (
    "java.lang",
    "java.lang.invoke",
    "java.lang.reflect",
    "java.io",
    "java.net",
    "java.nio",
    "java.math",
    "java.text",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "sun.nio.ch",
    "sun.nio.cs",
    "sun.security.action",
    "sun.util.calendar",
)
"""Java packages that RayDP accesses by reflection, closed by default in Java 17."""


def run_items(
    function: Callable[[Any], pa.Table],
    items: Sequence[Any],
    folder: str,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run the items with the given numbers in a Spark task and write each result to a file,
    atomically.
    """
    for batch in batches:
        for number in batch.column(0).to_pylist():
            path = os.path.join(folder, f"{number:06d}.arrow")
            try:
                table = function(items[number])
            except InputError as error:
                write_error(folder, "InputError", str(error))
                raise
            temporary = f"{path}.{os.getpid()}"
            with pa.OSFile(temporary, "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)
            os.replace(temporary, path)
        yield pa.record_batch({"id": batch.column(0)})


def write_error(folder: str, kind: str, message: str) -> None:
    """Write an error for the parent, unless there is one already."""
    path = os.path.join(folder, "error.json")
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump({"kind": kind, "message": message}, file)
    if not os.path.exists(path):
        os.replace(temporary, path)


def settings(job: dict[str, Any], *, logging: str) -> dict[str, str]:
    """Compute Spark settings for a job. Pure."""
    folder = job["folder"]
    common = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": os.path.join(folder, "local"),
        "spark.sql.warehouse.dir": os.path.join(folder, "local", "warehouse"),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
        "spark.task.maxFailures": "4",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }
    if job["ray_address"] is None:
        options = f"-Dlog4j2.configurationFile=file:{logging} -Djava.io.tmpdir={folder}/local"
        common["spark.driver.extraJavaOptions"] = options
        if job["master"].startswith("local"):
            common |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        return common
    opened = " ".join(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED)
    common["spark.log4j.config.file.name"] = f"file:{logging}"
    for name in ("spark.executor", "spark.driver", "spark.ray.raydp_app_master"):
        common[f"{name}.extraJavaOptions"] = opened
    return common


def start(job: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """Start a session. Returns (session, stop function)."""
    os.makedirs(os.path.join(job["folder"], "local"), exist_ok=True)
    logging = os.path.join(job["folder"], "log4j2.properties")
    with open(logging, "w") as file:
        properties = resources.files("rayrec.ingest").joinpath("log4j2.properties").read_text()
        file.write(f"{properties}appender.file.fileName = {job['folder']}/spark.log\n")
    conf = settings(job, logging=logging)
    if job["ray_address"] is not None:
        return _start_on_ray(job, conf)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("rayrec")
    if job["master"].startswith("sc://"):
        builder = builder.remote(job["master"])
        conf = {
            name: value for name, value in conf.items() if name.startswith("spark.sql.execution")
        }
    else:
        if job["master"].startswith("local"):
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        # local[N] fails at the first task failure. local[N,4] tries four times, like a cluster.
        builder = builder.master(re.sub(r"^local\[(\*|\d+)\]$", r"local[\1,4]", job["master"]))
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    return session, session.stop


def _start_on_ray(job: dict[str, Any], conf: dict[str, str]) -> tuple[Any, Callable[[], None]]:
    import ray
    import raydp

    environment = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(
        address=job["ray_address"],
        log_to_driver=False,
        runtime_env={"env_vars": environment, "py_executable": sys.executable},
    )
    session = raydp.init_spark(
        f"rayrec-{os.getpid()}",
        job["executors"],
        job["executor_cpus"],
        job["executor_memory"],
        configs=conf,
    )

    def stop() -> None:
        raydp.stop_spark()
        ray.shutdown()

    return session, stop


def reason(error: BaseException) -> str:
    """Extract the line with the cause from a Spark error, without Java and Python stack traces."""
    lines = str(error).splitlines()
    causes = [
        line.strip() for line in lines if re.match(r"\s*(?:[\w.]+\.)?\w*(Error|Exception): ", line)
    ]
    return (causes or lines or [type(error).__name__])[-1][:500]


def main() -> None:
    job = json.loads(sys.argv[1])
    # Protocol with the parent: it writes a job per line, {folder, tasks}, to standard input, and
    # waits for the results as files in that folder. Closing standard input ends the driver, as the
    # parent's death does. The main thread runs the jobs, so another one has to notice that.
    # Unbounded, since the parent sends one job at a time. None is the end of standard input.
    lines: queue.Queue[str | None] = queue.Queue()
    # Set while a job runs, whose end the parent no longer waits for if standard input is closed.
    running = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        if running.is_set():
            os._exit(1)  # No process waits for this job. The JVM exits with its parent.
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    session, stop = start(job)
    with open(os.path.join(job["folder"], "ready"), "w"):
        pass
    while (line := lines.get()) is not None:
        request = json.loads(line)
        folder = request["folder"]
        tasks = request["tasks"]
        with open(os.path.join(folder, "job.pickle"), "rb") as file:
            function, items = pickle.load(file)  # Written by the parent into a private folder.
        task = functools.partial(run_items, function, items, folder)
        running.set()
        try:
            session.range(0, tasks, 1, tasks).mapInArrow(task, "id long").write.format("noop").mode(
                "overwrite"
            ).save()
        except Exception as error:
            write_error(folder, "Exception", reason(error))
            raise
        running.clear()
    stop()


if __name__ == "__main__":
    main()
