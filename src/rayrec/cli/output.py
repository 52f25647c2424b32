"""Command results on standard output: text on a terminal, JSON with --json or into a pipe."""

import sys
from typing import IO, Any

from rayrec.commands.declaration import Shown
from rayrec.config import InputError
from rayrec.humanize import json_values


def show(shown: Shown, *, as_json: bool, quiet: bool, out: IO[str]) -> int:
    """Print a result and return the exit status. Text in addition to JSON goes to standard error.

    Raises InputError if the result contains an error, such as a failed gate.
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

    print(json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False), file=out, flush=True)
