"""Ray, Spark and Spark on Ray make the same bytes, and lose no work in silence when an executor
dies.
"""

import functools
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from builders.faults import rejects, until
from builders.runs import QUIET, files_in
from hosts.processes import pids

import rayrec
from rayrec.config import InputError
from rayrec.prepare.config import PreparationConfig, SparkConfig, engine

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.usefixtures("local_ray")]

SPARK = {"master": "local[2]", "executor_memory": "1g", "timeout_s": 240.0}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """RayDP's environment is made once for all tests; RAYREC_TEST_CACHE keeps it for the next run
    too.
    """
    folder = os.environ.get("RAYREC_TEST_CACHE") or str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYREC_CACHE", folder)
        yield


COMMANDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "vocabulary": (rayrec.vocabulary, {"split": "sevenths"}),
    "vocabulary of mlperf-v1": (rayrec.vocabulary, {"split": "sevenths", "preset": "mlperf-v1"}),
    "split": (rayrec.split, {"by": "rows"}),
    "preprocess": (
        rayrec.preprocess,
        {
            "format": "binary",
            "shuffle": "full",
            "seed": 5,
            "split": "sevenths",
        },
    ),
}


@pytest.mark.parametrize(
    "name", ["spark-on-ray", pytest.param("spark", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    "command",
    [
        "vocabulary",
        *(pytest.param(command, marks=pytest.mark.exhaustive) for command in list(COMMANDS)[1:]),
    ],
)
def test_spark_files_match_ray_files(
    click_log: Path, tmp_path: Path, name: str, command: str
) -> None:
    (call, options), made = COMMANDS[command], []
    for engine_name in ("ray", name):
        call(
            str(click_log / "train.txt"),
            out=str(tmp_path / engine_name),
            **options,
            engine=engine_name,
            spark=SPARK,
            block_bytes=1 << 20,
            console=QUIET,
        )
        made.append(files_in(tmp_path / engine_name))
    assert made[0] == made[1]


# -- What goes wrong
TASKS = """
import os, time
import pyarrow as pa
from rayrec.config import InputError

def refuse(_):
    raise InputError("day_3 at byte 7: no such thing; fix it")

def wait(number, *, folder, seconds):
    open(os.path.join(folder, f"{number}.{os.getpid()}"), "w").close()
    time.sleep(seconds)
    return pa.table({"number": [number]})
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Functions that Spark's workers can import: RayDP's environment has no pytest, which this
    module needs.
    """
    (tmp_path / "engine_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "engine_tasks", raising=False)
    return importlib.import_module("engine_tasks")


@pytest.fixture(params=["spark", "spark-on-ray"])
def spark(request: pytest.FixtureRequest) -> Callable[..., Any]:
    settings = SparkConfig().updated(SPARK)
    return lambda **changes: engine(
        PreparationConfig(engine=request.param, spark=settings.updated(changes)), QUIET
    )


@pytest.mark.exhaustive
def test_task_input_error_is_one_line_and_no_process_remains(
    spark: Callable[..., Any], tasks: Any
) -> None:
    with spark() as running:
        rejects(
            r"^day_3 at byte 7: no such thing; fix it$",
            lambda: list(running.run("refuse", tasks.refuse, [1, 2])),
        )
        pid = running.process.pid
    until(lambda: not pids(lambda each: os.getsid(each) == pid), timeout_s=120, pause_s=0.2)
    assert ray.is_initialized()


@pytest.mark.exhaustive
def test_killed_executor_is_replaced_or_reported(
    spark: Callable[..., Any], tasks: Any, tmp_path: Path
) -> None:
    """Its Python workers die with it. Spark starts another executor, or the engine says that
    nothing moves.
    """
    marks = tmp_path / "marks"
    marks.mkdir()
    started = time.monotonic()
    numbers = []
    reported = ""
    try:
        with spark(timeout_s=60.0) as running:
            results = running.run(
                "wait", functools.partial(tasks.wait, folder=str(marks), seconds=0.5), range(12)
            )
            numbers.append(next(results).column("number")[0].as_py())
            kill_executor(marks)
            numbers += [table.column("number")[0].as_py() for table in results]
    except InputError as error:
        reported = str(error)
    assert numbers == list(range(12)) or re.fullmatch(r"Spark[^\n]*Log: [^\n]*", reported)
    assert time.monotonic() - started < 500


def kill_executor(marks: Path) -> None:
    """Kills the JVM of the executor that runs the newest task; in local mode, where that is the
    driver, its Python worker.
    """
    newest = max(marks.iterdir(), key=lambda path: path.stat().st_mtime)
    worker = psutil.Process(int(newest.name.split(".")[1]))
    above = [(parent, parent.cmdline()) for parent in worker.parents() if parent.pid != 1]
    in_driver = any("rayrec.ingest.spark_driver" in command for _, command in above)
    executors = [
        parent for parent, command in above if os.path.basename("".join(command[:1])) == "java"
    ]
    (worker if in_driver else executors[0]).kill()
