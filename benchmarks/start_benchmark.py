"""Benchmark of command times, from start to exit, stage by stage.

Trains with one worker in its process, with one and two on a local Ray, and with two on a running
Ray that trained before. Also evaluates, predicts, exports, and serves until the first answer.
Peers: bare Ray Train until its first step, bare Ray Serve until its first answer, a plain TorchRec
script and LightGBM until their test AUROC, and Python that imports torch.
"""

import contextlib
import functools
import importlib.util
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts.ports import free_ports
from hosts.processes import RayHead, Session, environment_for, wait_for_ray
from logs import synthetic_log
from recover_benchmark import BARE, first_step_after
from rows import emit, in_turn, medians_of, note
from subprocesses import check_ended

from rayrec.observe.events import read_events
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import in_order

LIGHTGBM = Path(__file__).parent / "peers" / "lightgbm_clicks.py"
TORCHREC = Path(__file__).parent / "peers" / "plain_dlrm.py"
TORCH = "Python that imports torch and ends"
SERVE_PEER = Path(__file__).parent / "peers" / "bare_ray_serve.py"
RAY_SERVE = "bare Ray Serve, one replica that imports torch, no model"
LIGHTGBM_NAME = "LightGBM, its defaults with early stopping, reads by pandas"
RAY = "bare Ray Train, 2 workers, a tiny DDP step, reads no rows"
TRAININGS = {
    "train, 1 worker in process": ["--scaling.num-workers", "1"],
    "train, 1 worker on a local Ray": ["--scaling.num-workers", "1", "--cluster.address", "local"],
    "train, 2 workers on a local Ray": ["--scaling.num-workers", "2", "--cluster.address", "local"],
    "train, 2 workers on a running Ray, second command": [
        "--scaling.num-workers",
        "2",
        "--cluster.address",
        "HEAD",
    ],
}
"""Flags of each; HEAD is the address of a Ray that has run the same command once before."""
QUICK = tuple(name for name in TRAININGS if "1 worker on" not in name)
"""Trainings that `--quick` includes."""
SCORINGS = {
    "evaluate": ["evaluate", "RUN", "LOG"],
    "predict": ["predict", "RUN", "LOG", "--out", "predicted"],
    "export": ["export", "RUN", "--out", "exported"],
}
"""Arguments of commands that read the first training's run, and end."""
SERVE = "serve"
FIRST_STEP = "first_step_s"
EXIT = "exit_s"
ANSWER = "answer_s"
PLAIN = {
    workers: f"plain TorchRec, {workers} by torchrun, rows preprocessed before"
    for workers in (1, 2)
}
PLAIN_NETWORK = (
    "--workload.model.no-first-order",
    "--workload.model.embedding-penalty",
    "0",
    "--epochs",
    "1",
)
"""Flags with which recipe criteo_demo has the settings of the plain TorchRec script."""
TIMEOUT_S = 600.0


def waterfall(
    events: Sequence[Mapping[str, Any]], *, began_s: float, ended_s: float
) -> dict[str, float]:
    """Return the seconds of each stage of a training command, in order. They add up to the whole
    command.

    `events`: events of a run with one start.
    """
    run = RunSummary(events)
    (stages,) = run.starts
    times = {
        kind: [event["time"] for event in events if event["kind"] == kind]
        for kind in {e["kind"] for e in events}
    }
    stepped_s = began_s + sum(stages.values())
    finished_s = times["finish"][-1]
    summary_s = times["summary"][-1]
    trained_s = max(
        time_s for kind in ("step", "evaluate", "checkpoint") for time_s in times.get(kind, [])
    )
    trained_s = min(trained_s, finished_s)
    split = run.time
    paused_s = split.evaluation_s + split.checkpoint_s
    return {
        **{name: stages[name] for name in in_order([stages])},
        "training": trained_s - stepped_s - paused_s,
        "evaluation": split.evaluation_s,
        "saves": split.checkpoint_s,
        "test": finished_s - trained_s,
        "summary": summary_s - finished_s,
        "shutdown": ended_s - summary_s,
    }


def first_step_s(stages: Mapping[str, float]) -> float:
    """Return the seconds of a waterfall until the first step is done."""
    names = list(stages)
    return sum(stages[name] for name in names[: names.index("training")])


