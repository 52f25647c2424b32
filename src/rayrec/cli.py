"""The command `rayrec`: finds the verb and its exit status. Imports nothing heavy before a verb is known."""

from __future__ import annotations

import difflib
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rayrec.config import InputError
from rayrec.verbs import STATUSES, VERBS

_COLLECT_EVERY = 5000
"""Objects made between two collections of the youngest; Python's 700 makes imports of torch and TorchRec a fifth slower."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with one of `STATUSES`."""
    _keep_stdout_for_results()
    gc.set_threshold(_COLLECT_EVERY)
    status = run(list(sys.argv[1:] if arguments is None else arguments))
    gc.freeze()  # or the interpreter's last collections visit all modules, for a second
    sys.exit(status)


def _keep_stdout_for_results() -> None:
    """Points file descriptor 1 to standard error, and `sys.stdout` to what it was: Ray's C++ prints warnings to the former, and
    the processes it starts inherit it."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller
        return
    sys.stdout.flush()
    results = os.dup(1)  # which no child inherits
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        import rayrec

        print(rayrec.__version__)
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        return _fail(f"rayrec: no command '{verb}'; " + (f"did you mean '{near[0]}'?" if near else "see rayrec --help"))
    try:
        if verb == "doctor":  # must also run where what the other commands import is missing
            return _doctor(rest)
        from rayrec.commands import command

        return command(verb)(rest) or 0
    except InputError as error:
        return _fail(f"rayrec {verb}: {error}")
    except OSError as error:
        mendable = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
        if mendable and error.filename is not None:
            return _fail(f"rayrec {verb}: {error.filename}: {error.strerror}")
        return _fail(
            f"rayrec {verb}: {str(error) or type(error).__name__}", status=1
        )  # a store that is out, a disk that is full
    except ModuleNotFoundError as error:
        if error.name in ("torchrec", "fbgemm_gpu", "torch", "ray", "tyro"):
            return _fail(f"rayrec {verb}: {error.name} is not installed; `rayrec doctor` says how to fix it")
        raise
    except KeyboardInterrupt:
        print(f"rayrec {verb}: interrupted", file=sys.stderr)
        return 130


def _doctor(arguments: list[str]) -> int:
    import json

    from rayrec.environment.doctor import doctor

    if arguments not in ([], ["--json"]):
        print(f"usage: rayrec doctor {VERBS['doctor'][0]}\n\n{VERBS['doctor'][1]}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    report = doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments else "\n".join(report.lines()))
    return 0 if report.ok else 2


def _fail(message: str, *, status: int = 2) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return status


def help_text() -> str:
    lines = ["usage: rayrec COMMAND ...", "", "From raw logs to a served model on Ray.", ""]
    lines += [f"  {f'{verb} {arguments}':35} {text}" for verb, (arguments, text) in VERBS.items()]
    lines += ["", "rayrec COMMAND --help shows each flag; --config FILE.yaml may take the place of a RECIPE."]
    lines += ["Exit status:", *(f"  {status:<5} {text}" for status, text in STATUSES.items())]
    return "\n".join(lines)
