"""Commands: public functions, each declared for the command line where it is defined. Imports nothing heavy."""

from rayrec.commands import data, runs, scoring, serving, training  # each declares its commands
from rayrec.commands.declaration import COMMANDS

__all__ = ["COMMANDS", "data", "runs", "scoring", "serving", "training"]
