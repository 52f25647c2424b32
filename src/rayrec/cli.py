"""The command `rayrec`: finds the verb and its exit status. Imports nothing heavy before a verb is known."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from rayrec.config import InputError

COMMANDS = {
    "recipes": ("", "lists the recipes, a line each"),
    "config": ("RECIPE [--flags]", "prints the resolved configuration as YAML"),
    "generate": ("OUT --rows N", "writes a synthetic click log with a planted truth, and truth.json beside it"),
    "vocabulary": ("PATH --out DIR", "one pass over a click log -> the Preprocessor (schema, constants, vocabularies)"),
    "plan": ("RECIPE [--flags]", "shows how a recipe's tables are spread over its workers, and whether they fit"),
    "train": ("RECIPE [--flags] [-v|-q]", "trains; the same storage and name again goes on where the run stopped"),
    "evaluate": ("CHECKPOINT PATH", "scores every row of a log exactly once -> metrics as JSON"),
    "predict": ("CHECKPOINT PATH --out DIR", "writes scores as Parquet, in input order, with the row's number"),
    "benchmark": ("NAME", "measures, as ratios against a peer or a ceiling in the same run"),
    "doctor": ("[--json]", "what is installed, what fits together, what does not and how to mend it"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command. Exit status: 0 done, 2 the user can mend it, 130 interrupted, 143 terminated, 1 anything else."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


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
    if verb not in COMMANDS:
        near = difflib.get_close_matches(verb, COMMANDS, n=1)
        return _fail(f"rayrec: no command '{verb}'; " + (f"did you mean '{near[0]}'?" if near else "see rayrec --help"))
    try:
        from rayrec import commands

        return commands.ALL[verb](rest) or 0
    except InputError as error:
        return _fail(f"rayrec {verb}: {error}")
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        return _fail(f"rayrec {verb}: {error.filename}: {error.strerror}")
    except ModuleNotFoundError as error:
        if error.name in ("torchrec", "fbgemm_gpu", "torch", "ray", "tyro"):
            return _fail(f"rayrec {verb}: {error.name} is not installed; `rayrec doctor` says how to mend it")
        raise
    except KeyboardInterrupt:
        print(f"rayrec {verb}: interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return 2


def help_text() -> str:
    lines = ["usage: rayrec COMMAND ...", "", "From raw logs to a served model on Ray.", ""]
    lines += [f"  {f'{verb} {arguments}':35} {text}" for verb, (arguments, text) in COMMANDS.items()]
    lines += ["", "rayrec COMMAND --help shows each flag; --config FILE.yaml may stand wherever a RECIPE does."]
    return "\n".join(lines)