def run_command(command: Sequence[str], folder: Path) -> tuple[float, float, str]:
    """Run a command and return its start and end in Unix time, and its standard output. Raises
    RuntimeError if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        began_s = time.time()
        environment = environment_for(folder / "cache", OMP_NUM_THREADS="1")
        with Session(command, environment=environment, output=Path(scratch) / "command") as session:
            status = session.process.wait(TIMEOUT_S)
            ended_s = time.time()
            check_ended(" ".join(Path(part).name for part in command[:6]), status, session.err)
            return began_s, ended_s, session.out


def rayrec(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rayrec", *arguments]


def train(flags: Sequence[str], log: Path, run: Path) -> dict[str, float]:
    """Train once and return the waterfall, with `auroc` of the test rows.

    For a running Ray, starts it and measures the second command. Keeps the run in the folder `run`.
    """
    if "HEAD" not in flags:
        return train_once(flags, log, run)
    with (
        tempfile.TemporaryDirectory(prefix="rs", dir="/tmp") as folder,  # a short path
        RayHead(Path(folder), cache=run.parent / "cache", num_cpus=2) as head,
    ):
        wait_for_ray(head)
        flags = [head.address if flag == "HEAD" else flag for flag in flags]
        train_once(flags, log, run.with_name(f"{run.name}_before"))
        return train_once(flags, log, run)


def train_once(flags: Sequence[str], log: Path, run: Path) -> dict[str, float]:
    command = rayrec("train", "criteo_demo", "--train-data.path", str(log), *PLAIN_NETWORK, *flags)
    placed = ["--storage-path", str(run.parent), "--name", run.name]
    began_s, ended_s, out = run_command([*command, *placed], run.parent)
    stages = waterfall(read_events(run / "events.jsonl"), began_s=began_s, ended_s=ended_s)
    times = {**stages, FIRST_STEP: first_step_s(stages), EXIT: ended_s - began_s}
    return {**times, "auroc": json.loads(out)["metrics"]["auroc"]}


def until_exit(command: Sequence[str], folder: Path) -> dict[str, float]:
    began_s, ended_s, _ = run_command(command, folder)
    return {EXIT: ended_s - began_s}


def score(arguments: Sequence[str], log: Path, run: Path, folder: Path) -> dict[str, float]:
    """Measure the seconds of a command that reads a run. It writes into `folder`."""
    inputs = {"RUN": str(run), "LOG": str(log)}
    outputs = {name: str(folder / name) for name in ("predicted", "exported")}
    return until_exit(
        rayrec(*({**inputs, **outputs}.get(argument, argument) for argument in arguments)), folder
    )


def serve(log: Path, run: Path, folder: Path) -> dict[str, float]:
    """Measure the seconds of `rayrec serve` from the command to its first answer with a row's
    score.
    """
    with open(log, "rb") as rows:
        row = next(rows)
    port = free_ports(1)
    headers = {"content-type": "text/tab-separated-values"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/score", row, headers)
    command = rayrec("serve", str(run), "--port", str(port))
    return until_answer(command, request, folder / "serve")


def bare_ray_serve(folder: Path) -> dict[str, float]:
    """Measure the seconds of the peer's script to its first answer."""
    port = free_ports(1)
    command = [sys.executable, str(SERVE_PEER), str(port)]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/")
    return until_answer(command, request, folder / "bare_serve")


def until_answer(
    command: Sequence[str], request: urllib.request.Request, output: Path
) -> dict[str, float]:
    """Measure the seconds of a server's command until it answers a request with one score."""
    environment = environment_for(output.with_name("cache"), OMP_NUM_THREADS="1")
    began_s = time.time()
    with Session(command, environment=environment, output=output) as session:
        while time.time() < began_s + TIMEOUT_S and session.process.poll() is None:
            # not ready: no connection, or 503
            with contextlib.suppress(OSError), urllib.request.urlopen(request) as answer:
                (_,) = json.load(answer)["scores"]
                return {ANSWER: time.time() - began_s}
            time.sleep(0.02)
        raise RuntimeError(f"{command}: gave no answer:\n{session.err[-4000:]}")


def plain_torchrec(log: Path, workers: int, folder: Path) -> dict[str, float]:
    """Train the plain script on the log's rows as NumPy arrays, with the categories of recipe
    criteo_demo.
    """
    rows = folder / "npy"
    if not rows.exists():
        options = ("--format", "npy", "--split", "sevenths", "--min-count", "2")
        run_command(rayrec("preprocess", str(log), "--out", str(rows), *options), folder)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
    ]
    began_s, ended_s, out = run_command([*torchrun, str(TORCHREC), str(rows)], folder)
    result = json.loads(out.strip().splitlines()[-1])
    return {
        FIRST_STEP: result["first_step_s"] - began_s,
        EXIT: ended_s - began_s,
        "auroc": result["auroc"],
    }


def bare_ray(folder: Path) -> dict[str, float]:
    """Measure the seconds of bare Ray Train from the command to its first step."""
    steps = folder / "steps"
    began_s = time.time()
    with Session(
        [sys.executable, str(BARE), str(steps)],
        environment=environment_for(folder),
        output=folder / "bare",
    ) as session:
        return {FIRST_STEP: first_step_after(steps, began_s, session) - began_s}


def lightgbm(log: Path, folder: Path) -> dict[str, float]:
    began_s, ended_s, out = run_command([sys.executable, str(LIGHTGBM), str(log)], folder)
    return {EXIT: ended_s - began_s, "auroc": json.loads(out.strip().splitlines()[-1])["auroc"]}


