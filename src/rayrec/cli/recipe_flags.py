"""Flags of a recipe: its settings, their short names, and the selection for its help."""

from dataclasses import replace
from typing import NamedTuple

from rayrec.cli.flags import Flag, flag_name, flags_of
from rayrec.commands.settings import ALIASES, resolve_alias
from rayrec.config import Config


class Short(NamedTuple):
    """Entry of the short help."""

    group: str
    name: str
    metavar: str
    help: str
    unset: str = ""
    """Description of the behavior if the setting is None."""


SHORT = {
    "train_data.path": Short("Data", "data", "PATH", "training data: file, glob or folder, local or a URL", "required"),
    "eval_data": Short("Data", "", "PATH", "evaluation data", "rows held out by the recipe"),
    "workload.schema": Short("Data", "schema", "FILE", "YAML file with the columns of the log, for other logs than Criteo's"),
    "max_bad_fraction": Short("Data", "", "X", "maximum share of invalid lines in a log"),
    "steps": Short("Length", "", "N", "number of steps, instead of --epochs"),
    "epochs": Short("Length", "", "N", "number of passes over the training rows"),
    "batch_size": Short("Length", "", "N", "rows per worker and step"),
    "evaluate_every": Short("Length", "", "N", "steps between evaluations", "by --evaluations-per-epoch"),
    "workload.model": Short("Model", "model", "NAME", "network, such as finalnet; A+B is an ensemble"),
    "workload.dense_optimizer.learning_rate": Short("Model", "lr", "X", "learning rate of the network"),
    "workload.optimizer.learning_rate": Short("Model", "lr", "X", "learning rate"),
    "workload.sparse_optimizer.learning_rate": Short("Model", "table-lr", "X", "learning rate of the embedding tables"),
    "precision": Short("Model", "", "", "precision of the network"),
    "seed": Short("Model", "", "N", "seed of initialization and row order"),
    "init_from": Short("Model", "", "RUN", "run or checkpoint with the initial weights"),
    "name": Short("Run", "", "NAME", "name of the run; an existing run is resumed", "RECIPE-DATE-TIME"),
    "storage_path": Short("Run", "", "PATH", "folder or URL for runs"),
    "checkpoint.every": Short("Run", "", "N", "steps between checkpoints", "with every evaluation"),
    "scaling.num_workers": Short("Machines", "workers", "N | N M", "number of training processes, or minimum and maximum"),
    "gpus": Short("Machines", "", "N", "number of GPUs, one per worker"),
    "cluster.address": Short("Machines", "", "A", "HOST:PORT or auto: a Ray cluster; local: a local Ray; none: this process"),
}
"""Flags in a recipe's help, in order. --help-all shows all settings."""


def recipe_flags(config: Config) -> list[Flag]:
    """Return all settings of a recipe as flags in field order, followed by --gpus."""
    short = {resolve_alias(config, name): flag_name(name) for name in ALIASES if name != "gpus"}
    gpus = Flag("gpus", int, None, name="gpus", help=SHORT["gpus"].help, metavar="N")
    return [replace(flag, aliases=(short[flag.path],)) if flag.path in short else flag for flag in [*flags_of(config), gpus]]
