"""Train a small run twice on a local Ray, once with a worker killed by SIGKILL, for the picture of
docs/faults.md.

`python tools/kill_run.py` takes two minutes and needs two CPUs. `make pictures` draws the picture.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# Helpers of the tests: they start commands, find and kill their processes.
from builders.runs import small_run  # noqa: E402
from hosts.processes import Run  # noqa: E402

from rayrec.data.synthetic import generate  # noqa: E402

RECORD = ROOT / "docs" / "assets" / "kill.jsonl"
STEPS = 6_000
KILLED_AT = 2_500
FIELDS = (
    "kind",
    "step",
    "cause",
    "number",
    "checkpoint",
    "weights_sha256",
    "steps_redone",
    "rows_repeated",
    "rows_lost",
)


def run(folder: Path, log: Path, *, kill: bool) -> list[dict[str, object]]:
    """Return the events of a run, with times in seconds since its first event."""
    checkpoint = {"every": 500, "num_to_keep": 5}
    changes = {"steps": STEPS, "evaluate_every": STEPS, "checkpoint": checkpoint, "log_every": 50}
    config = small_run(log, str(folder), epochs=100, failure={"standby_after_s": 5.0}, **changes)
    killed: list[dict[str, object]] = []
    with Run(config, folder / "commands", cache=folder / "cache").start() as command:
        if kill:
            command.wait_for_step(KILLED_AT + 200)
            command.session.kill("train worker")
            killed.append({"time": time.time(), "kind": "SIGKILL"})
        command.summary(timeout_s=400)
        events = sorted([*command.events(), *killed], key=lambda event: event["time"])
    began = events[0]["time"]
    return [
        {
            "seconds": round(event["time"] - began, 2),
            **{name: event[name] for name in FIELDS if name in event},
        }
        for event in events
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(str(folder / "log"), rows=20_000)
        undisturbed = run(folder / "undisturbed", folder / "log", kill=False)
        killed = run(folder / "killed", folder / "log", kill=True)
    hashes = [events[-1]["weights_sha256"] for events in (undisturbed, killed)]
    assert hashes[0] == hashes[1], hashes
    killed[-1]["weights_of_undisturbed"] = hashes[0]
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("".join(json.dumps(event) + "\n" for event in killed))


if __name__ == "__main__":
    main()
