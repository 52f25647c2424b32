"""From a command to its exit, stage by stage: training with one worker in its own process, with one and two on a local Ray, and
with two on a running one that trained before; evaluation, prediction, export, and serving until the first answer. Against bare
Ray Train until its first step, a plain TorchRec script and LightGBM until their test AUROC, and Python that imports torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from logs import synthetic_log
from ports import free_ports
from processes import RayHead, Session, environment_for
from recover_benchmark import BARE, first_step_after
from rows import emit, say

from rayrec.observe.events import read_events
from rayrec.observe.start_up import in_order, starts
from rayrec.observe.time_split import time_split

LIGHTGBM = Path(__file__).parent / "peers" / "lightgbm_clicks.py"
TORCHREC = Path(__file__).parent / "peers" / "plain_dlrm.py"
TORCH = "Python that imports torch and ends"
LIGHTGBM_NAME = "LightGBM, its defaults with early stopping, reads by pandas"
RAY = "bare Ray Train, 2 workers, a tiny DDP step, reads no rows"
TRAININGS = {
    "train, 1 worker in process": ["--scaling.num-workers", "1"],
    "train, 1 worker on a local Ray": ["--scaling.num-workers", "1", "--cluster.address", "local"],
    "train, 2 workers on a local Ray": ["--scaling.num-workers", "2", "--cluster.address", "local"],
    "train, 2 workers on a running Ray, second command": ["--scaling.num-workers", "2", "--cluster.address", "HEAD"],
}
"""Flags of each; HEAD is the address of a Ray that has run the same command once before."""
QUICK = tuple(name for name in TRAININGS if "1 worker on" not in name)
"""Trainings of a quick run."""
SCORINGS = {
    "evaluate": ["evaluate", "RUN", "LOG"],
    "predict": ["predict", "RUN", "LOG", "--out", "predicted"],
    "export": ["export", "RUN", "--out", "exported"],
}
"""Arguments of commands that read the first training's run, and end."""
SERVE = "serve"
FIRST_STEP, EXIT, ANSWER = "first_step_s", "exit_s", "answer_s"
PLAIN = {workers: f"plain TorchRec, {workers} by torchrun, rows preprocessed before" for workers in (1, 2)}
TIMEOUT_S = 600.0


def waterfall(events: Sequence[Mapping[str, Any]], *, began_s: float, ended_s: float) -> dict[str, float]:
    """Seconds of each stage of a training command that began and ended at these times, in order; they add up to all of it. Of
    the events of a run of one start."""
    (stages,) = starts(events)
    times = {kind: [event["time"] for event in events if event["kind"] == kind] for kind in {e["kind"] for e in events}}
    stepped_s, finished_s, summary_s = began_s + sum(stages.values()), times["finish"][-1], times["summary"][-1]
    trained_s = max(time_s for kind in ("step", "evaluate", "checkpoint") for time_s in times.get(kind, []))
    trained_s = min(trained_s, finished_s)
    split = time_split(events)
    held_s = split.evaluation_s + split.checkpoint_s
    return {
        **{name: stages[name] for name in in_order([stages])},
        "training": trained_s - stepped_s - held_s,
        "evaluation": split.evaluation_s,
        "saves": split.checkpoint_s,
        "test": finished_s - trained_s,
        "summary": summary_s - finished_s,
        "shutdown": ended_s - summary_s,
    }


def first_step_s(stages: Mapping[str, float]) -> float:
    """Seconds of a waterfall until the first step is done."""
    names = list(stages)
    return sum(stages[name] for name in names[: names.index("training")])


