"""Commands on runs: top, report, profile, benchmark, doctor."""

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import Argument, RunFolder, Shown, command
from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.environment.doctor import Report
    from rayrec.observe.console import Console


@command("Watch", prints=True, examples=("rayrec top runs/demo",))
def top(
    run: RunFolder,
    *,
    once: Annotated[bool, Argument("show the state and exit; default without a terminal")] = False,
) -> None:
    """Show a run in the terminal while it trains. Ctrl-C does not stop the run.

    With `once`, shows the current state and returns. Raises InputError if no run is found.
    """
    from rayrec.observe.console import top as show

    show(run, once=once)


@command(
    "Watch",
    show=lambda path: Shown({"report": path}),
    examples=("rayrec report runs/demo", "rayrec report runs/one runs/two --out both.html"),
)
def report(
    *runs: Annotated[str, Argument("folders of up to eight runs", "RUN")],
    out: Annotated[
        str | None,
        Argument(
            "output file (.html) or folder; default RUN/report.html, required for several runs",
            "FILE",
        ),
    ] = None,
    price_per_node_hour: Annotated[
        float | None, Argument("price of a node per hour, to report costs")
    ] = None,
    nodes: Annotated[int, Argument("number of nodes")] = 1,
    currency: Annotated[str, Argument("currency of the price")] = "USD",
) -> str:
    """Write an HTML report of one or several runs, finished or in progress.

    The page is self-contained. Several runs are shown in columns. `out` is a file (.html) or
    folder; None: RUN/report.html, only for a single run. With a node price in `currency`, includes
    the cost of the run. Returns the file's path. Raises InputError if no run is found.
    """
    from rayrec.observe.report import comparison
    from rayrec.observe.report import run as run_report
    from rayrec.observe.run_summary import Price

    price = None if price_per_node_hour is None else Price(price_per_node_hour, nodes, currency)
    if len(runs) == 1:
        return run_report.write(runs[0], out=out, price=price)
    if not runs:
        raise InputError("missing run folder. Set one, or several to compare them.")
    if out is None:
        raise InputError("out: required for several runs. Set --out FILE.html.")
    return comparison.write(runs, out=out, price=price)


@command("Watch", examples=("rayrec profile runs/demo --steps 10",))
def profile(
    run: RunFolder,
    *,
    steps: Annotated[int, Argument("number of steps to record, at most 200")] = 10,
    timeout_s: Annotated[float, Argument("maximum seconds to wait for the profile")] = 300.0,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """Record steps of a run in progress with torch.profiler, on all workers.

    Requests a profile of `steps` steps (at most 200), waits for it, and returns its folder in
    RUN/profile. Needs only access to the run's folder. Raises InputError if the run is not
    training, does not answer or ends before, or if a worker fails to write its profile.
    """
    from rayrec import storage
    from rayrec.observe.events import read_events
    from rayrec.training.profiling import request_profile

    folder = storage.absolute(run)
    events = read_events(storage.join(folder, "events.jsonl"))
    return request_profile(
        folder, events, steps=steps, timeout_s=timeout_s, note=_console(console).note
    )


@command("Watch", prints=True, raw=True, examples=("rayrec benchmark train --quick",))
def benchmark(
    *arguments: Annotated[
        str, Argument("name of a benchmark and its flags; --help lists them", "NAME")
    ],
) -> None:
    """Run a benchmark against other implementations. Prints one JSON object per row."""
    # Benchmarks exist only in the source tree.
    script = Path(__file__).parents[3] / "benchmarks" / "run.py"
    if not script.exists():
        raise InputError(
            "benchmarks not found. They require a source checkout, installed with `pip install -e "
            ".`."
        )
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


@command(
    "Watch",
    show=lambda report: Shown(
        report.to_dict(), "\n".join(report.lines()), status=0 if report.ok else 2, as_text=True
    ),
)
def doctor() -> "Report":
    """Check the installation and report problems with their fixes."""
    from rayrec.environment.doctor import doctor as examine

    return examine()