def candidates(
    log: Path, folder: Path, *, trainings: Iterable[str], with_lightgbm: bool
) -> dict[str, Callable[[], dict[str, float]]]:
    """Return a function that measures each candidate of a round. Their files go to a new folder."""
    folder.mkdir()
    runs = {name: folder / f"run{number}" for number, name in enumerate(trainings)}
    run = next(iter(runs.values()))
    functions: dict[str, Callable[[], dict[str, float]]] = {
        "bare Ray": functools.partial(bare_ray, folder),
        **{
            name: functools.partial(train, TRAININGS[name], log, run_folder)
            for name, run_folder in runs.items()
        },
        **{
            PLAIN[workers]: functools.partial(plain_torchrec, log, workers, folder)
            for workers in PLAIN
        },
        "import torch": functools.partial(
            until_exit, [sys.executable, "-c", "import torch"], folder
        ),
        **{
            name: functools.partial(score, arguments, log, run, folder)
            for name, arguments in SCORINGS.items()
        },
        SERVE: functools.partial(serve, log, run, folder),
        "bare Ray Serve": functools.partial(bare_ray_serve, folder),
    }
    return (
        {**functions, "LightGBM": functools.partial(lightgbm, log, folder)}
        if with_lightgbm
        else functions
    )


class Report:
    """Printer of each command's rows, each once, as soon as the command and its peer are measured.

    A row measures the time until a training's first step or exit, until scoring exits, or until a
    server's first answer.
    """

    def __init__(self, *, rows: int, repeats: int, with_lightgbm: bool) -> None:
        self._rows = rows
        self._repeats = repeats
        self._with_lightgbm = with_lightgbm
        self._printed: set[tuple[str, str, str | None]] = set()

    def print(self, medians: Mapping[str, Any]) -> None:
        """Print the rows of the measured candidates, which `medians` has by name."""
        for name in TRAININGS:
            plain = PLAIN[int(TRAININGS[name][1])]
            self._row(medians, name, FIRST_STEP, ": command -> first step", "bare Ray", RAY)
            self._row(medians, name, FIRST_STEP, ": command -> first step", plain)
            to_exit = ", one epoch: raw TSV -> test AUROC, command -> exit"
            self._row(
                medians,
                name,
                EXIT,
                to_exit,
                *(("LightGBM", LIGHTGBM_NAME) if self._with_lightgbm else (None,)),
            )
            self._row(medians, name, EXIT, to_exit, plain)
        for name in SCORINGS:
            self._row(medians, name, EXIT, ": command -> exit", "import torch", TORCH)
        to_answer = ": command -> first answer"
        self._row(medians, SERVE, ANSWER, to_answer, "import torch", TORCH)
        self._row(medians, SERVE, ANSWER, to_answer, "bare Ray Serve", RAY_SERVE)

    def _row(
        self,
        medians: Mapping[str, Any],
        name: str,
        end: str,
        text: str,
        peer: str | None,
        peer_name: str | None = None,
    ) -> None:
        if (name, end, peer) in self._printed or not {name, peer or name} <= medians.keys():
            return
        self._printed.add((name, end, peer))
        ours = medians[name]
        theirs = {} if peer is None else medians[peer]
        more = dict[str, Any]()
        peer_s = theirs.get(end, theirs.get(EXIT))
        if peer_s is not None:
            more["peer_s"] = round(peer_s, 2)
        if name in TRAININGS and end == EXIT:
            more["auroc"] = round(ours["auroc"], 4)
            if "auroc" in theirs:
                more["peer_auroc"] = round(theirs["auroc"], 4)
        if peer == "bare Ray":
            left_out = (FIRST_STEP, EXIT, "auroc")
            more["stages_s"] = {
                key: round(value, 3) for key, value in ours.items() if key not in left_out
            }
        emit(
            "start",
            peer=peer_name or peer,
            workload=f"criteo_demo network, {self._rows:,} rows; {name}{text}",
            unit="s",
            value=ours[end],
            ratio=None if peer_s is None else ours[end] / peer_s,
            repeats=self._repeats,
            **more,
        )


def main(*, quick: bool) -> None:
    rows, repeats, trainings = (20_000, 1, QUICK) if quick else (110_000, 3, tuple(TRAININGS))
    log = Path(synthetic_log(rows))
    with_lightgbm = importlib.util.find_spec("lightgbm") is not None
    if not with_lightgbm:
        note(
            "  LightGBM is not installed, so there is nothing to compare with it; `pip install "
            "lightgbm` adds it"
        )
    report = Report(rows=rows, repeats=repeats, with_lightgbm=with_lightgbm)
    with tempfile.TemporaryDirectory() as folder:
        in_turn(
            repeats,
            lambda number: candidates(
                log, Path(folder) / str(number), trainings=trainings, with_lightgbm=with_lightgbm
            ),
            shown=lambda times: ", ".join(f"{key} {value:.2f}" for key, value in times.items()),
            on_result=lambda results: report.print(medians_of(results)),
        )
