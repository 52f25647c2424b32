"""Commands: public functions that are also declared for the command line. Imports nothing heavy."""

# Each module declares its commands.
from rayrec.commands import data, inference, runs, serving, train
from rayrec.commands.declaration import COMMANDS

__all__ = ["COMMANDS", "data", "inference", "runs", "serving", "train"]
