"""Command `rayrec benchmark NAME`: runs one benchmark, or all, and prints results as JSON lines on
standard output.
"""

import importlib
import sys
from pathlib import Path

# tests/ has helpers that run and kill processes.
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
    "images",
    "gpt2",
    "predict",
    "ranking",
    "serve",
    "observe",
    "quality",
    "epoch",
    "zoo",
    "light",
    "scale",
    "links",
    "plan",
    "data-nodes",
    "warm-start",
    "synthetic-tasks",
    "movielens",
    "tune",
    "movielens-top-k",
    "movielens-next-item",
)
NOT_IN_ALL = ("gpu",)
"""Benchmarks that `all` skips, because they need hardware."""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(
            "usage: rayrec benchmark NAME [--quick] [--data PATH]; NAME: "
            f"{', '.join((*NAMES, *NOT_IN_ALL, 'all'))}"
        )
        return 0 if arguments else 2
    selected = NAMES if arguments[0] == "all" else (arguments[0],)
    available = (*NAMES, *NOT_IN_ALL)
    if not set(selected) <= set(available):
        print(
            f"rayrec benchmark: no benchmark '{arguments[0]}'; there are "
            f"{', '.join((*available, 'all'))}",
            file=sys.stderr,
        )
        return 2
    from rows import failed, note, part

    from rayrec.config import InputError

    for name in selected:
        # Of several benchmarks one that lacks a requirement is skipped; alone it ends the command.
        with part(name, "rows after those above", passing=() if selected[1:] else (InputError,)):
            importlib.import_module(f"{name.replace('-', '_')}_benchmark").main(
                quick="--quick" in arguments
            )
    if failed():
        note(f"rayrec benchmark: rows with an error, of {', '.join(failed())}")
    return 1 if failed() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
