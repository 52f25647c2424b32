"""Runs with a random fault every few seconds: all must end with the weights of a run without
faults.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from builders.damage import cut_short, flip_a_bit, remove_file, tear_manifest
from builders.runs import small_run
from hosts.processes import Run

from rayrec.checkpoint import committed
from rayrec.data.synthetic import generate

STEPS = 3000
LONGEST_START_S = 60.0
"""Half of the misfortunes wait so long for training to go on."""
LEFT_ALONE_S = 900.0


def kill(role: str, run: Run, chance: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(run.session.find(role)).pid, signal.SIGKILL)


def damage(run: Run, chance: random.Random) -> None:
    """Damage the newest checkpoint; never the run's last one, which no later one can replace."""
    newest = committed(run.path)[-1]
    if newest.step == run.config.steps:
        raise IndexError
    chance.choice((flip_a_bit, cut_short, remove_file, tear_manifest))(newest)


MISFORTUNES: dict[str, Callable[[Run, random.Random], object]] = {
    "worker": partial(kill, "train worker"),
    "data task": lambda run, _: run.session.kill_data_task(timeout_s=3),
    "controller": partial(kill, "controller"),
    "driver": lambda run, _: run.kill_driver(),
    "everything": lambda run, _: run.session.end(),
    "SIGTERM": lambda run, _: run.session.process.terminate(),
    "checkpoint": damage,
}
NOTHING_HAPPENED = (IndexError, AssertionError, FileNotFoundError)
"""Raised if there is no such process or task, or no such checkpoint any more."""


class Trial:
    """One run, disturbed by a seed's chance."""

    def __init__(self, seed: int, run: Run) -> None:
        self._chance = random.Random(seed)
        self._run = run
        self._seed = seed
        self._start_s = time.monotonic()
        self.happened: Counter[str] = Counter()
        self.refused: list[str] = []

    def say(self, text: str) -> None:
        step = max((event["step"] for event in self._run.events("step")), default=0)
        print(f"seed {self._seed} {self.seconds:6.1f} s, step {step:5}: {text}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start_s

    def disturb(self, seconds: float) -> None:
        """Until so many seconds have gone since the first step, or the run has finished."""
        self._run.start()
        self._run.wait_for("step", timeout_s=LEFT_ALONE_S)
        self._start_s = time.monotonic()
        while self.seconds < seconds:
            if not self._pause(seconds):
                return
            kind = self._chance.choice(list(MISFORTUNES))
            with contextlib.suppress(*NOTHING_HAPPENED):
                MISFORTUNES[kind](self._run, self._chance)
                self.happened[kind] += 1
                self.say(kind)

    def _pause(self, seconds: float) -> bool:
        """Waits a few seconds, half of the time after training has gone on; False once the run has
        finished.
        """
        until_s = time.monotonic() + self._chance.uniform(0.5, 6)
        if self._chance.random() < 0.5:
            begun_s = time.monotonic()
            since = time.time()
            while not any(event["time"] > since for event in self._run.events("step")):
                if not self._alive():
                    return False
                if time.monotonic() > begun_s + LONGEST_START_S or self.seconds > seconds:
                    break
                time.sleep(0.1)
            until_s += time.monotonic() - begun_s
        while time.monotonic() < until_s:
            if not self._alive():
                return False
            time.sleep(0.05)
        return True

    def _alive(self) -> bool:
        """Runs the command again where it ended; False once the run has finished."""
        status = self._run.session.process.poll()
        if status is None:
            return True
        if status == 0:
            return False
        self.say(f"the command ended with {status}")
        if status == 2:
            # no misfortune is the user's to fix
            self.refused.append(self._run.session.err.strip().splitlines()[-1])
        self._run.start()
        return True

    def finish(self) -> dict[str, Any]:
        """The summary, once the run is left alone; empty where it does not get there."""
        self.say("left alone")
        deadline_s = time.monotonic() + LEFT_ALONE_S
        while self._alive():
            if time.monotonic() > deadline_s or self._run.num_commands > 100:
                print(self._run.session.err[-4000:])
                return {}
            time.sleep(0.2)
        return self._run.summary()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=10,
        help="runs, each with a chance of its own",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the first seed",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="for which a run is disturbed",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="of each run",
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rayrec-chaos-"))
    generate(
        str(folder / "log"),
        rows=20_000,
        days=7,
        seed=1,
        parallelism=2,
    )
    lines = []
    bad = 0

    def run_of(name: str) -> Run:
        config = small_run(
            folder / "log",
            str(folder),
            name=name,
            steps=arguments.steps,
            failure={"max_failures": -1},
        )
        return Run(config, folder / f"{name}-commands", cache=folder / "cache")

    with run_of("peace").start() as peace:
        expected = peace.summary(timeout_s=LEFT_ALONE_S)
    print(
        f"left in peace: {expected['wall_s']:.0f} s, weights {expected['weights_sha256'][:16]}",
        flush=True,
    )
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        with run_of(f"seed-{seed}") as run:
            trial = Trial(seed, run)
            trial.disturb(arguments.seconds)
            summary = trial.finish()
        keys = ("weights_sha256", "rows", "rows_lost", "rows_repeated")
        same = (
            not trial.refused
            and bool(summary)
            and all(summary[key] == expected[key] for key in keys)
        )
        bad += not same
        counts = "".join(f"{trial.happened[kind]:>{len(kind) + 2}}" for kind in MISFORTUNES)
        restarts = summary.get("restarts", 0)
        steps_redone = summary.get("steps_redone", 0)
        figures = f"{run.num_commands:>10}{restarts:>10}{steps_redone:>14}"
        lines.append(
            f"{seed:>4}{counts}{figures}{trial.seconds:>9.0f} s  {'same' if same else 'DIFFERENT'}"
        )
        lines += [f"     {line}" for line in trial.refused]
        trial.say("finished with the same weights" if same else "NOT the same weights")
    kinds = "".join(f"  {kind}" for kind in MISFORTUNES)
    print(f"seed{kinds}  commands  restarts  steps redone  in all     weights", *lines, sep="\n")
    if bad:
        print(f"{bad} of {arguments.seeds} differ; what they left is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
