"""The command line `rayrec`. Imports nothing heavy before the command is known."""

import contextlib
import functools
import gc
import inspect
import os
import sys
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from rayrec.cli import help
from rayrec.cli.flags import SWITCHES
from rayrec.commands import COMMANDS
from rayrec.commands.declaration import Command, Shown
from rayrec.config import InputError, suggest

_COLLECT_EVERY = 50_000
"""Allocations between garbage collections. Python's 700 slows imports of torch and TorchRec by a
fifth.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with one of `rayrec.cli.help.STATUSES`."""
    _keep_stdout_for_results()
    gc.set_threshold(_COLLECT_EVERY)
    try:
        status = run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        if not _drop_closed_output():
            raise
        status = 1
    gc.freeze()  # Otherwise the final collections scan all modules for a second.
    sys.exit(status)


def _keep_stdout_for_results() -> None:
    """Redirect file descriptor 1, to which Ray's C++ code prints warnings, to standard error, but
    keep `sys.stdout`.
    """
    if sys.stdout is None or sys.stderr is None:  # Closed by the caller.
        return
    sys.stdout.flush()
    results = os.dup(1)  # Not inherited by child processes.
    os.dup2(2, 1)
    sys.stdout = os.fdopen(
        results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1
    )


def _drop_closed_output() -> bool:
    """Drop the rest of the output if its reader is gone, as after `| head`, and return whether it
    is.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python fails to flush its buffer at exit, with status 120.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        return True
    return False


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help.overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        import rayrec

        print(rayrec.__version__)
        return 0
    name = arguments[0]
    words = arguments[1:]
    if name == "resume" and not words:
        return _fail("rayrec resume: missing run. Usage: rayrec resume RUN, such as runs/demo")
    # `resume` is `train` with the folder of a run. What the run stored is its recipe.
    if name == "resume":  # A trailing slash marks a folder instead of a recipe.
        words = [
            word if word.startswith("-") or number else f"{word.rstrip('/')}/"
            for number, word in enumerate(words)
        ]
    command = COMMANDS.get("train" if name == "resume" else name)
    if command is None:
        hint = suggest(name, [*COMMANDS, "resume"], otherwise="see rayrec --help.")
        return _fail(f"rayrec: unknown command '{name}', {hint}")
    return command.run(functools.partial(_status, command, name, words))


def _status(command: Command, name: str, words: list[str]) -> int:
    """Run a command, print its error, if any, and return the exit status."""
    try:
        return _run(command, words)
    except InputError as error:
        return _fail(f"rayrec {name}: {error}")
    except OSError as error:
        is_user_error = isinstance(
            error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
        )
        if is_user_error and error.filename is not None:
            return _fail(f"rayrec {name}: {error.filename}: {error.strerror}")
        # `rayrec ... | head` closes the pipe. That is no error to report, but the work is not done.
        if _drop_closed_output():
            return 1
        # Store outage or full disk.
        return _fail(f"rayrec {name}: {str(error) or type(error).__name__}", status=1)
    except ModuleNotFoundError as error:
        if error.name in ("torchrec", "fbgemm_gpu", "torch", "ray"):
            return _fail(
                f"rayrec {name}: {error.name} is not installed. Run `rayrec doctor` for the fix."
            )
        raise
    except KeyboardInterrupt:
        print(f"rayrec {name}: interrupted", file=sys.stderr)
        return 130


def _run(command: Command, words: list[str]) -> int:
    if command.raw:
        switches: set[str] = set()
    else:
        words, switches = take_switches(words)
    if switches & {"-h", "--help", "--help-all"}:
        print(_help(command, words, everything="--help-all" in switches))
        return 0
    from rayrec.cli.parser import parse

    call = parse(command, words)
    out = sys.stdout
    # With torchrun, each rank runs this command, and one of them speaks.
    is_first = _is_first(command)
    quiet = "-q" in switches or not is_first
    # -q hides the output of a job, but not of its supervisor.
    silent = quiet and command.recipe != "after --"
    parameters = inspect.signature(command.function).parameters
    keywords = call.keywords
    if "console" in parameters:
        from rayrec.observe.console import Console

        keywords["console"] = Console(verbose="-v" in switches, quiet=silent)
    if "stopwatch" in parameters:
        from rayrec.observe.timing import Stopwatch

        keywords["stopwatch"] = Stopwatch.since_process_start()
    if "started" in parameters:
        keywords["started"] = lambda served: print_json(served, out)
    if "show" in parameters:
        keywords["show"] = (
            None if quiet else functools.partial(print, end="", file=sys.stderr, flush=True)
        )
    # A shell reads results from a pipe, so that nothing else may be in it.
    # Only results reach standard output. Output of Ray and other libraries goes to standard error.
    with contextlib.nullcontext() if command.prints else contextlib.redirect_stdout(sys.stderr):
        result = command.function(*call.arguments, **keywords)
    if result is None or not is_first:
        return 0
    return show(command.show(result), as_json="--json" in switches, quiet=quiet, out=out)


def take_switches(words: list[str]) -> tuple[list[str], set[str]]:
    """Take the common switches out of the words before --, which starts the command of a job."""
    end = words.index("--") if "--" in words else len(words)
    options = {*SWITCHES, "-h", "--help", "--help-all"}
    before = words[:end]
    job = words[end:]
    return [word for word in before if word not in options] + job, {
        word for word in before if word in options
    }


def _help(command: Command, words: list[str], *, everything: bool) -> str:
    if (
        command.recipe == "first"
        and words
        and (not words[0].startswith("-") or "--config" in " ".join(words))
    ):
        from rayrec.cli.parser import configured

        return help.recipe_help(command, configured(command, words)[0], everything=everything)
    return help.command_help(command, everything=everything)


def _is_first(command: Command) -> bool:
    """Return whether this process shows the result. With torchrun, only rank 0 does."""
    if command.group != "Train":
        return True
    from rayrec.cluster.layout import TorchrunEnv

    torchrun = TorchrunEnv.from_environment()
    return torchrun is None or torchrun.rank == 0


def _fail(message: str, *, status: int = 2) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return status


def show(shown: Shown, *, as_json: bool, quiet: bool, out: IO[str]) -> int:
    """Print a result and return the exit status. Text beside JSON goes to standard error. Raises
    InputError for an error in it.
    """
    text = shown.value if isinstance(shown.value, str) else shown.text
    to_people = not as_json and (shown.as_text or out.isatty())
    if text is not None and (isinstance(shown.value, str) or to_people):
        print(text, file=out, flush=True)
    elif shown.value is not None:
        if text is not None and not quiet:
            print(text, file=sys.stderr, flush=True)
        print_json(shown.value, out)
    if shown.error:
        raise InputError(shown.error)
    return shown.status


def print_json(value: Any, out: IO[str]) -> None:
    """Print indented standard JSON. NaN and infinities become null."""
    import json

    from rayrec.humanize import json_values

    print(
        json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False),
        file=out,
        flush=True,
    )
