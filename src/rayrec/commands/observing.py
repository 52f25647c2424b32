"""Commands on how it went, or goes: top, report, profile, benchmark."""

import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from rayrec import api
from rayrec.commands.arguments import flags, print_json
from rayrec.config import InputError


def _top(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Show a run, local or on S3, until it is finished; Ctrl-C leaves it alone.

    Args:
        run: Folder of a run.
        once: Show how it stands now, and end; so it does anyhow where standard output is no terminal.
    """
    api.top(run, once=once)


def top(arguments: list[str]) -> None:
    flags("top", _top, arguments)


def _report(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: str | None = None,
    price_per_node_hour: float | None = None,
    nodes: int = 1,
    currency: str = "USD",
) -> dict[str, Any]:
    """Write what a run's events tell, of a run in progress too, as one HTML file that needs no other; of several runs, side by
    side.

    Args:
        runs: Folder of a run, or of up to eight.
        out: File (.html) or folder to write to; default RUN, for several runs there is none.
        price_per_node_hour: Tells what the run cost: in all, for each epoch, for each point of AUROC.
        nodes: Machines that this price was paid for.
        currency: Currency of the price.
    """
    return {
        "report": api.report(*runs, out=out, price_per_node_hour=price_per_node_hour, nodes=nodes, currency=currency)
    }


def report(arguments: list[str]) -> None:
    print_json(flags("report", _report, arguments))


def _profile(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")], steps: int = 10, timeout_s: float = 300.0
) -> dict[str, Any]:
    """Record some steps of a run in progress with torch.profiler, on every worker.

    Args:
        run: Folder of a run that is training now.
        steps: Steps to record, 200 at most.
        timeout_s: Seconds to wait for the workers to have written it.
    """
    return api.profile(run, steps=steps, timeout_s=timeout_s)


def profile(arguments: list[str]) -> None:
    print_json(flags("profile", _profile, arguments))


def benchmark(arguments: list[str]) -> None:
    # Benchmarks live beside the package in the source tree, with the peers they measure against.
    script = Path(__file__).parents[3] / "benchmarks" / "run.py"
    if not script.exists():
        raise InputError(
            "benchmarks are part of the source tree; run them from a checkout installed with `pip install -e .`"
        )
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
