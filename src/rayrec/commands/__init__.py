"""Commands: public functions that are also declared for the command line. Imports nothing heavy."""

from rayrec.commands import data, runs, scoring, serving, training  # Each module declares its commands.
from rayrec.commands.declaration import COMMANDS

__all__ = ["COMMANDS", "data", "runs", "scoring", "serving", "training"]
