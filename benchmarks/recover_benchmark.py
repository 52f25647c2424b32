"""Benchmark of recovery from a killed train worker, or a killed driver with its Ray.

Peer: a bare Ray Train run that does almost nothing, and so needs only the time of Ray.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from builders.runs import small_run
from hosts.processes import Run, Session, environment_for
from logs import synthetic_log
from rows import emit, in_turn, medians_of

BARE = Path(__file__).parent / "peers" / "bare_ray_train.py"
STEPS = 20_000
"""Never reached."""
WAIT_S = 180.0


def first_step_after(path: Path, since: float, session: Session) -> float:
    """Return the Unix time of the bare run's first step after `since`."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        steps = [float(line) for line in path.read_text().splitlines()] if path.exists() else []
        if later := [step for step in steps if step > since]:
            return later[0]
        assert session.process.poll() is None, session.err
        assert time.monotonic() < deadline_s, session.err
        time.sleep(0.02)


def bare(folder: Path) -> dict[str, float]:
    """Measure bare Ray Train: seconds from the command to its first step, and from a worker's
    SIGKILL to the next step.
    """
    path = folder / "steps"
    began = time.time()
    command = [sys.executable, str(BARE), str(path)]
    with Session(command, environment=environment_for(folder), output=folder / "bare") as session:
        started = first_step_after(path, began, session)
        time.sleep(3)
        session.kill("train worker")
        killed = time.time()
        # The other worker may be through with a step that both had begun; a new one takes longer
        # than this to come.
        return {
            "driver_s": started - began,
            "worker_s": first_step_after(path, killed + 0.5, session) - killed,
        }


def ours(folder: Path, log: Path) -> dict[str, float]:
    """Measure the seconds of rayrec, in total and by part."""
    checkpoint = {"every": 40, "num_to_keep": 2}
    # 60 by default: not before a first step, whose CPUs it would take
    failure = {"standby_after_s": 15.0}
    config = small_run(
        log,
        str(folder),
        steps=STEPS,
        log_every=1,
        evaluate_every=STEPS,
        checkpoint=checkpoint,
        failure=failure,
    )
    with Run(config, folder / "commands", cache=folder / "cache").start() as run:
        run.wait_for_save(80)
        run.session.wait_for_standby(2)
        run.session.kill("train worker")
        killed = time.time()
        failed = run.wait_for("failure", since=killed)["time"]
        started = run.wait_for("start", since=failed)["time"]
        stepped = run.wait_for("step", since=started)["time"]
        worker_times = {
            "worker_s": stepped - killed,
            "worker_detect_s": failed - killed,
            "worker_restart_s": started - failed,
            "worker_first_step_s": stepped - started,
        }
        run.wait_for("checkpoint", since=stepped)
        run.kill_driver()
        killed = time.time()
        run.start()
        began = run.wait_for("run", since=killed)["time"]
        prepared = run.wait_for("prepared", since=began)["time"]
        started = run.wait_for("start", since=prepared)["time"]
        stepped = run.wait_for("step", since=started)["time"]
        return {
            **worker_times,
            "driver_s": stepped - killed,
            "driver_ray_s": began - killed,
            "driver_prepare_s": prepared - began,
            "driver_workers_s": started - prepared,
            "driver_first_step_s": stepped - started,
        }


def main(*, quick: bool) -> None:
    log = Path(synthetic_log(20_000)).parent
    repeats = 1 if quick else 3
    with tempfile.TemporaryDirectory() as folder:

        def candidates(number: int) -> dict[str, Callable[[], dict[str, float]]]:
            our_folder, bare_folder = (
                Path(folder) / f"{name}{number}" for name in ("ours", "bare")
            )
            our_folder.mkdir()
            bare_folder.mkdir()
            return {"bare": partial(bare, bare_folder), "ours": partial(ours, our_folder, log)}

        results = in_turn(
            repeats,
            candidates,
            shown=lambda times: ", ".join(f"{key} {value:.1f}" for key, value in times.items()),
        )

    medians = medians_of(results)
    for kind, workload in (
        ("worker", "kill -9 of 1 of 2 train workers -> first step after it"),
        ("driver", "kill -9 of the driver, its Ray goes with it, same command again -> first step"),
    ):
        value = medians["ours"][f"{kind}_s"]
        peer = medians["bare"][f"{kind}_s"]
        emit(
            "recover",
            peer="bare Ray Train, 2 workers, a tiny DDP step, nothing restored"
            + ("" if kind == "worker" else "; command -> first step"),
            workload=f"criteo_demo network, 20,000 rows, 2 CPUs; {workload}",
            unit="s",
            value=value,
            ratio=value / peer,
            repeats=repeats,
            peer_s=round(peer, 2),
            **{
                key: round(seconds, 2)
                for key, seconds in medians["ours"].items()
                if key.startswith(kind) and key != f"{kind}_s"
            },
        )
