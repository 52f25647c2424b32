"""`rayrec benchmark NAME`: runs one benchmark, or all; results on standard output, a JSON object a row."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# In tests there is what runs and kills processes.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

NAMES = (
    "start",
    "ingest",
    "vocabulary",
    "preprocess",
    "train",
    "busy",
    "tables",
    "models",
    "checkpoint",
    "recover",
    "preempt",
    "mnist",
    "gpt2",
    "predict",
    "ranking",
    "serve",
    "observe",
    "quality",
    "zoo",
    "scale",
    "links",
    "plan",
    "warm-start",
    "truths",
    "movielens",
    "tune",
    "movielens-top-k",
)
OTHERS = ("gpu",)
"""Which `all` leaves out: they need hardware."""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"usage: rayrec benchmark NAME [--quick] [--data PATH]; NAME: {', '.join((*NAMES, *OTHERS, 'all'))}")
        return 0 if arguments else 2
    wanted = NAMES if arguments[0] == "all" else (arguments[0],)
    known = (*NAMES, *OTHERS)
    if not set(wanted) <= set(known):
        print(
            f"rayrec benchmark: no benchmark '{arguments[0]}'; there are {', '.join((*known, 'all'))}", file=sys.stderr
        )
        return 2
    for name in wanted:
        importlib.import_module(f"{name.replace('-', '_')}_benchmark").main(quick="--quick" in arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
