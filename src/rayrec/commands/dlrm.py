"""Flags of TorchRec's dlrm_main.py as settings for `rayrec train`; read by the command dlrm."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayrec import storage
from rayrec.bounds import Count, Finite, Natural
from rayrec.commands.declaration import parse_counts
from rayrec.commands.settings import named_configuration, value_at
from rayrec.config import Config, InputError

_RANDOM_BATCHES = 10
"""Default number of random batches of each set."""
_NUM_TABLES = 26
_INTERACTIONS = {"original": "dot", "dcn": "cross", "projection": "projection"}
_BRANCHES = ((1, "first"), (2, "second"))


@dataclass(frozen=True, kw_only=True)
class DLRMFlags(Config):
    """Flags of TorchRec's dlrm_main.py, with its defaults."""

    epochs: Count = 1
    """--epochs."""
    batch_size: Count = 32
    """--batch-size, of each process."""
    drop_last_training_batch: bool = False
    """Rejected: every row is trained once in each epoch."""
    test_batch_size: Count | None = None
    """--eval-batch-size. None: batch_size."""
    limit_train_batches: Count | None = None
    """--steps; for random data, its training batches of each process [10]."""
    limit_val_batches: Count | None = None
    """--eval-rows, evenly spread over the data; for random data, its validation batches [10]."""
    limit_test_batches: Count | None = None
    """Test batches of random data [10]. Rejected with data."""
    dataset_name: Literal["criteo_1t", "criteo_kaggle"] = "criteo_1t"
    """Accepted: the data has its split."""
    num_embeddings: Count = 100_000
    """Rows of each table."""
    num_embeddings_per_feature: tuple[int, ...] | None = None
    """Rows of the 26 tables, separated by commas, instead of num_embeddings."""
    dense_arch_layer_sizes: str = "512,256,64"
    """--workload.model.bottom-mlp."""
    over_arch_layer_sizes: str = "512,512,256,1"
    """--workload.model.top-mlp."""
    embedding_dim: Count = 64
    """--workload.model.embedding-dim."""
    interaction_branch1_layer_sizes: str = "2048,2048"
    """--workload.model.projection-first."""
    interaction_branch2_layer_sizes: str = "2048,2048"
    """--workload.model.projection-second."""
    dcn_num_layers: Count = 3
    """--workload.model.cross-layers."""
    dcn_low_rank_dim: Count = 512
    """--workload.model.cross-low-rank."""
    undersampling_rate: float | None = None
    """Rejected: dlrm_main.py does not use it either."""
    seed: Natural = 0
    """--seed, also of random data."""
    pin_memory: bool = False
    """Accepted: memory is pinned with GPUs."""
    mmap_mode: bool = False
    """Accepted: arrays are mapped."""
    in_memory_binary_criteo_path: str | None = None
    """--train-data.path: arrays after `rayrec adopt`, or the output of `rayrec preprocess`. None:
    random data.
    """
    synthetic_multi_hot_criteo_path: str | None = None
    """The same, for multi-hot arrays."""
    learning_rate: Finite = 15.0
    """Learning rate of network and tables."""
    eps: Finite = 1e-8
    """Term of Adagrad for both, as --workload.sparse-optimizer.eps."""
    shuffle_batches: bool = False
    """Accepted: the order within a batch does not change its gradient."""
    shuffle_training_set: bool = False
    """--train-data.shuffle window, instead of none."""
    validation_freq_within_epoch: Count | None = None
    """--evaluate-every. None: once per epoch."""
    validation_auroc: float | None = None
    """--early-stopping.target."""
    evaluate_on_epoch_end: bool = False
    """Accepted: the default without validation_freq_within_epoch."""
    evaluate_on_training_end: bool = False
    """Accepted: always."""
    adagrad: bool = False
    """Adagrad for network and tables, instead of SGD."""
    interaction_type: Literal["original", "dcn", "projection"] = "original"
    """--workload.model.interaction: dot, cross or projection."""
    collect_multi_hot_freqs_stats: bool = False
    """Rejected: `rayrec validate` counts categories."""
    multi_hot_sizes: str | None = None
    """--workload.preset.multi-hot.sizes of random data. Rejected with data, which is adopted with
    its bags.
    """
    multi_hot_distribution_type: Literal["uniform", "pareto"] | None = None
    """--workload.preset.multi-hot.distribution."""
    lr_warmup_steps: Natural = 0
    """--workload.schedule.warmup-steps."""
    lr_decay_start: Natural = 0
    """--workload.schedule.decay-start-step."""
    lr_decay_steps: Natural = 0
    """--workload.schedule.decay-steps."""
    change_lr: bool = False
    """Rejected: dlrm_main.py lost it in 2022."""
    lr_change_point: float | None = None
    """Rejected, as change_lr."""
    lr_after_change_point: float | None = None
    """Rejected, as change_lr."""
    print_lr: bool = False
    """Accepted: RUN/events.jsonl has it."""
    print_progress: bool = False
    """Accepted: always."""
    allow_tf32: bool = False
    """--tf32."""
    print_sharding_plan: bool = False
    """Whether to print the sharding plan before training. RUN/events.jsonl always has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_memory_binary_criteo_path and self.synthetic_multi_hot_criteo_path:
            raise InputError(
                "--in_memory_binary_criteo_path and --synthetic_multi_hot_criteo_path: set only one"
            )
        if len(self.table_rows) != _NUM_TABLES:
            raise InputError(
                f"--num_embeddings_per_feature: must be {_NUM_TABLES} numbers, got "
                f"{len(self.table_rows)}"
            )
        schedule = "lost in 2022; use --lr_decay_start and --lr_decay_steps"
        with_data = {
            "limit_test_batches": "the test scores all test rows of the data; leave it out",
            "multi_hot_sizes": (
                "needs random data; adopt the arrays that "
                "materialize_synthetic_multihot_dataset.py made"
            ),
        }
        unsupported = {
            "drop_last_training_batch": "every row is trained once in each epoch; leave it out",
            "undersampling_rate": "dlrm_main.py does not use it either; leave it out",
            "collect_multi_hot_freqs_stats": (
                "`rayrec validate PATH` counts categories; leave it out"
            ),
            **dict.fromkeys(("change_lr", "lr_change_point", "lr_after_change_point"), schedule),
            **(with_data if self.data else {}),
        }
        problems = [
            f"--{name}: {fix}"
            for name, fix in unsupported.items()
            if getattr(self, name) not in (None, False)
        ]
        if self.data and self.limit_train_batches and self.epochs > 1:
            problems.append(
                "--limit_train_batches: would train the same batches in each epoch; set --epochs 1"
            )
        if problems:
            raise InputError(". ".join(problems))

    @property
    def data(self) -> str | None:
        return self.in_memory_binary_criteo_path or self.synthetic_multi_hot_criteo_path

    @property
    def table_rows(self) -> tuple[int, ...]:
        return self.num_embeddings_per_feature or (self.num_embeddings,) * _NUM_TABLES

    def sizes(self, name: str) -> tuple[int, ...]:
        """Parse numbers separated by commas. Raises InputError."""
        expected = "numbers of at least 1 separated by commas, such as 512,256"
        return parse_counts(f"--{name}", getattr(self, name), expected)


def train_settings(flags: DLRMFlags, *, workers: int, use_gpu: bool) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the settings that it lacks, for a number of processes. Raises
    InputError for unsuitable data.
    """
    model: dict[str, Any] = {
        "interaction": _INTERACTIONS[flags.interaction_type],
        "embedding_dim": flags.embedding_dim,
        "bottom_mlp": flags.sizes("dense_arch_layer_sizes"),
        "top_mlp": flags.sizes("over_arch_layer_sizes"),
    }
    if flags.interaction_type == "dcn":
        model |= {"cross_layers": flags.dcn_num_layers, "cross_low_rank": flags.dcn_low_rank_dim}
    if flags.interaction_type == "projection":
        model |= {
            f"projection_{name}": flags.sizes(f"interaction_branch{n}_layer_sizes")
            for n, name in _BRANCHES
        }
    optimizer = {"kind": "adagrad", "eps": flags.eps} if flags.adagrad else {"kind": "sgd"}
    workload = {
        **{f"model.{name}": value for name, value in model.items()},
        **{
            f"{part}_optimizer.{name}": value
            for part in ("sparse", "dense")
            for name, value in optimizer.items()
        },
        "schedule.warmup_steps": flags.lr_warmup_steps,
        "schedule.decay_start_step": flags.lr_decay_start,
        "schedule.decay_steps": flags.lr_decay_steps,
    }
    recipe, data = _data_options(flags) if flags.data else _random_data_options(flags, workers)
    eval_batch_size = flags.test_batch_size or flags.batch_size
    settings = {
        **data,
        "train_data.shuffle": "window" if flags.shuffle_training_set else "none",
        "epochs": flags.epochs,
        "batch_size": flags.batch_size,
        "eval_batch_size": eval_batch_size,
        "eval_rows": flags.limit_val_batches * eval_batch_size * workers
        if flags.data and flags.limit_val_batches
        else None,
        "evaluate_every": flags.validation_freq_within_epoch,
        "evaluations_per_epoch": 1,
        "early_stopping.target": flags.validation_auroc,
        "learning_rate": flags.learning_rate,
        "seed": flags.seed,
        "tf32": flags.allow_tf32,
        "scaling.num_workers": workers,
        "scaling.use_gpu": use_gpu,
        **{f"workload.{name}": value for name, value in workload.items()},
    }
    default = named_configuration(recipe)
    return recipe, {
        name: value for name, value in settings.items() if value != value_at(default, name)
    }


