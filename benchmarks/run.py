"""Command `rayrec benchmark NAME`: runs one benchmark, or all, and prints results as JSON lines on
standard output.
"""

import importlib
import sys
from pathlib import Path

# tests/ has helpers that run and kill processes.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "start": ("start_benchmark",),
    "ingest": ("ingest_benchmark", "vocabulary_rows", "preprocess_rows"),
    "train": ("train_benchmark", "busy_rows"),
    "models": ("models_benchmark", "synthetic_tasks_rows"),
    "checkpoint": ("checkpoint_benchmark",),
    "recover": ("recover_benchmark", "preempt_rows"),
    "mnist": ("mnist_benchmark",),
    "gpt2": ("gpt2_benchmark",),
    "serve": ("serve_benchmark", "predict_rows", "recommend_rows"),
    "zoo": ("zoo_benchmark", "quality_rows", "epoch_rows", "light_rows", "warm_start_rows"),
    "movielens": ("movielens_benchmark", "movielens_top_k_rows"),
    "sequences": ("sequences_benchmark",),
    "own-logs": ("own_logs_benchmark",),
    "features": ("features_benchmark",),
    "scale": ("scale_benchmark", "plan_rows", "links_rows", "data_nodes_rows"),
    "gpu": ("gpu_benchmark",),
}
"""Modules of each benchmark."""
NOT_IN_ALL = ("gpu",)
"""Benchmarks that `all` skips, because they need hardware."""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(
            "usage: rayrec benchmark NAME [--quick] [--data PATH]; NAME: "
            f"{', '.join((*BENCHMARKS, 'all'))}"
        )
        return 0 if arguments else 2
    selected = tuple(BENCHMARKS) if arguments[0] == "all" else (arguments[0],)
    if not set(selected) <= set(BENCHMARKS):
        print(
            f"rayrec benchmark: no benchmark '{arguments[0]}'; there are "
            f"{', '.join((*BENCHMARKS, 'all'))}",
            file=sys.stderr,
        )
        return 2
    from rows import failed, note, part

    from rayrec.config import InputError

    modules = [
        (name, module)
        for name in selected
        if arguments[0] != "all" or name not in NOT_IN_ALL
        for module in BENCHMARKS[name]
    ]
    for name, module in modules:
        # A module that lacks a requirement is skipped; if it is the only one, the command ends.
        with part(name, "rows after those above", passing=() if modules[1:] else (InputError,)):
            importlib.import_module(module).main(quick="--quick" in arguments)
    if failed():
        note(f"rayrec benchmark: rows with an error, of {', '.join(failed())}")
    return 1 if failed() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
