"""From a command to its exit, stage by stage: training with one worker in its own process, with one and two on a local Ray,
evaluation, prediction and export; against bare Ray Train until its first step, LightGBM until its test AUROC, and Python that
imports torch."""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from logs import synthetic_log
from processes import Session, environment_for
from recover_benchmark import BARE, first_step_after
from rows import emit, say

from rayrec.observe.events import read_events
from rayrec.observe.start_up import KIND, in_order, starts
from rayrec.observe.time_split import time_split

LIGHTGBM = Path(__file__).parent / "peers" / "lightgbm_clicks.py"
RAY = "bare Ray Train, 2 workers, a tiny DDP step, reads no rows"
TRAININGS = {
    "train, 1 worker in process": ["--scaling.num-workers", "1"],
    "train, 1 worker on a local Ray": ["--scaling.num-workers", "1", "--cluster.address", "local"],
    "train, 2 workers on a local Ray": ["--scaling.num-workers", "2", "--cluster.address", "local"],
}
QUICK = ("train, 1 worker in process", "train, 2 workers on a local Ray")
"""Trainings of a quick run."""
SCORINGS = {
    "evaluate": ["evaluate", "RUN", "LOG"],
    "predict": ["predict", "RUN", "LOG", "--out", "predicted"],
    "export": ["export", "RUN", "--out", "exported"],
}
"""Arguments of commands that read the first training's run."""
FIRST_STEP, EXIT = "first_step_s", "exit_s"
TIMEOUT_S = 600.0


def waterfall(events: Sequence[Mapping[str, Any]], *, began_s: float, ended_s: float) -> dict[str, float]:
    """Seconds of each stage of a training command that began and ended at these times, in order; they add up to all of it. Of
    the events of a run of one start. `handover`: what no stage until the first step counts."""
    (stages,) = starts(events)
    times = {kind: [event["time"] for event in events if event["kind"] == kind] for kind in {e["kind"] for e in events}}
    stepped_s, finished_s, summary_s = times[KIND][-1], times["finish"][-1], times["summary"][-1]
    trained_s = max(time_s for kind in ("step", "evaluate", "checkpoint") for time_s in times.get(kind, []))
    trained_s = min(trained_s, finished_s)
    split = time_split(events)
    held_s = split.evaluation_s + split.checkpoint_s
    return {
        **{name: stages[name] for name in in_order([stages])},
        "handover": stepped_s - began_s - sum(stages.values()),
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
    """The waterfall of one training, and `auroc` of its test rows. Its run is left in the folder `run`."""
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
    run = next(iter(runs.values()))
    candidates: dict[str, Callable[[], dict[str, float]]] = {
        "bare Ray": functools.partial(bare_ray, folder),
        **{name: functools.partial(train, TRAININGS[name], log, place) for name, place in runs.items()},
        "import torch": functools.partial(until_exit, [sys.executable, "-c", "import torch"], folder),
        **{name: functools.partial(score, arguments, log, run, folder) for name, arguments in SCORINGS.items()},
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
    """A row for each command and end: training until its first step and until its exit, scoring until its exit."""
    log, booster = f"criteo_demo network, {rows:,} rows", found.get("LightGBM")
    for name in (name for name in TRAININGS if name in found):
        taken = found[name]
        stages = {key: round(value, 3) for key, value in taken.items() if key not in (FIRST_STEP, EXIT, "auroc")}
        emit(
            "start",
            peer=RAY,
            workload=f"{log}; {name}: command -> first step",
            unit="s",
            value=taken[FIRST_STEP],
            ratio=taken[FIRST_STEP] / found["bare Ray"][FIRST_STEP],
            repeats=repeats,
            peer_s=round(found["bare Ray"][FIRST_STEP], 2),
            stages_s=stages,
        )
        emit(
            "start",
            peer=None if booster is None else "LightGBM, its defaults with early stopping, reads by pandas",
            workload=f"{log}; {name}, one epoch: raw TSV -> test AUROC, command -> exit",
            unit="s",
            value=taken[EXIT],
            ratio=None if booster is None else taken[EXIT] / booster[EXIT],
            repeats=repeats,
            auroc=round(taken["auroc"], 4),
            **(
                {} if booster is None else {"peer_s": round(booster[EXIT], 2), "peer_auroc": round(booster["auroc"], 4)}
            ),
        )
    for name in SCORINGS:
        emit(
            "start",
            peer="Python that imports torch and ends",
            workload=f"{log}; {name}: command -> exit",
            unit="s",
            value=found[name][EXIT],
            ratio=found[name][EXIT] / found["import torch"][EXIT],
            repeats=repeats,
            peer_s=round(found["import torch"][EXIT], 2),
        )


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