def _data_options(flags: DLRMFlags) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the settings of preprocessed data. Raises InputError if its tables have
    other sizes.
    """
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.encoding.presets import MLPERF_NUM_EMBEDDINGS
    from rayrec.data.log_source import LogSource

    path = flags.data
    assert path is not None
    if not storage.exists(path):
        raise InputError(
            f"{path}: not found. Pass the folder of TorchRec's arrays, or omit it to train on "
            "random rows."
        )
    dataset = LogSource.at(path).dataset()
    rows = (
        "mlperf"
        if flags.table_rows == MLPERF_NUM_EMBEDDINGS
        else ",".join(map(str, flags.table_rows))
    )
    adopt = f"`rayrec adopt {shlex.quote(path)} --num-embeddings-per-feature {rows}`"
    if dataset is None:
        raise InputError(
            f"{path}: must be adopted once, which copies nothing. Run {adopt}. For a raw log: "
            "`rayrec train`."
        )
    sizes = tuple(Preprocessor.load(dataset.preprocessor).num_embeddings)
    if sizes != flags.table_rows:
        names = ",".join(map(str, sizes))
        raise InputError(
            f"{path}: its tables have {names} rows. Pass them as --num_embeddings_per_feature, or "
            f"run {adopt} with --out NEW."
        )
    return "mlperf_dlrm", {"train_data.path": path, "steps": flags.limit_train_batches}


def _random_data_options(flags: DLRMFlags, workers: int) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the settings of random rows for all batches."""
    size = flags.test_batch_size or flags.batch_size
    train = (flags.limit_train_batches or _RANDOM_BATCHES) * flags.batch_size * workers
    validation = (flags.limit_val_batches or _RANDOM_BATCHES) * size * workers
    test = (flags.limit_test_batches or _RANDOM_BATCHES) * size * workers
    total = train + validation + test
    preset: dict[str, Any] = {
        "num_embeddings": flags.table_rows,
        "split.kind": "fraction",
        "split.validation": validation / total,
        "split.test": test / total,
    }
    recipe = "mlperf_dlrm"
    if flags.multi_hot_sizes is not None:
        recipe = "mlperf_dcnv2"  # Its preset has bags.
        preset |= {"multi_hot.sizes": flags.sizes("multi_hot_sizes")}
        preset |= {"multi_hot.distribution": flags.multi_hot_distribution_type or "uniform"}
    path = f"random:{total}:{flags.seed}" if flags.seed else f"random:{total}"
    return recipe, {
        "train_data.path": path,
        **{f"workload.preset.{name}": value for name, value in preset.items()},
    }


def command_line(recipe: str, settings: Mapping[str, Any]) -> str:
    """Return the command `rayrec train` with these settings, for a shell."""
    return shlex.join(
        [
            "rayrec",
            "train",
            recipe,
            *(word for name, value in settings.items() for word in _words(name, value)),
        ]
    )


def _words(name: str, value: Any) -> Iterator[str]:
    owner, dot, last = name.replace("_", "-").rpartition(".")
    yield f"--{owner}{dot}{'no-' if value is False else ''}{last}"
    if not isinstance(value, bool):
        yield from map(str, value if isinstance(value, tuple) else [value])
