"""What observing costs: the same training, every phase timed, data stages counted and trackers fed, and with all of that off."""

from __future__ import annotations

from typing import Any

from children import child, run_task
from logs import synthetic_log
from rows import emit, say


def train(*, path: str, observed: bool, steps: int, log_every: int) -> dict[str, Any]:
    """Speed of a run of the demo's network on one worker with all cores, behind its first fifth; see `measured_run`."""
    from measured import measured_run

    from rayrec.recipes import criteo_demo

    config = criteo_demo(path).replace(
        steps=steps,
        evaluate_every=10**9,
        log_every=log_every,
        batch_size=4096,
        early_stopping={"patience": 0},
        scaling={"num_workers": 1},
        cluster={"num_cpus": 2},
        observe={"times": observed},
        trackers={"tensorboard": observed, "prometheus": observed},
    )
    found = measured_run(config, warm_steps=steps // 5)
    return {name: found[name] for name in ("rows_per_s", "blocked_fraction", "config_hash")}


def main(*, quick: bool) -> None:
    steps, repeats = (60, 1) if quick else (600, 5)
    path = synthetic_log(200_000 if quick else 1_000_000)
    common = {"path": path, "steps": steps, "log_every": 10 if quick else 20}
    on, off = [], []
    for number in range(repeats):
        # Whoever comes first has the cooler processor.
        for observed in (True, False) if number % 2 else (False, True):
            (on if observed else off).append(child(__file__, "train", observed=observed, **common))
        say(f"  round {number + 1}: on {on[-1]['rows_per_s']:,.0f}/s, off {off[-1]['rows_per_s']:,.0f}/s")
    # Noise only slows down: the best of each is nearest to what it costs.
    best_on, best_off = (max(found["rows_per_s"] for found in runs) for runs in (on, off))
    emit(
        "observe",
        peer="the same run with observe.times and trackers off",
        workload="criteo_demo network, batch 4096, 1 worker, from raw TSV",
        value=best_on,
        ratio=best_on / best_off,
        repeats=repeats,
        config_hash=on[-1]["config_hash"],
        peer_rows_per_s=round(best_off),
        ratios=[round(a["rows_per_s"] / b["rows_per_s"], 4) for a, b in zip(on, off, strict=True)],
        blocked_fraction=round(on[-1]["blocked_fraction"], 4),
    )


if __name__ == "__main__":
    run_task(train)