def run_command(command: Sequence[str], folder: Path) -> tuple[float, float, str]:
    """Unix times of a command's begin and end, and its standard output. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        began_s = time.time()
        environment = environment_for(folder / "cache", OMP_NUM_THREADS="1")
        with Session(command, environment=environment, output=Path(scratch) / "command") as session:
            status = session.process.wait(TIMEOUT_S)
            ended_s = time.time()
            if status:
                raise RuntimeError(f"{' '.join(command)} ended with {status}:\n{session.err[-4000:]}")
            return began_s, ended_s, session.out


def rayrec(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rayrec", *arguments]


def train(flags: Sequence[str], log: Path, run: Path) -> dict[str, float]:
    """The waterfall of one training, and `auroc` of its test rows. On a running Ray, which this starts, it is that of a second
    command. Its run is left in the folder `run`."""
    if "HEAD" not in flags:
        return train_once(flags, log, run)
    with (
        tempfile.TemporaryDirectory(prefix="rs", dir="/tmp") as folder,  # a short path
        RayHead(Path(folder), cache=run.parent / "cache", num_cpus=2) as head,
    ):
        head.wait()
        flags = [head.address if flag == "HEAD" else flag for flag in flags]
        train_once(flags, log, run.with_name(f"{run.name}_before"))
        return train_once(flags, log, run)


def train_once(flags: Sequence[str], log: Path, run: Path) -> dict[str, float]:
    command = rayrec("train", "criteo_demo", "--train-data.path", str(log), "--epochs", "1", *flags)
    placed = ["--storage-path", str(run.parent), "--name", run.name]
    began_s, ended_s, out = run_command([*command, *placed], run.parent)
    stages = waterfall(read_events(run / "events.jsonl"), began_s=began_s, ended_s=ended_s)
    found = {**stages, FIRST_STEP: first_step_s(stages), EXIT: ended_s - began_s}
    return {**found, "auroc": json.loads(out)["metrics"]["auroc"]}


def until_exit(command: Sequence[str], folder: Path) -> dict[str, float]:
    began_s, ended_s, _ = run_command(command, folder)
    return {EXIT: ended_s - began_s}


def score(arguments: Sequence[str], log: Path, run: Path, folder: Path) -> dict[str, float]:
    """Seconds of a command that reads a run; what it writes goes to `folder`."""
    places = {"RUN": str(run), "LOG": str(log)}
    written = {name: str(folder / name) for name in ("predicted", "exported")}
    return until_exit(rayrec(*({**places, **written}.get(argument, argument) for argument in arguments)), folder)


def serve(log: Path, run: Path, folder: Path) -> dict[str, float]:
    """Seconds of `rayrec serve` from the command to its first answer with a row's score."""
    with open(log, "rb") as rows:
        row = next(rows)
    port, began_s = free_ports(1), time.time()
    headers = {"content-type": "text/tab-separated-values"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/score", row, headers)
    environment = environment_for(folder / "cache", OMP_NUM_THREADS="1")
    command = rayrec("serve", str(run), "--port", str(port))
    with Session(command, environment=environment, output=folder / "serve") as session:
        while time.time() < began_s + TIMEOUT_S and session.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(request) as answer:  # not ready: refused, or 503
                (_,) = json.load(answer)["scores"]
                return {ANSWER: time.time() - began_s}
            time.sleep(0.02)
        raise RuntimeError(f"rayrec serve gave no answer:\n{session.err[-4000:]}")


def preprocessed(log: Path, folder: Path) -> Path:
    """The rows of the log as NumPy arrays, with the categories that recipe criteo_demo keeps."""
    options = ("--format", "npy", "--split", "sevenths", "--min-count", "2")
    run_command(rayrec("preprocess", str(log), "--out", str(folder / "npy"), *options), folder)
    return folder / "npy"


def plain_torchrec(rows: Path, workers: int, folder: Path) -> dict[str, float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    began_s, ended_s, out = run_command([*torchrun, str(TORCHREC), str(rows)], folder)
    found = json.loads(out.strip().splitlines()[-1])
    return {FIRST_STEP: found["first_step_s"] - began_s, EXIT: ended_s - began_s, "auroc": found["auroc"]}


def bare_ray(folder: Path) -> dict[str, float]:
    """Seconds of bare Ray Train from the command to its first step."""
    steps, began_s = folder / "steps", time.time()
    with Session(
        [sys.executable, str(BARE), str(steps)], environment=environment_for(folder), output=folder / "bare"
    ) as session:
        return {FIRST_STEP: first_step_after(steps, began_s, session) - began_s}


def lightgbm(log: Path, folder: Path) -> dict[str, float]:
    began_s, ended_s, out = run_command([sys.executable, str(LIGHTGBM), str(log)], folder)
    return {EXIT: ended_s - began_s, "auroc": json.loads(out.strip().splitlines()[-1])["auroc"]}


def one_round(log: Path, folder: Path, *, trainings: Iterable[str], with_lightgbm: bool) -> dict[str, dict[str, float]]:
    """What each candidate took, in turn."""
    runs = {name: folder / f"run{number}" for number, name in enumerate(trainings)}
    run, arrays = next(iter(runs.values())), preprocessed(log, folder)
    candidates: dict[str, Callable[[], dict[str, float]]] = {
        "bare Ray": functools.partial(bare_ray, folder),
        **{name: functools.partial(train, TRAININGS[name], log, place) for name, place in runs.items()},
        **{PLAIN[workers]: functools.partial(plain_torchrec, arrays, workers, folder) for workers in PLAIN},
        "import torch": functools.partial(until_exit, [sys.executable, "-c", "import torch"], folder),
        **{name: functools.partial(score, arguments, log, run, folder) for name, arguments in SCORINGS.items()},
        SERVE: functools.partial(serve, log, run, folder),
    }
    if with_lightgbm:
        candidates["LightGBM"] = functools.partial(lightgbm, log, folder)
    found = {}
    for name, candidate in candidates.items():
        found[name] = candidate()
        say(f"  {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in found[name].items()))
    return found


def medians(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of every value of every candidate; a stage that a round lacks lasted 0 s in it."""
    return {
        name: {key: statistics.median(found[name].get(key, 0.0) for found in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }


def emit_rows(found: Mapping[str, Mapping[str, float]], *, rows: int, repeats: int) -> None:
    """Rows for each command and end: training until its first step and until its exit, scoring until its exit, serving until its
    first answer; a row for each peer."""

    def row(name: str, end: str, text: str, peer: str | None, peer_name: str | None = None, **more: Any) -> None:
        value, theirs = found[name][end], {} if peer is None else found[peer]
        peer_s = theirs.get(end, theirs.get(EXIT))
        emit(
            "start",
            peer=peer_name or peer,
            workload=f"criteo_demo network, {rows:,} rows; {name}{text}",
            unit="s",
            value=value,
            ratio=None if peer_s is None else value / peer_s,
            repeats=repeats,
            **({} if peer_s is None else {"peer_s": round(peer_s, 2)}),
            **({"peer_auroc": round(theirs["auroc"], 4)} if end == EXIT and "auroc" in theirs else {}),
            **more,
        )

    for name in (name for name in TRAININGS if name in found):
        taken, plain = found[name], PLAIN[int(TRAININGS[name][1])]
        stages = {key: round(value, 3) for key, value in taken.items() if key not in (FIRST_STEP, EXIT, "auroc")}
        row(name, FIRST_STEP, ": command -> first step", "bare Ray", RAY, stages_s=stages)
        row(name, FIRST_STEP, ": command -> first step", plain)
        whole, auroc = ", one epoch: raw TSV -> test AUROC, command -> exit", round(taken["auroc"], 4)
        row(name, EXIT, whole, *(("LightGBM", LIGHTGBM_NAME) if "LightGBM" in found else (None,)), auroc=auroc)
        row(name, EXIT, whole, plain, auroc=auroc)
    for name in SCORINGS:
        row(name, EXIT, ": command -> exit", "import torch", TORCH)
    row(SERVE, ANSWER, ": command -> first answer", "import torch", TORCH)


def main(*, quick: bool) -> None:
    rows, repeats, trainings = (20_000, 1, QUICK) if quick else (110_000, 3, tuple(TRAININGS))
    log = Path(synthetic_log(rows))
    with_lightgbm = importlib.util.find_spec("lightgbm") is not None
    if not with_lightgbm:
        say("  LightGBM is not installed, so there is nothing to compare with it; `pip install lightgbm` adds it")
    rounds = []
    for number in range(repeats):
        say(f"  round {number + 1}")
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(log, Path(folder), trainings=trainings, with_lightgbm=with_lightgbm))
    emit_rows(medians(rounds), rows=rows, repeats=repeats)
