"""Commands: public functions that are also declared for the command line. Imports nothing heavy."""

from rayrec.commands import data, inference, runs, serving, train  # Each module declares its commands.
from rayrec.commands.declaration import COMMANDS

__all__ = ["COMMANDS", "data", "inference", "runs", "serving", "train"]
